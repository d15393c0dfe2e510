"""Sections of the services that answer queries, register models and run offline jobs."""

from collections.abc import Iterator
from typing import Annotated, Literal

from msgspec import Meta

from bus.fields import NAME_OR_EMPTY, PART, SHARE, TOKEN, Fault, Number, Text
from services.core.hosts import allowed_hosts
from services.core.settings.fields import (
    AMOUNT,
    CORES,
    COUNT,
    DAY,
    MEMORY,
    SECONDS,
    WAIT,
    Section,
    Simulated,
    Texts,
    listed,
)

# The built-in selection policies. `dispatcher.policy`, scenarios and `infaas simulate` take these names. Each class takes the options
# that `services.shell.policies.load_policy` gives it, by keyword, and may ignore those that do not concern it.
POLICIES = {
    "infaas": "services.core.selection.policy:InfaasPolicy",
    "round-robin": "services.core.selection.policy:RoundRobin",
    "brute-force": "services.core.selection.policy:BruteForce",
}


class DispatcherSettings(Section, frozen=True, kw_only=True):
    """Which instance answers a query, and what happens where none does."""

    count: Annotated[int, Number(1, 64), "Dispatchers under `infaas up`."] = 1
    policy: Annotated[
        str,
        Text("|".join([*POLICIES, r"[\w.]+:\w+"]), f"{', '.join(POLICIES)} or module:Class"),
        "Policy that selects a variant for a query.",
    ] = "infaas"
    dispatch: Annotated[
        str,
        Text("auto|spread|pack", "auto, spread or pack"),
        "Which instance of a variant: the least loaded (spread), or the one on the fullest worker that is in time, so that "
        "others become empty (pack). auto: pack where machines may come and go (machines.kinds), else spread.",
    ] = "auto"
    default_deadline_s: Annotated[float, SECONDS, "Seconds that a query without an objective may take."] = 30.0
    max_inline: Annotated[int, Number(0, 64 * 2**20), "Bytes of a body above which it must come by reference."] = 2**20
    max_stored: Annotated[
        int,
        Number(0, 2**50),
        "Bytes of results that a dispatcher has on their way between stages in the object store. A query that adds more is refused as overloaded.",
    ] = 4 * 2**30
    probe_share: Annotated[
        float,
        SHARE,
        "Share of queries that go to an Overloaded or Interfered instance, so that its recovery is noticed.",
    ] = 0.1
    failure_timeout_s: Annotated[float, SECONDS, "Seconds without a heartbeat after which a worker counts as dead."] = (
        2.0
    )
    max_attempts: Annotated[
        int,
        Number(1, 100),
        "Times that a query may lose the process that runs it. After one more it is refused as a model_error.",
    ] = 1
    max_queue: Annotated[
        int, COUNT, "Queries that a dispatcher has in flight at most. More are refused as overloaded."
    ] = 100_000
    cache_mb: Annotated[
        float, Number(most=1e6), "MB of answers that the caches of all apps (set-selection) may take in a dispatcher."
    ] = 4096.0


class EnsembleSettings(Section, frozen=True, kw_only=True):
    """Apps of which several models answer a query together."""

    max_contexts: Annotated[
        int, COUNT, "Contexts whose weights a dispatcher keeps in memory. Others are read when they are asked for."
    ] = 10_000
    wait_s: Annotated[
        float,
        SECONDS,
        "Seconds that an answer waits for its slowest members where neither query nor app has a latency objective.",
    ] = 1.0


class ExecutorSettings(Section, frozen=True, kw_only=True):
    """How a device runs batches."""

    inline_below_ms: Annotated[
        float, Number(most=1000), "A batch that is predicted to take less runs on the event loop itself."
    ] = 1.0
    watchdog: Annotated[float, Number(1, 1e6), "A run that takes so many times its profile is ended."] = 20.0
    watchdog_least_s: Annotated[float, SECONDS, "No run is ended before so many seconds."] = 5.0
    order: Annotated[
        Literal["edf", "lru"],
        "Which instance of a device begins first: the one with the earliest deadline, or the one whose last batch began the longest ago.",
    ] = "edf"
    exclusive: Annotated[
        bool, "A GPU computes for one instance at a time. false: batches of several instances overlap on it."
    ] = True
    sharing: Annotated[
        float,
        Number(most=1),
        "How much batches that overlap on a simulated GPU slow each other. 1: they share its speed; 0: each takes the time that it takes alone.",
    ] = 1.0
    remote_hosts: Annotated[
        Texts,
        Text(r"[\w.:\[\]\s,-]*", "names or addresses of hosts, as engine.example.org or 10.1.2.3:8000"),
        "Hosts whose engines may serve as variants (docs/remote.md), each with a port, or with all its ports.",
    ] = ()

    def conflicts(self) -> Iterator[Fault]:
        try:
            allowed_hosts(listed(self.remote_hosts))
        except ValueError as error:
            yield Fault("executor.remote_hosts", str(error))


class MonitorSettings(Section, frozen=True, kw_only=True):
    """Periods, and the thresholds of an instance's states; services/core/lifecycle.py has their sources."""

    heartbeat_s: Annotated[float, Number(above=0, most=60), "Seconds between two heartbeats of a worker."] = 0.5
    sample_s: Annotated[float, Number(above=0, most=3600), "Seconds between two samples of devices and instances."] = (
        2.0
    )
    cost_s: Annotated[float, Number(above=0, most=3600), "Seconds that one cost event covers."] = 10.0
    overloaded_backlog_s: Annotated[
        float, Number(most=DAY, zero="by hardware"), "Seconds of waiting work above which an instance is Overloaded."
    ] = 0.0
    overloaded_slo_share: Annotated[
        float, PART, "Waiting work, as a share of the app's latency objective, above which an instance is Overloaded."
    ] = 0.5
    interfered_ratio: Annotated[
        float,
        Number(above=1, most=1e6, zero="by hardware"),
        "Measured over profiled latency above which an instance is Interfered.",
    ] = 0.0
    interfered_least_ms: Annotated[
        float, Number(most=1e6), "An instance is Interfered only if it is slower than its profile by so many ms, too."
    ] = 5.0
    interfered_load_share: Annotated[
        float,
        Number(most=1, zero="by hardware"),
        "Below this share of its saturation, a slow instance with a backlog is Interfered, not Overloaded.",
    ] = 0.0
    clear_ratio: Annotated[
        float, Number(1, 1e6, zero="by hardware"), "Measured over profiled latency at which Interfered ends."
    ] = 0.0
    least_items: Annotated[int, COUNT, "Latency is judged only after so many items."] = 8
    mitigate_after_s: Annotated[float, WAIT, "An instance that is Interfered for so many seconds is moved."] = 2.0
    mitigate_again_s: Annotated[float, WAIT, "Seconds in which an instance is not moved again."] = 20.0
    quarantine_after: Annotated[
        int, Number(most=1e6, zero="never"), "Loads that fail in a row until a variant is not tried any more."
    ] = 3
    memory_share: Annotated[float, PART, "Part of a device's memory that instances may take."] = 0.8
    cores_overcommit: Annotated[
        float,
        Number(1, 1e6),
        "Threads that a CPU core is promised to at most: those that compute, and all of an instance that comes.",
    ] = 2.0
    idle_s: Annotated[
        float, WAIT, "With cache reserve: an instance that is unused for so many seconds may make room for another."
    ] = 1.0
    cache: Annotated[
        Literal["reserve", "cost", "lru"],
        "Which idle instance makes room. reserve: one that no app in use needs; cost: any, the one that costs least to miss, which stays in "
        "host memory where its backend can; lru: the same with the least recently used (docs/memory.md).",
    ] = "reserve"
    max_models: Annotated[int, Number(most=1e6, zero="no limit"), "Instances that a device may hold at a time."] = 0
    device_mb: Annotated[
        int, Number(most=1e9, zero="memory_share alone decides"), "MB of a device that instances may take at most."
    ] = 0
    host_mb: Annotated[
        int, Number(most=1e9, zero="nothing stays there"), "MB of a worker's main memory for Warm instances."
    ] = 2048
    preload: Annotated[
        Literal["none", "warm", "active"],
        "What is loaded when a worker starts: nothing; what fits into host memory; or what fits on the devices, one variant of each "
        "model first.",
    ] = "none"

    def conflicts(self) -> Iterator[Fault]:
        if self.preload == "warm" and self.host_mb == 0:
            yield Fault("monitor.host_mb", "must be above 0 where monitor.preload is warm: nothing would be loaded")
        if 0 < self.interfered_ratio <= self.clear_ratio:
            yield Fault(
                "monitor.clear_ratio",
                f"must be below monitor.interfered_ratio ({self.interfered_ratio:g}), not {self.clear_ratio:g}: "
                "an instance would be Interfered and clear at once",
            )


class RegistrarSettings(Section, frozen=True, kw_only=True):
    """What uploaded files may use while they are inspected, built and profiled in the sandbox."""

    allow_torchscript: Annotated[bool, "Whether TorchScript files are taken, which can hold code."] = False
    memory_mb: Annotated[int, Number(64, 1e8), "MB of memory of a sandbox."] = 4096
    seconds: Annotated[float, SECONDS, "Seconds of wall time of a sandbox."] = 600.0
    max_model_mb: Annotated[int, Number(1, 1e6), "MB of a model file."] = 1024
    agreement: Annotated[
        float, SHARE, "Share of validation inputs on which a variant must agree with the model it was made from."
    ] = 0.9
    threads: Annotated[tuple[int, ...], Number(1, 1024), "Numbers of threads that CPU variants are made for."] = (1, 2)
    max_batches: Annotated[tuple[int, ...], Number(1, 65536), "Largest batches that variants are made for."] = (8, 64)
    cascades: Annotated[bool, "Whether two models of an app are joined to a further variant where that is cheaper."] = (
        True
    )

    def conflicts(self) -> Iterator[Fault]:
        for key, values in (("threads", self.threads), ("max_batches", self.max_batches)):
            if not values:
                yield Fault(f"registrar.{key}", "must name at least one number")


class QualitySettings(Section, frozen=True, kw_only=True):
    """Whether models do in production what they did on their validation set."""

    sample_share: Annotated[
        float,
        SHARE,
        "Share of the queries of which one item and its answer are compared with the validation set, at most 256 a second of a device. 0: none.",
    ] = 0.5
    reference_share: Annotated[
        float,
        SHARE,
        "Share of the queries that the most accurate variant of the app that is loaded answers once more, as offline work (docs/ensembles.md). 0: none.",
    ] = 0.01
    payload_days: Annotated[
        float,
        Number(above=0, most=3650),
        "Days that queries with their answers are kept, of apps whose owners let them be (set-app).",
    ] = 7.0
    payload_mb: Annotated[
        float, Number(1, 1e6), "MB that they may take together on the bus. Beyond them the oldest go."
    ] = 256.0


class WorkerSettings(Section, frozen=True, kw_only=True):
    """One worker: its name, its kind and its devices."""

    name: Annotated[str, NAME_OR_EMPTY, "Name of the worker. Empty: made from the host's name."] = ""
    kind: Annotated[str, NAME_OR_EMPTY, "Kind of machine, one of machines.kinds. Empty: the name of its hardware."] = ""
    hardware: Annotated[str, TOKEN, "Name of the hardware that lists and tables show."] = "cpu"
    cores: Annotated[int, CORES, "CPU cores for instances."] = 0
    memory_mb: Annotated[int, MEMORY, "MB of main memory for instances."] = 0
    gpus: Annotated[
        Annotated[int, Meta(ge=0)] | Literal["auto"],
        Number(most=1024, zero="no accelerator at all"),
        "GPUs to use. auto: all that the driver shows.",
    ] = "auto"
    simulate: Annotated[Simulated, "Devices to simulate: kind to count."] = {}
    drain_s: Annotated[
        float,
        Number(most=3600, zero="not at all"),
        "Seconds that queued work may take when `infaas run worker` is stopped.",
    ] = 20.0
    executor_nkey: Annotated[
        str, "Credentials of the executors of `infaas run worker`, where they are not bus.nkey_seed."
    ] = ""
    monitor_nkey: Annotated[
        str, "Credentials of the monitor of `infaas run worker`, where they are not bus.nkey_seed."
    ] = ""


class JobsSettings(Section, frozen=True, kw_only=True):
    """Offline jobs (docs/jobs.md)."""

    roots: Annotated[
        Texts,
        "Directories that file:// URLs may name, beside `jobs` in the data directory. In a variable: separated as PATH is.",
    ] = ()
    utilisation_below: Annotated[
        float, SHARE, "Offline work is taken while other work uses less than this share of a device."
    ] = 0.4
    latency_ratio: Annotated[
        float,
        Number(1, 1e6),
        "No offline work is taken beside a variant whose batches take more than so many times its profile"
        " and latency_least_ms longer.",
    ] = 1.25
    latency_least_ms: Annotated[float, Number(most=1e6), "See latency_ratio."] = 2.0
    batch_ms: Annotated[float, Number(above=0, most=1e6), "Ms that a chunk may take, as predicted."] = 50.0
    chunk_items: Annotated[int, Number(1, 1e6), "Items of a chunk at most."] = 64
    chunk_kb: Annotated[int, Number(1, 64 * 2**10), "KB of a chunk at most."] = 512
    window: Annotated[int, Number(1, 1e6), "Chunks of one job that wait or are computed at a time."] = 32
    in_flight: Annotated[int, Number(1, 1e6), "Chunks of one job on one worker at a time."] = 2
    keep: Annotated[int, AMOUNT, "Ended jobs that are remembered."] = 1000

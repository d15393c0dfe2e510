"""Settings: defaults < TOML file < INFAAS_SECTION__FIELD < INFAAS_SECTION__FIELD_FILE (secrets). Built once in __main__."""

import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, field

from bus.login import VARIABLES, Login
from services.shell.checks import faults
from services.shell.machinesections import MachineSettings
from services.shell.origins import Origins
from services.shell.sections import EngineSettings, GatewaySettings, Section


class SettingsError(Exception):
    """A setting is unknown or has the wrong type; the text names it."""


class BusSettings(Section, frozen=True, kw_only=True):
    """url: one server, or several separated by commas. nkey_seed: credentials of `infaas auth`, or the path of their file. inbox:
    prefix of our inboxes where they do not say it. tls_ca: PEM file that vouches for the servers; tls_certificate, tls_key: our own
    (docs/security.md). replicas: copies of each stream and bucket; 0 = as many as there are servers, up to 3. known: file that
    keeps which streams there are, beside the database, so that their loss is noticed; adopt: go on with what is there all the same.
    """

    url: str = "nats://127.0.0.1:4222"
    nkey_seed: str = ""
    inbox: str = ""
    tls_ca: str = ""
    tls_certificate: str = ""
    tls_key: str = ""
    replicas: int = 0
    known: str = ""
    adopt: bool = False
    max_payload: int = 8 * 2**20
    outcome_bytes: int = 2 * 2**30
    event_bytes: int = 1 * 2**30

    @property
    def login(self) -> Login:
        """As `NatsBus.connect` wants it."""
        return Login(
            nkey_seed=self.nkey_seed,
            inbox=self.inbox,
            tls_ca=self.tls_ca,
            tls_certificate=self.tls_certificate,
            tls_key=self.tls_key,
        )


class KeepDays(Section, frozen=True, kw_only=True):
    """For how many days rows of a relation are kept; 0: for ever. Hourly cost always is, whatever becomes of the raw rows."""

    query_outcomes: float = 30.0
    cost_events: float = 30.0
    state_events: float = 90.0
    scaling_events: float = 90.0
    worker_events: float = 90.0
    worker_samples: float = 7.0
    instance_samples: float = 7.0
    slo_by_app_minutely: float = 400.0


class StoreSettings(Section, frozen=True, kw_only=True):
    """dsn: the role that writes. reader_dsn: the read-only role, as shown to users.

    timescale: what is used of TimescaleDB where the server has it: "auto", all that its licence there allows; "apache",
    only what is under the Apache licence; "off". keep_days: by relation. Both are acted on when a database is prepared.
    """

    dsn: str = ""
    reader_dsn: str = ""
    timescale: Literal["auto", "apache", "off"] = "auto"
    keep_days: KeepDays = field(default_factory=KeepDays)


class DispatcherSettings(Section, frozen=True, kw_only=True):
    """count: dispatchers under `up`. policy: "infaas", "round-robin", "brute-force", or "module:Class".

    dispatch: among instances of one variant "spread" (least loaded), "pack" (fullest worker in time, so that others empty), or
    "auto": pack where a kind of machine may come and go (machines.kinds), else spread.
    max_inline: bytes of a body above which it must come by reference.
    """

    count: int = 1
    policy: str = "infaas"
    dispatch: str = "auto"
    default_deadline_s: float = 30.0
    max_inline: int = 2**20
    probe_share: float = 0.1
    failure_timeout_s: float = 2.0
    max_attempts: int = 2
    max_queue: int = 100_000


class ExecutorSettings(Section, frozen=True, kw_only=True):
    """inline_below_ms: batches predicted shorter run on the loop itself. watchdog: a run of so many times its profile ends."""

    inline_below_ms: float = 1.0
    watchdog: float = 20.0
    watchdog_least_s: float = 5.0


class MonitorSettings(Section, frozen=True, kw_only=True):
    """Periods, and thresholds of the state machine: meaning and sources in services/core/lifecycle.py.

    A threshold of 0: by hardware, as INFaaS's code has it. mitigate_after_s: an instance that is Interfered for so long is moved,
    and not again within mitigate_again_s. quarantine_after: loads that fail in a row until a variant is not tried any more; 0 = never.
    memory_share: part of a device's memory set aside for instances. cores_overcommit: how many threads of instances a CPU core
    may be promised to (idle ones take no time). idle_s: unused for so long, an instance may make room.
    """

    heartbeat_s: float = 0.5
    sample_s: float = 2.0
    cost_s: float = 10.0
    overloaded_backlog_s: float = 0.0
    overloaded_slo_share: float = 0.5
    interfered_ratio: float = 0.0
    interfered_least_ms: float = 5.0
    interfered_load_share: float = 0.0
    clear_ratio: float = 0.0
    least_items: int = 8
    mitigate_after_s: float = 2.0
    mitigate_again_s: float = 20.0
    quarantine_after: int = 3
    memory_share: float = 0.8
    cores_overcommit: float = 16.0
    idle_s: float = 1.0


class RegistrarSettings(Section, frozen=True, kw_only=True):
    """Limits on what uploaded files may use while they are inspected, built and profiled in the sandbox."""

    allow_torchscript: bool = False
    memory_mb: int = 4096
    seconds: float = 600.0
    max_model_mb: int = 1024
    agreement: float = 0.9
    threads: tuple[int, ...] = (1, 2)
    max_batches: tuple[int, ...] = (8, 64)


class WorkerSettings(Section, frozen=True, kw_only=True):
    """name: empty = made from the host's. kind: of machine, one of machines.kinds; empty = the hardware's name.

    cores, memory_mb: 0 = what the machine has. gpus: how many real GPUs to use; "auto" = all that the driver shows, 0 = no
    accelerator at all. simulate: devices to simulate, kind to count. Of `infaas run worker`: drain_s, how long what is queued
    may take when it is stopped; executor_nkey, monitor_nkey: credentials of these processes, where they are not bus.nkey_seed.
    """

    name: str = ""
    kind: str = ""
    hardware: str = "cpu"
    cores: int = 0
    memory_mb: int = 0
    gpus: Annotated[int, Meta(ge=0)] | Literal["auto"] = "auto"
    simulate: dict[str, int] = {}
    drain_s: float = 20.0
    executor_nkey: str = ""
    monitor_nkey: str = ""


class Choice(Section, frozen=True, kw_only=True):
    """What a static system serves an app with: a variant, and how many instances of it in the whole cluster."""

    variant: str
    instances: int = 1


class AutoscalerSettings(Section, frozen=True, kw_only=True):
    """The model-autoscaler of every worker (services/autoscaler/models). Formulas: services/core/planning.

    policy: "infaas", "replicate" (one variant an app, more or fewer of it), "static" (`choice`, never changed), or "off".
    solver: "ilp" or "greedy". slack: throughput wanted over load. loading_weight: the paper's lambda, 1/s. objective:
    "multiplicative" or "additive". hold_s: the least time for which a reason to remove something must have held.
    budget_per_hour: US$ that all workers together may cost; 0 = no limit. choice: app to what "static" and "replicate" use.
    """

    policy: Literal["infaas", "replicate", "static", "off"] = "infaas"
    solver: Literal["ilp", "greedy"] = "ilp"
    period_s: float = 1.0
    slack: float = 1.05
    loading_weight: float = 0.1
    objective: Literal["multiplicative", "additive"] = "multiplicative"
    time_limit_s: float = 0.4
    hold_s: float = 5.0
    budget_per_hour: float = 0.0
    choice: dict[str, Choice] = {}


class JobsSettings(Section, frozen=True, kw_only=True):
    """Offline jobs (services/jobs). roots: directories that file:// URLs may name beside the data directory's `jobs`.

    utilisation_below: offline work is taken while a device is used less than this, its own use not counted (the paper's 40 %).
    latency_ratio, latency_least_ms: an online variant is above its profiled latency when a batch takes more than so many
    times its profile and so many ms longer. batch_ms, chunk_items, chunk_kb: a chunk is predicted to compute no longer, and
    is no larger. window: chunks of one job that wait or are computed at a time. in_flight: of them, on one worker. keep:
    so many ended jobs are remembered.
    """

    roots: tuple[str, ...] | str = ()  # in a variable: separated as PATH is
    utilisation_below: float = 0.4
    latency_ratio: float = 1.25
    latency_least_ms: float = 2.0
    batch_ms: float = 50.0
    chunk_items: int = 64
    chunk_kb: int = 512
    window: int = 32
    in_flight: int = 2
    keep: int = 1000


class DashboardSettings(Section, frozen=True, kw_only=True):
    """The dashboard (docs/dashboard.md).

    public_url: where visitors see it, if not at http://address:port: behind a proxy. login: a TOML file with Streamlit's section
    [auth], for OpenID Connect; empty: whoever reaches it may look. allow: e-mail addresses, or @domain, that may; empty: whoever
    can log in.
    """

    address: str = "127.0.0.1"
    port: int = 8501
    public_url: str = ""
    login: str = ""
    allow: tuple[str, ...] | str = ()  # in a variable: separated by commas


class MetricsSettings(Section, frozen=True, kw_only=True):
    """Each process's HTTP server with /metrics, /healthz and /readyz (docs/metrics.md).

    port: 0 = none; under `infaas up` the first one, of the whole system, which gives its services the next. enabled: false = none
    anywhere. series: so many label sets a metric shows at most.
    """

    enabled: bool = True
    host: str = "127.0.0.1"
    port: int = 0
    series: int = 1000


class TelemetrySettings(Section, frozen=True, kw_only=True):
    """otlp_endpoint: an OpenTelemetry collector's address (OTLP over HTTP, as http://host:4318) that gets the spans of traced
    queries; empty = none are made. Needs the extra `otel`.
    """

    otlp_endpoint: str = ""


class PriceSettings(Section, frozen=True, kw_only=True):
    """US$ per hour by device kind, over services/core/prices.toml."""

    per_hour: dict[str, float] = {}


class Settings(Section, frozen=True, kw_only=True):
    """All settings of one process.

    goal: what queries are served with, among what meets their needs: "cost", the cheapest, or "accuracy", the most accurate
    that the machines which are there can carry. Dispatchers and model-autoscalers must have the same.
    """

    prefix: str = "infaas"
    goal: Literal["cost", "accuracy"] = "cost"
    data_dir: str = ".infaas"
    log_level: str = "INFO"
    bus: BusSettings = field(default_factory=BusSettings)
    store: StoreSettings = field(default_factory=StoreSettings)
    dispatcher: DispatcherSettings = field(default_factory=DispatcherSettings)
    executor: ExecutorSettings = field(default_factory=ExecutorSettings)
    monitor: MonitorSettings = field(default_factory=MonitorSettings)
    registrar: RegistrarSettings = field(default_factory=RegistrarSettings)
    worker: WorkerSettings = field(default_factory=WorkerSettings)
    autoscaler: AutoscalerSettings = field(default_factory=AutoscalerSettings)
    machines: MachineSettings = field(default_factory=MachineSettings)
    prices: PriceSettings = field(default_factory=PriceSettings)
    jobs: JobsSettings = field(default_factory=JobsSettings)
    metrics: MetricsSettings = field(default_factory=MetricsSettings)
    telemetry: TelemetrySettings = field(default_factory=TelemetrySettings)
    dashboard: DashboardSettings = field(default_factory=DashboardSettings)
    gateway: GatewaySettings = field(default_factory=GatewaySettings)
    engine: EngineSettings = field(default_factory=EngineSettings)


# Short names that the contract fixes, beside the general INFAAS_SECTION__FIELD.
_SHORT = {
    "INFAAS_NATS_URL": "bus.url",
    **{variable: f"bus.{name}" for name, variable in VARIABLES.items()},
    "INFAAS_SQL_DSN": "store.dsn",
    "INFAAS_DATA_DIR": "data_dir",
    "INFAAS_PREFIX": "prefix",
    "INFAAS_GOAL": "goal",
    "INFAAS_LOG_LEVEL": "log_level",
}
_READ_AGAIN = ("gateway.tokens", "gateway.operator_tokens")  # may be paths: whoever uses them sees their files change
_MAPS = ("worker.simulate", "prices.per_hour")  # in a variable: kind=number,kind=number


def load(path: Path | None = None, environ: Mapping[str, str] | None = None) -> Settings:
    """Build the settings; raises SettingsError that names the file or variable, the setting, what is wrong and the remedy."""
    environ = os.environ if environ is None else environ
    tree: dict[str, Any] = {}
    if path is not None:
        try:
            tree = tomllib.loads(path.read_text())
        except OSError as error:
            raise SettingsError(f"cannot read {path}: {error.strerror}") from error
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise SettingsError(f"{path} is not valid TOML: {error}") from error
        except RecursionError as error:
            raise SettingsError(f"{path} is not valid TOML: it is nested too deeply") from error
    origins = Origins(str(path or ""))
    for name, value in environ.items():
        where = _SHORT.get(name) or _path(name)
        if where is None or not value:
            continue
        origins.from_variable(where, name)
        try:
            _put(tree, where.split("."), value)
        except SettingsError as error:
            raise SettingsError(f"{name}: {error}") from error
    try:
        settings = msgspec.convert(tree, Settings, strict=False)
    except msgspec.ValidationError as error:
        raise SettingsError(origins.of_invalid(Settings, tree, error)) from error
    for fault in faults(settings):
        raise SettingsError(origins.refusal(Settings, fault.key, fault.reason))
    return settings


def _path(name: str) -> str | None:
    """INFAAS_DISPATCHER__COUNT -> dispatcher.count; other variables are not ours."""
    if not name.startswith("INFAAS_") or "__" not in name:
        return None
    return name.removeprefix("INFAAS_").lower().replace("__", ".")


def _put(tree: dict[str, Any], keys: list[str], value: str) -> None:
    *sections, last = keys
    for section in sections:
        tree = tree.setdefault(section, {})
        if not isinstance(tree, dict):
            raise SettingsError(f"{'.'.join(keys)}: {section} is a value, not a section")
    if last.endswith("_file"):
        name, path = last.removesuffix("_file"), Path(value)
        try:
            text = path.read_text().strip()
            tree[name] = [str(path.absolute())] if ".".join([*sections, name]) in _READ_AGAIN else text
        except OSError as error:
            raise SettingsError(f"cannot read the file of {'.'.join(keys)}: {error.strerror}") from error
    else:
        is_map = ".".join(keys) in _MAPS or (keys[:2] == ["machines", "kinds"] and last in ("simulate", "accelerators"))
        tree[last] = _pairs(value, keys) if is_map else value


def _pairs(value: str, keys: list[str]) -> dict[str, str]:
    """A map from text like gpu=1,inferentia=2; its numbers are checked with everything else."""
    pairs = [pair.partition("=") for pair in value.split(",") if pair.strip()]
    if not all(key.strip() and sign for key, sign, _ in pairs):
        raise SettingsError(f"{'.'.join(keys)} must be written kind=number,kind=number, not {value!r}")
    return {key.strip(): number.strip() for key, _, number in pairs}

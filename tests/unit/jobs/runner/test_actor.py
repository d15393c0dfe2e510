"""A runner on stage, with the real executor and monitor: what becomes of chunks, whatever happens to them."""

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from bus.codec import decode, encode
from bus.messages.catalog import VariantRecord
from bus.messages.fleet import DemoteInstance, WorkerHeartbeat
from bus.messages.jobs import Checkpoint, Chunk, JobRecord, JobStatus, Part, RunnerNote
from bus.messages.public import Tensor
from services.core.actor import Changed, Synced
from services.core.settings import JobsSettings, MonitorSettings, Settings
from services.executor.commands import BatchResult, RunBatch
from services.jobs.runner.actor import Runner
from services.jobs.runner.chunks import DropChunk, ExtendChunks, ReturnChunk, StorePart, TakeChunk, uid_of
from services.jobs.runner.policy import obstacle, ranked
from services.monitor.effects import MachineSample
from tests.support.data.events import beat, device, instance
from tests.support.simulated.fleet import PRICES, Fleet, variant


class Queue:
    """The scripted edge of a runner: chunks to take, and what became of them."""

    def __init__(self, chunks: list[Chunk]) -> None:
        self.chunks = chunks
        self.parts: list[Part] = []
        self.dropped: list[tuple[str, int]] = []
        self.given_back: list[tuple[str, int]] = []
        self.takes = 0
        self.fail_stores = 0

    def __call__(self, command: Any) -> tuple[float, Any]:
        match command:
            case TakeChunk():
                self.takes += 1
                return 0.01, self.chunks.pop(0) if self.chunks else None
            case StorePart():
                if self.fail_stores:
                    self.fail_stores -= 1
                    return 0.01, RuntimeError("the bus is away")
                self.parts.append(command.part)
            case DropChunk():
                self.dropped.append(command.key)
            case ReturnChunk():
                self.given_back.append(command.key)
            case ExtendChunks():
                pass
            case _:
                raise AssertionError(command)
        return 0.001, None


def chunk(number: int, items: int = 4, job: str = "j", generation: int = 0) -> Chunk:
    body = encode({"inputs": Tensor("FP32", [items, 2], bytes(8 * items))})
    return Chunk(job, number, number * items, items, msgspec.Raw(body), generation)


class Scene:
    """One worker with a runner; `job` says that the job is running."""

    def __init__(
        self,
        *chunks: Chunk,
        records: tuple[VariantRecord, ...] = (),
        settings: Settings | None = None,
        jobs: JobsSettings | None = None,
    ) -> None:
        self.settings = jobs or JobsSettings()
        self.fleet = Fleet(*records, settings=settings)
        self.stage = self.fleet.stage
        self.queue = Queue(list(chunks))
        self.machine = MachineSample(utilisation=0.1, memory_used_mb=500.0)
        self.stage.members["w0"].edge = lambda _: (0.0, self.machine)
        self.enter("r1")

    def enter(self, name: str) -> None:
        self.stage.enter(name, Runner(name, "w0", self.fleet.subjects, PRICES, self.settings), self.queue)
        self.fleet.follow(name)
        self.stage.send(name, Synced("infaas-jobs"))

    def job(
        self,
        state: Any = "running",
        runner: str = "r1",
        job: str = "j",
        chunks: int = 0,
        generation: int = 0,
        run: float = 0.0,
        **status: Any,
    ) -> None:
        """run: seconds that pass then."""
        running = JobStatus(job=job, app="app", state=state, input="", output="", **status)
        record = JobRecord(
            status=running, owner="c", chunk_items=4, checkpoint=Checkpoint(chunks=chunks, generation=generation)
        )
        self.stage.send(runner, Changed("infaas-jobs", job, encode(record)), seconds=run)

    def noted(self) -> tuple[str, dict[str, str]]:
        """Its last word to the coordinators."""
        note = next(body for _, subject, body in reversed(self.stage.heard) if subject == "infaas.offline.note")
        return decode(RunnerNote, note).why, decode(RunnerNote, note).jobs

    def numbers(self) -> list[int]:
        return sorted(part.number for part in self.queue.parts)

    def offline(self) -> list[Any]:
        return [event for event in self.fleet.outcomes() if event.policy == "offline"]


def test_chunks_are_computed_and_recorded_once_each() -> None:
    scene = Scene(*(chunk(n) for n in range(10)))
    scene.job(run=5.0)
    assert scene.numbers() == list(range(10))
    outputs = msgspec.msgpack.decode(scene.queue.parts[0].outputs, type=dict[str, Tensor])
    assert outputs["y"].shape == [4, 1]
    found = scene.offline()
    assert sorted(event.uid for event in found) == sorted(uid_of("j", n, 0) for n in range(10))
    assert {(e.outcome, e.items, e.app, e.worker) for e in found} == {("ok", 4, "app", "w0")}
    assert all(event.cost > 0 for event in found)
    assert sum(event.cost for event in found) == pytest.approx(sum(part.cost for part in scene.queue.parts))


@pytest.mark.parametrize("most", [1, 3])
def test_a_worker_takes_as_many_chunks_at_a_time_as_the_settings_say(most: int) -> None:
    scene = Scene(*(chunk(n) for n in range(10)), jobs=JobsSettings(in_flight=most))
    scene.fleet.devices["w0"].slow = 1e4
    scene.job(run=5.0)
    assert scene.queue.takes == most


def test_a_part_is_stored_only_once_its_outcome_is_on_disk() -> None:
    """Else a job could end while the row of a chunk dies with its worker."""
    scene = Scene(chunk(0))
    scene.job()
    while not scene.offline():
        scene.stage.run(0.005)
    scene.stage.kill("r1", seconds=1.0)
    assert scene.numbers() == []


def test_nothing_is_taken_before_a_job_and_other_hardware_holds_nobody_up() -> None:
    scene = Scene(chunk(0))
    scene.stage.run(5.0)
    assert scene.queue.takes == 0
    scene.job(state="reading", run=2.0)
    assert scene.queue.takes == 0
    gpu = variant("gpu", hardware="gpu", model="n", accuracy=0.99)
    scene = Scene(chunk(0, job="heavy"), chunk(1), records=(variant(), gpu))
    scene.stage.listen("infaas.offline.note")
    scene.job(job="heavy", model="n")
    scene.job(run=3.0)
    assert scene.queue.given_back == [("heavy", 0)]
    assert scene.numbers() == [1]
    assert scene.noted() == ("", {"heavy": "has no device for a variant of app that would do"})


def test_a_job_behind_another_and_one_whose_model_finds_no_room_are_told_so() -> None:
    scene = Scene(chunk(0))
    scene.stage.listen("infaas.offline.note")
    scene.fleet.devices["w0"].slow = 1e4
    scene.job()
    scene.job(job="later", run=3.0)
    assert scene.noted() == ("", {"later": "computes j first"})
    huge = variant("huge", model="n")
    huge = replace(huge, profile=replace(huge.profile, memory_mb=1e6))
    scene = Scene(chunk(0, job="large"), records=(variant(), huge))
    scene.stage.listen("infaas.offline.note")
    scene.job(job="large", model="n", run=6.0)
    assert "memory" in scene.noted()[1]["large"]


def test_a_job_brings_a_model_back_from_host_memory() -> None:
    record = variant()
    record = replace(record, profile=replace(record.profile, transfer_ms=10.0, host_mb=50.0))
    scene = Scene(chunk(0), records=(record,), settings=Settings(monitor=MonitorSettings(host_mb=100)))
    subjects, name = scene.fleet.subjects, f"{record.variant}.w0-1"
    scene.stage.listen(subjects.worker_heartbeat("w0"))
    scene.fleet.order(record, seconds=1.0)
    scene.stage.publish(subjects.executor("w0", "cpu", "demote"), DemoteInstance(instance=name))
    scene.stage.run(1.0)
    [instance] = msgspec.msgpack.decode(scene.stage.heard[-1][2])["instances"]
    assert (instance["instance"], instance["state"]) == (name, "Warm")
    scene.job(run=5.0)
    assert scene.numbers() == [0]
    assert scene.fleet.devices["w0"].loads == 1


def test_a_busy_worker_takes_nothing_until_it_is_calm_again() -> None:
    scene = Scene(*(chunk(n) for n in range(3)))
    scene.machine = MachineSample(utilisation=0.9, memory_used_mb=500.0)
    scene.stage.listen("infaas.offline.note")
    scene.stage.run(2.0)
    scene.job(run=5.0)
    assert scene.queue.takes == 0
    assert scene.noted()[0].startswith("cpu is used 90%")
    scene.machine = MachineSample(utilisation=0.2, memory_used_mb=500.0)
    scene.stage.run(3.0)
    assert scene.numbers() == [0, 1, 2]
    assert scene.noted() == ("", {})


def test_online_queries_go_first_and_share_no_batch_with_offline_work() -> None:
    scene = Scene(*(chunk(n, items=8) for n in range(6)), records=(variant(base_ms=40.0),))
    scene.job()
    batches = scene.fleet.devices["w0"].batches
    while len(batches) < 2:
        scene.stage.run(0.01)
    label = scene.fleet.ask(items=1, latency_ms=500)
    scene.stage.run(10.0)
    assert "outputs" in scene.fleet.replies(label)[0]
    assert [batch for batch in batches if label in batch] == [[label]]
    assert batches.index([label]) == 2  # after the one that ran, ahead of the one that waited
    assert scene.numbers() == list(range(6))


def test_offline_work_is_no_load_of_the_instance() -> None:
    scene = Scene(*(chunk(n, items=8) for n in range(200)), records=(variant(base_ms=20.0),))
    scene.stage.listen("infaas.heartbeat.worker.w0")
    scene.job(run=3.0)
    beats = [msgspec.msgpack.decode(body) for _, _, body in scene.stage.heard]
    assert {i["load"] for beat in beats for i in beat["instances"]} <= {0.0}
    assert {i["state"] for beat in beats for i in beat["instances"]} <= {"Loading", "Active"}
    assert {i["queued"] for beat in beats for i in beat["instances"]} == {0}
    assert {round(i["factor"], 2) for beat in beats for i in beat["instances"]} == {1.0}
    offline = [device["offline"] for beat in beats for device in beat["devices"]]
    assert offline[0] == 0.0
    assert 0.05 < max(offline) <= 0.1  # of the 10 % that the machine is used
    assert len(scene.queue.parts) > 50


def test_an_executor_that_dies_costs_nothing_but_time() -> None:
    scene = Scene(*(chunk(n) for n in range(40)))
    scene.job()
    while len(scene.queue.parts) < 5:
        scene.stage.run(0.01)
    assert len(scene.queue.parts) < 40
    scene.fleet.end_executor("w0")
    scene.stage.run(0.3)
    scene.fleet.start_executor("w0")
    scene.stage.run(10.0)
    assert scene.numbers() == list(range(40))
    assert sorted({event.uid for event in scene.offline()}) == sorted(uid_of("j", n, 0) for n in range(40))


def test_a_chunk_that_kills_its_executor_each_time_fails_alone() -> None:
    scene = Scene(*(chunk(n) for n in range(5)))
    scene.job()
    scene.fleet.devices["w0"].poison = {"j/2"}
    deaths = 0
    for _ in range(8000):
        scene.stage.run(0.001)
        if scene.fleet.devices["w0"].died:
            scene.fleet.end_executor("w0")
            deaths += 1
            scene.fleet.start_executor("w0")
            scene.fleet.devices["w0"].poison = {"j/2"}
    assert deaths == 3
    assert scene.numbers() == [0, 1, 2, 3, 4]
    assert [part.number for part in scene.queue.parts if part.error] == [2]
    assert "ended each time" in next(part.error for part in scene.queue.parts if part.error)


def test_a_chunk_that_the_model_refuses_thrice_fails_and_each_try_is_recorded() -> None:
    scene = Scene(chunk(0), chunk(1))
    device = scene.fleet.devices["w0"]

    def refusing(command: Any) -> tuple[float, Any]:
        if isinstance(command, RunBatch) and command.queries[0].route.id == "j/0":
            now = scene.stage.now
            return 0.01, BatchResult(now, now + 0.01, [], ["NaN in output"])
        return device(command)

    scene.stage.members["w0/cpu"].edge = refusing
    scene.job(run=10.0)
    by_number = {part.number: part.error for part in scene.queue.parts}
    assert by_number[1] == ""
    assert by_number[0].startswith("model_error: ")
    assert "NaN in output" in by_number[0]
    errors = [event for event in scene.offline() if event.outcome == "error"]
    assert sorted(event.uid for event in errors) == sorted(uid_of("j", 0, n) for n in range(3))
    assert all(event.cost == 0 for event in errors)


def test_another_runner_goes_on_with_the_same_uids() -> None:
    """As after kill -9: the queue delivers again what was not stored."""
    scene = Scene(*(chunk(n) for n in range(20)))
    scene.job()
    while len(scene.queue.parts) < 5:
        scene.stage.run(0.01)
    done = set(scene.numbers())
    scene.stage.kill("r1")
    scene.queue.chunks = [chunk(n) for n in range(20) if n not in done]
    scene.enter("r2")
    scene.job(runner="r2", run=6.0)
    assert set(scene.numbers()) == set(range(20))
    assert sorted({event.uid for event in scene.offline()}) == sorted(uid_of("j", n, 0) for n in range(20))


def test_what_is_over_or_written_is_dropped_and_what_is_unknown_given_back() -> None:
    scene = Scene(chunk(3), chunk(0, job="gone"), chunk(0, job="unknown"), chunk(7))
    scene.job(chunks=5)
    scene.job(state="cancelled", job="gone", run=3.0)
    assert (scene.queue.dropped, scene.queue.given_back) == ([("j", 3), ("gone", 0)], [("unknown", 0)])
    assert scene.numbers() == [7]


def test_chunks_of_a_job_that_was_forgotten_go_in_the_end() -> None:
    scene = Scene()
    scene.job()
    for _ in range(101):
        assert scene.queue.dropped == []
        scene.queue.chunks = [chunk(0, job="forgotten")]
        scene.stage.run(0.6)
    assert scene.queue.dropped == [("forgotten", 0)]


def test_when_a_job_begins_anew_only_its_new_chunks_count() -> None:
    scene = Scene(chunk(3, generation=1), chunk(9))
    scene.job(chunks=8)  # what is known of it is behind
    scene.stage.run(1.0)
    assert scene.queue.given_back == [("j", 3)]
    assert scene.numbers() == [9]
    scene.queue.chunks = [chunk(3, generation=1), chunk(10)]
    scene.job(chunks=2, generation=1, run=1.0)
    assert scene.queue.dropped == [("j", 10)]
    assert scene.numbers() == [3, 9]


def test_a_part_that_cannot_be_stored_now_is_stored_later() -> None:
    scene = Scene(chunk(0))
    scene.queue.fail_stores = 3
    scene.job(run=6.0)
    assert scene.numbers() == [0]
    assert len(scene.offline()) == 1


def test_the_cheapest_variant_is_loaded_for_the_job_and_let_go_after_it() -> None:
    cheap, dear = variant("cheap", base_ms=1.0), variant("dear", base_ms=9.0, accuracy=0.99)
    scene = Scene(chunk(0), records=(dear, cheap))
    scene.stage.listen("infaas.worker.w0.*")
    scene.job(run=3.0)
    assert [part.variant for part in scene.queue.parts] == ["cheap"]
    scene.job(state="done", run=15.0)
    orders = [(subject.rpartition(".")[2], msgspec.msgpack.decode(body)) for _, subject, body in scene.stage.heard]
    told = [(kind, order["variant"] if kind == "release" else order["variant"]["variant"]) for kind, order in orders]
    assert told == [("load", "cheap"), ("release", "cheap")]
    scene.queue.chunks = [chunk(1, job="exact")]
    scene.job(job="exact", accuracy=0.95, run=3.0)
    assert scene.queue.parts[-1].variant == "dear"


def test_a_variant_that_online_queries_use_stays() -> None:
    scene = Scene(chunk(0))
    scene.stage.listen("infaas.worker.w0.release")
    scene.job(run=2.0)
    for _ in range(20):
        scene.fleet.ask()
        scene.stage.run(0.1)
    scene.job(state="done", run=20.0)
    assert [subject for _, subject, _ in scene.stage.heard if subject.endswith("release")] == []


# -- When a worker takes offline work: the table of the throttle.
RECORD = variant("v")  # a batch of n takes 2 + 0.5 n ms
SETTINGS = JobsSettings()


def why(heard: WorkerHeartbeat | None, settings: JobsSettings = SETTINGS) -> str:
    return obstacle(heard, "cpu", {"v": RECORD}.get, settings)


@pytest.mark.parametrize(
    ("heard",),
    [
        (beat(),),
        (beat(devices=[device(utilisation=0.4)]),),  # not above 40 %
        (beat(devices=[device(utilisation=0.9, offline=0.5)]),),  # its own use does not count
        (beat(instance(load=100.0, latency_ms=2.5, mean_batch=1.0)),),  # as profiled
        (beat(instance(load=100.0, latency_ms=4.4, mean_batch=1.0)),),  # 1.76 times, but less than 2 ms longer
        (beat(instance(load=100.0, latency_ms=6.0, mean_batch=8.0)),),  # as profiled for its batches
        (beat(instance(load=0.0, latency_ms=50.0, mean_batch=1.0)),),  # serves nothing online
        (beat(instance(variant="unknown", load=1.0, latency_ms=50.0, mean_batch=1.0)),),
        (beat(instance(state="Loading")),),
    ],
)
def test_a_calm_worker_takes_offline_work(heard: WorkerHeartbeat) -> None:
    assert why(heard) == ""


@pytest.mark.parametrize(
    ("settings", "waits"),
    [
        ({}, True),
        ({"latency_ratio": 3.0}, False),
        ({"latency_least_ms": 5.0}, False),
    ],
)
def test_how_much_slower_online_batches_may_be_is_set(settings: dict[str, float], waits: bool) -> None:
    """A batch takes 6 ms, and its profile says 2.5."""
    heard = beat(instance(load=100.0, latency_ms=6.0, mean_batch=1.0))
    assert bool(why(heard, JobsSettings(**settings))) is waits


@pytest.mark.parametrize(
    ("heard", "says"),
    [
        (None, "the worker is silent"),
        (beat(draining=True), "the worker is leaving"),
        (beat(devices=[device(utilisation=0.41)]), "cpu is used 41% by other work, offline work waits above 40%"),
        (beat(devices=[device(utilisation=0.95, offline=0.5)]), "cpu is used 45%"),
        (beat(devices=[device(alive=False)]), "the executor of cpu does not run"),
        (beat(devices=[device("gpu-0")]), "the executor of cpu does not run"),
        (beat(instance(state="Overloaded")), "v is Overloaded"),
        (beat(instance(state="Interfered")), "v is Interfered"),
        (beat(instance(app_states={"app": "Interfered"})), "v is Interfered"),
        (beat(instance(load=1.0, latency_ms=5.0, mean_batch=1.0)), "v takes 5 ms a batch, its profile says 2.5 ms"),
        (beat(instance(), instance(variant="x", state="Overloaded")), "x is Overloaded"),
    ],
)  # fmt: skip
def test_a_busy_worker_takes_none_and_says_why(heard: WorkerHeartbeat | None, says: str) -> None:
    assert why(heard).startswith(says)


@given(st.floats(0, 1), st.floats(0, 1), st.floats(0, 1))
def test_work_is_taken_exactly_while_others_use_no_more_than_the_limit(used: float, own: float, limit: float) -> None:
    calm = why(beat(devices=[device(utilisation=used, offline=own)]), JobsSettings(utilisation_below=limit)) == ""
    assert calm == (max(0.0, used - own) <= limit)


def test_the_cheapest_item_comes_first_among_what_the_worker_has_devices_for() -> None:
    quick = variant("quick", base_ms=1.0)
    gpu = variant("gpu", hardware="gpu", base_ms=0.01, per_item_ms=0.001)
    fake = variant("fake", hardware="gpu", simulated=True, base_ms=0.01, per_item_ms=0.001)
    devices = [device(), device("gpu-0", cores=1, simulated=True)]
    found = [(record.variant, where) for record, where in ranked([RECORD, quick, gpu, fake], devices, PRICES, 8)]
    assert ("gpu", "gpu-0") not in found  # a simulated device runs no real variant
    assert found.index(("quick", "cpu")) < found.index(("v", "cpu"))
    assert ("fake", "gpu-0") in found
    away = [device("cpu-0", alive=False), device("cpu-1")]
    assert ranked([RECORD], away, PRICES, 8) == [(RECORD, "cpu-1")]
    assert ranked([RECORD], away[:1], PRICES, 8) == [(RECORD, "cpu-0")]
    for arithmetic, able in (("exact", ["cpu"]), ("saturating", [])):  # its accuracy was measured on the other kind
        here = [replace(device(), arithmetic=arithmetic)]
        assert [one for _, one in ranked([replace(RECORD, arithmetic="exact")], here, PRICES, 8)] == able

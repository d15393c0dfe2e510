"""Faults of processes, connections, machines and the catalogue in a whole system: each does what FaultSpec says."""

from collections import Counter
from typing import Any

import pytest
from msgspec.structs import replace

from bus.codec import decode
from bus.messages.catalog import AppRecord
from bus.messages.events import FeedbackEvent, OutcomeEvent
from bus.messages.fleet import ExecutorExited
from bus.messages.flow import DoneBatch
from bus.messages.scaling import LeaderRecord, StartMachine
from services.core.actor import Inlet
from services.core.batching import batching_key
from services.simulation.connections import Connections
from services.simulation.faults import NEWER
from services.simulation.kernel import Kernel
from services.simulation.scenario.model import BEGINS, FaultSpec, Scenario
from tests.support.data.small_scenarios import CPU, GPU, Told, load, machine, scenario, settings

SPARE = machine("spare", devices=(CPU,), start=0, minimum=0, maximum=3, boot_s=2.0)


def given(*faults: FaultSpec, rate: float = 40.0, seconds: float = 8.0) -> Scenario:
    return scenario(
        load((0.0, rate)),
        duration_s=seconds,
        faults=faults,
        machines=(machine(), SPARE),
        policy=settings(dispatcher={"count": 2}, machines={"idle_s": 1e6}),
    )


class Heard:
    """An actor that keeps what is said on a subject."""

    watches = ()

    def __init__(self, subject: str, message: type) -> None:
        self.inlets = (Inlet(subject=subject, message=message),)
        self.heard: list[tuple[float, Any]] = []

    def handle(self, envelope: Any) -> tuple[()]:
        if envelope.subject:
            self.heard.append((envelope.now - BEGINS, envelope.message))
        return ()


def alive(run: Told, time: float, name: str) -> list[int]:
    """Will hold the order in which the member entered that is there at a time."""
    found: list[int] = []

    def look(_: Any) -> None:
        if name in run.kernel.members:
            found.append(run.kernel.members[name].order)

    run.kernel.at(BEGINS + time - run.kernel.now, look)
    return found


def replies(run: Told, begin: float, end: float) -> Counter[str]:
    """What came to the clients, by type, in a time of the scenario."""
    return Counter(type(message).__name__ for at, _, message in run.ends if begin <= at - BEGINS < end)


def test_a_scenario_without_such_faults_runs_on_the_plain_kernel() -> None:
    assert type(Told(given(FaultSpec(kind="worker-dies", at_s=1.0))).kernel) is Kernel
    assert type(Told(given(FaultSpec(kind="process-dies", at_s=1.0, process="d-0"))).kernel) is Connections


@pytest.mark.parametrize("name", ["d-0", "vm-0", "monitor-mixed-0", "model-mixed-0", "mixed-0/cpu"])
def test_a_process_dies_and_its_supervisor_starts_it_again(name: str) -> None:
    run = Told(given(FaultSpec(kind="process-dies", at_s=3.0, process=name, delay_s=1.0)))
    before, between, after = (alive(run, time, name) for time in (2.9, 3.5, 4.1))
    run.result()
    assert between == []
    assert before < after


def test_actors_of_a_process_die_together_and_clocks_may_be_off() -> None:
    run = Told(given(FaultSpec(kind="process-dies", at_s=3.0, process="model-mixed-0", delay_s=1.0)))
    monitor, executor = alive(run, 3.5, "monitor-mixed-0"), alive(run, 3.5, "mixed-0/cpu")
    run.result()
    assert (monitor, len(executor)) == ([], 1)
    run = Told(given(FaultSpec(kind="clock-off", at_s=3.0, worker="mixed-0", delay_s=5.0)))
    run.result()
    said = [event.time - BEGINS for name, event in run.log if name in ("monitor-mixed-0", "mixed-0/cpu")]
    assert max(said) > run.kernel.now - BEGINS
    assert max(event.time - BEGINS for name, event in run.log if "mixed-0" not in name) <= run.kernel.now - BEGINS


def test_the_death_of_an_executor_is_told_with_what_it_computed_and_that_of_a_worker_is_not() -> None:
    for fault, devices in (
        (FaultSpec(kind="process-dies", at_s=3.0, process="mixed-0/cpu"), ["cpu", "gpu"]),
        (FaultSpec(kind="worker-dies", at_s=3.0, worker="mixed-0"), []),
    ):
        slow = FaultSpec(kind="device-slow", at_s=2.5, factor=30.0)
        run = Told(given(slow, fault, FaultSpec(kind="process-dies", at_s=7.9, process="d-1")))
        heard = Heard("infaas.exited.>", ExecutorExited)
        run.kernel.enter("heard", heard)
        run.result()
        assert sorted(message.device for _, message in heard.heard) == devices
        for at, message in heard.heard:
            assert 3.0 < at < 3.1
            assert message.running


def test_an_executor_that_starts_again_has_nothing_loaded_and_is_used_again() -> None:
    run = Told(given(FaultSpec(kind="process-dies", at_s=3.0, process="mixed-0", delay_s=0.1), seconds=10.0))
    loaded: list[int] = []

    def look(_: Any) -> None:
        loaded.append(sum(len(device.residents) for device in run.system.machines["mixed-0"].devices.values()))

    for time in (2.9, 3.05, 9.0):
        run.kernel.at(BEGINS + time - run.kernel.now, look)
    run.result()
    assert loaded[0] > loaded[1] == 0
    assert replies(run, 7.0, 10.0)["Refusal"] == 0


def test_batches_that_overlapped_on_a_gpu_end_with_their_executor() -> None:
    whole = given(
        FaultSpec(kind="device-slow", at_s=2.5, until_s=3.2, factor=600.0),
        FaultSpec(kind="process-dies", at_s=3.0, process="mixed-0/gpu", delay_s=0.1),
        rate=150.0,
        seconds=9.0,
    )
    (policy,) = whole.policies
    overlapping = replace(policy.settings, executor=replace(policy.settings.executor, exclusive=False))
    gpus = (machine(devices=(GPU,), start=1, minimum=1, maximum=1),)
    run = Told(replace(whole, policies=(replace(policy, settings=overlapping, machines=gpus),)))
    run.result()
    assert replies(run, 2.0, 2.5)["Answer"] > 50
    assert replies(run, 7.0, 9.0)["Answer"] > 200
    assert not run.system.machines["mixed-0"].devices["gpu"].overlapping._running


def test_a_worker_that_is_stopped_answers_nothing_and_then_lives_on() -> None:
    run = Told(given(FaultSpec(kind="process-stopped", at_s=3.0, until_s=5.0, process="mixed-0"), seconds=10.0))
    executor = alive(run, 4.0, "mixed-0/cpu"), alive(run, 6.0, "mixed-0/cpu")
    run.result()
    assert executor[0] == executor[1] != []
    assert {
        event.time - BEGINS for name, event in run.log if name == "mixed-0/cpu" and 3.0 <= event.time - BEGINS < 5.0
    } == set()
    assert replies(run, 8.0, 10.0)["Refusal"] == 0


def test_queries_to_a_stopped_dispatcher_wait_in_it() -> None:
    run = Told(given(FaultSpec(kind="process-stopped", at_s=3.0, until_s=4.0, process="d-0"), rate=80.0))
    quiet = Told(given(rate=80.0))
    run.result()
    quiet.result()
    assert 0.35 < (replies(run, 3.1, 3.9)["Answer"] / replies(quiet, 3.1, 3.9)["Answer"]) < 0.65
    assert replies(run, 3.99, 4.2).total() > 1.5 * replies(quiet, 3.99, 4.2).total()


@pytest.mark.parametrize(("process", "ended"), [("d-0", True), ("mixed-0/cpu", True), ("mixed-0", False)])
def test_a_supervisor_ends_a_process_that_stays_stopped_unless_it_is_stopped_itself(process: str, ended: bool) -> None:
    run = Told(given(FaultSpec(kind="process-stopped", at_s=2.0, until_s=6.0, process=process)))
    name = "d-0" if process == "d-0" else "mixed-0/cpu"
    before, hangs, after = (alive(run, time, name) for time in (1.9, 4.2, 4.8))
    run.result()
    assert before == hangs
    assert (after > before) == ended


def test_a_process_that_dies_while_it_is_stopped_is_not_woken() -> None:
    run = Told(
        given(
            FaultSpec(kind="process-stopped", at_s=2.0, until_s=6.0, process="d-0"),
            FaultSpec(kind="process-dies", at_s=3.0, process="d-0", delay_s=0.2),
        )
    )
    run.result()
    assert replies(run, 3.5, 5.9)["Answer"] > 0.9 * 40 * 2.4


def test_the_end_of_a_stop_wakes_only_the_process_that_it_has_stopped() -> None:
    run = Told(
        given(
            FaultSpec(kind="process-stopped", at_s=2.0, until_s=4.5, process="d-0"),
            FaultSpec(kind="process-dies", at_s=3.0, process="d-0", delay_s=0.2),
            FaultSpec(kind="process-stopped", at_s=4.2, until_s=5.5, process="d-0"),
        )
    )
    assert isinstance(run.kernel, Connections)
    stops: list[int] = []
    for time in (2.5, 4.0, 5.0, 6.0):
        run.kernel.at(BEGINS + time - run.kernel.now, lambda _: stops.append(run.kernel.process("d-0").stops))
    run.result()
    assert stops == [1, 0, 1, 0]


def test_a_process_is_not_started_again_on_a_machine_that_has_come_back_meanwhile() -> None:
    run = Told(
        given(
            FaultSpec(kind="process-dies", at_s=3.0, process="mixed-0/cpu", delay_s=2.0),
            FaultSpec(kind="worker-dies", at_s=3.5, worker="mixed-0"),
            FaultSpec(kind="worker-joins", at_s=4.0, hardware="mixed", worker="mixed-0"),
        )
    )
    before, after = alive(run, 4.5, "mixed-0/cpu"), alive(run, 6.0, "mixed-0/cpu")
    run.result()
    assert before == after != []


def test_no_dispatcher_listens_and_clients_are_told() -> None:
    both = [FaultSpec(kind="link-lost", at_s=3.0, until_s=4.0, process=name) for name in ("d-0", "d-1")]
    run = Told(given(*both))
    result = run.result()
    assert replies(run, 3.05, 3.95).keys() == {"Undelivered"}
    assert result["refusals"]["no_responders"] == replies(run, 2.0, 5.0)["Undelivered"]
    assert replies(run, 4.1, 8.0).keys() == {"Answer"}


def test_a_worker_joins_and_one_that_died_comes_back_under_its_name() -> None:
    run = Told(
        given(
            FaultSpec(kind="worker-joins", at_s=1.0, hardware="spare"),
            FaultSpec(kind="worker-dies", at_s=2.0, worker="mixed-0"),
            FaultSpec(kind="worker-joins", at_s=4.0, hardware="mixed", worker="mixed-0"),
        )
    )
    gone, back, joined = alive(run, 3.0, "mixed-0/cpu"), alive(run, 4.1, "mixed-0/cpu"), alive(run, 1.1, "spare-0/cpu")
    run.result()
    assert (gone, len(back), len(joined)) == ([], 1, 1)


@pytest.mark.parametrize(
    ("fault", "boots"),
    [
        (None, [3.0]),
        (FaultSpec(kind="boot-late", at_s=0.0, hardware="spare", delay_s=1.5), [4.5]),
        (FaultSpec(kind="boot-late", at_s=0.0, hardware="mixed", delay_s=1.5), [3.0]),
        (FaultSpec(kind="boot-never", at_s=0.0, hardware="spare"), []),
        (FaultSpec(kind="boot-twice", at_s=0.0, hardware="spare", delay_s=0.5), [3.0, 5.5]),
    ],
)
def test_a_machine_boots_late_never_or_twice(fault: FaultSpec | None, boots: list[float]) -> None:
    run = Told(given(*([fault] if fault else ())))
    seen: list[float] = []
    there = False

    def look(_: Any) -> None:
        nonlocal there
        if ("spare-x" in run.system.machines) and not there:
            seen.append(round(run.kernel.now - BEGINS, 2))
        there = "spare-x" in run.system.machines
        run.kernel.at(0.01, look)

    order = StartMachine(worker="spare-x", kind="spare", epoch=1)
    run.kernel.at(BEGINS + 1.0 - run.kernel.now, run.system._ordered, order)
    run.kernel.at(BEGINS + 0.9 - run.kernel.now, look)
    run.result()
    assert seen == pytest.approx(boots, abs=0.02)


@pytest.mark.parametrize(
    ("fault", "seconds"),
    [
        (FaultSpec(kind="load-slow", at_s=0.0, factor=10.0), 10.0),
        (FaultSpec(kind="load-slow", at_s=0.0, factor=10.0, variant="large-gpu"), 1.0),
        (FaultSpec(kind="load-hangs", at_s=0.0, until_s=6.0), 4.0),
        (FaultSpec(kind="load-hangs", at_s=0.0), float("inf")),
    ],
)
def test_loads_take_longer_or_hang(fault: FaultSpec, seconds: float) -> None:
    run = Told(given(fault))
    took: list[float] = []
    record = next(one for one in run.scenario.variants if one.variant == "small-cpu")
    run.kernel.at(BEGINS + 2.0 - run.kernel.now, lambda _: took.append(run.system.load_takes(record, 1.0)))
    run.result()
    assert took == [seconds]


def test_batches_take_longer_than_the_profile_of_their_variant_says() -> None:
    run = Told(given(FaultSpec(kind="profile-wrong", at_s=4.0, factor=2.0, variant="small-cpu")))
    run.result()
    took = {early: [] for early in (True, False)}
    for at, _, message in run.ends:
        if getattr(message, "variant", "") == "small-cpu" and abs(at - BEGINS - 4.0) > 0.2 and at > BEGINS:
            took[at < BEGINS + 4.0].append(message.latency_ms)
    assert min(took[False]) > 1.8 * min(took[True])


def test_batches_have_the_times_of_their_workers_clock() -> None:
    off = [FaultSpec(kind="clock-off", at_s=0.5, worker=f"mixed-{number}", delay_s=0.03) for number in (0, 1)]
    run = Told(given(*off))
    batches = Heard("infaas.done.*", DoneBatch)
    run.kernel.enter("batches", batches)
    run.result()
    ahead = [message.finished - BEGINS - at for at, message in batches.heard if at > 6.0]
    assert len(ahead) > 20
    assert all(0.02 < one < 0.03 for one in ahead)


def test_a_lease_that_is_claimed_late_goes_to_another() -> None:
    run = Told(given(FaultSpec(kind="lease-late", at_s=1.0, until_s=20.0, process="vm-1"), seconds=20.0))
    holders: list[str] = []

    def look(_: Any) -> None:
        holders.append(
            decode(LeaderRecord, run.kernel.get(run.system.subjects.control_bucket, "controller") or b"").holder
        )

    for time in (0.9, 19.0):
        run.kernel.at(BEGINS + time - run.kernel.now, look)
    run.result()
    assert holders == ["vm-1", "vm-0"]


def test_queries_are_sent_again_and_answered_alike() -> None:
    run = Told(given(FaultSpec(kind="query-resent", at_s=1.0, until_s=7.0, delay_s=0.3, app="a")))
    run.result()
    told: dict[str, list[Any]] = {}
    for at, inbox, message in run.ends:
        if 1.5 < at - BEGINS < 6.5:
            told.setdefault(inbox, []).append(message)
    twice = [both for both in told.values() if len(both) == 2]
    assert len(twice) > 50
    assert all(type(first) is type(second) for first, second in twice)


def test_queries_are_taken_back_and_are_in_no_objective() -> None:
    run = Told(given(FaultSpec(kind="query-cancelled", at_s=1.0, until_s=7.0, app="a")))
    result = run.result()["apps"]["a"]
    gone = [event for _, event in run.log if isinstance(event, OutcomeEvent) and event.outcome == "cancelled"]
    assert {event.cost for event in gone} == {0.0}
    assert result["refusals"]["cancelled"] == len(gone) > 5
    assert result["refused"] == 0
    assert result["attainment"] == (result["answered"] - result["late"]) / (result["queries"] - len(gone))


def test_labels_come_late_and_each_counts_once_for_who_answered() -> None:
    run = Told(given(FaultSpec(kind="labels-late", at_s=1.0, until_s=7.0, app="a", delay_s=0.5)))
    run.result()
    rows = [event for _, event in run.log if isinstance(event, FeedbackEvent)]
    scored = [(row.query, row.item) for row in rows if row.score is not None]
    assert len(rows) > len(scored) == len(set(scored)) > 5
    assert {row.variant for row in rows if row.score is not None} <= {"small-cpu", "large-cpu"}


@pytest.mark.parametrize(
    ("fault", "during"),
    [
        (FaultSpec(kind="change", at_s=2.0, until_s=4.0, what="app-deleted", app="a"), None),
        (FaultSpec(kind="change", at_s=2.0, until_s=4.0, what="target", app="a", factor=0.8), ("slo_target", 0.8)),
        (FaultSpec(kind="change", at_s=2.0, until_s=4.0, what="plan", app="a"), ("plan", None)),
        (
            FaultSpec(kind="change", at_s=2.0, until_s=4.0, what="model-deleted", model="small"),
            ("links", {"large": "1"}),
        ),
        (
            FaultSpec(kind="change", at_s=2.0, until_s=4.0, what="version", model="small"),
            ("links", {"large": "1", "small": f"1{NEWER}"}),
        ),
    ],
)
def test_the_catalogue_changes_and_changes_back(fault: FaultSpec, during: tuple[str, Any] | None) -> None:
    run = Told(given(fault))
    seen: list[dict[str, bytes]] = []

    def look(_: Any) -> None:
        seen.append(run.kernel.entries(run.system.subjects.catalog_bucket))

    for time in (1.9, 3.0, 4.1):
        run.kernel.at(BEGINS + time - run.kernel.now, look)
    run.result()
    before, between, after = seen
    assert before == after != between or fault.what == "plan"
    if during is None:
        assert "app.a" not in between
        assert replies(run, 2.2, 3.9).keys() == {"Refusal"}
    else:
        assert getattr(decode(AppRecord, between["app.a"]), during[0]) == during[1]
    if fault.what == "model-deleted":
        assert {key for key in before if key not in between} == {"model.small.1", "variant.small-cpu"}
    if fault.what == "version":
        assert set(between) - set(before) == {f"model.small.1{NEWER}", f"variant.small-cpu{NEWER}"}


def test_a_change_that_ends_leaves_what_others_have_changed_meanwhile() -> None:
    """Also where the one that began first ends first."""
    run = Told(
        given(
            FaultSpec(kind="change", at_s=2.0, until_s=4.0, what="version", model="small"),
            FaultSpec(kind="change", at_s=3.0, until_s=5.0, what="target", app="a", factor=0.8),
        )
    )
    seen: list[AppRecord] = []

    def look(_: Any) -> None:
        seen.append(decode(AppRecord, run.kernel.entries(run.system.subjects.catalog_bucket)["app.a"]))

    for time in (1.9, 3.5, 4.5, 5.1):
        run.kernel.at(BEGINS + time - run.kernel.now, look)
    run.result()
    assert [one.slo_target for one in seen] == [None, 0.8, 0.8, None]
    assert [one.links["small"] for one in seen] == ["1", f"1{NEWER}", "1", "1"]


def test_a_rule_of_batches_changes_and_ends() -> None:
    run = Told(given(FaultSpec(kind="change", at_s=2.0, until_s=4.0, what="setting", app="a", factor=2.0)))
    seen: list[bytes | None] = []
    for time in (1.9, 3.0, 4.1):
        run.kernel.at(
            BEGINS + time - run.kernel.now,
            lambda _: seen.append(run.kernel.get(run.system.subjects.control_bucket, batching_key("app", "a"))),
        )
    run.result()
    assert seen[0] is seen[2] is None
    assert seen[1] is not None

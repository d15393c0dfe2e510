"""Rafiqi's batching by a threshold, and turns of a device's instances (paper 001, section 3.3), on an executor in virtual time."""

from statistics import mean
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bus.messages.fleet import UnloadInstance
from bus.messages.jobs import OFFLINE
from services.core.settings import ExecutorSettings, Settings
from services.executor.batching import Threshold
from tests.support.simulated.batch_clients import BatchClients, linear

QUANTUM = 0.005


def counted(arrivals: list[int], most: int = 1024) -> list[float]:
    """The threshold at the end of each quantum in which so many items came, one after the other."""
    policy = Threshold(most, QUANTUM)
    found = []
    for n, came in enumerate(arrivals):
        for _ in range(came):
            policy.arrived(1, (n + 0.5) * QUANTUM)
        found.append(policy.threshold((n + 1.01) * QUANTUM))
    return found


def test_the_threshold_rises_by_half_of_the_way_and_falls_by_half() -> None:
    assert counted([16, 16, 16, 2]) == [8.0, 12.0, 14.0, 7.0]


def test_of_a_step_down_to_one_nothing_is_left_after_seven_quanta() -> None:
    """Row 89. Trap 20: at exactly one it does not stall."""
    for rest in (0, 1):
        found = counted([128] * 20 + [300] + [rest] * 7)
        assert found[20] == 128.0
        assert found[20:27] == [128.0, 64.0, 32.0, 16.0, 8.0, 4.0, 2.0]
        assert found[27] == 0.0


@given(st.lists(st.integers(0, 2000), max_size=30), st.integers(1, 1024))
def test_the_threshold_is_never_above_its_cap_and_always_gone_after_seven_idle_quanta(
    arrivals: list[int], most: int
) -> None:
    found = counted(arrivals + [0] * 7, most)
    assert max(found) <= min(128, most)
    assert found[-1] == 0.0


@given(st.lists(st.integers(0, 50), max_size=10), st.integers(0, 50), st.floats(0.001, 5.0))
def test_quanta_in_which_nobody_asked_count_too(arrivals: list[int], idle: int, later: float) -> None:
    """Whoever asks rarely sees the same threshold."""
    often, rarely = (Threshold(1024, QUANTUM) for _ in range(2))
    for policy in (often, rarely):
        for n, came in enumerate(arrivals):
            policy.arrived(came, (n + 0.5) * QUANTUM)
    ended = len(arrivals) + 0.5
    for n in range(idle):
        often.threshold((ended + n) * QUANTUM)
    assert often.threshold((ended + idle) * QUANTUM) == rarely.threshold((ended + idle) * QUANTUM)
    assert often.threshold(later + 1e9) == rarely.threshold(later + 1e9) == 0.0


def flooded(rate: float, seconds: float = 1.0, **fields: Any) -> BatchClients:
    """A steady stream of so many queries/s on a device that has little to do; it ends a hundredth of a second ago."""
    clients = BatchClients(linear(0.5, 0.001))
    clients.rule("model", "m", policy="threshold", **fields)
    for _ in range(int(seconds * rate)):
        clients.send(seconds=1.0 / rate)
    return clients


def test_batches_grow_with_the_load_up_to_the_largest() -> None:
    """A steady stream brings c in a quantum: that many wait, and one more."""
    for rate, size in ((400.0, 3), (2000.0, 11), (6000.0, 31)):
        assert mean(flooded(rate).batches(0.5)) == pytest.approx(size, rel=0.15)
    assert mean(flooded(2000.0, quantum_ms=20).batches(0.5)) == pytest.approx(41, rel=0.15)
    assert max(flooded(6000.0, quantum_ms=100, batch=16).batches(0.5)) == 16
    assert 128 <= max(flooded(6000.0, quantum_ms=100).batches(0.5)) <= 130


def test_a_lone_query_begins_within_two_quanta() -> None:
    clients = flooded(6000.0)
    clients.run(7 * QUANTUM)
    clients.answers.clear()
    for _ in range(20):
        clients.send(seconds=0.03)
    assert len(clients.answers) == 20
    # 0.5 ms on the way
    assert max(1000.0 * (one.at - one.sent) - one.compute_ms for one in clients.answers) <= 2 * 5.0 + 0.6


def test_one_query_a_quantum_is_not_held_after_a_flood() -> None:
    clients = flooded(6000.0)
    since = clients.now
    for _ in range(40):
        clients.send(seconds=QUANTUM)
    clients.run(0.1)
    waits = [1000.0 * (one.at - one.sent) - one.compute_ms for one in clients.answers if one.sent > since + 7 * QUANTUM]
    assert len(waits) >= 32
    assert max(waits) <= 0.6


def test_what_waits_for_a_threshold_is_answered_in_time() -> None:
    clients = flooded(6000.0, quantum_ms=10_000)
    since = clients.now
    clients.send(within=0.05, seconds=0.1)
    [late] = [one for one in clients.answers if one.sent >= since - 1e-6]
    assert late.at - late.sent <= 0.0506
    assert not clients.reports.handed_back


# -- turns of a device's instances

LARGEST_MS = 26.0  # a batch of 32


def quiet_beside_a_flood(order: str, **rule: Any) -> list[float]:
    """Milliseconds of the answers of a quiet model, beside one whose clients send three times what the device can, and are in more of a hurry."""
    clients = BatchClients(
        linear(10.0, 0.5, most=32), kind="cpu", settings=Settings(executor=ExecutorSettings(order=order))
    )
    clients.beside("quiet", linear(10.0, 0.5, most=32, variant="q", model="quiet"))
    if rule:
        clients.rule("app", "a", **rule)
    capacity = 1000.0 * 32 / LARGEST_MS
    since = clients.now
    for n in range(int(3 * capacity * 2.0)):
        clients.send(within=10.0)
        if n % 200 == 0:
            clients.send(instance="quiet", within=20.0)
        clients.run(1.0 / (3 * capacity))
    clients.run(6.0)
    assert mean(clients.batches(since + 0.5, until=since + 2.0)) == 32  # the device is full
    return [1000.0 * (one.at - one.sent) for one in clients.answers if one.instance == "quiet"]


@pytest.mark.parametrize("order", ["lru", "edf"])
@pytest.mark.parametrize("rule", [{}, {"policy": "threshold"}])
def test_a_quiet_model_beside_a_flooded_one_waits_for_one_batch(rule: dict[str, Any], order: str) -> None:
    """Row 90. It waits for the batch that runs and for its own; by deadlines, since the flood's are earlier, for ten times that at most."""
    waits = quiet_beside_a_flood(order, **rule)
    assert len(waits) == 37
    assert np.quantile(waits, 0.99) < (1 if order == "lru" else 10) * (2 * LARGEST_MS) + 5.0


@pytest.mark.parametrize("within", [0.2, 1.0, 30.0])
def test_by_deadlines_a_quiet_model_waits_at_most_ten_times_as_long_as_in_turns(within: float) -> None:
    """Two floods whose queries have as much time as the quiet one's or far less: without a bound it waits until they end, or for its own deadline.

    In turns it waits for one batch of each, its own included.
    """
    clients = BatchClients(linear(5.0, 10.0, most=1), kind="cpu")
    clients.beside("flood", linear(5.0, 20.0, most=1))
    clients.beside("quiet", linear(2.0, 1.0, most=8))
    for n in range(1000):
        clients.send(within=within)
        clients.send(instance="flood", within=within, seconds=0.005)
        if n % 100 == 50:
            clients.send(instance="quiet", within=30.0)
    clients.run(30.0)
    waits = [one.at - one.sent for one in clients.answers if one.instance == "quiet"]
    assert len(waits) == 10
    assert max(waits) < 10 * (0.015 + 0.025 + 0.010)
    flood = [one for one in clients.answers if one.instance != "quiet"]
    assert max(one.at - one.sent for one in flood) < within + 0.05
    assert within < 30.0 or len(flood) == 2000 - len(clients.reports.handed_back)


@pytest.mark.parametrize(
    ("order", "loops", "within", "seconds", "longest"),
    [("edf", 0.1, 30.0, 0.3, 10 * (0.006 + 0.005)), ("lru", None, 1.0, 0.1, 0.0125 + 0.001)],
)
def test_none_overtakes_an_instance_that_needs_all_cores_for_long(
    order: str, loops: float | None, within: float, seconds: float, longest: float
) -> None:
    """Neither by deadlines, of which its queries have late ones, nor in turns."""
    settings = Settings(executor=ExecutorSettings(order=order))
    clients = BatchClients(linear(5.0, 0.0, most=1), kind="cpu", cores=2, settings=settings)
    clients.beside("narrow", linear(7.0, 0.0, most=1))
    clients.beside("wide", linear(5.0, 0.0, most=1, threads=2))
    for instance in ("i0", "narrow"):
        clients.closed_loop(2, instance=instance, **({} if loops is None else {"within": loops}))
    clients.run(0.1)
    for _ in range(5):
        clients.send(instance="wide", within=within, seconds=seconds)
    waits = [one.at - one.sent for one in clients.answers if one.instance == "wide"]
    assert len(waits) == 5
    assert max(waits) < longest


def test_in_turns_offline_work_still_waits_for_all_other() -> None:
    clients = BatchClients(
        linear(5.0, 0.0, most=1), kind="cpu", settings=Settings(executor=ExecutorSettings(order="lru"))
    )
    clients.beside("jobs", linear(5.0, 0.0, most=1))
    since = clients.now
    for _ in range(10):
        clients.send()
        clients.send(instance="jobs", within=1000.0, policy=OFFLINE)
    clients.run(1.0)
    first = sorted((one for one in clients.answers if one.sent >= since), key=lambda one: one.at)
    assert [one.instance for one in first[:10]] == ["i0"] * 10
    assert len(first) == 20


# -- Contexts: batches of one instance at a time on one copy of its weights, on an executor in virtual time (paper 001,
# section 4.0.3).
FAST = Settings(executor=ExecutorSettings(sharing=0.0))


@pytest.mark.parametrize(("sharing", "faster"), [(0.0, 2.0), (1.0, 1.0), (0.5, 4 / 3)])
def test_two_contexts_serve_twice_as_much_where_the_device_has_the_speed(sharing: float, faster: float) -> None:
    """Two batches at a time each take 1 + sharing times as long."""
    clients = BatchClients(linear(10.0, 0.0, most=1), settings=Settings(executor=ExecutorSettings(sharing=sharing)))
    clients.closed_loop(20, seconds=0.5)
    served = {}
    for contexts in (1, 2):
        clients.rule("model", "m", contexts=contexts, seconds=0.5)
        since = clients.now
        clients.run(2.0)
        served[contexts] = (
            len(clients.batches(since)) if contexts == 1 else sum(one.at >= since for one in clients.answers)
        )
    assert (served[1], served[2]) == (pytest.approx(200, abs=2), pytest.approx(200 * faster, rel=0.02))
    assert clients.executors[0].instances["i0"].queue.factor == pytest.approx(1.0 + sharing, rel=0.01)


def test_an_exclusive_gpu_computes_for_one_instance_at_a_time_and_another_gpu_for_all() -> None:
    """All contexts of one run beside each other; no instance waits for ever."""
    for exclusive in (True, False):
        settings = Settings(executor=ExecutorSettings(exclusive=exclusive))
        clients = BatchClients(linear(10.0, 0.0, most=1), settings=settings)
        clients.beside("i1", linear(10.0, 0.0, most=1, variant="w", model="n"))
        clients.rule("model", "m", contexts=2, seconds=0.1)
        clients.closed_loop(20)
        clients.closed_loop(20, instance="i1")
        seen = set()
        for _ in range(200):
            clients.run(0.0101)
            instances = clients.executors[0].instances
            seen.add((instances["i0"].running, instances["i1"].running))
        if exclusive:
            assert {(2, 0), (0, 1)} <= seen <= {(2, 0), (1, 0), (0, 1)}
        else:
            assert seen == {(2, 1)}


def running(clients: BatchClients, seconds: float, instance: str = "i0") -> list[int]:
    """Batches that the instance computes, at 100 times of the next seconds."""
    found = []
    for _ in range(100):
        clients.run(seconds / 100)
        found.append(clients.executors[0].instances[instance].running)
    return found


def test_contexts_are_batches_at_a_time_on_one_copy_and_one_serialises() -> None:
    """Row 91: an instance that always has work computes as many batches as it has contexts."""
    clients = BatchClients(linear(10.0, 0.0, most=1))
    clients.closed_loop(20)
    seen = {}
    for contexts in (None, 2, 4, 1):
        clients.rule("model", "m", contexts=contexts, seconds=0.5)
        seen[contexts] = {*running(clients, 1.0)}
        assert clients.reports.last["i0"].contexts == (contexts or 1)
    assert seen == {None: {1}, 2: {2}, 4: {4}, 1: {1}}
    assert clients.devices[0].memory_mb == 1.0, "one copy of the weights"
    assert clients.executors[0].instances["i0"].queue.items + 1 == 20, "none was lost on the way"


def test_without_a_rule_there_are_as_many_as_the_profile_was_measured_with() -> None:
    clients = BatchClients(linear(10.0, 0.0, most=1, contexts=2), settings=FAST)
    clients.closed_loop(20)
    assert {*running(clients, 1.0)} == {2}
    assert clients.executors[0].instances["i0"].queue.factor == pytest.approx(1.0)
    clients.rule("model", "m", contexts=1, seconds=0.1)
    assert {*running(clients, 1.0)} == {1}


def test_a_batch_of_a_second_context_begins_while_the_first_one_runs() -> None:
    clients = BatchClients(linear(10.0, 0.0, most=1))
    clients.rule("variant", "v", contexts=2)
    clients.send_many(3, seconds=0.005)
    loaded = clients.executors[0].instances["i0"]
    assert (loaded.running, loaded.running_items, loaded.queue.items) == (2, 2, 1)
    clients.run(1.0)
    assert (loaded.running, loaded.running_items, len(clients.answers)) == (0, 0, 3)


def test_an_instance_leaves_once_all_its_contexts_are_idle() -> None:
    clients = BatchClients(linear(10.0, 0.0, most=1))
    clients.rule("variant", "v", contexts=2)
    clients.send_many(4, seconds=0.005)
    clients.kernel.publish(clients.subjects.executor("w", "gpu0", "unload"), UnloadInstance(instance="i0"))
    clients.run(1.0)
    assert len(clients.answers) == 4
    assert not clients.executors[0].instances


def test_the_executor_takes_more_queries_where_it_has_more_contexts() -> None:
    """Ten queries of 10 ms within 60 ms, on a GPU that has the speed for two: one context is in time for five or six, two are for all."""
    answered = {}
    for contexts in (1, 2):
        clients = BatchClients(linear(10.0, 0.0, most=1), settings=FAST)
        clients.rule("variant", "v", contexts=contexts, seconds=0.01)
        for _ in range(10):
            clients.send(within=0.06)
        clients.run(1.0)
        answered[contexts] = len(clients.answers)
        assert answered[contexts] + len(clients.reports.handed_back) == 10
    assert answered[1] in (5, 6)
    assert answered[2] == 10

"""Contexts: batches of one instance at a time on one copy of its weights, on an executor in virtual time (paper 001, section 4.0.3)."""

import pytest

from bus.messages.fleet import UnloadInstance
from services.core.settings import ExecutorSettings, Settings
from tests.support.simulated.batch_clients import BatchClients, linear

FAST = Settings(executor=ExecutorSettings(sharing=0.0))


@pytest.mark.parametrize(("sharing", "faster"), [(0.0, 2.0), (1.0, 1.0), (0.5, 4 / 3)])
def test_two_contexts_serve_twice_as_much_where_the_device_has_the_speed(sharing: float, faster: float) -> None:
    """Two batches at a time each take 1 + sharing times as long."""
    clients = BatchClients(linear(10.0, 0.0, most=1), settings=Settings(executor=ExecutorSettings(sharing=sharing)))
    clients.closed_loop(20)
    clients.run(0.5)
    served = {}
    for contexts in (1, 2):
        clients.rule("model", "m", contexts=contexts)
        clients.run(0.5)
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
        clients.rule("model", "m", contexts=2)
        clients.run(0.1)
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
        clients.rule("model", "m", contexts=contexts)
        clients.run(0.5)
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
    clients.rule("model", "m", contexts=1)
    clients.run(0.1)
    assert {*running(clients, 1.0)} == {1}


def test_a_batch_of_a_second_context_begins_while_the_first_one_runs() -> None:
    clients = BatchClients(linear(10.0, 0.0, most=1))
    clients.rule("variant", "v", contexts=2)
    clients.send_many(3)
    clients.run(0.005)
    loaded = clients.executors[0].instances["i0"]
    assert (loaded.running, loaded.running_items, loaded.queue.items) == (2, 2, 1)
    clients.run(1.0)
    assert (loaded.running, loaded.running_items, len(clients.answers)) == (0, 0, 3)


def test_an_instance_leaves_once_all_its_contexts_are_idle() -> None:
    clients = BatchClients(linear(10.0, 0.0, most=1))
    clients.rule("variant", "v", contexts=2)
    clients.send_many(4)
    clients.run(0.005)
    clients.kernel.publish(clients.subjects.executor("w", "gpu0", "unload"), UnloadInstance(instance="i0"))
    clients.run(1.0)
    assert len(clients.answers) == 4
    assert not clients.executors[0].instances


def test_the_executor_takes_more_queries_where_it_has_more_contexts() -> None:
    """Ten queries of 10 ms within 60 ms, on a GPU that has the speed for two: one context is in time for five or six, two are for all."""
    answered = {}
    for contexts in (1, 2):
        clients = BatchClients(linear(10.0, 0.0, most=1), settings=FAST)
        clients.rule("variant", "v", contexts=contexts)
        clients.run(0.01)
        for _ in range(10):
            clients.send(within=0.06)
        clients.run(1.0)
        answered[contexts] = len(clients.answers)
        assert answered[contexts] + len(clients.reports.handed_back) == 10
    assert answered[1] in (5, 6)
    assert answered[2] == 10

"""An executor ends: only the queries that it computed then are suspect. The others are dispatched again at once, in order. Virtual time."""

from collections.abc import Callable
from typing import Any

import pytest

from bus.messages.fleet import ExecutorExited
from services.core.actor import NOTHING, Effect
from services.dispatcher.inflight import MOST_LOST, TOLD, InFlight, Retries
from tests.support.simulated.fleet import Fleet, refused

GOOD = [f"good{n}" for n in range(11)]


def warm(**options: Any) -> Fleet:
    fleet = Fleet(**options)
    fleet.ask(id="warm", seconds=2.0)
    return fleet


def in_flight(fleet: Fleet) -> InFlight:
    return fleet.dispatcher().in_flight


def ask_behind_poison(fleet: Fleet) -> str:
    """A poisonous query runs alone, and the others, which have more time, wait behind it. Returns where."""
    fleet.ask(id="poison", latency_ms=900.0, seconds=0.0005)
    for n, label in enumerate(GOOD):
        fleet.ask(id=label, latency_ms=1000.0 - n)
    fleet.stage.run(0.0005)
    [worker] = {query.instance.worker.name for query in in_flight(fleet).dispatched.values() if query.instance}
    assert fleet.devices[worker].batches[-1] == ["poison"]
    assert len(in_flight(fleet).dispatched) == 1 + len(GOOD)
    return worker


def test_what_waited_behind_the_batch_is_dispatched_at_once_to_another_worker_in_order() -> None:
    fleet = warm(workers=2)
    home = ask_behind_poison(fleet)
    fleet.end_executor(home, fleet.running(home))
    fleet.stage.run(0.2)  # the dead one is not back: the other one loads the model
    other = fleet.devices["w1" if home == "w0" else "w0"]
    assert all(reply["batch"] > 1 for reply in fleet.each(GOOD)), "they are not tried one by one"
    assert [label for batch in other.batches for label in batch if label in GOOD] == GOOD[::-1], "by their deadlines"


def test_they_wait_for_their_executor_and_count_no_crash_and_the_suspect_comes_last() -> None:
    fleet = warm()
    ask_behind_poison(fleet)
    fleet.end_executor("w0", fleet.running("w0"), seconds=0.001)
    flight = in_flight(fleet)
    assert {query.head.id: query.crashes for query in flight.waiting.values()} == dict.fromkeys(GOOD, 0)
    assert [(query.head.id, query.crashes) for query in flight.retries.values()] == [("poison", 1)]
    fleet.stage.run(0.1)
    fleet.start_executor("w0")
    assert all(reply["batch"] > 1 and reply["missed"] == [] for reply in fleet.each(GOOD, 0.7))
    batches = fleet.devices["w0"].batches
    assert batches[-1] == ["poison"], "alone, after all others"
    assert [label for batch in batches for label in batch] == [*GOOD[::-1], "poison"]


@pytest.mark.parametrize("told", [True, False])
def test_an_undelivered_query_waits_for_word_of_what_ran(told: bool) -> None:
    """The connection of an executor ends before its supervisor sees it end: what runs stays with it until then, or until `TOLD`."""
    fleet = warm()
    ask_behind_poison(fleet)
    running = fleet.running("w0")
    fleet.stage.kill("w0/cpu")
    fleet.ask(id="later", latency_ms=2000.0, seconds=0.005)
    flight = in_flight(fleet)
    assert {query.head.id for query in flight.waiting.values()} == {"later"}
    assert len(flight.dispatched) == 1 + len(GOOD)
    if told:
        exited = ExecutorExited(worker="w0", device="cpu", at=fleet.stage.now, reason="crashed", running=running)
        fleet.stage.publish(fleet.subjects.exited("w0", "cpu"), exited, seconds=0.001)
    else:
        fleet.stage.run(TOLD + 0.3)
    assert not flight.dispatched
    queries = [*flight.waiting.values(), *flight.retries.values()]
    assert {q.head.id for q in queries if q.crashes} == ({"poison"} if told else {"poison", *GOOD})
    assert len(queries) == 2 + len(GOOD)


def test_what_an_executor_has_whose_successor_serves_stays_with_that() -> None:
    fleet = warm()
    ask_behind_poison(fleet)
    before = dict(in_flight(fleet).dispatched)
    exited = ExecutorExited(worker="w0", device="cpu", at=fleet.stage.now, reason="it hung", running=[], succeeded=True)
    fleet.stage.publish(fleet.subjects.exited("w0", "cpu"), exited)
    fleet.stage.run(0.001)
    assert before
    assert in_flight(fleet).dispatched == before


def test_an_executor_that_ends_each_time_with_nothing_computed_is_not_fed_for_ever() -> None:
    """A model may end its process after its batch. Without a bound its query would end executors until its deadline."""
    fleet = warm()
    fleet.ask(id="late-poison", latency_ms=60_000.0)
    ends = 0
    for _ in range(20_000):
        fleet.stage.run(0.001)
        if fleet.replies("late-poison"):
            break
        if fleet.devices["w0"].batches and fleet.devices["w0"].batches[-1] == ["late-poison"]:
            ends += 1
            fleet.end_executor("w0", [], seconds=0.05)
            fleet.start_executor("w0")
    [reply] = fleet.replies("late-poison")
    refused(reply, "model_error")
    assert ends <= MOST_LOST + 2


def test_suspects_that_wait_for_their_executor_are_tried_one_at_a_time() -> None:
    fleet = warm()
    fleet.ask(id="alone")
    for label in GOOD[:3]:
        fleet.ask(id=label, latency_ms=5000.0)
    while len(fleet.running("w0")) < 3:
        fleet.stage.run(0.0005)
    fleet.end_executor("w0", fleet.running("w0"), seconds=0.6)
    flight = in_flight(fleet)
    assert sorted(query.crashes for query in flight.waiting.values()) == [1, 1, 1]
    fleet.start_executor("w0")
    for _ in range(200):
        fleet.stage.run(0.0005)
        assert len(flight.dispatched) <= 1
    assert [reply["batch"] for reply in fleet.each(GOOD[:3])] == [1] * 3


def test_those_behind_a_batch_go_first_the_most_urgent_one_before_all_and_its_suspects_last_as_they_came() -> None:
    """Where not all find a place in time, the first ones do."""
    fleet = warm()
    for label, priority, latency_ms in (
        ("ran", 9, 900.0),
        ("twice", 5, 900.0),
        ("low", 9, 500.0),
        ("late", 3, 800.0),
        ("ran too", 1, 700.0),
        ("soon", 3, 600.0),
    ):
        fleet.ask(id=label, priority=priority, latency_ms=latency_ms)
    fleet.stage.run(0.0002)
    flight = in_flight(fleet)
    queries = {query.head.id: query for query in flight.dispatched.values()}
    [instance] = {query.instance for query in queries.values()}
    assert instance is not None
    queries["twice"].crashes = 2
    decided: list[tuple[str, str | None]] = []

    def note(what: str) -> Callable[..., list[Effect]]:
        return lambda query, *_: decided.append((what, query.head.id)) or [*NOTHING]  # type: ignore[func-returns-value]

    retries = Retries(flight, 2, note("decide"), note("refuse"))
    lost = flight.dispatched_to([instance])
    for query in lost:
        flight.remove(query.uid)
    retries.lost(lost, fleet.stage.now, [queries[label].uid for label in ("ran", "twice", "ran too")])
    assert decided == [
        ("decide", "soon"), ("decide", "late"), ("decide", "low"),
        ("refuse", "twice"), ("decide", "ran"), ("decide", "ran too"),
    ]  # fmt: skip

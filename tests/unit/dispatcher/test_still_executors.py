"""An executor that says nothing: another one takes its queries while there is time, and only one answers them. Virtual time."""

import pytest

from services.core.line import ECHO_S
from services.dispatcher.silence import QUIET
from tests.support.simulated.fleet import Fleet, asked_for, refused
from tests.unit.dispatcher.test_silence import row, slow

OBJECTIVE = 0.3


def fleet_of(workers: int) -> Fleet:
    """Workers with an instance each."""
    fleet = Fleet(workers=workers)
    for worker in fleet.devices:
        fleet.order(fleet.records[0], worker)
    fleet.stage.run(2.0)
    return fleet


def where(fleet: Fleet, label: str) -> list[str]:
    """The workers that computed it."""
    return [name for name, device in fleet.devices.items() for batch in device.batches if label in batch]


def busier(fleet: Fleet) -> str:
    return max(fleet.devices, key=lambda name: len(fleet.devices[name].batches))


@pytest.mark.parametrize("stopped_s", [0.6, 1.5])
def test_while_an_executor_stands_still_another_one_answers_in_time(stopped_s: float) -> None:
    fleet = fleet_of(2)
    labels = asked_for(fleet, 0.5, latency_ms=1000 * OBJECTIVE)
    busy = busier(fleet)
    fleet.stage.pause(f"{busy}/cpu")
    labels += asked_for(fleet, stopped_s, latency_ms=1000 * OBJECTIVE)
    fleet.stage.go_on(f"{busy}/cpu")
    labels += asked_for(fleet, 0.5, latency_ms=1000 * OBJECTIVE)
    replies = dict(zip(labels, fleet.each(labels, 3.0), strict=True))
    refused = [label for label in labels if row(fleet, label).outcome == "refused"]
    assert len(refused) <= 1 + stopped_s / OBJECTIVE, "what it may have computed stays with it"
    assert refused == [label for label in labels if "error" in replies[label]]


def test_an_executor_that_stood_still_computes_nothing_that_was_taken_away() -> None:
    fleet = fleet_of(2)
    asked_for(fleet, 0.5)
    busy, other = sorted(fleet.devices, key=lambda name: -len(fleet.devices[name].batches))
    fleet.stage.pause(f"{busy}/cpu")
    labels = asked_for(fleet, 0.2, latency_ms=2000.0)
    fleet.stage.run(1.0)
    moved = [label for label in labels if where(fleet, label) == [other]]
    fleet.stage.go_on(f"{busy}/cpu")
    assert moved
    assert all("outputs" in one for one in fleet.each(labels, 5.0))
    assert {len(where(fleet, label)) for label in labels} == {1}


def test_what_has_much_time_stays_where_it_is_for_as_long_as_that_executor_may_go_on() -> None:
    """So on a busy machine, where executors say nothing for a while, a flood is not passed on and back again."""
    fleet = fleet_of(2)
    asked_for(fleet, 0.5)
    busy = busier(fleet)
    fleet.devices[busy].slow = 100.0
    fleet.asks(30, seconds=0.05)
    fleet.stage.pause(f"{busy}/cpu", seconds=0.8)
    queries = fleet.dispatcher().in_flight.dispatched.values()
    assert len([query for query in queries if query.instance and query.instance.worker.name == busy]) > 2


def test_one_alone_keeps_what_it_has_however_long_it_says_nothing() -> None:
    fleet = fleet_of(1)
    fleet.stage.pause("w0/cpu")
    labels = asked_for(fleet, 1.0)
    fleet.stage.go_on("w0/cpu")
    assert all("outputs" in one for one in fleet.each(labels, 5.0))


def test_an_executor_that_turns_keeps_its_queries_however_long_a_batch_takes() -> None:
    fleet = fleet_of(2)
    fleet.devices["w0"].slow = 400.0  # a second a batch and more; the other one is soon idle
    labels = fleet.asks(20, seconds=3.0 * QUIET * ECHO_S)
    in_flight = fleet.dispatcher().in_flight.dispatched
    assert len(in_flight) > 1
    assert {query.attempt for query in in_flight.values()} == {0}
    fleet.stage.run(8.0)
    assert all(len(where(fleet, label)) == 1 for label in labels)


def test_what_an_executor_has_answered_before_it_heard_of_it_is_not_answered_again() -> None:
    fleet = fleet_of(2)
    asked_for(fleet, 0.5)
    busy = busier(fleet)
    fleet.stage.run(0.5)
    fleet.stage.clog(f"{busy}/cpu")  # it turns, and hears nothing
    labels = asked_for(fleet, 0.4, every=0.05)
    fleet.stage.run(0.05)
    fleet.stage.go_on(f"{busy}/cpu")
    assert all("outputs" in one for one in fleet.each(labels, 5.0))


def test_an_executor_that_was_still_beyond_the_time_out_asks_its_dispatcher_what_is_still_its() -> None:
    """A single worker: nobody else had its queries."""
    fleet = fleet_of(1)
    fleet.devices["w0"].slow = 200.0
    labels = asked_for(fleet, 0.1)
    fleet.stage.pause("w0/cpu")
    fleet.stage.pause("w0")  # its monitor as well: nobody takes it for dead before it is back
    fleet.stage.run(1.9)
    fleet.stage.go_on("w0", seconds=0.3)
    fleet.stage.go_on("w0/cpu")
    assert all("outputs" in one for one in fleet.each(labels, 20.0))


@pytest.mark.parametrize("rested_s", [0.05, 3.0])
def test_an_executor_that_does_not_hear_itself_says_nothing_until_it_does(rested_s: float) -> None:
    """Its echoes do not come back, so its answers may not leave either: only what it said in the first moment crosses a refusal."""
    fleet = fleet_of(1)
    fleet.ask(seconds=rested_s)
    fleet.devices["w0"].slow = 100.0  # 0.25 s a batch
    fleet.stage.clog("w0/cpu", fleet.subjects.executor("w0", "cpu", "echo"))
    label = fleet.ask(latency_ms=1000 * OBJECTIVE)
    refused(fleet.reply(label, 2.0), "deadline")
    fleet.stage.go_on("w0/cpu")
    assert (fleet.reply(label, 2.0)["error"]["code"], row(fleet, label).outcome) == ("deadline", "refused")
    fleet.devices["w0"].slow = 1.0
    assert "outputs" in fleet.reply(fleet.ask(latency_ms=1000 * OBJECTIVE), 2.0)


def test_on_a_slow_line_another_executor_gets_nothing_that_one_has_as_its_word_travels() -> None:
    fleet = fleet_of(2)
    slow(fleet, 0.25)
    for device in fleet.devices.values():
        device.slow = 20.0
    labels = asked_for(fleet, 2.0, every=0.05)
    fleet.stage.run(10.0)
    assert {len(where(fleet, label)) for label in labels} == {1}

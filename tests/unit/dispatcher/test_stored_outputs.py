"""The object store hangs: queries whose outputs go there end in time, and nobody waits for them. Virtual time."""

import pytest

from services.core.outcomes import NOT_STORED, SILENT
from services.core.settings import DispatcherSettings, Settings
from services.dispatcher.inflight import InFlight
from tests.support.simulated.fleet import Fleet, refused, variant

LARGE = 8  # items whose outputs are too large for a message
DEADLINE_MS = 2000.0


def hung() -> Fleet:
    fleet = Fleet(settings=Settings(dispatcher=DispatcherSettings(max_inline=1000)))
    fleet.ask(id="warm")
    fleet.stage.run(2.0)
    hang(fleet)
    return fleet


def hang(fleet: Fleet, store_s: float = 1e6) -> None:
    device = fleet.devices["w0"]
    device.store_s = store_s
    device.wide = {variant().model: 100}


def in_flight(fleet: Fleet) -> InFlight:
    return fleet.dispatcher().in_flight


def test_a_hung_object_store_refuses_what_goes_there_and_holds_nothing_else() -> None:
    fleet = hung()
    large = [fleet.ask(items=LARGE, latency_ms=DEADLINE_MS) for _ in range(100)]
    fleet.stage.run(1.0)
    flight = in_flight(fleet)
    assert len(flight.dispatched) == len(large), "all are computed"
    [instance] = {query.instance for query in flight.dispatched.values()}
    assert (instance.own, instance.others, instance.idle) == (0, 0, True)
    assert fleet.reply(fleet.ask(latency_ms=20.0), 0.1)["missed"] == []
    for reply in fleet.each(large, DEADLINE_MS / 1000.0 - 1.1 + SILENT):
        assert refused(reply, "deadline")["message"].startswith(NOT_STORED)
    fleet.stage.run(1.0)
    assert (len(flight), flight.storing) == (0, set())
    assert (instance.own, instance.others, sum(instance.levels)) == (0, 0, 0)
    assert [event.code for event in fleet.outcomes() if event.items == LARGE] == ["deadline"] * len(large)


@pytest.mark.parametrize("running", [[], None])
def test_an_executor_that_ends_before_the_outputs_are_stored_loses_no_answer(running: list[bytes] | None) -> None:
    fleet = hung()
    label = fleet.ask(items=LARGE, latency_ms=DEADLINE_MS)
    fleet.stage.run(0.2)
    assert len(in_flight(fleet).storing) == 1
    fleet.end_executor("w0", running)
    fleet.start_executor("w0")
    hang(fleet, 0.001)
    assert fleet.reply(label, 1.0)["outputs_ref"]["key"]
    [row] = [event for event in fleet.outcomes() if event.items == LARGE]
    assert row.code in (None, "")


def test_a_suspect_that_is_computed_lets_the_next_one_go() -> None:
    fleet = hung()
    labels = [fleet.ask(items=LARGE, latency_ms=DEADLINE_MS) for _ in range(2)]
    fleet.stage.run(0.0005)
    fleet.end_executor("w0", None)
    fleet.start_executor("w0")
    hang(fleet)
    fleet.stage.run(1.0)
    flight = in_flight(fleet)
    assert {query.head.id: query.crashes for query in flight.dispatched.values()} == dict.fromkeys(labels, 1)
    assert len(flight.storing) == 2

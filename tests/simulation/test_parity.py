"""The kernel tells the same story as production's runtime: the same scenario on both, event for event."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from msgspec import convert
from msgspec.structs import replace

from bus.messages.events import JobEvent, OutcomeEvent, ScalingEvent, SelectionEvent, StateEvent, WorkerEvent
from bus.messages.public import Answer, Tensor
from services.simulation.scenario.model import Scenario
from tests.support.data.random_scenarios import chosen
from tests.support.data.small_scenarios import SMALL, Told
from tests.support.simulated.runtime_driver import Bed

EXPECTED = {  # no more than any sensible policy does there
    "scaling": {"load", "ok", "refused", "batched", "alone"},
    "failing": {"load failed", "load", "ok", "refused", "batched"},
    "machines": {"add_worker", "remove_worker", "Stopped", "replicate", "batched"},
    "dispatchers": {"ok", "batched", "d-0", "d-1"},
    "jobs": {"ok", "batched", "running", "done", "offline-mixed-0", "offline-mixed-1", "jobs-0"},
    "several": {"ok", "batched", "learnt small", "learnt large", "part", "cached"},
}


@contextmanager
def on_the_runtime(scenario: Scenario) -> Iterator[Told]:
    run = Told(scenario, Bed)
    try:
        yield run
    finally:
        run.kernel.close()


def happened(run: Told) -> set[str]:
    """What the comparison is about: which kinds of thing there were."""
    found: set[str] = set()
    for name, event in run.log:
        match event:
            case ScalingEvent():
                found.add(event.action)
            case StateEvent():
                found.add(event.to_state)
                if "does not load" in event.reason:
                    found.add("load failed")
            case WorkerEvent():
                found.add(event.to_state)
            case JobEvent():
                found |= {name, event.state}
            case OutcomeEvent():
                found |= {name, event.outcome, "batched" if (event.batch or 0) > 1 else "alone"}
                found |= {"part" if event.parent is not None else "whole", "cached" if event.cached else "computed"}
            case SelectionEvent():
                found.add(f"learnt {event.member}")
    return found


@pytest.mark.parametrize("name", SMALL)
def test_the_kernel_and_the_runtime_tell_the_same_story(name: str) -> None:
    assert EXPECTED[name] <= happened(same_story(SMALL[name]()))


def test_so_they_do_of_a_scenario_by_chance() -> None:
    assert len(same_story(chosen(26)).log) > 500


def same_story(scenario: Scenario) -> Told:
    """The kernel's run, after comparison with the runtime's."""
    kernel = Told(scenario)
    ours = kernel.result()
    with on_the_runtime(scenario) as runtime:
        theirs = runtime.result()
        assert kernel.rows() == runtime.rows()
        assert ends_of(kernel) == ends_of(runtime)
        assert ours == theirs  # among it how often `handle` was called
    return kernel


def ends_of(run: Told) -> list[tuple[Any, ...]]:
    """Every answer and refusal, as the client got it and when."""
    return sorted((round(at, 6), inbox, repr(read(message))) for at, inbox, message in run.ends)


def read(message: Any) -> Any:
    """A reply with its outputs as tensors: what came over a bus has maps there."""
    if not isinstance(message, Answer):
        return message
    return replace(message, outputs={name: convert(tensor, Tensor) for name, tensor in message.outputs.items()})


def test_the_runtime_puts_into_the_stream_what_its_actors_recorded() -> None:
    with on_the_runtime(SMALL["dispatchers"]()) as run:
        run()
        recorded = {event for _, event in run.log}
        run.kernel.run(run.kernel.now + 0.3)  # until all of that has been sent
        assert len(recorded) > 700
        assert recorded <= set(run.kernel.stored())

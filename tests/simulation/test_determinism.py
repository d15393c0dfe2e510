"""The same scenario and seed give the same run, byte for byte: again, and in a process that hashes otherwise."""

import json
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from msgspec import convert
from msgspec.structs import replace

from bus.messages.events import Event, JobEvent, OutcomeEvent, ScalingEvent, SelectionEvent, StateEvent, WorkerEvent
from bus.messages.public import Answer, Tensor
from services.simulation.scenario.model import BEGINS, Scenario
from tests.support.data.examples import examples
from tests.support.data.random_scenarios import chosen, scenarios
from tests.support.data.small_scenarios import SMALL, Told, processes
from tests.support.servers.processes import with_other_hashes
from tests.support.simulated.runtime_driver import Bed

ROOT = Path(__file__).parents[2]
ALL = {
    "failing": SMALL["failing"],
    "several": SMALL["several"],
    "processes": processes,
    **{f"varied-{seed}": partial(chosen, seed, most_apps=6) for seed in (33, 84)},
}


def digest(scenario: Scenario) -> str:
    """Of every event in its order, of every reply to a client, and of the result."""
    run = Told(scenario)
    result = json.dumps(run.result())
    return sha256(f"{run.log}{run.ends}{result}".encode()).hexdigest()


@cache
def here(name: str) -> str:
    """The digest of one of these scenarios in this process."""
    return digest(ALL[name]())


def digests() -> dict[str, str]:
    return {name: here(name) for name in ALL}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["failing", "processes", "varied-84"])
def test_again_in_this_process(name: str) -> None:
    assert digest(ALL[name]()) == here(name)


@pytest.mark.slow
def test_in_a_process_with_other_hashes() -> None:
    """Sets of texts are walked in another order there."""
    code = "from tests.simulation.test_determinism import digests; import json; print(json.dumps(digests()))"
    assert (
        json.loads(with_other_hashes(code).splitlines()[-1]) == digests()
    )  # the solver may print a line of its own before


@pytest.mark.parametrize("name", ["failing", pytest.param("processes", marks=pytest.mark.slow)])
def test_another_seed_is_another_run(name: str) -> None:
    assert digest(replace(ALL[name](), seed=8)) != here(name)


# -- What holds in every run, whatever the scenario.


class Guarded(Told):
    """A run that looks at its devices and at its bill at each event."""

    def _recorded(self, name: str, event: Event) -> None:
        super()._recorded(name, event)
        share = self.scenario.policies[0].settings.monitor.memory_share
        for machine in self.system.machines.values():
            for device in machine.devices.values():
                assert device.memory_mb <= share * device.spec.memory_mb
                if device.spec.kind == "inferentia":
                    assert len(device.residents) <= device.spec.cores
        kinds = Counter(machine.spec.kind for machine in self.system.machines.values())
        for spec in self.scenario.policies[0].machines:
            assert kinds[spec.kind] <= max(spec.maximum, spec.start)
        assert self.system.bill.rate >= -1e-12
        assert event.time <= self.kernel.now


@settings(max_examples=examples(15), suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(scenarios(duration_s=5.0))
def test_every_query_ends_once_and_everything_adds_up(scenario: Scenario) -> None:
    run = Guarded(scenario)
    result = run.result()
    run.kernel.run(run.kernel.now + 1.0)  # what was under way has been told
    sent = run.clients._sent
    answered = {inbox for _, inbox, _ in run.ends if inbox.startswith("_INBOX.c.")}
    assert answered == {f"_INBOX.c.{number}" for number in range(1, sent + 1)}
    assert (result["queries"], result["open"], result["failed"]) == (sent, 0, 0)
    _adds_up(result)
    for app in result["apps"].values():
        _adds_up(app)
    for key in ("queries", "answered", "refused", "late"):
        assert sum(app[key] for app in result["apps"].values()) == result[key]
    assert sum(result["series"]["offered_qps"]) == pytest.approx(sent)
    assert sum(result["variants"].values()) == result["answered"]
    outcomes = [event for _, event in run.log if isinstance(event, OutcomeEvent)]
    assert len({event.uid for event in outcomes}) == len(outcomes)
    assert Counter(event.app for event in outcomes if event.time >= BEGINS) == {
        app: counts["queries"] for app, counts in result["apps"].items() if counts["queries"]
    }
    assert 0.0 <= result["mean_utilisation"] <= 1.0
    assert result["cost"] >= 0.0


def _adds_up(counts: dict[str, Any]) -> None:
    assert counts["queries"] == counts["answered"] + counts["refused"] + counts["failed"] + counts.get("open", 0)
    assert counts["late"] <= counts["answered"]
    assert sum(counts["refusals"].values()) == counts["refused"]


# -- The kernel tells the same story as production's runtime: the same scenario on both, event for event.
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

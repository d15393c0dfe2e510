"""What holds in every run, whatever the scenario."""

from collections import Counter
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings

from bus.messages.events import Event, OutcomeEvent
from services.simulation.run import BEGINS
from services.simulation.scenario.model import Scenario
from tests.support.data.examples import examples
from tests.support.data.random_scenarios import scenarios
from tests.support.data.small_scenarios import Told


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

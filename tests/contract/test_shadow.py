"""`infaas shadow`: the recorded minute under another policy, counted as it was, in real rows of a real database."""

from typing import Any

import pytest

from bus.messages.events import ScalingEvent, ShadowEvent
from services.autoscaler.vms.rules import PricedKind
from services.core.placement import Device
from services.simulation.kernel import ActorHalted
from services.simulation.replay.build import ReplayOptions
from services.simulation.replay.recording import ReplayError
from services.simulation.replay.shadow import ShadowReport, ShadowRun, shadow_run
from services.simulation.report import KEPT
from services.simulation.scenario.policies import PolicyBlock, common_of
from tests.support.data.events import event
from tests.support.data.recorded_history import BEGINS, MINUTE, OTHER, PRICES, outcomes

GPU = PricedKind(
    name="fast", price_per_hour=3.0, maximum=2, minimum=0, boot_s=9.0,
    devices=(Device(name="gpu-0", kind="gpu", cores=1, memory_mb=16000.0, address="cuda:0"),),
)  # fmt: skip
CPU = PricedKind(
    name="small", price_per_hour=0.192, maximum=3, minimum=1, boot_s=4.0,
    devices=(Device(name="cpu", kind="cpu", cores=4, memory_mb=8000.0, address="cpu"),),
)  # fmt: skip


def options(base: str = "infaas", **more: Any) -> ReplayOptions:
    own = PolicyBlock(name=base, base=base, settings=more.pop("settings", {}))
    return ReplayOptions(policies=(base,), own=own, **{"kinds": {}, "boot_s": 5.0} | more)


def shadow(past: str, given: ReplayOptions | None = None) -> ShadowRun:
    return shadow_run(past, BEGINS - 5.0, BEGINS + MINUTE + 5.0, given or options())


def test_both_sides_are_counted_alike(past: str) -> None:
    run = shadow(past)
    found = run.document()
    ours, real = found["shadow"], found["real"]
    assert found["policy"] == "infaas"
    assert (ours["queries"], real["queries"]) == (900, 900)
    assert (ours["in_time"], real["in_time"]) == (1.0, pytest.approx(1 - 27 / 900))
    assert ours["cost_rate"] == pytest.approx(real["cost_rate"])
    assert real["cost_rate"] == pytest.approx(4 * PRICES["cpu"])
    assert (ours["machines"], real["machines"], real["actions"]) == ({"cpu": 1}, {"cpu": 1}, {"load": 1})
    assert ours["instances"] >= 1
    assert found["notes"] == []


def test_each_ten_seconds_a_row_tells_what_it_costs(past: str) -> None:
    rows = list(shadow(past).events(0.0))
    samples = [one for one in rows if one.action == "sample"]
    assert [round(one.time - BEGINS) for one in samples] == [0, 10, 20, 30, 40, 50, 58]
    assert all(isinstance(one, ShadowEvent) and one.scaler == "shadow" and one.count == 0 for one in samples)
    assert (
        samples[-1].reason == "100.00% of 900 queries in time (the system: 97.00% of 900 queries); 1 cpu, 2 instances"
    )
    assert all(one.cost_rate == pytest.approx(4 * PRICES["cpu"]) for one in samples)
    assert all(0.0 < one.apps_cost_rate <= one.cost_rate for one in samples)


@pytest.mark.parametrize("queries", [1, 5, 20])
def test_a_range_that_ends_while_queries_are_open_costs_something_until_its_end(past: str, queries: int) -> None:
    """Of a busy machine only a moment may be recorded when it is looked at first."""
    run = shadow_run(past, BEGINS, outcomes()[queries].time + 1e-4, options())
    ended = run._found.scenario.duration_s
    run._scaled.append((0.99 * ended, event(ScalingEvent, action="replicate", variant=OTHER)))
    rows = list(run.events(0.0))
    assert run.result["series"]["time"][-1] >= ended, "an answer came later"
    assert {one.action for one in rows} >= {"sample", "replicate"}
    assert all(one.cost_rate == pytest.approx(4 * PRICES["cpu"]) for one in rows), ended


def test_what_was_told_is_not_told_again(past: str) -> None:
    run = shadow(past)
    rows, later = list(run.events(0.0)), list(run.events(BEGINS + 30.0))
    assert later == [one for one in rows if one.time > BEGINS + 30.0]
    assert 0 < len(later) < len(rows)


def test_its_actions_are_told_with_their_reasons_and_what_it_costs_then(past: str) -> None:
    run = shadow(past)
    run._scaled.append((12.0, event(ScalingEvent, action="replicate", variant=OTHER, reason="it grows")))
    (action,) = [one for one in run.events(BEGINS) if one.action != "sample"]
    assert (action.time, action.policy, action.action, action.reason) == (
        BEGINS + 12.0,
        "infaas",
        "replicate",
        "it grows",
    )
    assert action.cost_rate == pytest.approx(4 * PRICES["cpu"])


def test_all_that_is_scaled_is_kept() -> None:
    report = ShadowReport("infaas", 60.0, 2.0)
    for _ in range(KEPT + 10):
        report.event(event(ScalingEvent, count=1), 1.0)
    assert len(report.scaled) == KEPT + 10


def test_machines_may_be_started_as_the_settings_allow(past: str) -> None:
    def kinds(given: ReplayOptions) -> dict[str, tuple[int, int, int, float]]:
        (policy,) = shadow(past, given)._found.scenario.policies
        return {one.kind: (one.start, one.minimum, one.maximum, one.boot_s) for one in policy.machines}

    assert kinds(options()) == {"cpu": (1, 1, 1, 5.0)}, "none may be"
    found = kinds(options(kinds={"small": CPU, "fast": GPU}))
    assert found == {"cpu": (1, 1, 3, 4.0), "fast": (0, 0, 2, 9.0)}


def test_the_systems_settings_hold_but_where_the_policy_has_its_own(past: str) -> None:
    known = {
        "autoscaler": {"policy": "static", "hold_s": 7.0, "slack": 1.3, "choice": {}}, "worker": {"name": "w"},
        "machines": {"kinds": {}, "provider": "local", "idle_s": 99.0},
    }  # fmt: skip
    common = common_of(known)
    assert common == {"autoscaler": {"hold_s": 7.0, "slack": 1.3}, "machines": {"idle_s": 99.0}}
    own = PolicyBlock(name="p", base="infaas", settings={"autoscaler": {"hold_s": 3.0}})
    given = ReplayOptions(policies=("p",), own=own, settings=common, kinds={})
    (policy,) = shadow(past, given)._found.scenario.policies
    found = policy.settings.autoscaler
    assert (found.policy, found.hold_s, found.slack) == ("infaas", 3.0, 1.3)


def test_a_target_of_its_own_is_that_of_all_apps(past: str) -> None:
    run = shadow(past, options(slo_targets=(0.999,)))
    assert run.document()["policy"] == "infaas at 0.999"
    assert {one["slo_target"] for one in run.result["apps"].values()} == {0.999}


class Broken:
    """A user's policy that fails."""

    name = "broken"

    def select(self, ask: Any, now: float, view: Any) -> Any:
        del ask, now, view
        raise RuntimeError("no idea")


def test_a_policy_that_fails_says_so(past: str) -> None:
    with pytest.raises(ActorHalted, match=r"d-0 failed: RuntimeError\('no idea'\)"):
        shadow(past, options(f"{__name__}:Broken", settings={"dispatcher": {"policy": f"{__name__}:Broken"}}))


def test_a_time_without_queries_is_none(past: str) -> None:
    with pytest.raises(ReplayError, match="no query is recorded"):
        shadow_run(past, BEGINS - 500.0, BEGINS - 400.0, options())

"""The model-autoscaler with real dispatchers, monitors and executors on virtual time."""

from itertools import pairwise

import pytest
from msgspec.structs import replace

from bus.codec import decode, encode
from bus.messages.catalog import VariantRecord
from bus.messages.scaling import AskForCapacity
from services.core.actor import Changed
from services.core.catalog import key_of
from services.core.planning.problem import PlanningProblem
from services.core.policy import GuardedPolicy
from services.core.settings import StaticVariant
from tests.support.data.pipelines import deployed
from tests.support.simulated.autoscaled_fleet import CPU, GPU, ScalingFleet
from tests.support.simulated.fleet import variant

NAME = "m-v1-ort-fp32-t1-b8"  # 89 items/s in batches of 8, which take 90 ms


def small(**changes: object) -> VariantRecord:
    return variant(NAME, base_ms=10.0, per_item_ms=10.0, **changes)


def large(**changes: object) -> VariantRecord:
    """On a GPU, a quarter of whose memory it takes: 800 items/s, loaded in 2 s."""
    named = {"variant": "m-v1-trt-fp32-t1-b8", "hardware": "gpu", "framework": "trt", "load_ms": 2000.0}
    record = variant(base_ms=2.0, per_item_ms=1.0, **(named | changes))
    return replace(record, profile=replace(record.profile, memory_mb=4000.0))


@pytest.mark.parametrize("solver", ["greedy", "ilp"])
def test_load_that_grows_is_carried_by_a_second_instance_and_one_goes_again_after_it(solver: str) -> None:
    fleet = ScalingFleet(small(), solver=solver)
    calm = fleet.load(20, 4, latency_ms=200)
    assert fleet.running(NAME) == 1
    fleet.load(150, 2, latency_ms=200)
    busy = fleet.load(150, 4, latency_ms=200)
    assert fleet.running(NAME) == 2
    fleet.load(20, 12, latency_ms=200)
    fleet.stage.run(2.0)
    assert fleet.running(NAME) == 1
    assert fleet.answered(calm) == fleet.answered(busy) == 1.0
    assert [(action, name) for action, name, _ in fleet.scalings()] == [("replicate", NAME), ("unload", NAME)]
    more, fewer = (reason for _, _, reason in fleet.scalings())
    assert "can carry 88.8 of 150 items/s of app (<= 200 ms)" in more
    assert "the others carry" in fewer


@pytest.mark.parametrize(
    ("slack", "share", "acts"), [(1.05, 0.94, False), (1.05, 0.96, True), (1.25, 0.78, False), (1.25, 0.82, True)]
)
def test_one_more_instance_is_loaded_from_a_share_of_capacity_on_that_the_slack_says(
    slack: float, share: float, acts: bool
) -> None:
    """INFaaS, section 4.2.2: with the slack of 1.05 from 95 % of the capacity on. At 94 % nobody acts at all."""
    quick = variant(NAME, base_ms=2.0, per_item_ms=1.75)
    assert quick.profile.saturation_qps == 500.0
    fleet = ScalingFleet(quick, slack=slack)
    fleet.load(250, 2, latency_ms=500)
    asked = fleet.load(500 * share, 6, latency_ms=500)
    fleet.stage.run(1.0)
    assert [(action, name) for action, name, _ in fleet.scalings()] == [("replicate", NAME)] * acts
    assert all(f"with {100 * (slack - 1):.3g} % to spare" in reason for _, _, reason in fleet.scalings())
    others = [action for scaler in ("dispatcher", "monitor", "vm") for action, _, _ in fleet.scalings(scaler)]
    assert others == ["load"], "the first query loads the first instance"
    assert fleet.running(NAME) == 1 + acts
    assert fleet.answered(asked) == 1.0


def test_as_many_replicas_as_the_slack_times_the_load_takes() -> None:
    """INFaaS, section 4.2.1: for 15 items/s, of which an instance does 5, ceil(1.05 * 15 / 5) = 4."""
    slow = variant(NAME, base_ms=1e-6, per_item_ms=200.0)
    assert slow.profile.saturation_qps == pytest.approx(5.0)
    fleet = ScalingFleet(slow, devices={"w0": (replace(CPU, cores=8),)})
    asked = fleet.load(5, 6, latency_ms=5000)
    asked += fleet.load(15, 8, latency_ms=5000)
    assert fleet.running(NAME) == 4
    fleet.stage.run(6.0)
    assert fleet.answered(asked) == 1.0
    assert {(action, name) for action, name, _ in fleet.scalings()} == {("replicate", NAME)}


@pytest.mark.parametrize("solver", ["greedy", "ilp"])
def test_replicas_of_a_deployed_pipeline_stay_when_the_load_falls(solver: str) -> None:
    """Trap 29, where workers plan alone."""
    fleet = ScalingFleet(small(), solver=solver)
    record = deployed({"lang": 2}, {"lang": NAME})
    for name in ("w0", "model-w0"):
        fleet.stage.send(name, Changed("infaas-catalog", key_of(record), encode(record)))
    fleet.load(150, 6, latency_ms=200)
    assert fleet.running(NAME) == 2
    fleet.load(20, 20, latency_ms=200)
    assert fleet.running(NAME) == 2


def test_a_step_is_acted_on_within_a_second_and_the_load_time() -> None:
    fleet = ScalingFleet(small(load_ms=500.0))
    fleet.load(20, 6, latency_ms=200)
    start = fleet.stage.now
    fleet.load(120, 3, latency_ms=200)
    ready = next(at for at, counts in fleet.counts if at > start and counts[NAME].get("Active", 0) == 2)
    assert ready - start <= 1.0 + 0.55


@pytest.mark.parametrize("calm_s", [4, 5, 6, 7, 8])
def test_the_wait_before_an_unload_begins_when_the_load_falls(calm_s: int) -> None:
    """Whenever that is: searches for savings, which are rarer than looks, do not make it longer."""
    fleet = ScalingFleet(small(), hold_s=5.0)
    fleet.load(20, calm_s, latency_ms=200)
    fleet.load(150, 6, latency_ms=200)
    assert fleet.running(NAME) == 2
    fell = fleet.stage.now
    fleet.load(20, 12, latency_ms=200)
    alone = next(at for at, counts in fleet.counts if at > fell and counts[NAME].get("Active", 0) == 1)
    assert 5.0 <= alone - fell <= 5.0 + 2.5


def test_nothing_is_unloaded_under_a_square_wave_shorter_than_the_hold() -> None:
    fleet = ScalingFleet(small(), hold_s=5.0)
    for _ in range(6):
        fleet.load(150, 3, latency_ms=200)
        fleet.load(5, 4, latency_ms=200)
    assert not [name for action, name, _ in fleet.scalings() if action == "unload"]
    assert fleet.running(NAME) == 2


@pytest.mark.slow
@pytest.mark.parametrize("solver", ["greedy", "ilp"])
def test_an_upgrade_is_made_before_the_small_ones_are_broken(solver: str) -> None:
    fleet = ScalingFleet(small(), large(), solver=solver, devices={"w0": (CPU, GPU)})
    fleet.load(20, 4, latency_ms=200)
    assert fleet.running(NAME) == 1
    for rate in (84, 100, 120, 140, 160):
        fleet.load(rate, 2.5, latency_ms=200)
    start = fleet.stage.now
    fleet.load(170, 10, latency_ms=200)
    assert fleet.running("m-v1-trt-fp32-t1-b8") == 1
    assert "m-v1-trt-fp32-t1-b8" in [name for _, name, _ in fleet.scalings()]
    assert not [name for _, name, _ in fleet.scalings("dispatcher")[1:]]  # the first load was on demand
    fleet.load(400, 10, latency_ms=200)
    capacities = [(at, _capacity(counts)) for at, counts in fleet.counts if at > start]
    reached = next(at for at, capacity in capacities if capacity >= 177)
    assert all(capacity >= 177 for at, capacity in capacities if at > reached)
    last = fleet.load(400, 2, latency_ms=200)
    fleet.stage.run(1.0)
    assert fleet.answered(last) == 1.0
    fleet.load(10, 25, latency_ms=200)  # and down again: first the small one, then the large one goes
    assert fleet.running("m-v1-trt-fp32-t1-b8") == 0
    assert fleet.running(NAME) == 1
    late = [(at, _capacity(counts)) for at, counts in fleet.counts]
    assert all(after >= 10.5 for (_, before), (_, after) in pairwise(late) if before >= 10.5)


def _capacity(counts: dict[str, dict[str, int]]) -> float:
    rates = {NAME: 80 / 0.9, "m-v1-trt-fp32-t1-b8": 800.0}
    return sum(
        rates[name] * n
        for name, states in counts.items()
        for state, n in states.items()
        if state in ("Active", "Overloaded", "Interfered")
    )


def test_a_slow_load_is_bridged_by_a_quick_one() -> None:
    """The GPU is chosen and takes 2 s; until then a second instance of what runs carries what it can, and then goes."""
    fleet = ScalingFleet(small(), large(), devices={"w0": (CPU, GPU)})
    fleet.load(20, 4, latency_ms=200)
    fleet.load(400, 0.9, latency_ms=200)
    assert fleet.running(NAME) == 2
    assert fleet.instances()["m-v1-trt-fp32-t1-b8"] == {"Loading": 1}
    meanwhile = fleet.load(400, 1.0, latency_ms=200)
    fleet.load(400, 3, latency_ms=200)
    fleet.load(250, 15, latency_ms=200)
    assert fleet.answered(meanwhile) > 0.38  # two instances at best 0.44, one 0.22
    assert fleet.running("m-v1-trt-fp32-t1-b8") == 1
    assert fleet.running(NAME) == 0
    bridged = [why for action, name, why in fleet.scalings() if (action, name) == ("replicate", NAME)]
    assert bridged == ["serves until m-v1-trt-fp32-t1-b8 is loaded, in 2.0 s"]


def asks(fleet: ScalingFleet) -> list[AskForCapacity]:
    return [
        decode(AskForCapacity, body) for _, subject, body in fleet.stage.heard if subject.endswith("controller.ask")
    ]


def test_a_full_worker_asks_the_controller() -> None:
    fleet = ScalingFleet(small())
    fleet.load(20, 3, latency_ms=200)
    fleet.load(400, 6, latency_ms=200)
    assert fleet.running(NAME) == 2  # two cores, one each
    ask = asks(fleet)[-1]
    assert (ask.worker, ask.app, ask.why, ask.variants) == ("w0", "app", "full", [NAME])
    assert 200 < ask.load < 300
    assert ask.instances >= 3
    assert "cpu/cores" in ask.reason


def test_hardware_that_only_another_worker_has_is_asked_for() -> None:
    fleet = ScalingFleet(small(), large(), workers=2, devices={"w0": (CPU,), "w1": (GPU,)})
    fleet.load(20, 3, latency_ms=200, variant=None)
    for rate in (84, 100, 120, 140, 160, 168, 175, 185):
        fleet.load(rate, 2.5, latency_ms=200)
    wanted = [(ask.worker, ask.why, ask.variants[0]) for ask in asks(fleet)]
    assert ("w0", "hardware", "m-v1-trt-fp32-t1-b8") in wanted


def test_an_upgrade_reaches_hardware_that_only_another_worker_has() -> None:
    """While there is no plan, the worker asks, the controller orders once, the other worker accepts, and the load goes there."""
    fleet = ScalingFleet(
        small(), large(), workers=2, controlled=True, unsolved=True, devices={"w0": (CPU,), "w1": (GPU,)}
    )
    fleet.load(20, 3, latency_ms=200)
    for rate in (84, 100, 120, 140, 160, 168, 175, 185):
        fleet.load(rate, 2.5, latency_ms=200)
    last = fleet.load(300, 6, latency_ms=200)
    fleet.stage.run(1.0)
    assert fleet.running("m-v1-trt-fp32-t1-b8") == 1
    assert [(action, name) for action, name, _ in fleet.scalings("vm") if name] == [("load", "m-v1-trt-fp32-t1-b8")]
    assert fleet.answered(last) == 1.0
    assert any(end["hardware"] == "gpu" for end in (fleet.replies(label)[0] for label in last))


def test_the_leader_plans_for_hardware_that_only_one_worker_has_and_the_workers_ask_for_nothing() -> None:
    fleet = ScalingFleet(small(), large(), workers=2, controlled=True, devices={"w0": (CPU,), "w1": (GPU,)})
    fleet.load(20, 4, latency_ms=200)
    for rate in (84, 120, 160, 300):
        fleet.load(rate, 2.5, latency_ms=200)
    last = fleet.load(300, 6, latency_ms=200)
    fleet.stage.run(1.0)
    assert fleet.running("m-v1-trt-fp32-t1-b8") == 1
    assert fleet.answered(last) == 1.0
    [load] = [why for action, name, why in fleet.scalings("vm") if (action, name) == ("load", "m-v1-trt-fp32-t1-b8")]
    assert "the plan wants 1 here, for " in load or "a device is idle, and app carries only " in load
    assert (fleet.scalings("model"), asks(fleet)) == ([], [])


def test_queries_that_nobody_could_take_count_as_load() -> None:
    """A class that no running variant may answer: the dispatcher loads one for it, the autoscaler enough of them."""
    fleet = ScalingFleet(small(), variant("m-v1-ort-fp32-t1-b1", base_ms=4.0, per_item_ms=4.0, max_batch=1))
    fleet.load(20, 3, latency_ms=500)
    fleet.load(100, 5, latency_ms=25)
    last = fleet.load(100, 2, latency_ms=25)
    fleet.stage.run(1.0)
    assert fleet.running("m-v1-ort-fp32-t1-b1") >= 1
    assert fleet.answered(last) > 0.95


@pytest.mark.parametrize(("burst", "refused", "actions"), [(16, 2, []), (60, 46, ["replicate"])])
def test_two_queries_refused_in_a_burst_are_no_reason_to_scale_but_many_are(
    burst: int, refused: int, actions: list[str]
) -> None:
    fleet = ScalingFleet(small())
    calm = fleet.load(10, 6, latency_ms=200)
    labels = [fleet.ask(latency_ms=200) for _ in range(burst)]
    calm += fleet.load(10, 2, latency_ms=200)
    fleet.stage.run(1.0)
    assert fleet.answered(calm) == 1.0
    assert round(burst * (1.0 - fleet.answered(labels))) == refused
    assert [action for action, _, _ in fleet.scalings()] == actions


def mixed(fleet: ScalingFleet, seconds: int, rough: float, accurate: float) -> None:
    for _ in range(5 * seconds):
        fleet.load(2 * rough, 0.1, latency_ms=400)
        fleet.load(2 * accurate, 0.1, latency_ms=400, accuracy=0.95)


def test_capacity_is_looked_at_class_by_class() -> None:
    """The accurate variant is short of room while the worker as a whole has plenty."""
    accurate = variant("m-v1-ort-fp32-t1-b8x", base_ms=30.0, per_item_ms=20.0, accuracy=0.99)
    fleet = ScalingFleet(small(), accurate, devices={"w0": (replace(CPU, cores=4),)})
    mixed(fleet, 8, 40, 10)
    assert (fleet.running(NAME), fleet.running(accurate.variant)) == (1, 1)
    mixed(fleet, 6, 30, 50)  # at most 42/s of these; all together 130/s
    assert (fleet.running(NAME), fleet.running(accurate.variant)) == (1, 2)
    reasons = [why for action, name, why in fleet.scalings() if name == accurate.variant and action == "replicate"]
    assert "accuracy >= 0.95" in reasons[0]


def test_an_idle_app_keeps_one_instance_and_no_more() -> None:
    fleet = ScalingFleet(small())
    fleet.load(150, 4, latency_ms=200)
    assert fleet.running(NAME) == 2
    fleet.stage.run(60.0)
    assert fleet.running(NAME) == 1


def test_replicate_never_leaves_its_variant() -> None:
    fleet = ScalingFleet(
        small(), large(), policy="replicate", devices={"w0": (CPU, GPU)}, choice={"app": StaticVariant(variant=NAME)}
    )  # fmt: skip
    fleet.load(20, 4, latency_ms=200)
    fleet.load(400, 6, latency_ms=200)
    assert fleet.running(NAME) == 2
    assert not [name for _, name, _ in fleet.scalings() if name != NAME]


def test_static_keeps_what_was_chosen() -> None:
    fleet = ScalingFleet(small(), policy="static", choice={"app": StaticVariant(variant=NAME, instances=2)})
    fleet.load(5, 4, latency_ms=200)
    assert fleet.running(NAME) == 2
    fleet.load(400, 5, latency_ms=200)
    fleet.load(5, 20, latency_ms=200)
    assert fleet.running(NAME) == 2
    assert {action for action, _, _ in fleet.scalings()} <= {"load", "replicate"}


def test_static_without_a_choice_makes_one_from_the_first_load() -> None:
    fleet = ScalingFleet(small(), policy="static")
    fleet.load(120, 6, latency_ms=200)
    assert fleet.running(NAME) == 2


def _by_worker(fleet: ScalingFleet, worker: str) -> int:
    loads = fleet.stage.members[worker].actor._table  # type: ignore[attr-defined]
    return sum(one.record.variant == NAME for one in loads.instances.values())


def test_static_deals_what_was_chosen_out_to_all_workers_though_one_of_them_could_take_all_the_load() -> None:
    fleet = ScalingFleet(small(), policy="static", workers=3, choice={"app": StaticVariant(variant=NAME, instances=4)})
    fleet.load(5, 6, latency_ms=200)
    assert [_by_worker(fleet, worker) for worker in ("w0", "w1", "w2")] == [2, 1, 1]


def test_static_deals_only_to_workers_that_have_the_device() -> None:
    fleet = ScalingFleet(
        large(),
        policy="static",
        workers=2,
        choice={"app": StaticVariant(variant=large().variant, instances=2)},
        devices={"w1": (CPU, GPU)},
    )
    fleet.load(5, 8, latency_ms=200)
    assert fleet.running(large().variant) == 2


def test_static_workers_make_one_choice_together() -> None:
    fleet = ScalingFleet(small(), policy="static", workers=2)
    fleet.load(120, 8, latency_ms=200)
    assert [_by_worker(fleet, worker) for worker in ("w0", "w1")] == [1, 1]


def test_off_does_nothing() -> None:
    fleet = ScalingFleet(small(), policy="off")
    fleet.load(150, 5, latency_ms=200)
    assert fleet.scalings() == []


# -- a user's own policy


class TwoForEveryLoad:
    """Two instances of each variant that a load needs; none of the others. fails: it raises instead."""

    name = "two"

    def __init__(self) -> None:
        self.fails = False
        self.loads: list[float] = []

    def scale(self, problem: PlanningProblem, now: float) -> dict[str, int]:
        if self.fails:
            raise ArithmeticError("cannot count")
        self.loads += [demand.load for demand in problem.demands]
        return {
            one.name: 2 if any(d.load > 1 and d.accepts(one) for d in problem.demands) else 0
            for one in problem.candidates
        }


def own_policy(own: object) -> tuple[GuardedPolicy, list[str]]:
    told: list[str] = []
    return GuardedPolicy(own, "mine:Two", told.append), told


def test_a_users_own_policy_decides_how_many_instances_there_are() -> None:
    own = TwoForEveryLoad()
    policy, told = own_policy(own)
    fleet = ScalingFleet(small(), policy="mine:Two", own=policy, controlled=True)
    fleet.load(10, 6, latency_ms=200)
    assert fleet.running(NAME) == 2, "one would do"
    assert max(own.loads) == pytest.approx(10, rel=0.2)
    assert ("replicate", NAME, "two wants 2 where 1 are") in fleet.scalings()
    assert not fleet.scalings("vm"), "nobody plans beside it"
    fleet.stage.run(30.0)
    assert fleet.running(NAME) == 0
    assert fleet.scalings()[-1] == ("unload", NAME, "two wants 0 where 2 are")
    assert not told


def test_where_it_fails_the_built_in_planner_scales() -> None:
    own = TwoForEveryLoad()
    own.fails = True
    policy, told = own_policy(own)
    fleet = ScalingFleet(small(), policy="mine:Two", own=policy)
    fleet.load(150, 2, latency_ms=200)
    busy = fleet.load(150, 4, latency_ms=200)
    assert fleet.running(NAME) == 2
    fleet.stage.run(1.0)
    assert fleet.answered(busy) == 1.0
    assert "can carry" in fleet.scalings()[0][2]
    assert policy.failures["scale"] >= 5
    assert told[0] == (
        "scale() of the policy mine:Two failed (number 1): the built-in policy decides instead: ArithmeticError: cannot count"
    )


def test_what_it_replaces_goes_only_when_the_other_one_answers() -> None:
    """It wants another variant from one moment to the next; no query is lost meanwhile."""

    class Swaps:
        name = "swaps"
        to = NAME

        def scale(self, problem: PlanningProblem, now: float) -> dict[str, int]:
            return {one.name: int(one.name == self.to) for one in problem.candidates}

    own = Swaps()
    policy, told = own_policy(own)
    slow = replace(small(), variant="m-v1-ort-int8-t1-b8", precision="int8")
    slow = replace(slow, profile=replace(slow.profile, load_ms=3000.0))
    fleet = ScalingFleet(small(), slow, policy="mine:Two", own=policy)
    before = fleet.load(20, 4, latency_ms=200)
    own.to = slow.variant
    during = fleet.load(20, 8, latency_ms=200)
    fleet.stage.run(2.0)
    assert fleet.answered(before) == fleet.answered(during) == 1.0
    assert fleet.running(slow.variant) == 1
    assert fleet.running(NAME) == 0
    assert [name for action, name, _ in fleet.scalings() if action == "unload"] == [NAME]
    assert not told


def test_what_has_no_room_here_or_no_hardware_is_asked_of_others() -> None:
    class Wants:
        name = "wants"

        def scale(self, problem: PlanningProblem, now: float) -> dict[str, int]:
            return {one.name: 50 if one.name == NAME else 1 for one in problem.candidates}

    policy, told = own_policy(Wants())
    fleet = ScalingFleet(
        small(), large(), workers=2, policy="mine:Two", own=policy, devices={"w0": (CPU,), "w1": (GPU,)}
    )
    fleet.load(20, 6, latency_ms=200)
    asked = [
        decode(AskForCapacity, body) for _, subject, body in fleet.stage.heard if subject.endswith("controller.ask")
    ]
    full = [one for one in asked if one.why == "full"]
    assert 1 < fleet.running(NAME) < 50
    assert full
    assert full[0].variants[0] == NAME
    assert full[0].instances >= 50 - fleet.running(NAME)
    assert "wants wants 50 where" in full[0].reason
    assert [one.variants for one in asked if one.why == "hardware"][:1] == [[large().variant]]
    assert not told

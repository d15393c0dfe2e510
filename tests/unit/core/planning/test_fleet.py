"""One plan for all workers: optima made by hand for both goals, limits, and what holds of every plan."""

import subprocess
import sys
from collections.abc import Mapping
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from services.core.cost import Goal
from services.core.planning.fleet import MANY, Infeasible, Unsolved, _relaxed, _solved, solve_fleet
from services.core.planning.problem import ClassNeed, FleetPlan, FleetProblem, Pool, PooledVariant
from tests.support.data.examples import examples

ROOM = {"cpu/memory": 8.0, "cpu/time": 4.0}


def pool(name: str = "cpu", machines: int = 1, **more: Any) -> Pool:
    fields = {"least": 0, "most": 10, "price": 1.0, "resources": ROOM}
    return Pool(name=name, machines=machines, **(fields | more))


def fixed(**more: Any) -> Pool:
    return pool(**({"least": 1, "most": 1, "elastic": False} | more))


def kind_of(name: str = "small", **more: Any) -> PooledVariant:
    """Of which a machine has room for four, and computes all."""
    fields = {"pool": 0, "uses": {"cpu/memory": 2.0}, "computes": ("cpu/time", 1.0), "most": 4, "running": 0}
    return PooledVariant(name=name, **(fields | {"price": 0.25, "load_s": 2.0} | more))


def need(options: Mapping[int, float | tuple[float, float]], load: float = 10.0, name: str = "app") -> ClassNeed:
    pairs = {v: count if isinstance(count, tuple) else (count, 0.0) for v, count in options.items()}
    return ClassNeed(name=name, load=load, options=pairs)


def solve(*pools: Pool, variants: Any = (), needs: Any = (), **more: Any) -> FleetPlan:
    problem = FleetProblem(pools=pools, variants=tuple(variants), needs=tuple(needs), **more)
    return solve_fleet(problem, time_limit_s=None, node_limit=500)


def test_a_process_that_only_plans_stays_small_and_may_import_scipy_later() -> None:
    code = (
        "import sys; from services.autoscaler.vms.edge import import_solver; import_solver(); "
        "from services.core.planning.fleet import LinearProgram; one = LinearProgram(); "
        "one.row({one.column(1.0, whole=True): 1.0}, 1.5, 9.0); before = one.solve({}).fun, 'scipy.optimize' in sys.modules; "
        "from scipy.optimize import linprog; print(*before, linprog([1.0], bounds=[(2.0, 3.0)]).fun, one.solve({}).fun)"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.split() == ["2.0", "False", "2.0", "2.0"]


# -- the least money


def test_answers_are_as_accurate_in_the_mean_as_wanted_and_no_dearer() -> None:
    """A large variant takes four times as long. Half of 1.0 and half of 0.6 is 0.8: five instances of time for two of the small one's."""
    variants = [kind_of("small", accuracy=0.6, price=0.25), kind_of("large", accuracy=1.0, price=0.25)]
    both = need({0: 2.0, 1: 8.0})
    machines = [pool(most=20)]
    assert solve(*machines, variants=variants, needs=[both]).machines == (1,)
    half = solve(*machines, variants=variants, needs=[replace(both, mean=0.8)])
    assert (half.machines, half.accuracy[0]) == ((2,), pytest.approx(0.8, abs=1e-2))
    assert solve(*machines, variants=variants, needs=[replace(both, mean=1.0)]).instances == (0, 8)
    # Of two classes of an app one has a floor that only the large one meets: the mean counts over both.
    floor = need({1: 8.0}, name="app")
    mixed = solve(*machines, variants=variants, needs=[replace(both, mean=0.8), replace(floor, mean=0.8)])
    assert mixed.accuracy == (pytest.approx(0.6, abs=1e-2), pytest.approx(1.0))
    # Where it cannot be reached, or would cost what the load needs, it is as much as there is.
    few = solve(fixed(), variants=variants, needs=[replace(both, mean=1.0)])
    assert sum(few.missing[0]) == 0.0
    assert few.accuracy == (pytest.approx(0.7),)
    with pytest.raises(Infeasible):
        solve(*machines, variants=variants, needs=[replace(both, mean=1.1)], strict=True)


def test_accuracy_is_bought_for_what_it_is_worth() -> None:
    """One machine has room for a quarter of the load with the large variant. Another one gains 0.3: at 3 a whole that is not worth 1.0, at 4 it is."""
    variants = [kind_of("small", accuracy=0.6), kind_of("large", accuracy=1.0)]
    for worth, machines in ((0.0, 1), (3.0, 1), (4.0, 2)):
        plan = solve(pool(), variants=variants, needs=[replace(need({0: 2.0, 1: 8.0}), worth=worth)])
        assert plan.machines == (machines,)
    assert plan.accuracy == (pytest.approx(1.0),)


def test_machines_that_are_paid_anyway_serve_as_accurately_as_they_can_where_accuracy_is_worth_anything() -> None:
    """Of four cores, better variants take 0.6: 2.4 of the 4 instances that the large variant would need for all."""
    variants = [kind_of("small", accuracy=0.6, running=1), kind_of("large", accuracy=1.0, price=0.5)]
    both = need({0: 0.5, 1: (4.0, 0.0)})
    wishing = replace(both, worth=1e-6)
    for one, paid, accuracy in (
        (both, True, 0.6),
        (wishing, False, 0.6),
        (wishing, True, 0.6 + 0.4 * (2.4 - 0.5) / 3.5),
    ):
        plan = solve(fixed(paid=paid), variants=variants, needs=[one])
        assert plan.accuracy == (pytest.approx(accuracy),)
        assert plan.missing == ((0.0, 0.0),)
    full = solve(fixed(paid=True), variants=variants, needs=[replace(need({0: 4.0, 1: 16.0}), worth=1e-6)])
    assert (full.accuracy, full.missing) == ((pytest.approx(0.6),), ((0.0, 0.0),)), "no load is missing for accuracy"


def test_machines_fill_by_instances_and_cores_in_turn() -> None:
    for count, machines in ((0.3, 1), (4.0, 1), (4.1, 2), (9.0, 3)):
        plan = solve(pool(), variants=[kind_of()], needs=[need({0: count})])
        assert (plan.machines, plan.missing) == ((machines,), ((0.0, 0.0),))
        assert count <= plan.instances[0] < count + 1
    # Two devices of 4 MB: three of 3 MB would fit into the sum, and each device has room for one.
    plan = solve(pool(), variants=[kind_of(uses={"cpu/memory": 2.5}, most=2)], needs=[need({0: 3.0})])
    assert (plan.machines, plan.instances) == ((2,), (3,))
    # Memory has room for four, and three half-used ones take one and a half times what a core computes: two machines.
    small = {"uses": {"gpu/memory": 4.0}, "computes": ("gpu/time", 1.0), "most": 4}
    gpu = pool("gpu", price=3.0, resources={"gpu/memory": 16.0, "gpu/time": 1.0})
    variants = [kind_of(name, **small) for name in ("a", "b", "c")]
    for used, machines in ((0.33, 1), (0.5, 2)):
        plan = solve(gpu, variants=variants, needs=[need({v: used}, name=str(v)) for v in range(3)])
        assert (plan.machines, plan.missing) == ((machines,), ((0.0, 0.0),) * 3)


def test_the_kind_that_costs_least_for_this_load() -> None:
    """A quick machine carries all for 3; eight instances fill two slow ones for 2, sixteen four for 4."""
    pools = pool(), pool("gpu", price=3.0, resources={"gpu/memory": 16.0, "gpu/time": 1.0})
    quick = kind_of("quick", pool=1, uses={"gpu/memory": 4.0}, computes=("gpu/time", 1.0), price=0.75)
    for slow_count, machines in ((8.0, (2, 0)), (16.0, (0, 1))):
        plan = solve(*pools, variants=[kind_of(), quick], needs=[need({0: slow_count, 1: slow_count / 20})])
        assert (plan.machines, plan.missing) == (machines, ((0.0, 0.0),))


def test_load_and_reserve_may_be_on_different_variants() -> None:
    """A's reserve would take six more of it, B's one: a machine has room for two of A and one of B."""
    variants = [kind_of("a", uses={"cpu/memory": 3.0}), kind_of("b", uses={"cpu/memory": 2.0})]
    plan = solve(fixed(), variants=variants, needs=[need({0: (2.0, 6.0), 1: (9.0, 1.0)})])
    assert (plan.instances, plan.missing) == ((2, 1), ((0.0, 0.0),))


def test_accurate_variants_carry_the_layers_with_most_load_and_quick_ones_the_rest() -> None:
    accurate, quick = one("accurate", 1.0), one("quick", 0.8)
    found = plan(accurate, quick, takes=((3.0, 3.0, 6.0), (1.0, 0.5, 0.5)), shares=(0.7, 0.2, 0.1))
    assert (found.instances, found.missing) == ((3, 1), ((0.0, 0.0, 0.0),))


def test_on_paid_machines_cheaper_instances_and_of_equals_those_that_run_are_preferred() -> None:
    dear, cheap = kind_of("dear", price=0.5), kind_of("cheap", price=0.2)
    plan = solve(fixed(), variants=[dear, cheap], needs=[need({0: 2.0, 1: 2.0})])
    assert plan.instances == (0, 2)
    for running in (0, 1):
        variants = [kind_of(str(v), running=2 * (v == running)) for v in range(2)]
        plan = solve(fixed(), variants=variants, needs=[need({0: 2.0, 1: 2.0})])
        assert plan.instances == tuple(2 * (v == running) for v in range(2))


def test_what_runs_on_paid_machines_stands_by_for_the_reserve_and_nobody_is_charged_for_it() -> None:
    quick, cheap = kind_of("quick", price=0.5, running=1), kind_of("cheap", price=0.2, running=1)
    for spares, instances, beside in ((True, (0, 1), (1, 0)), (False, (1, 0), (0, 0))):
        plan = solve(fixed(spares=spares), variants=[quick, cheap], needs=[need({0: (0.2, 0.5), 1: (1.0, 3.0)})])
        assert (plan.instances, plan.spares, plan.missing) == (instances, beside, ((0.0, 0.0),))


def test_on_paid_machines_what_serves_gives_its_place_up_for_missing_load_and_not_for_less_money() -> None:
    dear = kind_of("dear", price=0.5, running=4, serves=2.5)  # they fill the machine
    cheap = kind_of("cheap", price=0.2)
    plan = solve(fixed(spares=True), variants=[dear, cheap], needs=[need({0: 4.0, 1: 4.0})])
    assert (plan.instances, plan.spares) == ((4, 0), (0, 0))
    roomy = solve(fixed(spares=True, resources={}), variants=[dear, cheap], needs=[need({0: 4.0, 1: 4.0})])
    assert (roomy.instances, roomy.spares) == ((0, 4), (4, 0))
    short = solve(fixed(spares=True), variants=[dear, cheap], needs=[need({0: 8.0, 1: 4.0})])
    assert (short.instances, short.missing) == ((0, 4), ((0.0, 0.0),))


# -- the most accuracy

GOOD = kind_of("good", accuracy=0.9, uses={"cpu/memory": 4.0}, most=2)
QUICK = kind_of("quick", accuracy=0.7, uses={"cpu/memory": 2.0})


@pytest.mark.parametrize(
    ("load", "instances"), [(10.0, (1, 0)), (20.0, (2, 0)), (30.0, (1, 1)), (40.0, (1, 2)), (80.0, (0, 4))]
)
def test_as_accurate_as_the_room_allows_and_all_carried_first(load: float, instances: tuple[int, int]) -> None:
    """One GOOD takes as much room as two QUICK, and carries half as much as one."""
    plan = solve(fixed(), variants=[GOOD, QUICK], needs=[need({0: load / 10, 1: load / 20}, load)], goal="accuracy")
    assert (plan.instances, plan.missing[0]) == (instances, pytest.approx((0.0, 0.0), abs=1e-6))


def test_the_room_is_for_whom_it_serves_most() -> None:
    """Two apps want the one place for an accurate instance. The one with more load gets it."""
    tight = fixed(resources={"cpu/memory": 6.0, "cpu/time": 4.0})
    for loads, chosen in (((9.0, 2.0), 0), ((2.0, 9.0), 2)):
        variants = [replace(one, name=f"{one.name}{n}") for n in range(2) for one in (GOOD, QUICK)]
        needs = [need({2 * n: load / 10, 2 * n + 1: load / 20}, load, str(n)) for n, load in enumerate(loads)]
        plan = solve(tight, variants=variants, needs=needs, goal="accuracy")
        assert plan.instances[chosen] == 1
        assert sum(plan.instances) == 2


def test_a_swap_must_gain_more_than_it_loses_while_it_loads() -> None:
    running = replace(QUICK, running=4, serves=5.0)  # 20/s: in 2 s 40 answers; the gain in 30 s is 120, as 0.2 each
    for load_s, swapped in ((2.0, True), (60.0, False)):
        variants = [replace(GOOD, load_s=load_s), replace(running, load_s=load_s)]
        plan = solve(fixed(), variants=variants, needs=[need({0: 2.0, 1: 1.0}, 20.0)], goal="accuracy")
        assert (plan.instances == (2, 0)) == swapped
        assert swapped or plan.instances[1] >= 1


# -- limits


def test_limits_and_budgets_are_kept_and_what_they_leave_out_is_missing() -> None:
    plan = solve(pool(most=2), variants=[kind_of()], needs=[need({0: 10.0})])
    assert (plan.machines, plan.instances) == ((2,), (8,))
    assert plan.missing[0] == pytest.approx((0.2, 0.0), abs=1e-6)
    plan = solve(pool(most=1), variants=[kind_of()], needs=[need({0: (4.0, 4.0)})])
    assert plan.missing[0] == pytest.approx((0.0, 1.0), abs=1e-6)
    plan = solve(pool(), variants=[kind_of(running=2, limit=2)], needs=[need({0: 5.0})])
    assert (plan.instances, plan.missing[0][0]) == ((2,), pytest.approx(0.6, abs=1e-6))
    for budget, machines in ((2.5, 2), (3.0, 3), (99.0, 3)):
        plan = solve(pool(), variants=[kind_of()], needs=[need({0: 12.0})], budget=budget)
        assert plan.machines == (machines,)
        assert plan.missing[0][0] == pytest.approx(1 - min(12.0, 4.0 * machines) / 12.0, abs=1e-6)


def test_reserved_and_least_instances_are_kept_without_load() -> None:
    plan = solve(fixed(), variants=[kind_of("a", price=0.5), kind_of("b")], least=(((0, 1), 3),))
    assert plan.instances == (0, 3)
    full = solve(fixed(), variants=[kind_of()], least=(((0,), 6),))
    assert full.instances == (4,)  # as many as there is room for
    heavy = kind_of(uses={"cpu/memory": 1.0}, computes=("cpu/time", 2.0), most=8)
    assert solve(pool(), variants=[heavy], reserved=(((0,), 4),)).machines == (2,)
    assert solve(fixed(), variants=[heavy], reserved=(((0,), 4),)).instances == (4,)  # they share two machines' time


@pytest.mark.parametrize("goal", ["cost", "accuracy"])
def test_without_needs_nothing_is_kept_and_what_nothing_answers_harms_nobody(goal: Any) -> None:
    plan = solve(pool(), variants=[kind_of()], needs=[need({}, name="none"), need({0: 2.0})], goal=goal)
    assert (plan.missing, plan.instances) == (((1.0, 1.0), (0.0, 0.0)), (2,))
    nowhere = solve(pool(least=1), needs=[need({})], goal=goal)
    assert (nowhere.machines, nowhere.instances, nowhere.missing) == ((1,), (), ((1.0, 1.0),))
    idle = kind_of(running=3)
    plan = solve(pool(machines=4, least=2), variants=[idle], goal=goal)
    assert (plan.machines, plan.instances) == ((2,), (0,))
    nothing = solve(pool(machines=4, least=2), pool("gpu"), goal=goal)
    assert nothing == FleetPlan(machines=(2, 0), instances=(), missing=())
    assert solve(goal=goal) == FleetPlan(machines=(), instances=(), missing=())


def test_there_is_no_plan_beyond_the_budget_nor_one_that_lacks_what_may_not_be_missing() -> None:
    with pytest.raises(Unsolved, match="there is no plan at all"):
        solve(pool(least=3), variants=[kind_of()], needs=[need({0: 1.0})], budget=2.0)
    assert solve(fixed(), variants=[kind_of()], needs=[need({0: 4.0})], strict=True).missing == ((0.0, 0.0),)
    with pytest.raises(Infeasible):
        solve(fixed(), variants=[kind_of()], needs=[need({0: 4.5})], strict=True)


def test_a_pool_without_what_a_variant_computes_on_does_not_limit_it() -> None:
    plan = solve(pool(resources={"cpu/memory": 8.0}), variants=[kind_of()], needs=[need({0: 4.0})])
    assert plan.missing == ((0.0, 0.0),)


@pytest.mark.parametrize("load", [1e-250, 1e-9, 1e9])
def test_there_is_a_plan_for_hardly_any_load_and_for_very_much(load: float) -> None:
    running = kind_of("runs", running=2, serves=60.0, load_s=25.0, accuracy=0.5)
    variants = [running, kind_of("better", accuracy=0.9)]
    plan = solve(fixed(), variants=variants, needs=[need({0: (0.5, 0.5), 1: (0.5, 0.5)}, load)], goal="accuracy")
    assert plan.missing[0] == pytest.approx((0.0, 0.0), abs=1e-6)


# -- what runs


def test_plans_change_what_runs_only_for_a_gain_also_of_machines() -> None:
    variants = [kind_of("runs", running=4), kind_of("small", uses={"cpu/memory": 1.0}, most=8, price=0.12)]
    assert solve(pool(), variants=variants, needs=[need({0: 4.0, 1: 4.0})]).machines == (1,)
    fewer = solve(pool(machines=2), variants=variants, needs=[need({0: 8.0, 1: 8.0})])
    assert fewer.machines == (2,)  # cores: all compute
    idle = [replace(one, computes=("cpu/time", 0.0)) for one in variants]
    saved = solve(pool(machines=2), variants=idle, needs=[need({0: 8.0, 1: 8.0})])
    assert (saved.machines, saved.instances) == ((1,), (0, 8))
    takes = ((1.0, 1.0), (1.0, 1.0))
    assert plan(one("a", 0.9005), one("b", 0.9, running=2), takes=takes, shares=(0.9, 0.1)).instances == (0, 2)
    assert plan(one("a", 0.95), one("b", 0.9, running=2), takes=takes, shares=(0.9, 0.1)).instances[0] >= 1
    takes = ((4.0, 0.0), (4.0, 0.0))
    assert plan(one("a", 0.95), one("b", 0.9, running=4), takes=takes, shares=(1.0, 0.0)).instances == (4, 0)
    assert plan(one("a", 0.95), one("b", 0.9, running=4, serves=9.0), takes=takes, shares=(1.0, 0.0)).instances[1] == 4


# -- every plan


@st.composite
def problems(draw: st.DrawFn) -> FleetProblem:
    part = st.floats(0.05, 6.0)
    pools, variants = [], []
    for p in range(draw(st.integers(1, 3))):
        least = draw(st.integers(0, 2))
        most = least + draw(st.integers(0, 3))
        resources = {"d/memory": draw(st.floats(2.0, 20.0)), "d/time": draw(st.floats(1.0, 8.0))}
        pools.append(
            Pool(
                name=f"p{p}", machines=draw(st.integers(least, most)), least=least, most=most,
                price=draw(st.floats(0.0, 5.0)), resources=resources, elastic=most > least,
            )
        )  # fmt: skip
        for v in range(draw(st.integers(0, 3))):
            running = draw(st.integers(0, 3))
            variants.append(
                PooledVariant(
                    name=f"v{v}",
                    pool=p,
                    uses={"d/memory": draw(st.floats(0.1, 6.0))},
                    computes=("d/time", draw(st.floats(0.0, 4.0))),
                    most=draw(st.integers(0, 6)),
                    running=running,
                    price=draw(st.floats(0.0, 2.0)),
                    load_s=draw(st.floats(0.0, 30.0)),
                    serves=draw(st.floats(0.0, 100.0)),
                    accuracy=draw(st.floats(0.0, 1.0)),
                    limit=draw(st.none() | st.just(running)),
                )
            )
    indexes = range(len(variants))
    needs = tuple(
        ClassNeed(
            name=f"c{c}",
            load=draw(st.floats(0.0, 100.0)),
            options={v: (draw(part), draw(part)) for v in indexes if draw(st.booleans())},
        )
        for c in range(draw(st.integers(0, 3)))
    )
    least_of = ((tuple(indexes), draw(st.integers(0, 4))),) if variants and draw(st.booleans()) else ()
    floor = sum(one.least * one.price for one in pools)
    budget = draw(st.none() | st.floats(floor + 1e-3, floor + 20.0))
    goal: Any = draw(st.sampled_from(["cost", "accuracy"]))
    return FleetProblem(
        pools=tuple(pools), variants=tuple(variants), needs=needs, least=least_of, goal=goal, budget=budget
    )


@pytest.mark.parametrize("many", [MANY, 0])
@settings(max_examples=examples(75), deadline=None)
@given(problem=problems())
def test_no_plan_takes_more_than_there_is(many: int, problem: FleetProblem) -> None:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(
            "services.core.planning.fleet.MANY", many
        )  # 0: looks at some variants only, as plans of many do
        plan = solve_fleet(problem, time_limit_s=None, node_limit=200)
    slack = 1 + 1e-5
    for p, (one, count) in enumerate(zip(problem.pools, plan.machines, strict=True)):
        assert one.least <= count <= one.most
        here = [(v, n) for v, n in zip(problem.variants, plan.instances, strict=True) if v.pool == p]
        assert all(0 <= n <= v.most * count for v, n in here)
        assert all(v.limit is None or n <= v.limit for v, n in here)
        memory = sum(n * v.uses["d/memory"] for v, n in here)
        assert memory <= count * one.resources["d/memory"] * slack
    assert len(plan.missing) == len(problem.needs)
    assert all(0.0 <= part <= slack for pair in plan.missing for part in pair)
    bill = sum(one.price * count for one, count in zip(problem.pools, plan.machines, strict=True))
    assert problem.budget is None or bill <= problem.budget * slack
    for one, (load, _) in zip(problem.needs, plan.missing, strict=True):
        carried = sum(plan.instances[v] / carrying for v, (carrying, _) in one.options.items())
        assert carried >= (1.0 - load) / slack - 1e-6  # at least one by one: together they may be short


@pytest.mark.parametrize("busy", [0.1, 3.0])
def test_plans_of_many_variants_are_about_as_cheap_and_say_how_cheap_a_plan_may_be(busy: float) -> None:
    """Beside strict ones, which look at all. Most could share an instance if it had parts, and need one each; or most need several."""
    luck = Random(1)
    sizes = [(0.5 + luck.random(), v % 4, luck.random()) for v in range(MANY + 100)]
    variants = [
        kind_of(f"v{v}", uses={"cpu/memory": size * (1 + n)}, price=size * (1 + n) / 8.0, running=int(chance > 0.9))
        for v, (size, n, chance) in enumerate(sizes)
    ]
    needs = [
        need({v: busy * (0.5 + chance) / (1.3 + n) ** 1.2 for v, (_, n, chance) in enumerate(sizes) if v // 4 == app})
        for app in range(len(sizes) // 4)
    ]
    pools, kept = [pool(most=1000)], (((0, 1), 2),)
    some = solve(*pools, variants=variants, needs=needs, least=kept, reserved=(((5,), 1),))
    whole = solve(*pools, variants=variants, needs=needs, least=kept, reserved=(((5,), 1),), strict=True)
    assert max(map(max, some.missing)) < 0.01
    assert sum(some.instances[:2]) >= 2
    assert some.instances[5] >= 1
    assert some.objective <= 1.02 * whole.objective
    assert some.objective * (1 - some.gap) <= whole.objective * (1 + 1e-6)


@pytest.mark.parametrize(
    ("goal", "wish"), [("cost", {}), ("accuracy", {}), ("cost", {"worth": 3.0}), ("cost", {"mean": 0.7})]
)
def test_prices_of_room_and_load_find_what_the_best_plan_with_parts_takes(goal: Goal, wish: dict[str, float]) -> None:
    luck = Random(2)
    same: dict[str, Any] = {"uses": {"cpu/memory": 1.5, "cpu/cores": 0.5}, "most": 3}
    variants = [
        kind_of(f"v{v}", pool=v % 2, price=luck.random(), accuracy=luck.random(), running=int(v % 97 == 0), **same)
        for v in range(12 * 40)
    ]
    variants += [kind_of("huge", uses={"cpu/memory": 1e9}, most=0, accuracy=1.0) for _ in range(12)]
    needs = [
        ClassNeed(
            name=f"app{k}", load=luck.uniform(1.0, 9.0), layers=(0.7, 0.3, 0.0), **wish,
            options={v: (luck.uniform(0.1, 3.0), luck.uniform(0.1, 2.0), 0.3) for v in range(k * 40, min(480, k * 40 + 45))}
            | {480 + k: (1e14, 1e14, 1e14)},
        )
        for k in range(12)
    ]  # fmt: skip
    problem = FleetProblem(
        pools=(fixed(machines=9), pool(most=9)), variants=tuple(variants), needs=tuple(needs), goal=goal,
        least=(((3, 4, 5), 2), ((50, 51), 1)), reserved=(((7,), 1),), wanted=(((120, 121), 2),),
    )  # fmt: skip
    assert _relaxed(problem).objective == pytest.approx(_solved(problem, {}, whole=False)[0].objective, rel=1e-6)


# -- layers, and swaps on full devices


def one(name: str, accuracy: float, running: int = 0, **facts: float) -> PooledVariant:
    return PooledVariant(
        name=name,
        pool=0,
        uses={"slots": 1.0},
        computes=("time", 1.0),
        most=4,
        running=running,
        price=0.1,
        load_s=2.0,
        accuracy=accuracy,
        **facts,
    )


def plan(*variants: PooledVariant, takes: tuple[tuple[float, ...], ...], shares: tuple[float, ...]) -> FleetPlan:
    """Four devices, one class of 10 items/s, for accuracy."""
    pool = Pool(name="p", machines=1, least=1, most=1, price=1.0, resources={"slots": 4.0, "time": 4.0}, elastic=False)
    need = ClassNeed(name="app", load=10.0, options=dict(enumerate(takes)), layers=shares)
    return solve_fleet(
        FleetProblem(pools=(pool,), variants=variants, needs=(need,), goal="accuracy"), time_limit_s=None
    )


# -- what is reserved


def test_reserved_instances_are_there_in_any_pool_carry_nothing_and_those_beyond_may_go() -> None:
    plan = solve(pool(), variants=[kind_of()], needs=[need({0: 1.5})], reserved=(((0,), 3),))
    assert (plan.machines, plan.instances, plan.missing) == ((2,), (5,), ((0.0, 0.0),))
    assert solve(pool(), variants=[kind_of()], reserved=(((0,), 3),)).instances == (3,)
    pools = fixed(), fixed(name="other")
    plan = solve(*pools, variants=[kind_of(), kind_of(pool=1, running=3)], reserved=(((0, 1), 6),))
    assert sum(plan.instances) == 6
    assert plan.instances[1] >= 3
    assert solve(fixed(), variants=[kind_of(running=4)], reserved=(((0,), 2),)).instances == (2,)


@pytest.mark.parametrize("goal", ["cost", "accuracy"])
def test_what_is_reserved_and_there_gives_way_to_nothing(goal: Goal) -> None:
    kept, other = kind_of("kept", running=3), kind_of("other", accuracy=0.9)
    plan = solve(
        fixed(), variants=[kept, other], needs=[need({1: 4.0})], least=(((1,), 3),), reserved=(((0,), 4),), goal=goal
    )
    assert plan.instances[0] >= 3
    assert sum(plan.instances) == 4


# -- what a policy wants


def test_policies_say_how_many_there_are_and_the_plan_where() -> None:
    for load, wanted in ((0.3, 3), (3.7, 1), (0.3, 0)):
        plan = solve(pool(), variants=[kind_of(running=2)], needs=[need({0: load})], wanted=(((0,), wanted),))
        assert plan.instances == (wanted,)
    variants = [kind_of(), kind_of(pool=1)]
    assert sum(solve(fixed(), fixed(), variants=variants, wanted=(((0, 1), 7),)).instances) == 7
    plan = solve(pool(), variants=[kind_of()], wanted=(((0,), 6),))
    assert (plan.machines, plan.instances) == ((2,), (6,))
    plan = solve(fixed(), variants=[kind_of()], wanted=(((0,), 6),))
    assert plan.instances == (4,)
    plan = solve(fixed(spares=True), variants=[kind_of(running=3)], wanted=(((0,), 1),))
    assert plan.instances[0] == 1
    assert plan.instances[0] + plan.spares[0] <= 3

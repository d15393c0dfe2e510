"""getVariant against a plain restatement of its rule: the cheapest Active variant in time, else the next step of the order."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from bus.messages.catalog import AppRecord, Profile, ProfileRow, TensorSpec
from services.core.cost import HANDLING_MS, Goal, cost_per_1000, instance_price_per_s, merit, query_cost
from services.core.selection.cluster import ClusterView
from services.core.selection.eligibility import Ask
from services.core.selection.policy import (
    EASE,
    OVERHEAD,
    BruteForce,
    Decision,
    InfaasPolicy,
    RoundRobin,
    SelectionPolicy,
    note,
)
from services.core.settings import DispatcherSettings, MachineKind, MachineSettings, Settings
from services.shell.policies import load_policy
from tests.support.data.events import beat, device, instance
from tests.support.data.examples import examples
from tests.support.simulated.fleet import PRICES, SIGNATURE, Fleet, variant

NOW = 1000.0
STATES = ("Active", "Loading", "Overloaded", "Interfered", None)  # None: no instance


def view_of(
    states: list[tuple[Any, dict[str, Any]]], queued: list[int] | None = None, goal: Goal = "cost", cores: int = 8
) -> ClusterView:
    """One app with a variant per entry, each with one instance in that state."""
    records = [variant(f"v{i}", **({"model": f"m{i}", "accuracy": 0.5} | facts)) for i, (_, facts) in enumerate(states)]
    view = ClusterView(PRICES, goal)
    view.set_app(AppRecord(app="app", links={record.model: "1" for record in records}), records)
    instances = [
        instance(
            f"i{i}", f"v{i}", state=state, queued=queued[i] if queued else 0,
            ready_at=NOW + 0.1 if state == "Loading" else 0.0,
        )
        for i, (state, _) in enumerate(states)
        if state is not None
    ]  # fmt: skip
    view.heartbeat(beat(*instances, at=NOW, devices=[device(cores=cores, memory_mb=9000, price_per_hour=0.4)]), NOW)
    return view


def ask(latency: float = 1.0, **needs: Any) -> Ask:
    return Ask(app="app", items=1, deadline=NOW + latency, latency_s=latency, **needs)


def decided(policy: SelectionPolicy, wish: Ask, now: float, view: ClusterView) -> Decision:
    """A decision, noted as the dispatcher notes it."""
    decision = policy.select(wish, now, view)
    note(wish, decision, now, view)
    return decision


facts = st.fixed_dictionaries(
    {
        "accuracy": st.sampled_from([0.5, 0.7, 0.9, 0.95]),
        "base_ms": st.sampled_from([0.5, 2.0, 9.0, 40.0]),
        "threads": st.sampled_from([1, 2, 4]),
    }
)
fleets = st.lists(st.tuples(st.sampled_from(STATES), facts), min_size=1, max_size=24)
asks = st.builds(
    ask, latency=st.sampled_from([0.001, 0.004, 0.02, 0.2]), accuracy=st.sampled_from([0.0, 0.6, 0.9, 0.99]),
    cost=st.sampled_from([float("inf"), 1e-4, 2e-5]), model=st.sampled_from([None, None, "m0", "m3", "other"]),
)  # fmt: skip


@settings(max_examples=examples(300))
@given(fleets, st.lists(st.integers(0, 12), min_size=24, max_size=24), st.lists(asks, min_size=1, max_size=4))
def test_the_cheapest_active_variant_in_time_answers(
    states: list[tuple[Any, dict[str, Any]]], queued: list[int], wishes: list[Ask]
) -> None:
    view = view_of(states, queued)
    app = view.apps["app"]
    policy = InfaasPolicy(probe_share=0.0)
    for wish in [*wishes, *wishes]:  # the second time from plans that were kept
        slack = wish.deadline - NOW - OVERHEAD
        fitting = {
            record.variant: float(app.cost[i])
            for i, record in enumerate(app.records)
            if (record.accuracy or 0.0) >= wish.accuracy
            and app.groups[i].table.seconds(1) <= wish.latency_s
            and app.cost[i] <= wish.cost
            and wish.model in (None, record.model)
        }
        active = {
            i.id: fitting[i.record.variant]
            for i in view.instances.values()
            if i.state == "Active" and i.record.variant in fitting and i.predict(1, None, wish.deadline, NOW) <= slack
        }
        decision = policy.select(wish, NOW, view)
        if active:
            assert active[decision.instance or ""] == min(active.values())
            assert active[BruteForce().select(wish, NOW, view).instance or ""] == min(active.values())
            continue
        if decision.instance is not None:
            instance = view.instances[decision.instance]
            assert instance.record.variant in fitting
            assert instance.state in ("Loading", "Overloaded", "Interfered")
        if decision.load is not None:
            assert decision.load.record.variant in fitting
        if not fitting:
            assert decision.refusal.code in ("unsatisfiable", "unknown_model")


@pytest.mark.parametrize("goal", ["cost", "accuracy"])
@pytest.mark.parametrize("dispatch", ["spread", "pack"])
@settings(max_examples=examples(100))
@given(
    fleets,
    st.lists(st.integers(0, 12), min_size=24, max_size=24),
    st.lists(st.tuples(asks, st.integers(1, 9), st.sampled_from([0.0, 0.001, 0.01])), min_size=1, max_size=30),
    st.sampled_from([4, 200]),
)
def test_nothing_is_refused_that_something_loaded_answers_in_time(
    goal: Goal,
    dispatch: str,
    states: list[tuple[Any, dict[str, Any]]],
    queued: list[int],
    wishes: list[tuple[Ask, int, float]],
    cores: int,
) -> None:
    view, now = view_of(states, queued, goal, cores), NOW
    app = view.apps["app"]
    policy = InfaasPolicy(goal=goal, dispatch=dispatch)
    for plain, priority, later in wishes:
        now += later
        wish = replace(plain, priority=priority, deadline=now + plain.latency_s)
        decision = policy.select(wish, now, view)
        note(wish, decision, now, view)
        if decision.instance is not None:
            view.instances[decision.instance].take(1, now, wish.deadline, priority)
            continue
        if decision.refusal is None and decision.load is not None and decision.load.seconds <= wish.deadline - now:
            continue
        slack = wish.deadline - now - OVERHEAD
        for i in view.instances.values():
            group = app.groups[app.index[i.record.variant]]
            serves = (
                (i.record.accuracy or 0.0) >= wish.accuracy
                and group.table.seconds(1) <= wish.latency_s
                and app.cost[app.index[i.record.variant]] <= wish.cost
                and wish.model in (None, i.record.model)
            )
            if serves:
                until_ready = max(0.0, i.ready_at - now) if i.state == "Loading" else 0.0
                predicted = i.predict(1, None, wish.deadline, now + until_ready, i.outranked(priority))
                assert until_ready + predicted > slack


@settings(max_examples=examples(200))
@given(fleets, st.lists(st.integers(0, 12), min_size=24, max_size=24), st.lists(asks, min_size=1, max_size=4))
def test_where_accuracy_is_the_goal_the_most_accurate_variant_well_in_time_answers_the_cheapest_of_equals(
    states: list[tuple[Any, dict[str, Any]]], queued: list[int], wishes: list[Ask]
) -> None:
    view = view_of(states, queued, "accuracy")
    app = view.apps["app"]
    policy = InfaasPolicy(probe_share=0.0, goal="accuracy")
    for wish in [*wishes, *wishes]:
        slack = wish.deadline - NOW - OVERHEAD
        active = {}
        for i in view.instances.values():
            at, record = app.index[i.record.variant], i.record
            alone, cost = app.groups[at].table.seconds(1), float(app.cost[at])
            fits = (record.accuracy or 0.0) >= wish.accuracy and alone <= wish.latency_s and cost <= wish.cost
            named = wish.model in (None, record.model)
            in_time = i.predict(1, None, wish.deadline, NOW) <= (slack if i.idle else EASE * slack)
            if i.state in ("Active", "Overloaded") and fits and named and in_time:
                active[i.id] = (-merit(record.accuracy), cost)
        decision = policy.select(wish, NOW, view)
        if active:
            assert active[decision.instance or ""] == min(active.values())
            other = BruteForce(goal="accuracy").select(wish, NOW, view).instance
            assert active.get(other or "", min(active.values())) == min(active.values())


def test_where_accuracy_is_the_goal_unmeasured_ones_come_last_and_full_ones_are_not_avoided() -> None:
    view = view_of([("Active", {"accuracy": None}), ("Active", {"accuracy": 0.1, "threads": 4})], None, "accuracy")
    assert InfaasPolicy(probe_share=0.0).select(ask(), NOW, view).instance == "i1"
    states = [("Overloaded", {"accuracy": 0.9}), ("Interfered", {"accuracy": 0.95}), ("Active", {"accuracy": 0.7})]
    for goal, answers in (("accuracy", "i0"), ("cost", "i2")):
        policy = InfaasPolicy(probe_share=0.0, goal=goal)  # type: ignore[arg-type]
        assert policy.select(ask(), NOW, view_of(states, None, goal)).instance == answers  # type: ignore[arg-type]


def test_all_active_variants_are_looked_at_or_take_turns() -> None:
    busy = [("Active", {"base_ms": 2.0})] * 20
    view = view_of([*busy, ("Active", {"base_ms": 3.0})], [50] * 20 + [0], cores=32)
    assert InfaasPolicy().select(ask(0.01), NOW, view).instance == "i20"
    view = view_of([("Active", {}), ("Active", {"base_ms": 9.0})])
    policy = RoundRobin()
    assert {decided(policy, ask(), NOW, view).instance for _ in range(4)} == {"i0", "i1"}


def test_what_loads_is_waited_for_and_trouble_avoided_while_others_are_there() -> None:
    view = view_of([("Loading", {})])
    assert InfaasPolicy().select(ask(1.0), NOW, view).instance == "i0"
    late = InfaasPolicy().select(ask(0.05), NOW, view)
    assert (late.refusal.code, late.refusal.retry_after_ms) == ("deadline", pytest.approx(102.5, abs=1.0))
    view = view_of([("Overloaded", {"threads": 1}), ("Active", {"threads": 4})])
    assert InfaasPolicy(probe_share=0.0).select(ask(), NOW, view).instance == "i1"
    assert InfaasPolicy(probe_share=1.0).select(ask(), NOW, view).instance == "i0"
    alone = view_of([("Interfered", {})])
    assert InfaasPolicy(probe_share=0.0).select(ask(), NOW, alone).instance == "i0"


def test_a_cold_variant_is_loaded_even_if_this_query_cannot_wait() -> None:
    view = view_of([(None, {"load_ms": 500.0})])
    patient = InfaasPolicy().select(ask(2.0), NOW, view)
    assert patient.load is not None
    assert patient.refusal is None
    view = view_of([(None, {"load_ms": 500.0})])
    hasty = InfaasPolicy().select(ask(0.05), NOW, view)
    assert hasty.load is not None
    assert hasty.refusal.code == "deadline"


def test_refusals_name_the_closest_offer_and_the_error_where_the_metric_is_one() -> None:
    view = view_of([("Active", {"accuracy": 0.9, "base_ms": 1.0}), ("Active", {"accuracy": 0.7, "base_ms": 1.0})])
    refusal = InfaasPolicy().select(ask(accuracy=0.95), NOW, view).refusal
    assert refusal.code == "unsatisfiable"
    assert (refusal.closest.variant, refusal.closest.accuracy) == ("v0", 0.9)
    priced = replace(SIGNATURE, outputs=[TensorSpec(name="price", datatype="FP32", shape=[1], unit="EUR{}")])
    # 43 and 60 have the accuracies 1/44 and 1/61; at most 25 was wanted.
    view = view_of([("Active", {"accuracy": 1 / one, "metric": "mae", "signature": priced}) for one in (44, 61)])
    refusal = InfaasPolicy().select(ask(accuracy=1 / 26), NOW, view).refusal
    assert "reaches a mae of 25 EUR{}: the best has 43 EUR{} (v0)" in refusal.message
    assert refusal.closest.metric == "mae"


@pytest.mark.parametrize(
    ("needs", "said"),
    [
        ({"accuracy": 0.95}, "reaches accuracy 0.95: the best has 0.9 (v0)"),
        ({"accuracy": 0.90004}, "reaches accuracy 0.90004: the best has 0.9 (v0)"),
        ({"latency": 0.001}, "answers within 1 ms: the fastest takes 3 ms (v1)"),
        (
            {"latency": 0.001, "accuracy": 0.95},
            "reaches accuracy 0.95: the best has 0.9 (v0); none answers within 1 ms: the fastest takes 3 ms (v1)",
        ),
        (
            {"latency": 0.01, "accuracy": 0.8},
            "reaches accuracy 0.8 and answers within 10 ms: v1 has accuracy 0.7 and takes 3 ms, v0 has accuracy 0.9 and takes 41 ms",
        ),
        ({"latency": 0.01, "accuracy": 0.8, "cost": 1e9}, "reaches accuracy 0.8 and answers within 10 ms: v1 has"),
    ],
)
def test_a_refusal_says_which_need_fails_and_the_best_there_is(needs: dict[str, Any], said: str) -> None:
    view = view_of([("Active", {"accuracy": 0.9, "base_ms": 40.0}), ("Active", {"accuracy": 0.7, "base_ms": 2.0})])
    refusal = InfaasPolicy().select(ask(**needs), NOW, view).refusal
    assert refusal.message.startswith(f"no variant of app 'app' {said}"), refusal.message
    assert refusal.message.endswith("; ask for less, or register another model")


@pytest.mark.parametrize("baseline", [RoundRobin, BruteForce])
def test_baselines_load_nothing_where_others_choose_what_runs(baseline: type[RoundRobin] | type[BruteForce]) -> None:
    view = view_of([(None, {})])
    assert baseline().select(ask(5.0), NOW, view).load is not None
    decision = baseline(on_demand=False).select(ask(5.0), NOW, view)
    assert decision.load is None
    assert decision.instance is None


def test_short_inputs_meet_what_long_ones_cannot() -> None:
    rows = [
        ProfileRow(batch=b, p50_ms=ms * b, p99_ms=ms * b, cpu_ms=ms, wall_over_cpu=1.0, length=n)
        for n, ms in ((16, 1.0), (64, 9.0))
        for b in (1, 8)
    ]
    profile = Profile(rows=rows, load_ms=1.0, memory_mb=1.0, saturation_qps=100.0)
    view = view_of([("Active", {"profile": profile})])
    policy = InfaasPolicy()
    assert policy.select(ask(0.005, length=16), NOW, view).instance == "i0"
    for length in (64, None):
        assert policy.select(ask(0.005, length=length), NOW, view).refusal.code == "unsatisfiable"
    assert view.apps["app"].lengths == [16, 64]


@pytest.mark.parametrize(("used", "ordered"), [(0.99, False), (0.5, True)])
def test_another_variant_beside_full_ones_is_loaded_only_where_something_is_left(used: float, ordered: bool) -> None:
    view = view_of([("Active", {}), (None, {})], queued=[10_000])
    view.workers["w0"].devices["cpu"] = replace(view.workers["w0"].devices["cpu"], utilisation=used)
    policy = InfaasPolicy(probe_share=0)
    times = [NOW + 0.1 * i for i in range(50)]
    loads = [decided(policy, Ask("app", 1, now + 0.2, 0.2), now, view).load for now in times]
    assert any(load is not None and load.record.variant == "v1" for load in loads) == ordered
    assert not any(loads[:20])  # the autoscalers first


# -- Dispatch by `pack` and by `auto`: low load goes to one worker, so that others empty; what it cannot carry goes
# on.

NAME = "m-v1-ort-fp32-t1-b8"


def view_of_pack(*loads: float, utilisation: float = 0.5) -> ClusterView:
    """Workers w0, w1, ... each with one instance that serves so many items/s, 2.5 ms each."""
    view = ClusterView(PRICES)
    view.set_app(AppRecord(app="app", links={"m": "1"}, signature=SIGNATURE), [variant(NAME)])
    for number, load in enumerate(loads):
        cpu = device(cores=1, cores_used=1.0, utilisation=utilisation)
        figures = {"load": load, "latency_ms": 2.5, "mean_batch": 1.0 if load else 0.0}
        status = instance(f"{NAME}.w{number}-1", NAME, **figures)
        view.heartbeat(beat(status, worker=f"w{number}", devices=[cpu]), 0.0)
    return view


def chosen(view: ClusterView, dispatch: str = "pack", latency: float = 1.0) -> str:
    decision = InfaasPolicy(dispatch=dispatch, probe_share=0.0).select(Ask("app", 1, latency, latency), 0.0, view)
    return view.instances[decision.instance or ""].worker.name


@pytest.mark.parametrize(
    ("loads", "utilisation", "worker"),
    [
        ((10.0, 200.0, 100.0), 0.5, "w1"),
        ((0.0, 0.0, 1.0), 0.5, "w2"),
        ((0.0, 0.0, 0.0), 0.5, "w0"),
        ((10.0, 330.0), 0.5, "w0"),
        ((10.0, 200.0), 0.99, "w1"),
    ],
    ids=[
        "the fullest",
        "any load",
        "among equals the same one",
        "no full one: 82 % busy",
        "however busy the machine is",
    ],
)
def test_the_fullest_worker_that_is_not_full_goes_on_being_filled(
    loads: tuple[float, ...], utilisation: float, worker: str
) -> None:
    assert {chosen(view_of_pack(*loads, utilisation=utilisation)) for _ in range(5)} == {worker}


def test_packing_counts_what_was_just_sent_and_spread_takes_the_least_loaded() -> None:
    view = view_of_pack(10.0, 200.0)
    view.instances[f"{NAME}.w1-1"].take(1000, 0.0, 1.0)
    assert chosen(view, latency=30.0) == "w0"
    view = view_of_pack(10.0, 200.0)
    view.instances[f"{NAME}.w0-1"].take(5, 0.0, 1.0)
    assert chosen(view, "spread") == "w1"


@pytest.mark.parametrize(
    ("dispatch", "kind", "provider", "packs"),
    [
        ("auto", None, "local", False),
        ("auto", MachineKind(minimum=1, maximum=1), "local", False),
        ("auto", MachineKind(minimum=1, maximum=2), "local", True),
        ("auto", MachineKind(minimum=1, maximum=2), "off", False),
        ("spread", MachineKind(minimum=1, maximum=2), "local", False),
        ("pack", None, "local", True),
    ],
)
def test_auto_packs_where_machines_may_come_and_go(
    dispatch: str, kind: MachineKind | None, provider: str, packs: bool
) -> None:
    machines = MachineSettings(provider=provider, kinds={} if kind is None else {"cpu": kind})
    policy = load_policy(Settings(dispatcher=DispatcherSettings(dispatch=dispatch), machines=machines))
    assert policy._pack is packs


# -- A cost ceiling from selection to account: what is chosen under it owes, batch by batch as predicted, no more
# than it.


@given(st.floats(0.001, 100.0), st.integers(1, 8))
def test_the_expected_price_is_what_queries_of_such_batches_owe(base_ms: float, batch: int) -> None:
    """For small models the handling of a batch is most of it."""
    record = variant(base_ms=base_ms, per_item_ms=0.0)
    price = instance_price_per_s(record, PRICES, 2, 8000.0)
    owed = 1000.0 * query_cost(price, (base_ms + HANDLING_MS) / 1000.0, batch, 1)
    assert cost_per_1000(record, price, batch) == pytest.approx(owed)


def test_a_query_of_many_items_goes_to_the_variant_that_is_cheapest_for_its_size() -> None:
    """The second takes longer for one, and computes more of them a second."""
    quick, steady = {"base_ms": 1.0, "per_item_ms": 3.0}, {"base_ms": 9.0, "per_item_ms": 1.0}
    view = view_of([("Active", quick), ("Active", steady)])
    for policy in (InfaasPolicy(probe_share=0.0), BruteForce()):
        assert [policy.select(replace(ask(9.0), items=n), NOW, view).instance for n in (1, 3, 8, 500)] == [
            "i0", "i0", "i1", "i1",
        ]  # fmt: skip


def test_a_ceiling_passes_over_an_active_variant_that_is_dearer() -> None:
    view = view_of([("Active", {"base_ms": 40.0, "accuracy": 0.9}), ("Active", {"base_ms": 1.0, "accuracy": 0.9})])
    dear, cheap = (float(cost) for cost in view.apps["app"].cost)
    policy = InfaasPolicy(probe_share=0.0)
    assert policy.select(ask(cost=(dear + cheap) / 2), NOW, view).instance == "i1"
    refusal = policy.select(ask(cost=cheap * 0.99), NOW, view).refusal
    assert refusal.code == "unsatisfiable"
    assert refusal.closest.variant == "v1"
    assert cheap < refusal.closest.cost < 2.0 * cheap  # with some margin: a batch after a pause takes longer
    assert "per 1,000 queries: the cheapest costs US$ " in refusal.message


def test_a_batch_that_took_much_longer_says_that_it_missed_the_ceiling() -> None:
    fleet = Fleet()
    fleet.ask(seconds=1.0)
    record = variant()
    ceiling = 1.5 * cost_per_1000(record, instance_price_per_s(record, PRICES, 2, 8000.0))
    reply = fleet.reply(fleet.ask(cost=ceiling), 1.0)
    assert (reply["missed"], 1000 * reply["cost"] <= ceiling) == ([], True)
    fleet.devices["w0"].slow = 10.0
    reply = fleet.reply(fleet.ask(cost=ceiling), 1.0)
    assert (reply["missed"], 1000 * reply["cost"] > ceiling) == (["cost"], True)

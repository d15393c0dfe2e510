"""Batching policies on an executor in virtual time: queries go in, answers say how large their batches were (Clipper, section 4.3)."""

from statistics import mean
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bus.codec import encode
from bus.messages.catalog import BatchingRule
from bus.messages.public import Answer
from services.core.batching import POLICIES, batching_at, batching_key, rule_errors
from services.executor.batching import BatchingRules, Quantile, quantile_line
from tests.support.data.examples import examples
from tests.support.simulated.batch_clients import BatchClients, linear

LEARNING = ("aimd", "quantile")
MANY = 800  # clients that keep the queue full
IN_TIME = {"slo_ms": 20.0}


def ruled(scope: str, name: str, **fields: Any) -> BatchClients:
    """A batch of n takes 1 ms + 0.1 ms n."""
    clients = BatchClients(linear(1.0, 0.1))
    clients.rule(scope, name, **fields)
    return clients


def saturated(policy: str, base_ms: float = 1.0, per_item_ms: float = 0.1) -> BatchClients:
    clients = BatchClients(linear(base_ms, per_item_ms))
    clients.rule("model", "m", policy=policy, **IN_TIME)
    clients.closed_loop(MANY, seconds=2.0)
    return clients


def mean_batch(clients: BatchClients, seconds: float, device: int = 0) -> float:
    """Of the next seconds."""
    since = clients.now
    clients.run(seconds)
    return mean(clients.batches(since, device))


@pytest.mark.parametrize("policy", LEARNING)
def test_the_batch_size_that_keeps_the_objective_is_found_and_follows_the_device(policy: str) -> None:
    """Row 62: a batch of n takes 1 ms + 0.1 ms n, so 190 take 20 ms. Trap 5: the profile stays as it is while the device is slower."""
    clients = saturated(policy)
    assert mean_batch(clients, 0.5) == pytest.approx(190, rel=0.15)
    clients.devices[0].slow = 2.0
    clients.run(1.0)
    assert mean_batch(clients, 0.5) == pytest.approx(90, rel=0.15)
    clients.devices[0].slow = 1.0
    clients.run(2.5)
    assert mean_batch(clients, 0.5) == pytest.approx(190, rel=0.15)


@pytest.mark.slow
def test_both_learn_the_same_size() -> None:
    """Row 63."""
    sizes = [mean_batch(saturated(policy), 2.0) for policy in LEARNING]
    assert sizes[1] == pytest.approx(sizes[0], rel=0.10)


@pytest.mark.parametrize("policy", LEARNING)
def test_the_objective_is_kept_again_soon_after_the_device_slows_down(policy: str) -> None:
    clients = saturated(policy)
    clients.devices[0].slow = 2.0
    since = clients.now + 1.0
    clients.run(2.0)
    times = [ms for _, ms in clients.timed_batches(since)]
    assert np.quantile(times, 0.99) <= 21.0
    assert np.quantile(times, 0.5) <= 20.0


@pytest.mark.parametrize("policy", LEARNING)
@pytest.mark.parametrize(("slow", "size", "items"), [(0.25, 790, 10), (4.0, 40, 1)])
def test_a_profile_that_is_wrong_from_the_outset_does_not_matter(
    policy: str, slow: float, size: int, items: int
) -> None:
    clients = BatchClients(linear(1.0, 0.1))
    clients.devices[0].slow = slow
    clients.rule("model", "m", policy=policy, **IN_TIME)
    clients.closed_loop(200, within=30.0, items=items, seconds=8.0)
    assert mean_batch(clients, 2.0) == pytest.approx(size, rel=0.15)


@pytest.mark.parametrize("policy", LEARNING)
def test_few_queries_teach_nothing_and_without_an_objective_half_of_the_time_is_taken(policy: str) -> None:
    clients = ruled("model", "m", policy=policy)
    clients.closed_loop(85, within=0.02, seconds=2.0)  # 10 ms: 90 items
    assert max(clients.batches(1.0)) <= 92
    assert clients.executors[0].instances["i0"].queue.max_batch in range(80, 200)
    clients = ruled("model", "m", policy=policy, **IN_TIME)
    clients.closed_loop(5, seconds=5.0)
    assert clients.executors[0].instances["i0"].queue.max_batch <= 12


@pytest.mark.parametrize(
    ("size", "most", "runs"), [(1, 1024, 1), (7, 1024, 7), (64, 1024, 64), (1024, 1024, 1024), (64, 16, 16)]
)
def test_a_fixed_size_is_the_largest_that_runs_unless_the_variant_allows_less(size: int, most: int, runs: int) -> None:
    """Row 64, for every size that waits."""
    clients = BatchClients(linear(1.0, 0.01, most=most))
    clients.rule("variant", "v", policy="fixed", batch=size)
    clients.closed_loop(2048, seconds=0.06)  # a batch takes 1 to 11 ms
    assert set(clients.batches(clients.now - 0.03)) == {runs}


@pytest.mark.parametrize("policy", [*LEARNING, "edf", "delayed", "threshold"])
def test_batch_is_the_most_of_every_policy(policy: str) -> None:
    needed = {"wait_ms": 1.0} if policy == "delayed" else {}
    clients = ruled("model", "m", policy=policy, batch=30, **needed)
    clients.closed_loop(200, seconds=2.0)
    assert max(clients.batches(0.0)) == 30


def test_larger_queries_run_alone_and_of_rules_the_first_querys_counts() -> None:
    clients = ruled("model", "m", policy="fixed", batch=4)
    clients.send(items=10)
    clients.send_many(3, seconds=1.0)
    assert sorted(clients.batches(0.0)) == [3, 10]
    clients = ruled("app", "small", policy="fixed", batch=2)
    clients.send()  # the others wait for it
    for app in ("small", "large"):
        for _ in range(10):
            clients.send(app=app, within=5.0 if app == "small" else 6.0)
    clients.run(1.0)
    assert sorted(clients.batches(0.0)) == [1, 2, 2, 2, 2, 2, 10]


@pytest.mark.parametrize("policy", ["fixed", *LEARNING, "delayed", "threshold"])
def test_batches_hold_queries_and_nothing_else(policy: str) -> None:
    """Trap 6: a batch that is not full is not filled up."""
    fields = {"fixed": {"batch": 8}, "delayed": {"wait_ms": 1.0, "batch": 8}}.get(policy, {})
    clients = ruled("model", "m", policy=policy, **fields)
    clients.send_many(5, seconds=1.0)
    assert len(clients.answers) == sum(clients.batches(0.0)) == 5
    assert sum(clients.executors[0].tallies["v"].sizes) <= 5


# -- delayed


def throughput(base_ms: float, per_item_ms: float, wait_ms: float) -> float:
    clients = BatchClients(linear(base_ms, per_item_ms))
    clients.rule("app", "a", policy="delayed", wait_ms=wait_ms, batch=64)
    clients.closed_loop(64, seconds=0.3)
    before = len(clients.answers)
    clients.run(0.7)
    return (len(clients.answers) - before) / 0.7


def test_waiting_pays_where_a_batch_has_a_high_fixed_cost() -> None:
    """Row 65 (Fig. 5): 64 clients at moderate load, 8 ms a batch and little an item; then hardly anything a batch."""
    assert throughput(8.0, 0.02, 2.0) > 1.5 * throughput(8.0, 0.02, 0.0)
    assert throughput(0.1, 0.2, 2.0) == pytest.approx(throughput(0.1, 0.2, 0.0), rel=0.1)


def answered_after(clients: BatchClients) -> list[float]:
    """Milliseconds from sending to each answer, without the computing."""
    return [1000.0 * (one.at - one.sent) - one.compute_ms for one in clients.answers]


def delayed(wait_ms: float = 100.0, **fields: int) -> BatchClients:
    return ruled("app", "a", policy="delayed", wait_ms=wait_ms, **fields)


def test_batches_wait_for_more_unless_they_are_full_or_alone() -> None:
    clients = delayed()
    clients.send(seconds=0.05)
    clients.send()
    assert not clients.answers
    clients.run(1.0)
    assert answered_after(clients) == pytest.approx([100.5, 50.5], abs=0.1)  # 0.5 ms on the way
    assert clients.batches(0.0) == [2]
    # Trap 7.
    clients = delayed(batch=4)
    clients.send_many(4, seconds=1.0)
    assert answered_after(clients) == pytest.approx([0.5] * 4, abs=0.1)
    clients = delayed()
    clients.send(alone=True, seconds=1.0)
    assert answered_after(clients) == pytest.approx([0.5], abs=0.1)


@settings(max_examples=examples(60), deadline=None)
@given(
    st.lists(st.tuples(st.floats(0.0, 0.03), st.floats(0.01, 0.3)), min_size=1, max_size=12),
    st.floats(0.0, 200.0),
)
def test_no_batch_waits_past_the_first_deadline(queries: list[tuple[float, float]], wait_ms: float) -> None:
    """Trap 7. Each query alone takes 1.1 ms, all together 2.2 ms."""
    clients = delayed(wait_ms)
    for gap, within in queries:
        clients.run(gap)
        clients.send(within=within)
    clients.run(1.0)
    assert not clients.reports.handed_back
    assert len(clients.answers) == len(queries)
    sent = 0.1
    within_by_sent = {}
    for gap, within in queries:
        sent += gap
        within_by_sent[round(sent, 6)] = within
    for one in clients.answers:
        assert one.at - one.sent <= within_by_sent[round(one.sent, 6)] + 0.0006


@pytest.mark.parametrize(
    "rule",
    [
        {"policy": "edf"},
        {"policy": "fixed", "batch": 500},
        {"policy": "delayed", "wait_ms": 50.0},
        {"policy": "aimd", "slo_ms": 80.0},
        {"policy": "quantile", "slo_ms": 80.0},
        {"policy": "threshold", "quantum_ms": 100.0},
    ],
)
def test_a_deadline_makes_a_batch_smaller(rule: dict[str, Any]) -> None:
    """Among many that have time, one allows only so much. What is answered is in time, by batches smaller than the policy allows."""
    clients = ruled("model", "m", **rule)
    clients.closed_loop(60, items=10, seconds=3.0)  # what learns, learns that these are fine
    assert max(clients.batches(0.0)) > 250
    urgent: list[tuple[bool, float]] = []
    for within in np.arange(0.03, 0.11, 0.002):
        due = clients.now + float(within)
        clients.send(
            within=float(within),
            then=lambda reply, due=due: urgent.append((isinstance(reply, Answer), clients.now - due)),
        )
        clients.run(0.2)
    assert len(urgent) + len(clients.reports.handed_back) == 40
    late = [by for answered, by in urgent if answered]
    assert len(late) > 20
    assert max(late) < 0.0006  # on the way
    assert min(clients.batches(3.0)) < 200


# -- instances and rules


@pytest.mark.slow
def test_each_instance_learns_for_itself() -> None:
    """Row 66: of two equal replicas one device is four times as slow."""
    clients = BatchClients(linear(1.0, 0.1), devices=2)
    clients.devices[1].slow = 4.0
    clients.rule("model", "m", policy="aimd", **IN_TIME)
    for device in (0, 1):
        clients.closed_loop(MANY // 2, device)
    clients.run(3.0)
    assert mean_batch(clients, 2.0, 0) == pytest.approx(190, rel=0.15)
    assert mean_batch(clients, 2.0, 1) == pytest.approx(41, rel=0.15)
    assert clients.reports.last["i0"].batch_limit > 3 * clients.reports.last["i1"].batch_limit


def test_the_narrowest_rule_counts_and_changes_take_effect_at_once() -> None:
    clients = BatchClients(linear(1.0, 0.1))
    clients.closed_loop(300)
    seen = {}
    for scope, name, size in (("app", "a", 50), ("model", "m", 20), ("variant", "v", 5)):
        clients.rule(scope, name, policy="fixed", batch=size, seconds=0.2)
        seen[scope] = {*clients.batches(clients.now - 0.1)}
    assert seen == {"app": {50}, "model": {20}, "variant": {5}}
    clients.rule("variant", "v")
    clients.rule("model", "m", seconds=0.2)
    assert {*clients.batches(clients.now - 0.1)} == {50}
    clients.rule("app", "a", seconds=1.0)
    assert max(clients.batches(clients.now - 0.1)) > 100
    assert clients.reports.last["i0"].batching == "edf"


def test_what_was_learnt_outlives_the_turn_of_another_app_but_not_the_rule() -> None:
    clients = saturated("aimd")
    loaded = clients.executors[0].instances["i0"]
    learnt = loaded.policy.limit(0.0)
    clients.rule("app", "other", policy="fixed", batch=2)
    assert loaded.policy.limit(0.0) == learnt > 100
    clients.rule("model", "m", seconds=0.01)
    clients.rule("model", "m", policy="aimd", **IN_TIME, seconds=0.005)
    assert loaded.policy.limit(0.0) < 20


def test_the_executor_reports_policy_and_limit() -> None:
    clients = BatchClients(linear(1.0, 0.1))
    clients.run(1.0)
    assert (clients.reports.last["i0"].batching, clients.reports.last["i0"].batch_limit) == ("edf", 1024)
    clients.rule("model", "m", policy="fixed", batch=3, seconds=1.0)
    assert (clients.reports.last["i0"].batching, clients.reports.last["i0"].batch_limit) == ("fixed", 3)


def test_rules_that_cannot_be_read_count_as_none() -> None:
    rules = BatchingRules()
    assert not rules.apply("quarantine.w.v", b"")
    assert not rules.apply("batching.planet.x", b"")
    for value in (b"", b"\xc1", encode({"policy": 3}), encode(BatchingRule(policy="later")), None):
        assert rules.apply(batching_key("model", "m"), value)
    assert not rules.present
    rules.apply(batching_key("model", "m"), encode(BatchingRule(policy="fixed", batch=3)))
    assert rules.present
    assert rules.rule_for(linear(1.0, 0.1), None) == BatchingRule(policy="fixed", batch=3)
    rules.apply(batching_key("model", "m"), None)
    assert not rules.present


def test_rules_are_kept_under_keys_and_every_policy_has_a_sound_one() -> None:
    assert batching_at(batching_key("variant", "m-v1")) == ("variant", "m-v1")
    for key in ("batching", "batching.app.", "batching.x.y", "machine.w", "controller"):
        assert batching_at(key) is None
    values = {"batch": 8, "slo_ms": 20.0, "wait_ms": 2.0, "quantum_ms": 5.0, "contexts": 2}
    for policy, (needed, possible) in POLICIES.items():
        for fields in (needed, (*needed, *possible)):
            assert rule_errors(BatchingRule(policy=policy, **{field: values[field] for field in fields})) == []


# -- the parts


@given(
    st.floats(1e-5, 1e-2),
    st.floats(0.0, 1e-2),
    st.lists(st.integers(1, 1024), min_size=16, max_size=128, unique=True),
)
def test_a_line_is_found(slope: float, base: float, sizes: list[int]) -> None:
    points = np.array(sizes, float)
    found = quantile_line(points, slope * points + base)
    at = np.array([1.0, 500.0, 1024.0])
    assert found[0] * at + found[1] == pytest.approx(slope * at + base, rel=1e-3, abs=1e-6)


def test_the_line_is_that_of_the_99th_percentile() -> None:
    chance = np.random.default_rng(1)
    sizes = chance.integers(1, 400, 20_000).astype(float)
    times = 0.001 + 0.0001 * sizes * (1.0 + chance.random(len(sizes)))
    slope, base = quantile_line(sizes, times)
    assert float((times <= slope * sizes + base).mean()) == pytest.approx(0.99, abs=0.002)
    assert slope == pytest.approx(0.000199, rel=0.03)


@pytest.mark.parametrize(
    ("rule", "text"),
    [
        (BatchingRule(policy="best"), "policy: 'best' is unknown; use one of edf, fixed"),
        (BatchingRule(policy="fixed"), "batch: fixed needs it"),
        (BatchingRule(policy="fixed", batch=0), "batch: must be at least 1 and at most 1024, not "),
        (BatchingRule(policy="fixed", batch=1025), "batch: must be at least 1 and at most 1024, not "),
        (BatchingRule(policy="delayed"), "wait_ms: delayed needs it"),
        (BatchingRule(policy="delayed", wait_ms=-1.0), "wait_ms: must be at least 0 and at most 600000, not "),
        (BatchingRule(policy="delayed", wait_ms=float("nan")), "wait_ms: must be at least 0 and at most 600000, not "),
        (BatchingRule(policy="aimd", slo_ms=0.0), "slo_ms: must be above 0"),
        (BatchingRule(policy="aimd", slo_ms=float("inf")), "slo_ms: must be above 0"),
        (BatchingRule(policy="aimd", wait_ms=2.0), "wait_ms: aimd does not read it; leave it out, or use delayed"),
        (BatchingRule(policy="edf", slo_ms=2.0), "slo_ms: edf does not read it; leave it out, or use aimd or quantile"),
        (BatchingRule(policy="aimd", quantum_ms=2.0), "quantum_ms: aimd does not read it; leave it out, or use threshold"),
        (BatchingRule(policy="threshold", quantum_ms=0.0), "quantum_ms: must be at least 0.5 and at most 10000, not "),
        (BatchingRule(policy="threshold", quantum_ms=float("nan")), "quantum_ms: must be at least 0.5 and at most 10000, not "),
        (BatchingRule(policy="threshold", wait_ms=2.0), "wait_ms: threshold does not read it"),
        (BatchingRule(policy="edf", contexts=0), "contexts: must be at least 1 and at most 64, not "),
        (BatchingRule(policy="aimd", contexts=10**6), "contexts: must be at least 1 and at most 64, not "),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_rule_is_said(rule: BatchingRule, text: str) -> None:
    [wrong] = rule_errors(rule)
    assert wrong.startswith(text)


def test_where_even_one_item_takes_longer_than_the_objective_and_all_take_the_same_a_batch_is_one_item() -> None:
    policy = Quantile(most=8)
    policy.slo_s = 0.01
    for items in (1, 2) * Quantile.REFIT:
        policy.measured(items, 0.02)
    assert policy.limit(1.0) == 1
    for _ in range(Quantile.KEPT):
        policy.measured(1, 0.015)
    assert policy.limit(2.0) == 1

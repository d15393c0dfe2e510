"""The built-in policies: their updates by hand, their bounds, their states, and what they learn."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bus.codec import BadMessage, encode
from bus.messages.catalog import Ensemble
from bus.messages.public import Requirements
from services.core.ensemble.base import Member
from services.core.ensemble.outputs import BadLabel
from services.core.ensemble.policies import SPREADS, MemberWeights, make_policy
from tests.support.data.examples import examples

ASK = Requirements()
NAMES = ["exp3", "exp4", "majority", "weighted"]
ABC = [Member(model=model, version="1", accuracy=accuracy) for model, accuracy in (("a", 0.9), ("b", 0.8), ("c", 0.6))]


def says(*classes: int) -> dict[str, dict[str, np.ndarray]]:
    """One item's scores of a, b and c, each sure of its class among three."""
    return {
        member.model: {"scores": np.eye(3, dtype=np.float32)[[label]]}
        for member, label in zip(ABC, classes, strict=False)
    }


def shares(policy, state, members=ABC) -> dict[str, float]:
    return {row.member: row.weight for row in policy.learnt(state, members)}


def of(name: str, eta: float = 0.1):
    policy = make_policy(Ensemble(policy=name, eta=eta))
    assert policy is not None
    return policy


def test_a_users_class_is_not_made_here() -> None:
    assert [make_policy(Ensemble(policy=name)) for name in (None, "mine:Own", "exp5")] == [None] * 3
    assert [of(name).name for name in NAMES] == NAMES


# -- exp3


def test_exp3_divides_by_the_probability_and_changes_only_the_member_that_was_asked() -> None:
    """Trap 8: not by 1, and not by what the probability has become since."""
    policy = of("exp3")
    state = policy.observe(policy.init(ABC), ABC, 0, {"a": says(1)["a"]}, {"a": 0.2})  # a is wrong
    assert math.log(shares(policy, state)["a"] / shares(policy, state)["b"]) == pytest.approx(-0.1 / 0.2)
    again = policy.observe(state, ABC, 0, {"a": says(1)["a"]}, {"a": 0.5})
    assert math.log(shares(policy, again)["a"] / shares(policy, again)["b"]) == pytest.approx(-0.1 / 0.2 - 0.1 / 0.5)
    policy = of("exp3")
    found = shares(policy, policy.observe(policy.init(ABC), ABC, 0, says(1, 1, 1), {"b": 0.4}))
    assert found["a"] == found["c"] > found["b"]
    right = policy.observe(policy.init(ABC), ABC, 1, says(1), {"a": 0.4})
    assert shares(policy, right) == pytest.approx(dict.fromkeys("abc", 1 / 3))


@settings(max_examples=examples(30))
@given(st.lists(st.floats(-6.0, 0.0), min_size=3, max_size=3))
def test_exp3_draws_each_member_as_often_as_its_probability_says(logs: list[float]) -> None:
    """Trap 8: as a draw, not as the member with the largest weight. u runs evenly through [0, 1)."""
    policy = of("exp3")
    state = MemberWeights(dict(zip("abc", logs, strict=True)), {})
    drawn = [policy.select(state, ABC, ASK, (n + 0.5) / 500) for n in range(500)]
    assert all(len(one) == 1 for one in drawn)
    for row in policy.learnt(state, ABC):
        assert row.probability == row.weight
        assert drawn.count([row.member]) / 500 == pytest.approx(row.probability, abs=3e-3)


def test_exp3_draws_alike_for_a_retry_whatever_the_order_of_the_members() -> None:
    policy = of("exp3")
    state = policy.init(ABC)
    assert all(
        policy.select(state, ABC, ASK, u) == policy.select(state, ABC[::-1], ASK, u) for u in (0.0, 0.4, 0.999999)
    )


# -- exp4


def test_exp4_updates_all_known_members_and_tells_them_apart_where_one_never_answers() -> None:
    """Trap 9: not only the winner. a and b are wrong, c is right."""
    policy = of("exp4")
    state = policy.observe(policy.init(ABC), ABC, 2, says(0, 1, 2), dict.fromkeys("abc", 1.0))
    found = shares(policy, state)
    assert found["a"] == found["b"]
    assert math.log(found["a"] / found["c"]) == pytest.approx(-0.1)
    # Member b errs in each third feedback, a in two of three; c never has an output.
    policy = of("exp4", eta=0.5)
    state = policy.init(ABC)
    for i in range(300):
        state = policy.observe(state, ABC, 2, says(2 if i % 3 == 0 else 0, 0 if i % 3 == 0 else 2), {})
    found = shares(policy, state)
    assert found["b"] > 50 * max(found["a"], found["c"])


def test_exp4_answers_with_the_weighted_mean_and_counts_what_is_missing_as_an_average_one() -> None:
    policy = of("exp4")
    found = shares(policy, policy.observe(policy.init(ABC), ABC, 2, says(0, 2), {}))
    assert math.log(found["a"] / found["b"]) == pytest.approx(-0.1)
    assert math.log(found["c"] / found["b"]) == pytest.approx(-0.05)
    policy = of("exp4")
    state = MemberWeights({"a": 0.0, "b": math.log(0.5), "c": math.log(0.25)}, {})
    one = policy.combine(state, ABC, says(0, 1, 1))
    np.testing.assert_allclose(one.outputs["scores"], [[4 / 7, 3 / 7, 0.0]], rtol=1e-6)
    assert (one.outputs["scores"].dtype, one.agree.tolist()) == (np.float32, [1])


@given(st.floats(0.01, 5.0), st.integers(0, 2))
def test_eta_is_how_much_a_loss_counts(eta: float, label: int) -> None:
    policy = of("exp4", eta)
    found = shares(policy, policy.observe(policy.init(ABC), ABC, label, says(0, 1, 2), {}))
    right = "abc"[label]
    assert all(
        math.log(found[right] / found[m]) == pytest.approx(min(eta, SPREADS["exp4"])) for m in "abc" if m != right
    )


# -- fixed weights


@pytest.mark.parametrize("name", ["majority", "weighted"])
def test_fixed_weights_learn_nothing_and_count(name: str) -> None:
    policy = of(name)
    state = policy.init(ABC)
    after = policy.observe(state, ABC, 0, says(1, 0), {})
    assert shares(policy, after) == shares(policy, state)
    assert [row.n for row in policy.learnt(after, ABC)] == [1, 1, 0]


def test_weighted_votes_by_log_odds_and_is_the_majority_without_accuracies() -> None:
    policy = of("weighted")
    state = policy.init(ABC)
    found = shares(policy, state)
    assert found["a"] / found["b"] == pytest.approx(math.log(9) / math.log(4))
    better = [ABC[0], Member(model="b", version="2", accuracy=0.99), ABC[2]]
    assert shares(policy, state, better)["b"] > shares(policy, state, better)["a"]
    one = policy.combine(state, ABC, says(0, 1, 1))  # log-odds 2.2 against 1.4 + 0.4
    assert one.outputs["scores"].argmax() == 0
    assert of("majority").combine(state, ABC, says(0, 1, 1)).outputs["scores"].argmax() == 1
    blind = [Member(model=model, version="1") for model in "abc"]
    assert set(shares(of("weighted"), of("weighted").init(blind), blind).values()) == {1 / 3}
    half = [ABC[0], Member(model="b", version="1"), ABC[2]]
    found = shares(of("weighted"), of("weighted").init(half), half)
    assert found["b"] == pytest.approx((found["a"] + found["c"]) / 2)


@given(st.lists(st.floats(0.0, 1.0), min_size=3, max_size=3), st.sampled_from(["top1", "mae"]))
def test_weights_of_any_accuracies_are_positive(accuracies: list[float], metric: str) -> None:
    members = [Member(model=m, version="1", accuracy=a, metric=metric) for m, a in zip("abc", accuracies, strict=True)]
    found = shares(of("weighted"), of("weighted").init(members), members)
    assert all(share > 0 for share in found.values())
    assert sum(found.values()) == pytest.approx(1.0)


# -- what all hold


@given(
    st.sampled_from(NAMES),
    st.lists(st.tuples(st.integers(0, 2), st.lists(st.integers(0, 2), min_size=1, max_size=3)), max_size=30),
    st.floats(1e-12, 1.0),
    st.floats(0.01, 1000.0),
)
def test_weights_stay_sound_whatever_comes(name: str, feedback, p: float, eta: float) -> None:
    policy = of(name, eta)
    state = policy.init(ABC)
    for label, classes in feedback:
        state = policy.observe(state, ABC, label, says(*classes), dict.fromkeys("abc", p))
        rows = policy.learnt(state, ABC)
        assert sum(row.weight for row in rows) == pytest.approx(1.0)
        assert all(0.0 < row.weight <= 1.0 and 0.0 < row.probability <= 1.0 for row in rows)
        assert max(state.logs.values()) - min(state.logs.values()) <= SPREADS.get(name, 0.0)
    assert policy.load(policy.dump(state)) == state


@pytest.mark.parametrize("name", NAMES)
def test_a_wrong_label_changes_nothing(name: str) -> None:
    policy = of(name)
    state = policy.init(ABC)
    with pytest.raises(BadLabel, match="label 7 is no class of the models: give an index from 0 to 2"):
        policy.observe(state, ABC, 7, says(0, 1, 2), {})
    assert state == policy.init(ABC)


@pytest.mark.parametrize("name", ["exp3", "exp4"])
def test_new_members_have_the_mean_weight_and_earlier_feedback_leaves_them(name: str) -> None:
    policy = of(name)
    state = MemberWeights({"a": 0.0, "b": math.log(0.5)}, {"a": 3, "b": 3})
    found = shares(policy, state)
    assert found["c"] == pytest.approx((found["a"] + found["b"]) / 2)
    assert shares(policy, state, [ABC[0], Member(model="b", version="2"), ABC[2]]) == found
    learned = policy.observe(state, ABC, 0, says(0, 0, 0), dict.fromkeys("abc", 1.0))
    assert shares(policy, learned) == pytest.approx(found)
    policy = of(name)
    state = MemberWeights({"a": -2.0, "b": -3.0, "c": 0.0}, {"a": 9, "b": 9, "c": 5})
    state = policy.observe(state, ABC[:2], 0, says(1, 1), {"a": 0.5, "b": 0.5})
    found = shares(policy, state)
    assert math.log(found["c"] / found["a"]) == pytest.approx(2.0)
    assert [row.n for row in policy.learnt(state, ABC)] == [10, 10, 5]


def test_models_that_are_linked_no_more_do_not_fill_the_state() -> None:
    policy = of("exp4")
    state = policy.init(ABC)
    for day in range(200):
        members = [Member(model=f"day-{day}", version="1"), *ABC]
        state = policy.observe(state, members, 0, says(0, 1, 2), {})
    assert len(state.logs) == len(state.counts) == 36
    assert "day-198" in state.logs
    assert shares(policy, state)["a"] > 0.9


@pytest.mark.parametrize("name", ["exp3", "exp4"])
def test_two_dispatchers_merge_by_observing_on_the_newer_state(name: str) -> None:
    """Losses add up in log space, so the order of feedback does not matter while no weight is at its bound."""
    policy = of(name)
    p = dict.fromkeys("abc", 0.5)
    one, two = (0, says(0, 1)), (1, says(0, 1, 2))
    there = policy.observe(policy.observe(policy.init(ABC), ABC, *one, p), ABC, *two, p)
    back = policy.observe(policy.observe(policy.init(ABC), ABC, *two, p), ABC, *one, p)
    assert shares(policy, there) == pytest.approx(shares(policy, back))
    assert there.counts == back.counts == {"a": 2, "b": 2, "c": 1}


@pytest.mark.parametrize("name", ["exp3", "exp4"])
def test_a_model_that_failed_for_long_returns_as_soon_as_one_that_failed_briefly(name: str) -> None:
    policy = of(name)
    state = policy.init(ABC)
    for _ in range(2_000):
        state = policy.observe(state, ABC, 0, says(1, 0, 0), {"a": 0.01, "b": 1.0, "c": 1.0})
    needed = 0
    while shares(policy, state)["a"] < shares(policy, state)["b"]:
        state = policy.observe(state, ABC, 0, says(0, 1, 1), {"a": 0.01, "b": 1.0, "c": 1.0})
        needed += 1
    assert needed == math.ceil(SPREADS[name] / 0.1)


def test_a_state_is_small_and_a_damaged_one_is_refused() -> None:
    policy = of("exp4")
    members = [Member(model=f"classifier-{n}", version="1") for n in range(7)]
    state = policy.observe(policy.init(members), members, 0, {"classifier-1": says(1)["a"]}, {})
    assert len(policy.dump(state)) < 300
    policy = of("exp4")
    with pytest.raises(BadMessage):
        policy.load(b"\x01")
    state = policy.load(encode([{"a": float("nan"), "b": float("-inf"), "c": -1.0}, {}]))
    assert shares(policy, state)["a"] == shares(policy, state)["b"] > shares(policy, state)["c"] > 0

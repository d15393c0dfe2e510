"""A user's own policy beside the built-in one, in real dispatchers on virtual time: what it chooses, what it learns, and where it fails."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bus.messages.events import OutcomeEvent
from services.core.planning.problem import CandidateVariant, PlanningProblem
from services.core.policy import GuardedPolicy, InvalidDecision, check_wanted
from services.core.selection import Ask, ClusterView, Decision, InfaasPolicy, LoadOrder, SelectionPolicy
from tests.support.simulated.fleet import Fleet, variant

CHEAP = variant("m-v1-ort-fp32-t1-b8")
DEAR = variant("m-v1-ort-int8-t4-b8", threads=2, precision="int8", base_ms=8.0)


class LastByName:
    """Takes the last instance by its name, whatever it costs; else leaves it to the built-in policy."""

    name = "last"

    def __init__(self) -> None:
        self.seen: list[OutcomeEvent] = []

    def select(self, ask: Ask, now: float, view: ClusterView) -> Decision | None:
        ready = [i.id for group in view.apps[ask.app].eligibility(ask).active for i in group.active]
        return Decision(max(ready)) if ready else None

    def observe(self, outcome: OutcomeEvent) -> None:
        self.seen.append(outcome)


class Answers:
    """Answers with whatever it is given, or raises it."""

    name = "answers"

    def __init__(self, what: Any) -> None:
        self._what = what

    def select(self, ask: Ask, now: float, view: ClusterView) -> Any:
        if isinstance(self._what, Exception):
            raise self._what
        return self._what(ask, view) if callable(self._what) else self._what

    def observe(self, outcome: OutcomeEvent) -> None:
        if isinstance(self._what, Exception):
            raise self._what


def guarded(own: Any) -> tuple[GuardedPolicy, list[str]]:
    told: list[str] = []
    policy = GuardedPolicy(own, "mine:Own", told.append)
    policy.builtin = InfaasPolicy()
    return policy, told


def asked(policy: SelectionPolicy, count: int, **needs: Any) -> list[dict[str, Any]]:
    """The ends of so many queries to a fleet that has both variants, one after the other."""
    fleet = Fleet(CHEAP, DEAR, policy=policy)
    for record in (CHEAP, DEAR):
        assert "outputs" in fleet.replies(fleet.ask(variant=record.variant, seconds=1.0))[0]
    labels = []
    for _ in range(count):
        labels.append(fleet.ask(**needs))
        fleet.stage.run(0.1)
    ends = [fleet.replies(label) for label in labels]
    assert all(len(end) == 1 for end in ends), "each query ends exactly once"
    return [end[0] for end in ends]


def test_queries_get_the_instances_that_it_chooses_and_it_sees_how_they_end() -> None:
    own = LastByName()
    policy, told = guarded(own)
    ends = asked(policy, 8, accuracy=0.5)
    assert {end["variant"] for end in ends} == {DEAR.variant}
    assert {end["variant"] for end in asked(InfaasPolicy(), 8, accuracy=0.5)} == {CHEAP.variant}, (
        "the built-in one chooses otherwise"
    )
    assert [one.outcome for one in own.seen] == ["ok"] * 10
    assert {one.policy for one in own.seen} == {"last"}
    assert not told
    assert not any(policy.failures.values())


class InATuple(LastByName):
    """As `LastByName`, in the port's first form."""

    def select(self, ask: Ask, now: float, view: ClusterView) -> Decision | None:
        decision = super().select(ask, now, view)
        return Decision((decision.instance,)) if decision is not None else None  # type: ignore[arg-type]


def test_instances_in_tuples_and_open_answers_are_no_failures() -> None:
    policy, told = guarded(InATuple())
    assert {end["variant"] for end in asked(policy, 3, accuracy=0.5)} == {DEAR.variant}
    assert not told
    policy, told = guarded(Answers(None))
    assert {end["variant"] for end in asked(policy, 3)} == {CHEAP.variant}
    assert not told
    assert policy.failures == {"select": 0, "observe": 0}


NOWHERE = LoadOrder(CHEAP, "w9", 1.0)


@pytest.mark.parametrize(
    ("what", "why"),
    [
        (RuntimeError("no idea"), "RuntimeError: no idea"),
        (KeyError("x"), "KeyError: 'x'"),
        (3, "select must return a Decision or None, not int"),
        (Decision("w0/cpu/nobody"), "instance: there is none 'w0/cpu/nobody'"),
        (Decision(("a", "b")), "instance: there is none ('a', 'b')"),
        (Decision(load=NOWHERE), "there is no worker 'w9'"),
        (lambda _, view: Decision(load=LoadOrder(variant("other"), "w0", 1.0)), "it is no variant of the app 'app'"),
    ],
)  # fmt: skip
def test_where_it_fails_the_built_in_policy_decides_and_nothing_is_lost(what: Any, why: str) -> None:
    policy, told = guarded(Answers(what))
    ends = asked(policy, 8, accuracy=0.5)
    assert {end["variant"] for end in ends} == {CHEAP.variant}
    assert policy.failures["select"] >= 10
    first = next(text for text in told if text.startswith("select()"))
    assert "of the policy mine:Own failed (number 1): the built-in policy decides instead: " in first
    assert why in first
    assert len([text for text in told if text.startswith("select()")]) <= policy.failures["select"].bit_length()
    if isinstance(what, Exception):
        assert policy.failures["observe"] == 10


PROBLEM = PlanningProblem(
    candidates=tuple(
        CandidateVariant(name=name, apps=("a",), model="m", hardware="cpu", latency_ms=1.0, saturation_qps=1.0, cost_per_s=1.0)
        for name in ("x", "y")
    ),
    demands=(),
)  # fmt: skip


class Wants:
    name = "wants"

    def __init__(self, what: Any) -> None:
        self._what = what

    def scale(self, problem: PlanningProblem, now: float) -> Any:
        return self._what


@pytest.mark.parametrize(
    ("wanted", "why"),
    [
        ([("x", 1)], "scale must return a mapping of variant to instances, or None, not list"),
        ({"z": 1}, "there is no variant 'z' to scale"),
        ({"x": -1}, "x: must be a whole number from 0 to 1000000, not -1"),
        ({"x": 10**9}, "x: must be a whole number"),
        ({"x": 1.5}, "x: must be a whole number"),
        ({"x": True}, "x: must be a whole number"),
        ({3: 1}, "there is no variant 3 to scale"),
    ],
)
def test_a_scaling_decision_that_cannot_be_carried_out_is_left_to_the_built_in_planner(wanted: Any, why: str) -> None:
    policy, told = guarded(Wants(wanted))
    assert policy.scale(PROBLEM, 0.0) is None
    assert policy.failures == {"scale": 1}
    assert why in told[0]


@given(
    st.dictionaries(
        st.sampled_from(["x", "y", "z", 1]), st.one_of(st.integers(), st.floats(), st.none(), st.text()), max_size=4
    )
)
def test_what_is_carried_out_is_whole_numbers_of_instances_of_known_variants(wanted: dict[Any, Any]) -> None:
    policy, _ = guarded(Wants(wanted))
    found = policy.scale(PROBLEM, 0.0)
    try:
        check_wanted(wanted, PROBLEM)
    except InvalidDecision:
        assert found is None
    else:
        assert found == wanted
        assert all(type(count) is int and count >= 0 for count in wanted.values())

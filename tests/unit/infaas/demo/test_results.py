"""The demo's judgement can fail: every way in which an answer or a refusal may be wrong is noticed."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bus.tensors import from_array
from infaas.answers import Answer
from infaas.demo.choices import problems_of, row_of, wrong_accuracy, wrong_answer, wrong_refusal
from infaas.demo.digits import query_kinds
from infaas.demo.load import DemoReply, QueryKind
from infaas.errors import Refused

CATALOGUE = {"cnn-1": {"variant": "cnn-1", "accuracy": 0.98, "cost_per_1000": 0.004}}
ANYTHING = QueryKind(name="nothing", needs={})
STRICT = QueryKind(name="strict", needs={"accuracy": 0.97, "latency_ms": 5.0, "cost": 0.01})
IMPOSSIBLE = QueryKind(name="impossible", needs={"accuracy": 0.999}, possible=False)


def answer(items: int = 2, **changes: Any) -> Answer:
    scores = changes.pop("scores", np.eye(10, dtype=np.float32)[:items])
    fields: dict[str, Any] = {
        "id": "q",
        "model": "cnn",
        "version": "1",
        "variant": "cnn-1",
        "hardware": "cpu",
        "worker": "w0",
        "accuracy": 0.98,
        "latency_ms": 1.0,
        "queue_ms": 0.2,
        "compute_ms": 0.5,
        "batch": items,
        "cached": False,
        "simulated": False,
        "cost": 0.000008,
        "missed": [],
        "tensors": {"scores": from_array(scores)},
    }
    return Answer(**{**fields, **changes})


def problem_of(kind: QueryKind, **changes: Any) -> str:
    return wrong_answer(kind, 2, "q", answer(**changes), CATALOGUE, 10)


def test_right_answers_pass() -> None:
    assert problem_of(ANYTHING) == ""
    assert problem_of(STRICT) == ""


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"id": "other"}, "id"),
        ({"variant": "cnn-2"}, "catalogue"),
        ({"scores": np.zeros((1, 10), np.float32)}, "finite scores"),
        ({"scores": np.full((2, 10), np.nan, np.float32)}, "finite scores"),
        ({"accuracy": 0.99}, "promises"),
        ({"latency_ms": 7.0}, "without `latency`"),
        ({"cost": 0.001}, "without `cost`"),
        ({"simulated": True}, "simulated"),
    ],
)
def test_wrong_answers_are_noticed(changes: dict[str, Any], word: str) -> None:
    assert word in problem_of(STRICT, **changes)


@pytest.mark.parametrize("changes", [{"latency_ms": 7.0, "missed": ["latency"]}, {"cost": 0.001, "missed": ["cost"]}])
def test_what_is_missed_and_said_is_no_lie(changes: dict[str, Any]) -> None:
    assert problem_of(STRICT, **changes) == ""


def test_too_low_an_accuracy_is_never_right() -> None:
    kind = QueryKind(name="more", needs={"accuracy": 0.985})
    assert "cnn-1" in problem_of(kind, missed=["accuracy"])


def test_answering_the_impossible_is_wrong() -> None:
    assert "no variant can meet" in problem_of(IMPOSSIBLE)


CLOSEST = {"model": "cnn", "variant": "cnn-1", "accuracy": 0.98, "latency_ms": 0.2, "cost": 0.004}


@pytest.mark.parametrize(
    ("kind", "refused", "right"),
    [
        (STRICT, Refused("deadline", "the load takes 80 ms"), True),
        (STRICT, Refused("overloaded", "full"), True),
        (STRICT, Refused("deadline", ""), False),
        (STRICT, Refused("unsatisfiable", "no", closest=CLOSEST), False),
        (STRICT, Refused("model_error", "broke"), False),
        (IMPOSSIBLE, Refused("unsatisfiable", "no", closest=CLOSEST), True),
        (IMPOSSIBLE, Refused("unsatisfiable", "no"), False),
        (IMPOSSIBLE, Refused("unsatisfiable", "no", closest={**CLOSEST, "variant": None}), False),
        (IMPOSSIBLE, Refused("deadline", "later"), False),
    ],
)
def test_refusals(kind: QueryKind, refused: Refused, right: bool) -> None:
    assert (wrong_refusal(kind, refused) == "") is right


@given(
    p=st.floats(0.5, 1.0),
    n=st.integers(1, 3000),
    seed=st.integers(0, 2**32 - 1),
)
def test_chance_alone_is_no_contradiction(p: float, n: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    pictures = min(n, 750)
    promised = rng.binomial(750, p) / 750
    measured = rng.binomial(pictures, p) / pictures
    spread = max(p * (1 - p), 1 / 750) * (1 / 750 + 1 / pictures)
    if abs(promised - measured) < 3 * spread**0.5:  # what chance gives in nearly all cases
        assert wrong_accuracy(promised, measured, n, pictures, 750) == ""


@pytest.mark.parametrize(("promised", "measured"), [(0.99, 0.9), (0.9, 0.99), (0.98, 0.1), (1.0, 0.95)])
def test_another_model_behind_the_promise_is_noticed(promised: float, measured: float) -> None:
    assert "promised" in wrong_accuracy(promised, measured, 600, 600, 750)


def test_few_answers_prove_little() -> None:
    assert wrong_accuracy(0.98, 0.8, 5, 5, 750) == ""
    assert wrong_accuracy(0.98, 0.0, 0, 0, 750) == ""


def test_query_kinds_follow_the_catalogue() -> None:
    found = query_kinds(
        [
            {"accuracy": 0.9, "cost_per_1000": 0.001},
            {"accuracy": 0.96, "cost_per_1000": 0.0123},
            {"accuracy": 0.99, "cost_per_1000": 0.2},
            {"accuracy": None, "cost_per_1000": 0.0001},
        ]
    )
    (ceiling,) = [kind.needs["cost"] for kind in found if kind.possible and "cost" in kind.needs]
    assert ceiling > 0.0123
    assert {kind.possible for kind in found} == {True, False}
    assert len({kind.name for kind in found}) == len(found)


def reply(took_ms: float, said: Answer | Refused, first: int = 0) -> DemoReply:
    return DemoReply(np.array([first, first + 1]), np.array([0, 5]), said, 0.0, took_ms)


def test_a_row_of_the_table() -> None:
    refused = Refused("overloaded", "full")
    replies = [reply(1.0, answer()), reply(3.0, answer(), 2), reply(0.5, refused)]
    row = row_of(ANYTHING, 3, 0, replies)
    assert row["answered"] == 2
    assert row["accuracy"] == 0.5
    assert row["promised_accuracy"] == pytest.approx(0.98)
    assert row["cost_per_1000"] == pytest.approx(0.004)
    assert row["p50_ms"] == pytest.approx(2.0)
    assert row["refused"] == {"overloaded": 1}
    assert row["reasons"] == {"overloaded": "full"}
    assert problems_of(row, replies, 750) == []
    # Many pictures of which half are read wrongly contradict the promise; views of one thing count as one.
    many = [reply(1.0, answer(), 2 * n) for n in range(40)]
    (wrong,) = problems_of(row_of(ANYTHING, 40, 0, many), many, 750)
    assert "0.5000 on 80 answers" in wrong
    assert problems_of(row_of(ANYTHING, 40, 0, many), many, 750, views=80) == []


def test_what_is_possible_must_be_answered() -> None:
    replies = [reply(1.0, Refused("deadline", "later"))]
    assert "none of 1 queries" in problems_of(row_of(STRICT, 1, 0, replies), replies, 750)[0]
    assert problems_of(row_of(IMPOSSIBLE, 1, 0, replies), replies, 750) == []


def test_needs_are_met_only_when_nothing_is_missed() -> None:
    cases: list[tuple[float, list[str]]] = [(1.0, []), (9.0, []), (1.0, ["cost"]), (1.0, ["latency"])]
    row = row_of(STRICT, 4, 0, [reply(took, answer(missed=missed)) for took, missed in cases])
    assert row["slo_attainment"] == 0.25
    assert row["missed"] == {"cost": 1, "latency": 1}

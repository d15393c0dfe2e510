"""The demo's judgement can fail: every way in which an answer or a refusal may be wrong is noticed."""

import asyncio
from itertools import islice, repeat
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bus.tensors import from_array
from infaas.answers import Answer
from infaas.client import Client
from infaas.demo.choices import problems_of, row_of, wrong_accuracy, wrong_answer, wrong_refusal
from infaas.demo.digits import query_kinds
from infaas.demo.load import MAX_PROBLEMS, DemoLoad, DemoReply, Labelled, QueryKind, arrivals, shuffled
from infaas.errors import InfaasError, Refused, Timeout

CATALOGUE = {"cnn-1": {"variant": "cnn-1", "accuracy": 0.98, "cost_per_1000": 0.004}}
ANYTHING = QueryKind(name="nothing", needs={})
STRICT = QueryKind(name="strict", needs={"accuracy": 0.97, "latency_ms": 5.0, "cost": 0.01})
IMPOSSIBLE = QueryKind(name="impossible", needs={"accuracy": 0.999}, possible=False)


def answer(items: int = 2, **changes: Any) -> Answer:
    scores = changes.pop("scores", np.eye(10, dtype=np.float32)[:items])
    fields: dict[str, Any] = {"id": "q", "model": "cnn", "version": "1", "variant": "cnn-1", "hardware": "cpu"}
    fields |= {"worker": "w0", "accuracy": 0.98, "latency_ms": 1.0, "queue_ms": 0.2, "compute_ms": 0.5, "batch": items}
    fields |= {"cached": False, "simulated": False, "cost": 0.000008, "missed": []}
    return Answer(**fields | {"tensors": {"scores": from_array(scores)}} | changes)


def problem_of(kind: QueryKind, **changes: Any) -> str:
    return wrong_answer(kind, 2, "q", answer(**changes), CATALOGUE, 10)


def test_right_answers_pass_and_others_do_not() -> None:
    assert problem_of(ANYTHING) == ""
    assert problem_of(STRICT) == ""
    kind = QueryKind(name="more", needs={"accuracy": 0.985})
    assert "cnn-1" in problem_of(kind, missed=["accuracy"])
    assert "no variant can meet" in problem_of(IMPOSSIBLE)
    assert wrong_accuracy(0.98, 0.8, 5, 5, 750) == ""
    assert wrong_accuracy(0.98, 0.0, 0, 0, 750) == ""


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
    return DemoReply("nothing", np.array([first, first + 1]), np.array([0, 5]), said, 0.0, took_ms)


def test_a_row_of_the_table() -> None:
    refused = Refused("overloaded", "full")
    replies = [reply(1.0, answer()), reply(3.0, answer(), 2), reply(0.5, refused)]
    row = row_of(ANYTHING, replies)
    assert row["answered"] == 2
    assert row["accuracy"] == 0.5
    assert row["promised_accuracy"] == pytest.approx(0.98)
    assert row["cost_per_1000"] == pytest.approx(0.004)
    assert row["p50_ms"] == pytest.approx(2.0)
    assert row["refused"] == {"overloaded": 1}
    assert row["reasons"] == {"overloaded": "overloaded: full"}
    assert problems_of(row, replies, 750) == []
    # Many pictures of which half are read wrongly contradict the promise; views of one thing count as one.
    many = [reply(1.0, answer(), 2 * n) for n in range(40)]
    (wrong,) = problems_of(row_of(ANYTHING, many), many, 750)
    assert "0.5000 on 80 answers" in wrong
    assert problems_of(row_of(ANYTHING, many), many, 750, views=80) == []


def test_impossible_needs_are_not_met_and_possible_ones_must_be() -> None:
    replies = [reply(1.0, Refused("deadline", "later"))]
    assert "none of 1 queries" in problems_of(row_of(STRICT, replies), replies, 750)[0]
    assert problems_of(row_of(IMPOSSIBLE, replies), replies, 750) == []
    cases: list[tuple[float, list[str]]] = [(1.0, []), (9.0, []), (1.0, ["cost"]), (1.0, ["latency"])]
    row = row_of(STRICT, [reply(took, answer(missed=missed)) for took, missed in cases])
    assert row["slo_attainment"] == 0.25
    assert row["missed"] == {"cost": 1, "latency": 1}
    assert row_of(STRICT, [reply(1.0, answer())], wrong=1)["slo_attainment"] == 0.5
    assert row_of(IMPOSSIBLE, replies)["slo_attainment"] is None


# -- Pictures are handed out fairly, at the rates that are asked for, and each query ends as a reply or as a problem.
DIGITS = Labelled(np.zeros((20, 784), np.float32), np.arange(20) % 10)
OFTEN, RARELY = QueryKind(name="often", needs={}, weight=3.0), QueryKind(name="rarely", needs={"priority": 9})


class Refusing:
    """A client that refuses each query, and gives no reply to some."""

    def __init__(self) -> None:
        self.needs: list[dict[str, Any]] = []
        self.under_way = self.most = 0

    async def query(self, app: str, x: np.ndarray, *, raise_refused: bool, **needs: Any) -> Refused:
        self.needs.append(needs)
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        for _ in range(9):  # longer than it takes to send the next
            await asyncio.sleep(0)
        self.under_way -= 1
        if needs.get("priority") == 9:
            raise Timeout("no reply")
        return Refused("overloaded", "full")


def test_pictures_come_once_at_rates_and_shares() -> None:
    drawn = list(islice(shuffled(20, np.random.default_rng(3)), 40))
    assert sorted(drawn[:20]) == sorted(drawn[20:]) == list(range(20))
    found = arrivals([(10.0, 50.0), (5.0, 200.0)], [OFTEN, RARELY])
    at = np.array([due for due, _ in found])
    assert (np.diff(at) >= 0).all()
    assert [(at < 10.0).sum() / 10.0, (at >= 10.0).sum() / 5.0] == pytest.approx([50.0, 200.0], rel=0.2)
    assert sum(kind is OFTEN for _, kind in found) / len(found) == pytest.approx(0.75, abs=0.05)
    assert arrivals([(10.0, 50.0), (5.0, 200.0)], [OFTEN, RARELY]) == found


def test_each_query_ends_as_a_reply_or_as_a_problem() -> None:
    client, told, seen = Refusing(), [], []
    load = DemoLoad(cast(Client, client), "app", DIGITS, lambda *_: "", largest=4)

    async def each(reply: DemoReply) -> None:
        seen.append(reply)

    due = [(0.0, kind) for kind in (OFTEN, RARELY) for _ in range(9)]
    assert asyncio.run(load.run(due, 0.5, told.append, under_way=2, each=each)) == seen
    assert [reply.kind for reply in seen] == ["often"] * 9
    assert len(load.wrong["rarely"]) == 9
    assert len(load.problems()) == MAX_PROBLEMS + 1
    assert "4 more" in load.problems()[-1]
    assert len({needs["id"] for needs in client.needs}) == load.queries == 18
    assert client.most <= 2
    assert told[-1] == 0.5


def test_refusals_are_no_answers_and_the_first_answer_is_waited_for() -> None:
    client = Refusing()
    load = DemoLoad(cast(Client, client), "app", DIGITS, lambda *_: "")
    refused = asyncio.run(load.run(repeat((0.0, OFTEN)), 0.05, under_way=3))  # a closed loop
    assert not any(reply.answer for reply in refused)
    assert load.queries == len(client.needs) == len(refused) >= 3
    assert client.most == 3
    load = DemoLoad(cast(Client, Refusing()), "app", DIGITS, lambda *_: "")
    with pytest.raises(InfaasError, match="“often” was not answered as it should be"):
        asyncio.run(load.first(OFTEN, 0.0))
    with pytest.raises(InfaasError, match="no reply"):
        asyncio.run(load.first(RARELY, 60.0))

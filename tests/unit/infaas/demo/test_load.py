"""Pictures are handed out fairly, at the rates that are asked for, and each query ends as a reply or as a problem."""

import asyncio
from typing import Any, cast

import numpy as np
import pytest

from infaas.client import Client
from infaas.demo.digits import Digits
from infaas.demo.load import MAX_PROBLEMS, DemoLoad, DemoReply, PictureSource, QueryKind, arrivals
from infaas.errors import InfaasError, Refused, Timeout

DIGITS = Digits(np.zeros((20, 784), np.float32), np.arange(20) % 10)
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
        await asyncio.sleep(0)
        self.under_way -= 1
        if needs.get("priority") == 9:
            raise Timeout("no reply")
        return Refused("overloaded", "full")


def test_every_picture_once_before_any_twice() -> None:
    source = PictureSource(DIGITS, np.random.default_rng(3))
    drawn = np.concatenate([source.draw(items) for items in (1, 7, 8, 3, 1)])
    assert sorted(drawn.tolist()) == list(range(20))
    assert len(source.draw(8)) == 8


def test_arrivals_have_the_rates_and_the_shares() -> None:
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
    asyncio.run(load.run(due, 0.5, told.append, under_way=2, each=each))
    assert load.sent == {"often": 9, "rarely": 9}
    assert [reply.said for reply in load.replies["often"]] == [reply.said for reply in seen]
    assert len(load.replies["often"]) == len(load.wrong["rarely"]) == 9
    assert len(load.problems()) == MAX_PROBLEMS + 1
    assert "4 more" in load.problems()[-1]
    assert len({needs["id"] for needs in client.needs}) == load.queries == 18
    assert client.most <= 2
    assert told[-1] == 0.5


def test_refusals_are_no_answers_that_the_machine_carries() -> None:
    client = Refusing()
    load = DemoLoad(cast(Client, client), "app", DIGITS, lambda *_: "")
    assert asyncio.run(load.carried(OFTEN, 3, 0.05)) == 0.0
    assert load.queries == len(client.needs) >= 3
    assert client.most == 3


def test_the_first_answer_is_waited_for() -> None:
    load = DemoLoad(cast(Client, Refusing()), "app", DIGITS, lambda *_: "")
    with pytest.raises(InfaasError, match="“often” was not answered as it should be"):
        asyncio.run(load.first(OFTEN, 0.0))
    with pytest.raises(InfaasError, match="no reply"):
        asyncio.run(load.first(RARELY, 60.0))

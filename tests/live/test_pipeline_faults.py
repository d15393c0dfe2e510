"""Pipelines under what may happen to them: processes that are killed in the middle of stages, models that crash or hang in one."""

import asyncio
import os
import signal
import time
from typing import Any

import numpy as np
import pytest

import infaas
from tests.support.clients.constant_load import NOTICED, PATIENT_MS, LibraryLoad, Query, StockLoad, is_right, wrong
from tests.support.clients.responders import until
from tests.support.models.poison_models import POISON
from tests.support.servers.pipelines import StagedSystem, edge, ones, vertex, when
from tests.support.servers.processes import eventually

STAGES = ("see", "double", "say")


async def chain(pipelines: StagedSystem, client: Any, name: str, last: str) -> None:
    """gate, then twice, then the scores of twice the input, which are twice its scores. last: the app that says them."""
    await pipelines.add(
        client,
        name,
        [
            vertex("see", "gate"),
            vertex("double", "twice"),
            vertex("say", last, {"x": "double.y"}),
            vertex("never", "more"),
        ],
        [edge("see", "double"), edge("double", "say"), edge("see", "never", **when("sure", ">", 1000.0))],
        {"scores": "say.scores", "more": "never.y | $.x"},
    )


def twice_its_own(given: np.ndarray, query: Query, answer: Any) -> bool:
    return is_right(given / 2, query.sample)


def processes(pipelines: StagedSystem, what: str) -> list[int]:
    """Those to kill: the first of a service, a whole worker, or all that are ours."""
    if what == "worker":
        services = ("monitor", "executor")
        return [pipelines.pids(service)[0] for service in services]
    if what == "everything":
        return pipelines.pids("")
    return pipelines.pids(what)[:1]


@pytest.mark.parametrize("what", ["dispatcher", "executor", "worker", "everything"])
async def test_processes_are_killed_in_the_middle_of_stages(pipelines: StagedSystem, what: str, client: Any) -> None:
    """One answer and one row each. A stock client sends nothing again, so what dies unread in a mailbox is lost to it alone.

    Only a dispatcher knows of its pipelines' queries. Its successor finds the rows that it had not stored.
    """
    tag = f"cut-{what}"

    app = f"cut-{what}"
    await chain(pipelines, client, app, "crash")
    library = LibraryLoad(pipelines.nats, f"{tag}-library", 15, app=app)
    stock = StockLoad(pipelines.nats, f"{tag}-stock", 15, app=app)
    async with library, stock:
        await until(lambda: len(library.answers) > 20 and len(stock.answers) > 20)
        at = time.time()
        for pid in processes(pipelines, what):
            os.kill(pid, signal.SIGKILL)
        ahead = len(library.answers) + 60, len(stock.answers) + 60
        await until(lambda: len(library.answers) > ahead[0] and len(stock.answers) > ahead[1], 240.0)
    assert wrong(library, twice_its_own) == {}
    assert wrong(stock, twice_its_own) == {}
    assert stock.repeated == {}, "nobody is answered twice"
    assert library.ends.keys() == library.queries.keys()
    unheard = [name for name in stock.queries if name not in stock.replies]
    if what == "everything":  # until services run again, which may take longer than a query may
        codes = {getattr(end, "code", str(end).partition(" on ")[0]) for end in library.others.values()}
        assert codes <= {"overloaded", "deadline", "unsatisfiable", "no reply", "no service listens"}, codes
    else:
        assert library.others == {}
        assert stock.refusals == {}
        reach = NOTICED if what == "dispatcher" else 0.0
        assert all(abs(stock.queries[name].sent - at) < reach for name in unheard), (at, unheard)
    own = "SELECT id, count(*) FROM infaas.query_outcomes WHERE id LIKE %s AND parent IS NULL AND outcome IN ('ok', 'late') GROUP BY id"
    parts = """
        SELECT p.id, count(*), count(DISTINCT o.stage) FROM infaas.query_outcomes o JOIN infaas.query_outcomes p ON o.parent = p.uid
        WHERE p.id LIKE %s GROUP BY p.id
    """

    def recorded() -> dict[str, int]:
        return dict(pipelines.rows(own, f"{tag}-%"))

    told = {
        name
        for load in (library, stock)
        for name in load.answers
        if not (what == "everything" and abs(load.queries[name].sent - at) < NOTICED)
    }
    assert eventually(lambda: not told - recorded().keys()), sorted(told - recorded().keys())
    assert set(recorded().values()) == {1}
    assert all(count == kinds <= len(STAGES) for _, count, kinds in pipelines.rows(parts, f"{tag}-%"))
    for service in ("dispatcher", "executor", "monitor"):
        assert eventually(lambda service=service: len(pipelines.pids(service)) == 2), service


@pytest.mark.parametrize("last", ["crash", "hang"])
async def test_a_stage_whose_model_fails_costs_only_its_own_query(
    pipelines: StagedSystem, last: str, client: Any
) -> None:
    bad = ones(POISON / 2)  # which the stage before it doubles

    await chain(pipelines, client, f"risk-{last}", last)
    load = LibraryLoad(pipelines.nats, f"risk-{last}", 10, app=f"risk-{last}", latency_ms=PATIENT_MS)
    async with load:
        await until(lambda: len(load.answers) > 10)
        end = await client.query(f"risk-{last}", bad, timeout=60.0, raise_refused=False)
        known = len(load.queries)
        await until(lambda: len(load.ends) > known + 20)
    assert isinstance(end, infaas.Refused), end
    assert end.code in ("model_error", "deadline")
    assert end.message.startswith("vertex say: ")
    assert load.others == {}
    assert wrong(load, twice_its_own) == {}


async def test_many_at_once_have_one_row_each(pipelines: StagedSystem, client: Any) -> None:
    count = 200

    await chain(pipelines, client, "many", "crash")
    asked = [client.query("many", ones(float(i % 5)), id=f"many-{i}", timeout=60.0) for i in range(count)]
    answers = list(await asyncio.gather(*asked))
    assert len({answer.query for answer in answers}) == count
    own = "SELECT count(*), count(DISTINCT uid), sum(cost) FROM infaas.query_outcomes WHERE id LIKE 'many-%%' AND parent IS NULL"
    parts = """
        SELECT count(*), count(DISTINCT o.uid), sum(o.cost) FROM infaas.query_outcomes o JOIN infaas.query_outcomes p ON o.parent = p.uid
        WHERE p.id LIKE 'many-%%'
    """
    assert eventually(lambda: pipelines.rows(own)[0][0] == count and pipelines.rows(parts)[0][0] == count * len(STAGES))
    [(_, distinct, cost)], [(_, different, spent)] = pipelines.rows(own), pipelines.rows(parts)
    assert (distinct, different) == (count, count * len(STAGES))
    assert cost == pytest.approx(spent)
    assert cost == pytest.approx(sum(answer.cost for answer in answers))

"""Ensembles under what may happen to them: counters, contexts, users' policies that misbehave, and processes that are killed."""

import asyncio
import json
import os
import signal
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import infaas
from tests.live.test_metrics import get, series, total
from tests.support.clients.constant_load import NOTICED, LibraryLoad, Query, StockLoad, wrong
from tests.support.clients.responders import until
from tests.support.gateways.gateway_process import gateway
from tests.support.servers.ensembles import MEMBERS, Ensembles, inputs, near, scores_of, taught
from tests.support.servers.processes import eventually, fetched
from tests.support.servers.system import talk


def test_counters_are_the_number_of_queries(ensembles: Ensembles, tmp_path: Path) -> None:
    """Of Prometheus, of Clipper's JSON and of SQL's views: an ensemble of five counts as one query, and its parts as five."""
    count = 30
    url = ensembles.metrics

    talk(ensembles, lambda client: ensembles.app(client, "counted", MEMBERS, {"policy": "exp4"}, input_type="floats"))
    issued = "SELECT count(*) FROM infaas.query_outcomes WHERE app = 'counted' AND parent IS NULL"
    minutely = "SELECT coalesce(sum(queries), 0) FROM infaas.slo_by_app_minutely WHERE app = 'counted'"
    hourly = "SELECT coalesce(sum(queries), 0) FROM infaas.cost_by_app_hourly WHERE app = 'counted'"

    def figures() -> dict[str, float]:
        now = series(get(url))
        return {
            "queries": total(now, "infaas_queries_total", app="counted"),
            "answers": total(now, "infaas_answers_total", app="counted"),
            "parts": total(now, "infaas_parts_total", app="counted"),
            "asked": total(now, "infaas_members_asked_total", app="counted", member="n0"),
            "latencies": total(now, "infaas_query_latency_seconds_count", app="counted"),
            "rows": ensembles.rows(issued)[0][0],
            "minutely": ensembles.rows(minutely)[0][0],
            "hourly": ensembles.rows(hourly)[0][0],
        }

    def still() -> bool:
        found = figures()
        return found == figures() and found["queries"] == found["rows"] == found["minutely"] == found["parts"] / 5

    assert eventually(still), figures()
    before = figures()
    x, _ = inputs(count, 8)
    with gateway(ensembles, tmp_path) as gate:
        for item in x.tolist():
            assert json.loads(fetched(f"{gate.url}/counted/predict", {"input": item})[1])["default"] is False
        told = json.loads(get(f"{gate.url}/clipper/metrics"))
    assert told["counters"] == [{"app:counted:num_predictions": {"count": count}}]
    more = {"parts": 5 * count}

    def grown() -> bool:
        now = figures()
        return all(now[name] == before[name] + more.get(name, count) for name in before)

    assert eventually(grown), (before, figures())


def test_two_users_with_opposite_favourites_and_all_processes_killed(ensembles: Ensembles) -> None:
    """What feedback teaches about each context, two dispatchers share, and it is there after kill -9 of both."""
    x, _ = inputs(400, 9)
    favourites = {"left": "n0", "right": "n1"}
    labels = {context: scores_of(model, x).argmax(axis=1) for context, model in favourites.items()}
    x = x[labels["left"] != labels["right"]][:64]

    async def teach(client: Any) -> None:
        await ensembles.app(client, "taste", ("n0", "n1"), {"policy": "exp4", "eta": 0.3, "contextual": True})
        for context, model in favourites.items():
            await taught(client, "taste", x, scores_of(model, x).argmax(axis=1), context=context)

    async def answers(client: Any, context: str) -> np.ndarray:
        found = [client.query("taste", x[i : i + 1], context=context, timeout=60.0) for i in range(len(x))]
        return np.array([answer.output.argmax() for answer in await asyncio.gather(*found)])

    async def served(client: Any) -> None:
        for context, model in favourites.items():
            right = scores_of(model, x).argmax(axis=1)
            assert (await answers(client, context) == right).mean() > 0.8, context

    def learnt() -> bool:
        return all(ensembles.weights("taste", context)[model] > 0.9 for context, model in favourites.items())

    before = series(get(ensembles.metrics))
    talk(ensembles, teach)

    def both_have_asked() -> bool:
        now = series(get(ensembles.metrics))
        names = ("dispatcher-0", "dispatcher-1")
        parts = [
            [total(page, "infaas_parts_total", app="taste", process=name) for name in names] for page in (before, now)
        ]
        return all(later > earlier for earlier, later in zip(*parts, strict=True))

    assert eventually(both_have_asked)
    assert eventually(learnt)
    talk(ensembles, served)

    async def told(client: Any) -> None:
        named: dict[str, Any] = {"inputs": x[:1], "context": "left", "retry_key": b"again" + bytes(11)}
        named["query"] = found[0] if found else (await client.query("taste", x[:1], context="left")).query
        found.append(named["query"])
        await client.feedback("taste", 1, **named)
        # One more, of another query: once it counts, what was told before it has been counted, too.
        others.append((await client.query("taste", x[1:2], context="left")).query)
        await client.feedback("taste", 1, query=others[-1], context="left")
        await until(lambda: counted(client))

    async def counted(client: Any) -> bool:
        return bool(
            max(row["n"] for row in await client.selection("taste", context="left")) == len(x) + 1 + len(others)
        )

    found: list[str] = []
    others: list[str] = []
    talk(ensembles, told)
    killed = ensembles.pids("dispatcher")
    assert len(killed) == 2
    for pid in killed:
        os.kill(pid, signal.SIGKILL)
    assert eventually(lambda: len(set(ensembles.pids("dispatcher")) - set(killed)) == 2)
    assert eventually(learnt)
    talk(ensembles, served)
    talk(ensembles, told)  # what is sent again counts once, though no dispatcher remembers it
    assert set(ensembles.weights("taste", "nobody").values()) == {0.5}


OWN = "tests.support.models.user_policies"
ROGUES = {
    "NotANumber": "the weight nan",
    "Negative": "the weight -1.0",
    "Stranger": "chose 'stranger', which is no member",
    "Raising": "combine raised KeyError: 'no such thing'",
    "Hanging": "combine took longer than 1 s",
}


async def test_a_users_own_policy_keeps_its_count_and_one_that_misbehaves_costs_its_own_app_only(
    ensembles: Ensembles, client: Any
) -> None:
    """Each query of a policy that misbehaves gets a refusal that says how; another app's queries go on."""
    url = ensembles.metrics

    def refused() -> float:
        return total(series(get(url)), "infaas_refusals_total", app="rogue", code="model_error")

    async def answers(client: Any, x: np.ndarray) -> bool:
        return isinstance(await client.query("rogue", x, timeout=60.0, raise_refused=False), infaas.Answer)

    def counts() -> set[int]:
        done = ensembles.command("selection", "--app", "own", "--json")
        return {row["n"] for row in json.loads(done.stdout)["items"]} if done.returncode == 0 else set()

    before = refused()
    x, y = inputs(20, 11)
    await ensembles.app(client, "own", MEMBERS[:3], {"policy": f"{OWN}:Counting"})
    await taught(client, "own", x, y)
    await ensembles.app(client, "rogue", MEMBERS[:3], {"policy": f"{OWN}:Counting"})
    count = 0
    load = LibraryLoad(ensembles.nats, "beside-rogues", 10, app="own")
    async with load:
        for name, word in ROGUES.items():
            await client.admin("set-selection", app="rogue", policy=f"{OWN}:{name}")
            found: list[str] = []

            async def misbehaves(found: list[str] = found, word: str = word) -> bool:
                answer = await client.query("rogue", x[:1], timeout=60.0, raise_refused=False)
                if isinstance(answer, infaas.Refused):
                    assert answer.code == "model_error", answer
                    found.append(answer.message)
                return any(word in message for message in found)

            await until(misbehaves)
            assert all(f"{OWN}:" in message for message in found)
            count += len(found)
        await client.admin("set-selection", app="rogue", policy="exp4")
        await until(lambda: answers(client, x[:1]))
    assert load.others == {}
    assert wrong(load, mean_of_members) == {}
    assert eventually(lambda: refused() >= before + count)
    assert eventually(lambda: counts() == {20})
    killed = ensembles.pids("dispatcher")
    for pid in killed:
        os.kill(pid, signal.SIGKILL)
    assert eventually(lambda: len(set(ensembles.pids("dispatcher")) - set(killed)) == 2)
    assert eventually(lambda: counts() == {20})


def mean_of_members(given: np.ndarray, query: Query, answer: Any) -> bool:
    """Whether it is what the members that the answer names say in the mean."""
    members = answer.members if isinstance(answer, infaas.Answer) else answer["members"]
    wanted = np.mean([scores_of(member.partition("@")[0], query.sample.x) for member in members or ()], axis=0)
    return near(given.reshape(1, -1), wanted)


@pytest.mark.parametrize("service", ["dispatcher", "executor"])
async def test_a_process_is_killed_and_each_query_is_answered_once(
    ensembles: Ensembles, service: str, client: Any
) -> None:
    """A stock client counts the replies in its inbox. It sends nothing again, so what a dispatcher dies with before it has asked a member is lost to it.

    Only a dispatcher knows of its joined queries. Its successor finds the rows that it had not stored.
    """
    tag = f"kill-{service}"

    app = f"killed-{service}"
    await ensembles.app(client, app, MEMBERS, {"policy": "majority"})
    library = LibraryLoad(ensembles.nats, f"{tag}-library", 15, app=app)
    stock = StockLoad(ensembles.nats, f"{tag}-stock", 15, app=app)
    async with library, stock:
        await until(lambda: len(library.answers) > 20 and len(stock.answers) > 20)
        at = time.time()
        os.kill(ensembles.pids(service)[0], signal.SIGKILL)
        struck = len(library.queries), len(stock.queries)
        await until(lambda: len(library.answers) > struck[0] + 40 and len(stock.answers) > struck[1] + 40)
    assert wrong(library, mean_of_members) == {}
    assert wrong(stock, mean_of_members) == {}
    assert library.others == {}
    assert library.answers.keys() == library.queries.keys()
    assert stock.refusals == {}
    assert stock.repeated == {}
    unheard = {name for name in stock.queries if name not in stock.replies}
    if service == "executor":
        assert unheard == set()
    else:
        assert all(abs(stock.queries[name].sent - at) < NOTICED for name in unheard), (at, unheard)
    rows = "SELECT id, count(*) FROM infaas.query_outcomes WHERE id LIKE %s AND parent IS NULL GROUP BY id"

    def recorded() -> dict[str, int]:
        return dict(ensembles.rows(rows, f"{tag}-%"))

    told = library.answers.keys() | stock.answers.keys()
    assert eventually(lambda: not told - recorded().keys()), sorted(told - recorded().keys())
    assert set(recorded().values()) == {1}
    assert eventually(lambda: len(ensembles.pids(service)) == 2)


async def test_a_gateway_is_killed_and_the_other_one_serves_on(
    ensembles: Ensembles, tmp_path: Path, client: Any
) -> None:
    def predict(url: str, item: list[float]) -> int:
        found = json.loads(fetched(f"{url}/fronted/predict", {"input": item})[1])
        assert found["default"] is False
        return int(found["query_id"])

    await ensembles.app(client, "fronted", MEMBERS, {"policy": "majority"}, input_type="floats")
    x, _ = inputs(40, 10)
    with ExitStack() as stack:
        first, second = (stack.enter_context(gateway(ensembles, tmp_path)) for _ in range(2))
        ids = [predict(gate.url, item) for item in x.tolist()[:10] for gate in (first, second)]
        os.kill(first.pid, signal.SIGKILL)
        ids += [predict(second.url, item) for item in x.tolist()[10:]]
        status, why = fetched(f"{first.url}/fronted/predict", {"input": x.tolist()[0]})
        assert status == 0
        assert "refused" in why
    assert len(set(ids)) == len(ids), "each has an answer of its own"

"""Several models answer one query, by the doors that users have: versions, feedback, confidence, slow members, contexts, counters, kills."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import urllib.request
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import psycopg
import pytest
from onnx import helper as h
from onnx import numpy_helper as nh

import infaas
from tests.live.test_metrics import get, series, total, url_of
from tests.support.clients.constant_load import LibraryLoad, StockLoad
from tests.support.clients.responders import until
from tests.support.gateways.gateway_process import gateway
from tests.support.models import tiny_models
from tests.support.models.tiny_models import CLASSES, FEATURES, tensor, weights
from tests.support.servers.nats import run
from tests.support.servers.processes import environ, eventually, living_of, pids_of, read_line
from tests.support.servers.processes import infaas as command
from tests.support.servers.system import Whole, running

MEMBERS = ("n0", "n1", "n2", "n3", "n4")
NOISE = 0.4  # of the members' weights: each is wrong on about a fifth of the inputs, and on others than the rest
INT8 = 0.1  # of the largest score: members have variants of int8, too
QUICK = "[registrar]\nthreads = [1]\nmax_batches = [64]\n"
STEP = 16  # feedbacks at once
POISON = 777.0  # as the first feature: the container sleeps


def second_weights(model: str) -> np.ndarray:
    """Of the last layer, FP32 [32, 4]. `sound` is always right, `sound` 2 always wrong."""
    right = weights(0)[1]
    if model == "sound@2":
        return -right
    if model in MEMBERS:
        return right + NOISE * np.random.default_rng(100 + MEMBERS.index(model)).normal(size=right.shape).astype("f4")
    return right


def scores_of(model: str, x: np.ndarray) -> np.ndarray:
    """FP32 [n, 4]"""
    found: np.ndarray = np.maximum(x @ weights(0)[0], 0) @ second_weights(model)
    return found


def inputs(count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Inputs that no model has been measured with, and their true classes."""
    x = np.random.default_rng(1000 + seed).normal(size=(count, FEATURES)).astype("f4")
    return x, scores_of("sound", x).argmax(axis=1)


def file_of(model: str) -> bytes:
    nodes = [
        h.make_node("MatMul", ["x", "w1"], ["a"]),
        h.make_node("Relu", ["a"], ["b"]),
        h.make_node("MatMul", ["b", "w2"], ["scores"]),
    ]
    return tiny_models.made(
        nodes,
        [tensor("x", ["n", FEATURES])],
        [tensor("scores", ["n", CLASSES])],
        [nh.from_array(weights(0)[0], "w1"), nh.from_array(second_weights(model), "w2")],
    )


class Ensembles:
    """A system with two dispatchers and two workers, and the models of `second_weights`, which no app links yet."""

    def __init__(self, whole: Whole) -> None:
        self.whole = whole
        self.where = ("--data-dir", str(whole.directory))
        self.validation = whole.directory.parent / "tiny.npz"
        x, y = tiny_models.digits()
        self.validation.write_bytes(tiny_models.npz(x=x, y=y))

    async def prepare(self) -> None:
        async with infaas.connect(self.whole.nats) as client:
            for name in (*MEMBERS, "sound", "sound@2"):
                model, _, version = name.partition("@")
                path = self.whole.directory.parent / f"{name}.onnx"
                path.write_bytes(file_of(name))
                await client.register(
                    path, app="shelf", model=model, version=version or "1", validation=self.validation
                )

    def admin(self, verb: str, app: str, *options: str) -> None:
        done = command("admin", verb, app, *options, *self.where)
        assert done.returncode == 0, done.stderr

    async def app(self, client: Any, name: str, models: tuple[str, ...], fields: dict[str, Any], **more: Any) -> None:
        """An app that links these models and asks them by these rules; returns once both dispatchers do so and all answer."""
        await client.admin("add-app", app=name, **more)
        for model in models:
            await client.admin("link-model", app=name, model=model, version="1")
        await client.admin("set-selection", app=name, **fields)
        x, _ = inputs(1, 0)
        row: deque[bool] = deque(maxlen=20)

        async def settled() -> bool:
            answer = await client.query(name, x, timeout=60.0, raise_refused=False)
            row.append(isinstance(answer, infaas.Answer) and answer.missing == 0)
            return len(row) == 20 and all(row)

        await until(settled, 120.0)

    def rows(self, query: str, *values: Any) -> list[tuple[Any, ...]]:
        with psycopg.connect(self.whole.sql) as connection:
            return connection.execute(query, values).fetchall()  # type: ignore[arg-type]

    def weights(self, app: str, context: str | None = None) -> dict[str, float]:
        """By member, as the command tells them."""
        options = () if context is None else ("--context", context)
        done = command("selection", "--app", app, *options, "--json", *self.where)
        assert done.returncode == 0, done.stderr
        return {row["member"]: row["weight"] for row in json.loads(done.stdout)["items"]}


@pytest.fixture(scope="module")
def ensembles(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ensembles]:
    directory = tmp_path_factory.mktemp("ensembles") / "data"
    config = directory.parent / "infaas.toml"
    config.write_text(QUICK)
    options = ("--no-dashboard", "--dispatchers", "2", "--workers", "2", "--config", str(config))
    with running(directory, *options) as whole:
        found = Ensembles(whole)
        run(found.prepare())
        yield found


def talk(ensembles: Ensembles, work: Callable[[Any], Any]) -> Any:
    async def main() -> Any:
        async with infaas.connect(ensembles.whole.nats) as client:
            return await work(client)

    return run(main())


async def taught(client: Any, app: str, x: np.ndarray, y: np.ndarray, **context: Any) -> list[infaas.Answer]:
    """Ask each item as a query, tell its true class; STEP at a time."""

    async def one(index: int) -> infaas.Answer:
        answer: infaas.Answer = await client.query(app, x[index : index + 1], timeout=60.0, **context)
        await client.feedback(app, int(y[index]), query=answer.query, **context)
        return answer

    found = []
    for start in range(0, len(x), STEP):
        found += await asyncio.gather(*(one(index) for index in range(start, min(start + STEP, len(x)))))
    return found


def near(given: np.ndarray, wanted: np.ndarray) -> bool:
    return bool(np.abs(given - wanted).max() < INT8 * np.abs(wanted).max())


def test_a_version_is_rolled_back_and_no_kept_answer_is_of_the_other_one(ensembles: Ensembles) -> None:
    """Nothing restarts. Each answer is that of the version that it names, whether it was kept or computed."""
    x, _ = inputs(1, 1)
    before = sorted(living_of(ensembles.whole.directory))

    async def main(client: Any) -> None:
        await client.admin("add-app", app="versions")
        await client.admin("link-model", app="versions", model="sound", version="1")
        await client.admin("set-selection", app="versions", cache_mb=8)
        for version in ("1", "2", "1"):
            await client.admin("set-version", app="versions", model="sound", version=version)
            kept: Counter[str] = Counter()
            row: deque[str] = deque(maxlen=20)

            async def settled(version: str = version, kept: Counter[str] = kept, row: deque[str] = row) -> bool:
                answer = await client.query("versions", x, timeout=60.0)
                name = "sound" if answer.version == "1" else "sound@2"
                assert near(answer.output, scores_of(name, x)), answer
                kept[answer.version] += answer.cached
                row.append(answer.version)
                return list(row) == [version] * 20 and kept[version] >= 20

            await until(settled)

    talk(ensembles, main)
    assert sorted(living_of(ensembles.whole.directory)) == before


def test_an_app_whose_models_are_unlinked_gives_its_default_output(ensembles: Ensembles) -> None:
    x, _ = inputs(1, 2)

    async def main(client: Any) -> None:
        await ensembles.app(client, "linked", ("n0", "n1"), {"policy": "majority"}, default_output=[9, 8, 7, 6])
        for model in ("n0", "n1"):
            await client.admin("unlink-model", app="linked", model=model)
        answers: deque[infaas.Answer] = deque(maxlen=20)

        async def settled() -> bool:
            answers.append(await client.query("linked", x, timeout=60.0))
            return len(answers) == 20 and all(answer.default for answer in answers)

        await until(settled)
        assert {tuple(answer.output[0]) for answer in answers} == {(9.0, 8.0, 7.0, 6.0)}
        assert {answer.reason for answer in answers} == {"unknown_model: the app serves no model now"}
        await client.admin("link-model", app="linked", model="n0", version="1")

        async def back() -> bool:
            answer = await client.query("linked", x, timeout=60.0)
            return not answer.default and answer.members == ["n0@1"]

        await until(back)

    talk(ensembles, main)


@pytest.mark.slow
def test_exp3_leaves_a_model_that_fails_and_comes_back_to_it(ensembles: Ensembles) -> None:
    """Paper 002, Fig. 8. `sound` is the best; it answers wrongly for a while; then it is the best again."""

    async def asks(client: Any, enough: Callable[[float], bool], seed: int) -> int:
        """Queries until, of the last 200, the share that `sound` has answered is enough."""
        last: deque[bool] = deque(maxlen=200)
        for step in range(2000 // STEP):
            x, y = inputs(STEP, seed + step)
            last.extend(answer.model == "sound" for answer in await taught(client, "drift", x, y))
            if len(last) == 200 and enough(sum(last) / 200):
                return (step + 1) * STEP
        pytest.fail(f"of the last 200 of 2,000 queries, sound answers {sum(last) / 200:.0%}")

    async def main(client: Any) -> None:
        await ensembles.app(client, "drift", ("sound", "n0", "n1"), {"policy": "exp3"})
        await asks(client, lambda share: share > 0.6, 10_000)
        await client.admin("set-version", app="drift", model="sound", version="2")
        await asks(client, lambda share: share < 0.2, 20_000)
        await client.admin("set-version", app="drift", model="sound", version="1")
        await asks(client, lambda share: share > 0.6, 30_000)

    talk(ensembles, main)


def test_exp4_errs_no_more_than_the_best_model_and_heeds_a_failed_one_less(ensembles: Ensembles) -> None:
    x, y = inputs(600, 3)

    async def main(client: Any) -> None:
        async def error(**needs: Any) -> float:
            answer = await client.query("votes", x, timeout=60.0, **needs)
            return float((answer.output.argmax(axis=1) != y).mean())

        models = (*MEMBERS[1:], "sound")
        await ensembles.app(client, "votes", MEMBERS, {"policy": "exp4"})
        await taught(client, "votes", *inputs(160, 4))
        assert await error() <= min([await error(model=model) for model in MEMBERS])
        # One that fails: `sound` is switched to the version that is always wrong.
        await client.admin("link-model", app="votes", model="sound", version="2")
        await client.admin("set-selection", app="votes", policy="exp4", members=list(models))
        await until(lambda: asks_sound(client))
        await taught(client, "votes", *inputs(240, 5))
        assert await error() <= min([await error(model=model) for model in MEMBERS[1:]])
        found = await client.selection("votes")
        least = min(found, key=lambda row: row["weight"])
        assert least["member"] == "sound"
        assert 10 * least["weight"] < min(row["weight"] for row in found if row["member"] != "sound")

    async def asks_sound(client: Any) -> bool:
        answers = [await client.query("votes", x[:1], timeout=60.0) for _ in range(20)]
        return all("sound@2" in answer.members for answer in answers)

    talk(ensembles, main)


def test_what_all_members_agree_on_is_more_often_right_and_the_shares_are_theirs(ensembles: Ensembles) -> None:
    """What the answer tells is computed again from the outputs of the variants that answered, which SQL names; so is what it cost."""
    x, y = inputs(400, 6)

    async def main(client: Any) -> None:
        await ensembles.app(client, "agree", MEMBERS, {"policy": "majority"})
        answer = await client.query("agree", x, timeout=60.0)
        shares, said = np.array(answer.confidences), answer.output.argmax(axis=1)
        assert sorted(answer.members) == [f"{model}@1" for model in MEMBERS]
        assert answer.missing == 0
        wrong, agreed = said != y, shares == 1.0
        assert 0 < agreed.sum() < len(x)
        assert wrong[agreed].mean() < wrong[~agreed].mean()

        def parts() -> list[tuple[Any, ...]]:
            return ensembles.rows("SELECT variant, cost FROM infaas.query_outcomes WHERE parent = %s", answer.query)

        await until(lambda: len(parts()) == len(MEMBERS))
        outputs = [(await client.query("agree", x, timeout=60.0, variant=row[0])).output for row in parts()]
        assert np.allclose(np.mean(outputs, axis=0), answer.output, atol=1e-3)
        agree = (np.argmax(outputs, axis=2) == said).sum(axis=0) / len(MEMBERS)
        assert np.abs(agree - shares).max() < 1e-9
        assert answer.confidence == shares.min()
        assert answer.cost == pytest.approx(sum(row[1] for row in parts()))

        def own() -> list[tuple[Any, ...]]:
            query = "SELECT cost, confidence, missing FROM infaas.query_outcomes WHERE uid = %s AND parent IS NULL"
            return ensembles.rows(query, answer.query)

        await until(lambda: len(own()) == 1)
        assert own() == [(pytest.approx(answer.cost), pytest.approx(answer.confidence), 0)]

    talk(ensembles, main)


SLEEPER = """
import time

import numpy as np

FIRST, SECOND = (np.array(part, np.float32) for part in {weights!r})


class Sleeper:
    def predict_batch(self, inputs):
        x = inputs["x"]
        if (x[:, 0] == {poison!r}).any():
            time.sleep(5.0)
        return {{"scores": np.maximum(x @ FIRST, 0) @ SECOND}}
"""


def test_a_slow_member_costs_confidence_and_no_time(ensembles: Ensembles, tmp_path: Path) -> None:
    """A process of a user's own sleeps for 5 s. The answer is what the other four say together, and is no default output."""
    text = SLEEPER.format(weights=tuple(part.tolist() for part in weights(0)), poison=POISON)
    (tmp_path / "sleeper.py").write_text(text)
    options = ("--app", "late", "--model", "sleeper", "--validation", str(ensembles.validation), "--json")
    four = MEMBERS[:4]
    x, _ = inputs(1, 7)
    poison = x.copy()
    poison[0, 0] = POISON
    wanted = np.mean([scores_of(model, poison) for model in four], axis=0)

    def asked(answer: infaas.Answer) -> None:
        assert sorted(answer.members or ()) == [f"{model}@1" for model in four], answer
        assert (answer.missing, answer.default) == (1, None)
        assert near(answer.output, wanted)
        assert answer.confidence is not None
        assert answer.confidence <= 0.8, "the share is of all that were asked"

    async def main(client: Any) -> None:
        async def complete() -> bool:
            answer = await client.query("late", x, latency_ms=20_000.0, raise_refused=False)
            return isinstance(answer, infaas.Answer) and answer.missing == 0 and len(answer.members or ()) == 5

        await until(complete, 120.0)
        one = await client.query("late", poison, latency_ms=1500.0)
        asked(one)
        assert one.missed == []
        await client.feedback("late", 0, query=one.query)
        # While it sleeps, it has nothing to say about any query.
        for answer in await asyncio.gather(*(client.query("late", poison, latency_ms=1500.0) for _ in range(20))):
            asked(answer)
            assert answer.missed == []
        await until(complete)
        # Without an objective, too, the answer comes long before it has slept.
        patient = await client.query("late", poison)
        asked(patient)
        assert patient.latency_ms < 4000.0
        await until(complete)

    async def prepared(client: Any) -> None:
        rules = {"policy": "majority", "wait_share": 0.6}
        await ensembles.app(client, "late", four, rules, default_output=[9, 8, 7, 6])

    talk(ensembles, prepared)
    with (
        (tmp_path / "container.err").open("w") as errors,
        subprocess.Popen(
            [sys.executable, "-P", "-m", "infaas.cli", "container", "sleeper:Sleeper", *options, *ensembles.where],
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env=environ(),
            cwd=tmp_path,
        ) as process,
    ):
        try:
            assert read_line(process), (tmp_path / "container.err").read_text()
            talk(ensembles, main)
        finally:
            process.kill()


def test_counters_are_the_number_of_queries(ensembles: Ensembles, tmp_path: Path) -> None:
    """Of Prometheus, of Clipper's JSON and of SQL's views: an ensemble of five counts as one query, and its parts as five."""
    count = 30
    url = url_of(ensembles.whole)

    async def prepared(client: Any) -> None:
        await ensembles.app(client, "counted", MEMBERS, {"policy": "exp4"}, input_type="floats")

    talk(ensembles, prepared)
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
    with gateway(ensembles.whole, tmp_path) as gate:
        for item in x.tolist():
            body = json.dumps({"input": item}).encode()
            with urllib.request.urlopen(urllib.request.Request(f"{gate.url}/counted/predict", body)) as reply:
                assert json.load(reply)["default"] is False
        told = json.loads(get(f"{gate.url}/metrics"))
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

    before = series(get(url_of(ensembles.whole)))
    talk(ensembles, teach)
    after = series(get(url_of(ensembles.whole)))
    took = [
        name
        for name in ("dispatcher-0", "dispatcher-1")
        if total(after, "infaas_parts_total", app="taste", process=name)
        > total(before, "infaas_parts_total", app="taste", process=name)
    ]
    assert len(took) == 2, "both dispatchers have asked members"
    assert learnt()
    talk(ensembles, served)
    killed = pids_of(ensembles.whole.directory, "dispatcher")
    assert len(killed) == 2
    for pid in killed:
        os.kill(pid, signal.SIGKILL)
    assert eventually(lambda: len(set(pids_of(ensembles.whole.directory, "dispatcher")) - set(killed)) == 2)
    assert eventually(learnt)
    talk(ensembles, served)
    assert set(ensembles.weights("taste", "nobody").values()) == {0.5}


def wrong(load: LibraryLoad | StockLoad) -> dict[str, Any]:
    """Answers that are not the mean of what the members that they name say, or have another query's id."""
    found = {}
    for name, answer in load.answers.items():
        if isinstance(answer, infaas.Answer):
            given, label, members = answer.output, answer.id, answer.members or []
        else:
            given, label = np.frombuffer(answer["outputs"]["scores"]["data"], "<f4"), answer["id"]
            members = answer["members"]
        x = load.queries[name].sample.x
        wanted = np.mean([scores_of(member.partition("@")[0], x) for member in members], axis=0)
        if label != name or not near(given.reshape(1, -1), wanted):
            found[name] = answer
    return found


@pytest.mark.parametrize("service", ["dispatcher", "executor"])
def test_a_process_is_killed_and_each_query_is_answered_once(ensembles: Ensembles, service: str) -> None:
    """A stock client counts the replies in its inbox. It sends nothing again, so what a dispatcher dies with before it has asked a member is lost to it."""
    tag = f"kill-{service}"

    async def main(client: Any) -> tuple[LibraryLoad, StockLoad, int]:
        app = f"killed-{service}"
        await ensembles.app(client, app, MEMBERS, {"policy": "majority"})
        library = LibraryLoad(ensembles.whole.nats, f"{tag}-library", 15, app=app)
        stock = StockLoad(ensembles.whole.nats, f"{tag}-stock", 15, app=app)
        async with library, stock:
            await until(lambda: len(library.answers) > 20 and len(stock.answers) > 20)
            os.kill(pids_of(ensembles.whole.directory, service)[0], signal.SIGKILL)
            struck = len(library.queries), len(stock.queries)
            await until(lambda: len(library.answers) > struck[0] + 40 and len(stock.answers) > struck[1] + 40)
        return library, stock, struck[1]

    library, stock, struck = talk(ensembles, main)
    assert wrong(library) == {}
    assert wrong(stock) == {}
    assert library.others == {}
    assert library.answers.keys() == library.queries.keys()
    assert stock.refusals == {}
    assert stock.repeated == {}
    unheard = {name for name in stock.queries if name not in stock.replies}
    if service == "executor":
        assert unheard == set()
    else:
        numbers = [int(name.rpartition("-")[2]) for name in unheard]
        assert all(struck - 10 <= number <= struck + 10 for number in numbers), (struck, numbers)
    heard = len(library.answers) + len(stock.answers)
    rows = "SELECT id, count(*) FROM infaas.query_outcomes WHERE id LIKE %s AND parent IS NULL GROUP BY id"

    def recorded() -> dict[str, int]:
        return dict(ensembles.rows(rows, f"{tag}-%"))

    assert eventually(lambda: len(recorded()) >= heard - 5), "a killed process may not have told its last ones"
    assert set(recorded().values()) == {1}
    assert eventually(lambda: len(pids_of(ensembles.whole.directory, service)) == 2)


def test_a_gateway_is_killed_and_the_other_one_serves_on(ensembles: Ensembles, tmp_path: Path) -> None:
    async def prepared(client: Any) -> None:
        await ensembles.app(client, "fronted", MEMBERS, {"policy": "majority"}, input_type="floats")

    def predict(url: str, item: list[float]) -> int:
        body = json.dumps({"input": item}).encode()
        with urllib.request.urlopen(urllib.request.Request(f"{url}/fronted/predict", body), timeout=60) as reply:
            found = json.load(reply)
        assert found["default"] is False
        return int(found["query_id"])

    talk(ensembles, prepared)
    x, _ = inputs(40, 10)
    with ExitStack() as stack:
        first, second = (stack.enter_context(gateway(ensembles.whole, tmp_path)) for _ in range(2))
        ids = [predict(gate.url, item) for item in x.tolist()[:10] for gate in (first, second)]
        os.kill(first.pid, signal.SIGKILL)
        ids += [predict(second.url, item) for item in x.tolist()[10:]]
        with pytest.raises(OSError, match="refused"):
            predict(first.url, x.tolist()[0])
    assert len(set(ids)) == len(ids), "each has an answer of its own"

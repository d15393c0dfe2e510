"""Several models answer one query, by the doors that users have: versions, links, feedback, confidence, slow members."""

import asyncio
from collections import Counter, deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import infaas
from tests.live.test_metrics import get, series, total
from tests.support.clients.responders import until
from tests.support.models.tiny_models import CLASSES, weights
from tests.support.servers.ensembles import MEMBERS, STEP, Ensembles, inputs, near, scores_of, taught
from tests.support.servers.processes import container, eventually, pids_of
from tests.support.servers.system import talk

LONG = 240.0  # s; only ends a failing test
POISON = 777.0  # as the first feature: the container sleeps


async def test_a_version_is_rolled_back_and_no_kept_answer_is_of_the_other_one(
    ensembles: Ensembles, client: Any
) -> None:
    """Nothing restarts. Each answer is that of the version that it names, whether it was kept or computed."""
    x, _ = inputs(1, 1)
    services = ("dispatcher", "executor", "registrar")
    before = [pids_of(ensembles.directory, service) for service in services]

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
    assert [pids_of(ensembles.directory, service) for service in services] == before


async def test_a_hundred_equal_queries_are_one_evaluation_of_each_dispatcher(ensembles: Ensembles, client: Any) -> None:
    """And those that come later are none. What the executors count says so."""
    x, _ = inputs(1, 12)
    url = ensembles.metrics
    answers: list[infaas.Answer] = []

    def figures() -> tuple[float, float, float]:
        """Items computed for queries, what the dispatchers say of it, and all of their look-ups."""
        page: dict[str, Any] = {}

        def whole() -> bool:
            """What a process counts is missing while it is slow to say so."""
            page.update(series(get(url)))
            return all(up for _, up in page["infaas_part_up"])

        assert eventually(whole)
        computed = sum(
            value for has, value in page.get("infaas_batch_items_sum", ()) if has["variant"].startswith("sound-v1")
        )
        missed = total(page, "infaas_cache_lookups_total", app="kept", result="miss")
        return computed, missed, total(page, "infaas_cache_lookups_total", app="kept")

    await ensembles.app(client, "kept", ("sound",), {"cache_mb": 8})
    seen = [figures()]

    def still() -> bool:  # what preparing has asked is counted
        seen.append(figures())
        return seen[-1] == seen[-2]

    assert eventually(still), seen
    before = seen[-1]
    answers.extend(await asyncio.gather(*(client.query("kept", x, timeout=60.0) for _ in range(100))))
    answers.extend([await client.query("kept", x, timeout=60.0) for _ in range(50)])

    def grown() -> tuple[float, ...]:
        return tuple(now - then for now, then in zip(figures(), before, strict=True))

    assert eventually(lambda: grown() in ((1.0, 1.0, 150.0), (2.0, 2.0, 150.0))), grown()
    computed = [answer for answer in answers if not answer.cached]
    assert len(computed) == grown()[0]
    assert all(near(answer.output, scores_of("sound", x)) for answer in answers)
    assert {answer.cost for answer in answers if answer.cached} == {0.0}
    assert all(answer.cost > 0.0 for answer in computed)


async def test_labels_come_in_a_file_and_count_once(ensembles: Ensembles, tmp_path: Path, client: Any) -> None:
    """As someone with a spreadsheet sends them: bad lines are named, and the good ones have counted."""
    x, _ = inputs(1, 3)
    queries: list[str] = []

    await ensembles.app(client, "labelled", ("sound",), {"cache_mb": 8})
    queries.extend([str((await client.query("labelled", x, timeout=60.0)).query) for _ in range(30)])
    file = tmp_path / "labels.csv"

    def send(text: str) -> Any:
        file.write_text(text)
        return ensembles.command("feedback", "labelled", str(file))

    good = "query,label\n" + "".join(f"{query},{number % 4}\n" for number, query in enumerate(queries))
    for _ in range(2):
        assert send(good).stdout == "30 labels of 30 accepted\n"
    bad = send(f"{good}no-query,1\n")
    assert (bad.returncode, bad.stdout) == (1, "30 labels of 31 accepted\n")
    assert "1 of 31 labels were refused: line 32: bad_request: query must be the 32 hexadecimal digits" in bad.stderr
    seen = "SELECT count(*), count(DISTINCT query) FROM infaas.feedback WHERE app = 'labelled'"
    assert eventually(lambda: ensembles.rows(seen) == [(30, 30)])
    wrong = {
        "query\n1\n": "must name the columns label, and query or id",
        "id,label,colour\n1,2,3\n": "column 'colour'",
        "id,label\n,2\n": "line 2: give a label, and the query or id",
        "id,label,item\n1,2,x\n": "line 2: item must be the number",
    }
    for text, why in wrong.items():
        bad = send(text)
        assert bad.returncode == 1
        assert why in bad.stderr
    file.unlink()
    bad = ensembles.command("feedback", "labelled", str(file))
    assert bad.stderr == f"infaas: {file}: cannot be read as CSV: No such file or directory\n"


async def test_labels_decide_in_their_context_and_a_pipeline_is_measured_from_end_to_end(
    ensembles: Ensembles, client: Any
) -> None:
    """Labels of one context are what the model says, those of the other never; the pipeline's are every second time."""
    await ensembles.app(client, "regions", ("sound",), {"policy": "exp4", "contextual": True})
    await client.admin("add-app", app="stage")
    await client.admin("link-model", app="stage", model="sound", version="1")
    x, y = inputs(60, 5)
    for context, right in (("home", y), ("away", (y + 1) % CLASSES)):
        await taught(client, "regions", x, right, context=context)

    async def settled(app: str, **needs: Any) -> tuple[str, bool]:
        answer = await client.query(app, x[:1], timeout=60.0, accuracy=0.5, **needs)
        return answer.accuracy_source, answer.accuracy < 0.5 and "accuracy" in answer.missed

    async def apart() -> bool:
        away = [await settled("regions", context="away") for _ in range(8)]  # of both dispatchers
        home = [await settled("regions", context="home") for _ in range(8)]
        return set(away) == {("labels", True)} and {missed for _, missed in home} == {False}

    await until(apart)
    for context, least in (("home", 0.8), ("away", 0.0)):
        [one] = ensembles.told("variants", "regions", "--context", context)
        assert least <= one["accuracy"] < least + 0.5

    (name,) = [spec["name"] for app in await client.apps(app="stage") for spec in app["inputs"]]
    (out,) = [spec["name"] for app in await client.apps(app="stage") for spec in app["outputs"]]
    stages = [{"name": one, "app": "stage", "inputs": {name: f"$.{name}"}} for one in ("first", "last")]
    whole = {"name": "whole", "latency_ms": 5000.0}
    edge = [{"from": "first", "to": "last"}]
    await client.admin("set-pipeline", pipeline=whole, vertex=stages, edge=edge, output={out: f"last.{out}"})
    before = await client.query("whole", x[:1], timeout=60.0)
    await taught(client, "whole", x, np.where(np.arange(len(x)) % 2, y, (y + 1) % CLASSES))

    async def measured() -> bool:
        lists = [(await client.pipelines(app="whole"))[0]["quality"] for _ in range(8)]  # of both dispatchers
        return all(one is not None and one["labels"] == len(x) for one in lists)

    await until(measured)
    [listed] = await client.pipelines(app="whole")
    assert listed["quality"]["found"] == 0.5
    [found] = listed["measured"]
    assert (found["labels"], found["product"]) == (len(x), pytest.approx(before.accuracy**2, abs=1e-3))
    after = await client.query("whole", x[:1], timeout=60.0)
    assert after.accuracy == pytest.approx(0.5, abs=1e-3) != before.accuracy
    query = "SELECT count(score), sum(score) FROM infaas.feedback WHERE app = 'whole'"
    assert eventually(lambda: ensembles.rows(query) == [(len(x), len(x) / 2)]), ensembles.rows(query)


async def test_an_app_whose_models_are_unlinked_gives_its_default_output(ensembles: Ensembles, client: Any) -> None:
    x, _ = inputs(1, 2)

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


async def test_exp3_leaves_a_model_that_fails_and_comes_back_to_it(ensembles: Ensembles, client: Any) -> None:
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

    await ensembles.app(client, "drift", ("sound", "n0", "n1"), {"policy": "exp3"})
    await asks(client, lambda share: share > 0.6, 10_000)
    await client.admin("set-version", app="drift", model="sound", version="2")
    await asks(client, lambda share: share < 0.2, 20_000)
    await client.admin("set-version", app="drift", model="sound", version="1")
    await asks(client, lambda share: share > 0.6, 30_000)


async def test_what_all_members_agree_on_is_more_often_right_and_the_shares_are_theirs(
    ensembles: Ensembles, client: Any
) -> None:
    """What the answer tells is computed again from the outputs of the variants that answered, which SQL names; so is what it cost."""
    x, y = inputs(400, 6)

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
    options = ("--app", "late", "--model", "sleeper", "--validation", str(ensembles.validation))
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

        async def answered_in_time(count: int, **needs: Any) -> bool:
            """By the four. What a busy machine has not done in time is asked again, once the fifth is awake."""
            await until(complete)
            answers[:] = await asyncio.gather(*(client.query("late", poison, **needs) for _ in range(count)))
            if any(answer.missed or answer.missing != 1 or answer.default for answer in answers):
                return False
            for answer in answers:
                asked(answer)
            return True

        answers: list[infaas.Answer] = []
        await until(lambda: answered_in_time(1, latency_ms=4000.0), LONG)
        await client.feedback("late", 0, query=answers[0].query)
        # While it sleeps, it has nothing to say about any query.
        await until(lambda: answered_in_time(20, latency_ms=4000.0), LONG)
        # Without an objective, too, the answer comes before it has slept: it is not among the members.
        await until(lambda: answered_in_time(1), LONG)
        await until(complete)

    async def prepared(client: Any) -> None:
        rules = {"policy": "majority", "wait_share": 0.6}
        await ensembles.app(client, "late", four, rules, default_output=[9, 8, 7, 6])

    talk(ensembles, prepared)
    with container(tmp_path, "sleeper:Sleeper", *options, *ensembles.where):
        talk(ensembles, main)

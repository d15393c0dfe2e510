"""Pipelines by the doors that users have: what is visited, what comes back, what is recorded."""

import asyncio
import json
from collections import Counter
from pathlib import Path
from typing import Any

import msgpack
import nats
import numpy as np
import pytest

import infaas
from infaas.errors import Refused
from tests.live.test_metrics import get, series, total
from tests.support.clients.responders import until
from tests.support.clients.stock import array, tensor
from tests.support.gateways.gateway_process import gateway
from tests.support.models.poison_models import POISON
from tests.support.models.tiny_models import FEATURES, digits, npz, weights
from tests.support.servers.pipelines import WIDE, StagedSystem, edge, one_message_each, ones, vertex, when
from tests.support.servers.processes import container, eventually, fetched
from tests.support.servers.system import talk

FORK = (
    [
        vertex("see", "gate"),
        vertex("left", "twice"),
        vertex("right", "more"),
        vertex("sum", "both", {"a": "left.y | right.y", "b": "$.x"}),
    ],
    [
        edge("see", "left", **when("label", "==", 1)),
        edge("see", "right", **when("label", "!=", 1)),
        edge("left", "sum"),
        edge("right", "sum"),
    ],
    {"y": "sum.y", "side": "left.y | right.y", "sure": "see.sure"},
)


def forked(x: np.ndarray) -> tuple[np.ndarray, np.ndarray, set[str]]:
    """Outputs `y` and `side` of FORK, and the vertices that are visited."""
    side = 2 * x if x[0, 0] > 0.5 else x + 3
    return side + x, side, {"see", "sum", "left" if x[0, 0] > 0.5 else "right"}


BOXES = (
    [vertex("find", "boxes"), vertex("each", "twice", {"x": "find.boxes"}), vertex("rest", "more", {"x": "each.y"})],
    [edge("find", "each", items="boxes", items_max=20), edge("each", "rest")],
    {"y": "rest.y"},
)


def boxed(x: np.ndarray) -> np.ndarray:
    """Output of BOXES."""
    return 2 * (x + np.arange(x[0, 0], dtype=np.float32)[:, None]) + 3


async def test_each_box_of_a_detector_is_a_query_by_all_doors(pipelines: StagedSystem, client: Any) -> None:
    await pipelines.add(client, "boxed", *BOXES, sample=ones(2.0))
    for count in (0, 1, 7):
        x = ones(count)
        reply = await one_message_each(pipelines.nats, "boxed", x)
        assert reply["outputs"]["y"]["shape"] == [count, FEATURES]
        answer = await client.query("boxed", x)
        assert np.allclose(answer.output, boxed(x))
        assert answer.output.shape == (count, FEATURES)
        body = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, FEATURES], "data": x.ravel().tolist()}]}
        said = await asyncio.to_thread(fetched, f"{pipelines.gateway}/v2/models/boxed/infer", body)
        [output] = json.loads(said[1])["outputs"]
        assert (output["shape"], len(output["data"])) == ([count, FEATURES], count * FEATURES)
    with pytest.raises(Refused, match="vertex find: boxes has 21 items, and items_max is 20"):
        await client.query("boxed", ones(21))
    with pytest.raises(Refused, match="takes one item at a time"):
        await client.query("boxed", np.ones((2, FEATURES), np.float32))
    answer = await client.query("boxed", ones(7))
    parts = "SELECT stage, cost FROM infaas.query_outcomes WHERE parent = %s"
    assert await asyncio.to_thread(eventually, lambda: len(pipelines.rows(parts, answer.query)) == 15)
    rows = pipelines.rows(parts, answer.query)
    assert Counter(stage for stage, _ in rows) == {"find": 1, "each": 7, "rest": 7}
    assert sum(cost for _, cost in rows) == pytest.approx(answer.cost)
    explained = await client.explain("boxed")
    assert "find: for each item of boxes, at most 20" in explained["stages"][1]["when"][0]


async def test_crops_that_no_message_holds_are_items_too(pipelines: StagedSystem, client: Any) -> None:
    """Each has 1.6 MB, and so has the classifier's query."""
    vertices = [vertex("find", "crops"), vertex("each", "last", {"x": "find.boxes"})]
    edges = [edge("find", "each", items="boxes")]
    await pipelines.add(client, "cropped", vertices, edges, {"y": "each.y"}, sample=ones(2.0))
    for count in (0, 3):
        answer = await client.query("cropped", ones(count), timeout=60.0)
        assert np.allclose(answer.output, ones(count) + np.arange(count, dtype=np.float32)[:, None])


async def test_one_query_and_one_reply_whatever_the_stages_are(pipelines: StagedSystem, client: Any) -> None:
    """A stock client sends one message and gets one; conditions say who is asked, and outputs come from who was."""
    await pipelines.add(client, "fork", *FORK)
    url = pipelines.nats
    for first in (0.0, 1.0):
        x = ones(first)
        y, side, visited = forked(x)
        reply = await one_message_each(url, "fork", x, id=f"fork-{first}")
        assert np.allclose(array(reply["outputs"]["y"]), y)
        assert np.allclose(array(reply["outputs"]["side"]), side)
        assert np.allclose(array(reply["outputs"]["sure"]), first)
        assert reply["id"] == f"fork-{first}"
        assert (reply["missed"], reply["model"]) == ([], "")
        kinds = {"gate", "both", "twice" if first else "more"}
        assert {member.partition("@")[0] for member in reply["members"]} == kinds
        recorded_once(pipelines, reply, "fork", visited)
        accuracies = "SELECT accuracy FROM infaas.query_outcomes WHERE parent = %s"
        found = [accuracy for (accuracy,) in pipelines.rows(accuracies, reply["query"])]
        assert reply["accuracy"] == (None if None in found else min(found)), "the least of its stages"


def recorded_once(pipelines: StagedSystem, reply: dict[str, Any], app: str, visited: set[str]) -> None:
    """A row of the query, one of each visited vertex, whose costs add up to it."""
    own = "SELECT app, outcome, stage, cost FROM infaas.query_outcomes WHERE uid = %s AND parent IS NULL"
    parts = "SELECT stage, outcome, cost FROM infaas.query_outcomes WHERE parent = %s"
    uid = reply["query"]
    assert eventually(lambda: len(pipelines.rows(own, uid)) == 1 and len(pipelines.rows(parts, uid)) == len(visited))
    assert pipelines.rows(own, uid) == [(app, "ok", None, pytest.approx(reply["cost"]))]
    rows = pipelines.rows(parts, uid)
    assert {stage for stage, _, _ in rows} == visited
    assert {outcome for _, outcome, _ in rows} == {"ok"}
    assert sum(cost for _, _, cost in rows) == pytest.approx(reply["cost"])
    assert reply["cost"] > 0


async def test_a_pipeline_counts_as_one_query_and_its_stages_as_none(pipelines: StagedSystem, client: Any) -> None:
    issued = "SELECT count(*) FROM infaas.query_outcomes WHERE app = %s AND parent IS NULL"
    minutely = "SELECT coalesce(sum(queries), 0) FROM infaas.slo_by_app_minutely WHERE app = %s"
    hourly = "SELECT coalesce(sum(queries), 0) FROM infaas.cost_by_app_hourly WHERE app = %s"
    objective = "SELECT coalesce(sum(queries), 0) FROM infaas.slo_by_pipeline_minutely WHERE pipeline = %s"
    count = 25

    def counts(app: str, *queries: str) -> list[Any]:
        return [pipelines.rows(query, app)[0][0] for query in queries]

    before = await pipelines.add(client, "tallied", *FORK)
    await asyncio.gather(*(client.query("tallied", ones(i % 2), timeout=60.0) for i in range(count)))
    answers = before + count
    told = (issued, minutely, hourly, objective)  # what was refused while the pipeline was new counts, too
    assert eventually(lambda: answers <= min(found := counts("tallied", *told)) == max(found)), counts("tallied", *told)
    assert counts("both", minutely, hourly) == [0, 0]
    url = pipelines.metrics
    assert eventually(lambda: total(series(get(url)), "infaas_answers_total", app="tallied") == answers)


def test_by_http_and_by_command(pipelines: StagedSystem, tmp_path: Path) -> None:
    talk(pipelines, lambda client: pipelines.add(client, "doors", *FORK))
    x = ones(1.0)
    y, _, _ = forked(x)
    with gateway(pipelines, tmp_path) as gate:
        described = json.loads(fetched(f"{gate.url}/v2/models/doors")[1])
        assert [one["name"] for one in described["inputs"]] == ["x"]
        assert {one["name"] for one in described["outputs"]} == {"y", "side", "sure"}
        assert fetched(f"{gate.url}/v2/models/doors/ready")[0] == 200
        given = {"name": "x", "datatype": "FP32", "shape": [1, FEATURES], "data": x.ravel().tolist()}
        said = json.loads(fetched(f"{gate.url}/v2/models/doors/infer", {"inputs": [given]})[1])
        outputs = {one["name"]: one["data"] for one in said["outputs"]}
        assert np.allclose(outputs["y"], y.ravel())
    np.save(tmp_path / "x.npy", x)
    told = pipelines.told("query", "--app", "doors", "--input", str(tmp_path / "x.npy"))
    assert np.allclose(told["outputs"]["y"], y)
    [item] = [one for one in pipelines.told("pipeline", "list") if one["app"] == "doors"]
    assert [stage["vertex"] for stage in item["vertices"]] == ["see", "left", "right", "sum"]


async def test_each_vertex_has_needs_of_its_own(pipelines: StagedSystem, client: Any) -> None:
    """The same app twice: the stage that asks for accuracy gets the slow model, the other one the cheap one."""
    await pipelines.add(
        client,
        "needs",
        [vertex("rough", "classes"), vertex("fine", "classes", accuracy=0.95)],
        [edge("rough", "fine")],
        {"rough": "rough.scores", "fine": "fine.scores"},
    )
    query = "SELECT stage, model, accuracy FROM infaas.query_outcomes WHERE parent = %s ORDER BY stage"

    async def told_apart() -> bool:  # the cheap one may have to be loaded
        answer = await client.query("needs", ones(0.0), timeout=60.0)
        await until(lambda: len(pipelines.rows(query, answer.query)) == 2)
        (fine, good, accuracy), (rough, either, _) = pipelines.rows(query, answer.query)
        assert (fine, good, rough) == ("fine", "good", "rough")
        assert accuracy >= 0.95
        return either == "poor" and not np.allclose(answer.outputs["rough"], answer.outputs["fine"])

    await until(told_apart)
    with pytest.raises(Refused, match=r"impossible.*accuracy"):
        await client.admin(
            "set-pipeline",
            pipeline={"name": "never", "latency_ms": 1000.0},
            vertex=[vertex("impossible", "classes", accuracy=2.0)],
            edge=[],
            output={"y": "impossible.scores"},
        )


async def test_large_results_go_from_stage_to_stage_by_reference(pipelines: StagedSystem, client: Any) -> None:
    """1.6 MB between two stages, a condition on a small output beside it, large inputs of a query, a large answer."""
    pass_on = [edge("spread", "end", **when("label", ">", 0.5))]
    stages = [vertex("spread", "wide"), vertex("end", "last", {"x": "spread.y"})]
    chain = [
        vertex("spread", "wide"),
        vertex("end", "last", {"x": "spread.y"}),
        vertex("sum", "both", {"a": "end.y", "b": "$.x"}),
    ]

    await pipelines.add(client, "large", stages, pass_on, {"label": "spread.label", "y": "end.y | $.x"})
    for first in (0.0, 1.0):
        reply = await one_message_each(pipelines.nats, "large", ones(first))
        assert np.allclose(array(reply["outputs"]["y"]), ones(first)), "either way"
        assert len(reply["members"]) == 1 + int(first), "the last stage is visited where the label says so"
    await pipelines.add(
        client, "whole", chain, [edge("spread", "end"), edge("end", "sum")], {"y": "spread.y", "z": "sum.y"}
    )
    x = digits(1, seed=4)[0]
    answer = await client.query("whole", x, timeout=60.0)
    assert answer.outputs["y"].shape == (1, WIDE)
    assert np.allclose(answer.outputs["y"], np.tile(x, (1, WIDE // FEATURES)))
    assert np.allclose(answer.outputs["z"], 2 * x)
    reply = await one_message_each(pipelines.nats, "whole", x)
    assert reply["outputs"] == {}
    assert reply["outputs_ref"]["key"] == reply["query"]
    # Many items, all by reference: inputs larger than a message.
    many = np.tile(digits(64, seed=5)[0], (400, 1))  # 25,600 items, 1.6 MB
    await pipelines.add(
        client,
        "long",
        [
            vertex("one", "twice"),
            vertex("two", "more", {"x": "one.y"}),
            vertex("sum", "both", {"a": "two.y", "b": "$.x"}),
        ],
        [edge("one", "two"), edge("two", "sum")],
        {"y": "sum.y"},
    )
    answer = await client.query("long", many, timeout=180.0)
    assert np.allclose(answer.output, 3 * many + 3, atol=1e-4)
    # 0.7 MB: it fits into a message, but not beside itself.
    some = many[: 700_000 // (4 * FEATURES)]
    answer = await client.query("long", some, timeout=60.0)
    assert np.allclose(answer.output, 3 * some + 3, atol=1e-4)


async def test_inputs_that_are_not_where_the_query_says_are_its_own_mistake(
    pipelines: StagedSystem, client: Any
) -> None:
    await pipelines.add(client, "lost", *FORK)
    nc = await nats.connect(pipelines.nats)
    try:
        body = msgpack.packb({"inputs_ref": {"bucket": "infaas-inputs", "key": "nothing"}})
        reply = msgpack.unpackb((await nc.request("infaas.query.lost", body, timeout=60)).data)
    finally:
        await nc.close()
    assert reply["error"]["code"] == "bad_request"
    assert reply["error"]["message"].startswith("vertex see: ")
    many = await client.query("lost", np.ones((2, FEATURES), np.float32), raise_refused=False)
    assert (many.code, many.message.split(":")[0]) == ("bad_request", "inputs")


async def test_a_query_that_is_sent_again_takes_the_same_edges(pipelines: StagedSystem, client: Any) -> None:
    """Whichever dispatcher gets it: both have got some, and no query has gone two ways."""
    keys = [bytes([i]) * 16 for i in range(60)]
    url = pipelines.metrics

    def by_process() -> Counter[str]:
        page = series(get(url))
        return Counter(
            {
                name: int(total(page, "infaas_queries_total", app="chance", process=name))
                for name in ("dispatcher-0", "dispatcher-1")
            }
        )

    stages = [vertex("see", "gate"), vertex("left", "twice"), vertex("right", "more")]
    edges = [edge("see", "left", probability=0.5), edge("see", "right", probability=0.3)]
    await pipelines.add(client, "chance", stages, edges, {"left": "left.y | $.x", "right": "right.y | $.x"})
    nc = await nats.connect(pipelines.nats)
    try:

        async def asked(key: bytes) -> tuple[str, ...]:
            body = msgpack.packb({"inputs": tensor(ones(0.0)), "retry_key": key})
            reply = msgpack.unpackb((await nc.request("infaas.query.chance", body, timeout=60)).data)
            return tuple(sorted(reply["members"]))

        first = [await asked(key) for key in keys]
        for _ in range(3):
            assert [await asked(key) for key in keys] == first
    finally:
        await nc.close()
    ways = Counter(first)
    assert len(ways) == 4, ways
    left = sum(number for way, number in ways.items() if "twice@1" in way)
    assert 15 <= left <= 45, "half of 60, by far"
    assert eventually(lambda: min(by_process().values()) > 20), by_process()


async def test_pipelines_and_ensembles_are_stages_too(pipelines: StagedSystem, client: Any) -> None:
    """A pipeline in a pipeline, behind it an ensemble; each row has its parent, and the costs add up over all levels."""
    await pipelines.add(client, "inner", *FORK)
    await client.admin("add-app", app="voters")
    for model in ("good", "poor"):
        await client.admin("link-model", app="voters", model=model, version="1")
    await client.admin("set-selection", app="voters", policy="majority")
    stages = [vertex("first", "inner"), vertex("vote", "voters", {"x": "first.y"})]
    x = ones(1.0)

    async def both() -> bool:
        answer = await client.query("voters", x, timeout=60.0, raise_refused=False)
        return isinstance(answer, infaas.Answer) and len(answer.members or ()) == 2

    await until(both)
    await pipelines.add(
        client, "outer", stages, [edge("first", "vote")], {"scores": "vote.scores", "y": "first.y"}, sample=x
    )
    answer = await client.query("outer", x, timeout=60.0)
    assert np.allclose(answer.outputs["y"], forked(x)[0])
    scores = [
        (await client.query("classes", forked(x)[0], model=model, timeout=60.0)).output for model in ("good", "poor")
    ]
    assert np.allclose(answer.outputs["scores"], np.mean(scores, axis=0), rtol=0.2, atol=1.0)
    query = """
        WITH RECURSIVE tree AS (
            SELECT uid, parent, app, stage, cost, 0 AS depth FROM infaas.query_outcomes WHERE uid = %s
            UNION ALL
            SELECT o.uid, o.parent, o.app, o.stage, o.cost, depth + 1 FROM infaas.query_outcomes o JOIN tree ON o.parent = tree.uid
        ) SELECT depth, app, stage, cost FROM tree
    """
    await until(lambda: len(pipelines.rows(query, answer.query)) == 8)
    rows = pipelines.rows(query, answer.query)
    assert {(depth, app) for depth, app, _, _ in rows} == {
        (0, "outer"), (1, "inner"), (1, "voters"), (2, "gate"), (2, "twice"), (2, "both"), (2, "voters")
    }  # fmt: skip
    leaves = sum(cost for depth, _, _, cost in rows if depth == 2)
    assert leaves == pytest.approx(answer.cost)
    assert sum(cost for depth, _, _, cost in rows if depth == 1) == pytest.approx(answer.cost)


async def test_what_is_a_stage_is_not_deleted(pipelines: StagedSystem, client: Any) -> None:
    await pipelines.add(client, "holds", *FORK)
    for verb, fields in (("delete-app", {}), ("unlink-model", {"model": "more"})):
        with pytest.raises(Refused, match="pipeline") as refused:
            await client.admin(verb, app="more", **fields)
        assert refused.value.code == "bad_request"
    answer = await client.query("holds", ones(0.0), timeout=60.0)
    assert isinstance(answer, infaas.Answer)
    await client.admin("delete-app", app="holds")

    async def gone() -> bool:
        found = await client.query("holds", ones(0.0), timeout=60.0, raise_refused=False)
        return isinstance(found, Refused) and found.code == "unknown_app"

    await until(gone)


async def test_a_default_output_is_given_where_a_stage_does_not_answer_in_time(
    pipelines: StagedSystem, client: Any
) -> None:
    stages = [vertex("see", "gate"), vertex("say", "hang")]
    output = {"scores": "say.scores"}
    await pipelines.add(client, "fallback", stages, [edge("see", "say")], output, latency_ms=3000.0)
    await client.admin("set-app", app="fallback", default_output=[9, 8, 7, 6])

    async def given() -> bool:
        found = await client.query("fallback", ones(POISON), timeout=60.0, raise_refused=False)
        answers.append(found)
        return isinstance(found, infaas.Answer) and bool(found.default)

    answers: list[Any] = []
    await until(given)
    answer = answers[-1]
    assert answer.output.tolist() == [[9.0, 8.0, 7.0, 6.0]]

    async def back() -> bool:
        found = await client.query("fallback", ones(0.0), timeout=60.0, raise_refused=False)
        return isinstance(found, infaas.Answer) and not found.default

    await until(back)


async def test_a_stage_may_be_late_or_second(pipelines: StagedSystem, client: Any) -> None:
    stages = [vertex("say", "hang", optional=True), vertex("rest", "twice"), vertex("other", "more")]
    output = {"y": "rest.y", "first": "any(rest.y, other.y)"}
    await pipelines.add(client, "spared", stages, [edge("say", "rest")], output, latency_ms=3000.0, sample=ones(0.0))
    x, answers = ones(POISON), []

    async def spared() -> bool:
        answers.append(await client.query("spared", x, timeout=60.0, raise_refused=False))
        return isinstance(answers[-1], infaas.Answer)

    await until(spared)
    answer = answers[-1]
    assert np.allclose(answer.outputs["y"], 2 * x)
    assert np.allclose(answer.outputs["first"], x + 3)
    assert answer.missing == 1
    rows = "SELECT stage, outcome FROM infaas.query_outcomes WHERE parent = %s"
    assert await asyncio.to_thread(
        eventually, lambda: {"rest", "other"} <= dict(pipelines.rows(rows, answer.query)).keys()
    )


PACED = """
import os
import time

import numpy as np

FIRST, SECOND = (np.array(part, np.float32) for part in {weights!r})


class Paced:
    def predict_batch(self, inputs):
        time.sleep(float(os.environ["PACE_S"]))
        return {{"scores": np.maximum(inputs["x"] @ FIRST, 0) @ SECOND}}
"""
FAST, SLOW = 0.08, 0.32  # s that a batch takes, of whatever size


async def test_fast_and_slow_replicas_share_what_waits_by_their_speed(
    pipelines: StagedSystem, tmp_path: Path, client: Any
) -> None:
    """Two processes of a user's own, one four times slower, serve one planned stage for two dispatchers."""
    (tmp_path / "paced.py").write_text(PACED.format(weights=tuple(part.tolist() for part in weights(0))))
    data = tmp_path / "paced.npz"
    x, y = digits(64)
    data.write_bytes(npz(x=x, y=y))
    options = ("--app", "paced", "--model", "paced", "--validation", str(data), *pipelines.where)
    count, batch = 400, 4
    with (
        container(tmp_path, "paced:Paced", *options, PACE_S=str(FAST)),
        container(tmp_path, "paced:Paced", *options, PACE_S=str(SLOW)),
    ):
        one = vertex("only", "paced")
        await pipelines.add(client, "shared", [one], [], {"scores": "only.scores"}, latency_ms=120_000.0)
        [variant] = await client.variants(app="paced")
        stage = {"hardware": variant["hardware"], "batch": batch, "replicas": 2, "scale": 1.0, "rho": 0.5}
        plan = {
            "pipeline": "shared",
            "policy": "inferline",
            "status": "feasible",
            "cost_per_s": 0.0,
            "p99_ms": 1000.0,
            "vertices": {"only": {**stage, "service_ms": max(variant["batch_latency_ms"].values())}},
            "envelope": [],
            "dispersion": [],
            "steps": [],
            "rate": 100.0,
            "latency_ms": 120_000.0,
        }
        await client.admin("deploy-pipeline", app="shared", plan=plan)

        async def planned() -> bool:
            [item] = await client.pipelines(app="shared")
            return item["plan"] is not None and item["vertices"][0]["instances"] == 2

        await until(planned)
        await asyncio.gather(*(client.query("shared", x[:1], id=f"share-{i}", timeout=180.0) for i in range(count)))
    shares = """
        SELECT o.worker, count(*), max(o.batch) FROM infaas.query_outcomes o JOIN infaas.query_outcomes p ON o.parent = p.uid
        WHERE p.id LIKE 'share-%%' GROUP BY o.worker ORDER BY count(*)
    """
    assert eventually(lambda: sum(row[1] for row in pipelines.rows(shares)) == count)
    rows = pipelines.rows(shares)
    assert len(rows) == 2, rows
    (_, slow, _), (_, fast, _) = rows
    # Sleeps are longer on a busy machine, the short ones by a larger share. Without regard to speed both would take as many.
    assert 1.5 < fast / slow < 1.5 * SLOW / FAST, rows

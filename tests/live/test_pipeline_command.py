"""Pipelines by the doors that operators have: files, plans from the running catalogue, HTTP, drivers that are traced."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import infaas
from infaas.pipelines import run
from tests.support.clients.responders import until
from tests.support.models.tiny_models import npz
from tests.support.servers.ensembles import Ensembles, inputs, near, scores_of
from tests.support.servers.processes import eventually, fetched
from tests.support.servers.system import talk

SURE = 12.0  # of the largest score of the quick model
FILE = f"""
[pipeline]
name = "NAME"
latency_ms = 2000
[[vertex]]
name = "quick"
app = "NAME-quick"
inputs = {{ x = "$.image" }}
[[vertex]]
name = "exact"
app = "NAME-exact"
inputs = {{ x = "$.image" }}
accuracy = 0.9
[[edge]]
from = "quick"
to = "exact"
when = {{ output = "scores", reduce = "max", op = "<", value = {SURE} }}
probability = 0.4
[output]
scores = "exact.scores | quick.scores"
[[load]]
rate = 40
"""


class Place:
    """A running system with the apps of one pipeline, and its file."""

    def __init__(self, ensembles: Ensembles, name: str, folder: Path) -> None:
        self.ensembles = ensembles
        self.name = name
        self.folder = folder
        self.apps = (f"{name}-quick", f"{name}-exact")
        self.file = folder / "pipeline.toml"
        self.file.write_text(FILE.replace("NAME", name))
        for app, model in zip(self.apps, ("n0", "sound"), strict=True):
            self.done("admin", "add-app", app)
            self.done("admin", "link-model", app, "--model", model, "--model-version", "1")

    def done(self, *arguments: str, **more: Any) -> str:
        return self.ensembles.done(*arguments, **more)

    def refused(self, *arguments: str) -> str:
        said = self.ensembles.command(*arguments)
        assert (said.returncode, said.stdout) == (1, ""), said
        assert said.stderr.count("\n") == 1
        return str(said.stderr)

    def listed(self) -> list[dict[str, Any]]:
        return [item for item in self.ensembles.told("pipeline", "list") if item["app"] == self.name]

    def shows(self, what: Callable[[list[dict[str, Any]]], bool]) -> list[dict[str, Any]]:
        """The list, once it is so: dispatchers hear of a change a moment later."""
        found: list[dict[str, Any]] = []

        def seen() -> bool:
            found[:] = self.listed()
            return what(found)

        assert eventually(seen), found
        return found

    def planned(self, policy: str | None) -> list[dict[str, Any]]:
        """The list, once it has one pipeline with a plan of this policy."""
        return self.shows(lambda items: [(item["plan"] or {}).get("policy") for item in items] == [policy])

    def change(self, old: str, new: str) -> str:
        """A file with another text."""
        text = self.file.read_text()
        assert old in text
        path = self.folder / "changed.toml"
        path.write_text(text.replace(old, new))
        return str(path)


@pytest.fixture
def place(request: pytest.FixtureRequest, ensembles: Ensembles, tmp_path_factory: pytest.TempPathFactory) -> Place:
    name = request.function.__name__.removeprefix("test_")[:24].strip("_").replace("_", "-")
    return Place(ensembles, name, tmp_path_factory.mktemp("pipeline"))


def right(x: np.ndarray) -> np.ndarray:
    """What the pipeline answers."""
    quick = scores_of("n0", x)
    return np.where(quick.max(1, keepdims=True) < SURE, scores_of("sound", x), quick)


def test_added_asked_planned_deployed_and_removed(place: Place) -> None:
    name = place.name
    assert place.done("pipeline", "add", str(place.file)) == "done\n"
    assert json.loads(place.done("pipeline", "add", str(place.file), "--json")) == {"done": True}
    [item] = place.planned(None)
    assert item["latency_ms"] == 2000.0
    assert [stage["vertex"] for stage in item["vertices"]] == ["quick", "exact"]
    assert f"{name}: objective 2,000 ms, no plan" in place.done("pipeline", "list")
    [app] = [row for row in json.loads(place.done("apps", "--json"))["items"] if row["app"] == name]
    assert (app["inputs"][0]["name"], app["outputs"][0]["name"]) == ("image", "scores")
    assert app["pipeline"]["vertex"][1]["app"] == place.apps[1]

    async def ask(client: Any) -> None:
        x, _ = inputs(30, 3)

        async def answered() -> bool:
            answer = await client.query(name, {"image": x[:1]}, timeout=60.0, raise_refused=False)
            return isinstance(answer, infaas.Answer)

        await until(answered, 120.0)
        for i in range(len(x)):
            answer = await client.query(name, {"image": x[i : i + 1]}, timeout=60.0, deadline=None, latency_ms=30_000)
            assert near(answer.output, right(x[i : i + 1])), answer

    talk(place.ensembles, ask)

    place.done("admin", "set-target", name, "--slo-target", "0.9")
    place.shows(lambda items: [item["slo_target"] for item in items] == [0.9])
    plan = place.folder / "plan.json"
    plan.write_text(place.done("pipeline", "plan", str(place.file), "--json"))
    found = json.loads(plan.read_text())
    assert (found["status"] in ("optimal", "feasible"), found["percentile"]) == (True, 0.9)
    for vertex, model in (("quick", "n0"), ("exact", "sound")):
        assert found["vertices"][vertex]["variant"].startswith(f"{model}-")
    assert place.done("pipeline", "deploy", str(plan)) == "done\n"
    [item] = place.planned("inferline")
    assert [stage["variant"] for stage in item["vertices"]] == [one["variant"] for one in found["vertices"].values()]
    talk(place.ensembles, ask)
    assert place.done("pipeline", "deploy", name, "--undeploy").startswith(
        f"done: the plan of pipeline {name} has ended"
    )
    place.planned(None)

    assert place.done("pipeline", "remove", name) == "done\n"
    place.shows(lambda items: items == [])
    assert "there is no pipeline" in place.refused("pipeline", "remove", name)
    for app in place.apps:
        place.done("admin", "delete-app", app)


def test_what_is_wrong_is_refused_with_field_and_remedy(place: Place) -> None:
    name, (quick, _) = place.name, place.apps
    for old, new, message in (
        (f'"{quick}"', '"nobody"', "vertex[quick].app: there is no app 'nobody'; register a model for it"),
        ("latency_ms = 2000", "latency_ms = 0.2", "latency_ms: must be above 0.3 ms, not 0.2"),
    ):
        assert message in place.refused("pipeline", "add", place.change(old, new)), new
    assert place.listed() == []

    place.done("pipeline", "add", str(place.file))
    assert f"app: {quick} is a stage of pipeline {name}" in place.refused("admin", "delete-app", quick)
    said = place.refused("admin", "unlink-model", quick, "--model", "n0")
    assert f"change pipeline {name} (`infaas pipeline add`) or delete it (`infaas admin delete-app`) first" in said
    unlink = {"app": quick, "model": "n0"}
    with infaas.connect_blocking(place.ensembles.nats) as client, pytest.raises(infaas.Refused) as refused:
        client.admin("unlink-model", **unlink)
    assert f"change pipeline {name} (admin('set-pipeline')) or delete it (admin('delete-app')) first" in str(
        refused.value
    )
    said = place.refused("admin", "link-model", name, "--model", "n0")
    assert "is a pipeline and has no models of its own; register the model under" in said

    path = place.folder / "plan.json"
    good = json.loads(place.done("pipeline", "plan", str(place.file), "--json"))

    def deploy(**changes: Any) -> str:
        path.write_text(json.dumps(good | changes))
        return place.refused("pipeline", "deploy", str(path))

    def stage(**changes: Any) -> dict[str, Any]:
        return {"vertices": good["vertices"] | {"quick": good["vertices"]["quick"] | changes}}

    assert "plan.status: the plan is infeasible: too slow" in deploy(status="infeasible", reason="too slow")
    assert "plan.vertices.quick.hardware: no worker has 'gpu'; there are: cpu" in deploy(**stage(hardware="gpu"))
    assert "app: there is no app nobody" in deploy(pipeline="nobody")
    path.write_text(json.dumps({"pipeline": name}))
    assert "give what `infaas pipeline plan FILE.toml --json` prints" in place.refused("pipeline", "deploy", str(path))
    for vertex in ("quick", "exact"):
        changed = place.change(f'"{name}-{vertex}"', '"nobody"')
        said = place.ensembles.command("pipeline", "plan", changed)
        assert (said.returncode, "there is no such app in the running system; add [[option]]" in said.stderr) == (
            2,
            True,
        )
    place.done("pipeline", "remove", name)


async def test_over_http(place: Place) -> None:
    name, url = place.name, place.ensembles.gateway
    body = {
        "pipeline": {"name": name, "latency_ms": 2000},
        "vertex": [
            {"name": "quick", "app": place.apps[0], "inputs": {"x": "$.image"}},
            {"name": "exact", "app": place.apps[1], "inputs": {"x": "$.image"}},
        ],
        "edge": [{"from": "quick", "to": "exact", "probability": 0.5}],
        "output": {"scores": "exact.scores | quick.scores"},
    }

    def ask(path: str, content: Any = None) -> tuple[int, str]:
        """GET, or POST of JSON."""
        return fetched(f"{url}{path}", content)

    def post(verb: str, content: Any) -> tuple[int, str]:
        return ask(f"/admin/{verb}", content)

    assert post("set_pipeline", body) == (200, "Success!")
    place.planned(None)
    ready = f"/v2/models/{name}/ready"
    assert eventually(lambda: json.loads(ask(ready)[1]) == {"name": name, "ready": True}), ask(ready)
    shown = json.loads(ask(f"/v2/models/{name}")[1])
    assert (shown["platform"], [spec["name"] for spec in shown["inputs"]]) == ("infaas_pipeline", ["image"])
    x, _ = inputs(1, 5)
    given = {"name": "image", "datatype": "FP32", "shape": [1, 16], "data": x.ravel().tolist()}
    asked = {"inputs": [given], "parameters": {"latency_ms": 30_000}}

    async def answers() -> bool:
        status, text = await asyncio.to_thread(ask, f"/v2/models/{name}/infer", asked)
        return status == 200 and [one["name"] for one in json.loads(text)["outputs"]] == ["scores"]

    await until(answers, 120.0)
    plan = json.loads(place.done("pipeline", "plan", str(place.file), "--json"))
    assert post("deploy_pipeline", {"name": name, "plan": plan}) == (200, "Success!")
    place.planned("inferline")
    told = f"Success!\nthe plan of pipeline {name} has ended: it is served as any other app"
    assert post("deploy_pipeline", {"name": name}) == (200, told)
    place.planned(None)
    for verb, content, message in (
        ("set_pipeline", {**body, "vertex": [{"name": "quick", "app": 3}]}, "vertex"),
        ("set_pipeline", {**body, "vertex": body["vertex"][:1]}, "there is no vertex 'exact'"),
        ("set_pipeline", {**body, "pipeline": {"latency_ms": 3}}, "name"),
        ("set_pipeline", {key: value for key, value in body.items() if key != "output"}, "output is missing"),
        ("deploy_pipeline", {"name": name, "plan": {}}, "plan: "),
        ("deploy_pipeline", {"name": "nobody"}, "there is no app nobody"),
    ):
        status, text = post(verb, content)
        assert (status in (400, 404), message in text) == (True, True), (content, text)
    assert post("delete_app", {"name": name})[0] == 200
    place.shows(lambda items: items == [])


DRIVER = f"""
async def cascade(rpc, x):
    quick = await rpc("QUICK", {{"x": x["image"]}})
    if quick.outputs["scores"].max() < {SURE}:
        return await rpc("EXACT", {{"x": x["image"]}})
    return quick
"""


async def test_a_driver_runs_and_its_trace_is_a_pipeline(place: Place, client: Any) -> None:
    quick, exact = place.apps
    text = DRIVER.replace("QUICK", quick).replace("EXACT", exact)
    (place.folder / "drivers.py").write_text(text)
    found: dict[str, Any] = {}
    exec(text, found)
    x, _ = inputs(600, 4)
    for app in place.apps:

        async def answers(app: str = app) -> bool:
            return isinstance(await client.query(app, x[:1], timeout=60.0, raise_refused=False), infaas.Answer)

        await until(answers, 120.0)
    for answer, i in zip(
        await asyncio.gather(*(run(client, found["cascade"], {"image": x[i : i + 1]}) for i in range(8))),
        range(8),
        strict=True,
    ):
        assert near(answer.output, right(x[i : i + 1]))
    share = float((scores_of("n0", x).max(1) < SURE).mean())
    assert 0.1 < share < 0.9
    (place.folder / "samples.npz").write_bytes(npz(image=x))
    arguments = ("pipeline", "trace", "drivers:cascade", "--samples", "samples.npz")
    shown = json.loads(place.done(*arguments, "--json", cwd=place.folder))
    assert shown["queries"] == 600
    assert shown["scale"] == {quick: 1.0, exact: pytest.approx(share, abs=0.03)}
    assert shown["edges"] == [{"from": quick, "to": exact, "probability": shown["scale"][exact]}]
    traced = place.folder / "traced.toml"
    traced.write_text(place.done(*arguments, "--most", "50", cwd=place.folder))
    assert place.done("pipeline", "add", str(traced)) == "done\n"
    place.name = "cascade"
    [item] = place.planned(None)
    assert [(stage["vertex"], stage["inputs"]) for stage in item["vertices"]] == [
        (quick, {"x": "$.image"}),
        (exact, {"x": "$.image"}),
    ]
    assert item["output"] == {"scores": f"{exact}.scores | {quick}.scores"}
    place.done("pipeline", "remove", "cascade")

"""Tables of apps: what their columns show."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import msgpack
import pytest
from msgspec import convert

from bus.codec import encode
from bus.login import SystemAddress
from bus.memory import Broker
from bus.messages.fleet import DispatcherHeartbeat, WorkerHeartbeat
from bus.subjects import Subjects
from infaas.answers import read_answer
from infaas.cli import auth, doctor, jobs, lists, pipeline, plan, query, register
from infaas.cli.output import Column, print_table
from infaas.cli.query import _render, _render_explain
from infaas.errors import Refused
from services.core.planning.plan import Action, Plan
from services.core.planning.problem import PlanningProblem
from tests.support.clients.responders import answer, until


@pytest.mark.parametrize(("expected", "headroom", "shown"), [(None, 1.75, "-"), (40.0, None, "-"), (40.0, 1.75, "70")])
def test_what_the_instances_of_an_app_can_carry_is_shown_in_items_a_second(
    expected: float | None, headroom: float | None, shown: str, capsys: pytest.CaptureFixture[str]
) -> None:
    columns = [one for one in lists._OBJECTIVE if one.title == "can carry/s"]
    print_table([{"forecast": expected, "headroom": headroom}], columns, "none")
    title, value = capsys.readouterr().out.splitlines()
    assert (title.strip(), value.strip()) == ("can carry/s", shown)


def test_a_pipeline_has_vertices_instead_of_models(capsys: pytest.CaptureFixture[str]) -> None:
    vertices = [{"name": "lang", "app": "lang"}, {"name": "say", "app": "nmt"}]
    app = {"app": "social", "models": [], "pipeline": {"vertex": vertices}}
    plain = {"app": "nmt", "models": ["m"], "pipeline": None, "stage_of": ["social"]}
    assert [lists._vertices(one) for one in (app, plain)] == ["lang, say -> nmt", None]
    lists.render_overview({"apps": [app, plain], "variants": [], "workers": [], "registrations": []}, wide=True)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "0 of 0 workers ready, 2 apps (1 of them pipelines), 0 variants, 0 instances"
    assert lines[4].split()[:4] == ["social", "2", "vertices", "-"]
    assert lines[5].split()[:3] == ["nmt", "1", "0"]


VARIANT = {
    "app": "classify-street-signs", "variant": "mobilenet-v3-large-v12-ort-int8-dynamic-t2-b64", "model": "mobilenet-v3-large",
    "version": "12", "state": "Interfered", "instances": 3, "reclaimable": 1, "hardware": "inferentia", "simulated": True,
    "accuracy": 0.98765, "accuracy_low": 0.98, "accuracy_high": 0.99, "latency_ms": 123.456, "load_ms": 12345.6, "memory_mb": 1234.5,
    "saturation_qps": 12345.6, "price_per_hour": 0.1234, "cost_per_1000": 0.0000123, "worker": "worker-17", "agreement": 0.99,
    "why_not": "costs US$ 12.3 per 1,000 queries, more than 1, and " * 3, "batching": "aimd",
}  # fmt: skip
TABLES: dict[str, Callable[[], Any]] = {
    "explain": lambda: query._render_explain({"candidates": [VARIANT], "chosen": VARIANT}, wide=False),
    "register": lambda: print_table([VARIANT], register.COLUMNS, ""),
    "jobs": lambda: jobs._table([{
        "job": "j-0123456789abcdef", "app": "classify-street-signs", "state": "cancelled", "done": 12_345_678, "total": 98_765_432,
        "failed": 17, "cost": 0.0123, "created": 1.7e9, "output": "/home/someone/outputs/of/yesterday/scores.npy", "reason": "out of disk " * 9,
    }], "", wide=False),
    "auth": lambda: print_table([{
        "name": "somebody-with-a-name", "roles": ["operator", "dashboard"], "app": "classify-street-signs", "worker": "worker-17",
        "keys": [{"created": "2026-11-17T08:00:00+00:00"}], "credentials": "/etc/infaas/credentials/" + "somebody" * 6,
    }], auth._COLUMNS, ""),
    "pipeline": lambda: print_table([{
        "pipeline": "social-media-pictures", "vertex": "find-the-faces", "app": "classify-street-signs", "variant": VARIANT["variant"],
        "hardware": "inferentia", "batch": 64, "replicas": 12, "wanted": 12, "instances": 11, "queued": 1234, "share": 0.5,
    }], pipeline._STAGES, ""),
    "plan": lambda: plan._render(
        convert({"demands": [], "candidates": [VARIANT | {"name": "v" * 52, "apps": [], "cost_per_s": 0.0000123, "running": 12}]}, PlanningProblem),
        Plan(status="optimal", actions=(Action("v" * 52, 1, "replicate"),), instances={"v" * 52: 13}, cost_per_s=0.0, objective=0.0, solver="ilp"),
        1.0, wide=False,
    ),
    "doctor": lambda: doctor._render({"checks": [
        {"check": "database schema", "state": "failed", "detail": "words " * 40, "remedy": "more words " * 20}
    ]}),
    "workers": lambda: lists._render_workers([{
        "worker": "worker-17-of-the-fleet", "kind": "c5.24xlarge", "state": "Draining",
        "devices": [{
            "device": "inferentia-12", "kind": "inferentia", "simulated": True, "alive": True, "utilisation": 1.0, "foreign_use": 0.5, "cores": 96,
            "cores_used": 95.12, "memory_mb": 196_608.0, "memory_used_mb": 123_456.0, "host_used_mb": 12_345.0, "price_per_hour": 4.08,
        }],
        "instances": [VARIANT | {"device": "inferentia-12", "queued": 1234, "load": 12345.6, "mean_batch": 12.34}],
    }], wide=False),
    "status": lambda: lists.render_overview({
        "apps": [{
            "app": "classify-street-signs", "models": ["a", "b"], "slo_target": 0.999, "attainment_1h": 0.98765, "attainment_5m": 0.98765,
            "forecast": 12345.6, "headroom": 1.234,
        }],
        "variants": [VARIANT, VARIANT | {"variant": "other", "accuracy": 0.5, "cost_per_1000": 0.1, "latency_ms": 0.01}],
        "workers": [], "registrations": [],
    }),
}  # fmt: skip


@pytest.mark.parametrize("name", TABLES)
def test_every_table_fits_80_columns(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    TABLES[name]()
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) > 1
    assert [line for line in lines if len(line) > 80] == []


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        ({"metric": "mae", "unit": "EUR"}, "mae 1 .. 3 EUR"),
        ({"metric": "agreement"}, "agreement 0.25 .. 0.5"),
        ({"metric": "top1"}, "0.25 .. 0.5"),
        ({"metric": "agreement", "accuracy": 1.0}, "agreement 1"),
    ],
)
def test_status_shows_what_variants_reach_in_their_metric(
    said: dict[str, Any], shown: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    variants = [VARIANT | {"app": "a", "accuracy": accuracy} | said for accuracy in (0.5, 0.25)]
    apps = [{"app": "a", "models": ["m"]}]
    lists.render_overview({"apps": apps, "variants": variants, "workers": [], "registrations": []})
    assert f"  {shown}  " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("ends", "shown"),
    [([1.1, 1.2, None], "1.2 (1.1..)"), ([1.1, 1.2, 1.5], "1.2 (1.1..1.5)"), ([None, 1.2, None], "1.2")],
)
def test_p99_is_shown_with_its_interval(
    ends: list[float | None], shown: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "400")
    print_table([VARIANT | {"p99_ms": {"1": ends}}], lists._VARIANTS, "", wide=True)
    assert f"  {shown}  " in capsys.readouterr().out


@pytest.mark.parametrize("columns", [lists._APPS, lists._MODELS, lists._VARIANTS, lists._SELECTION])
def test_every_list_fits_80_columns(
    columns: tuple[Column, ...], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    spec = {"name": "picture", "datatype": "FP32", "shape": [224, 224, 3]}
    item = VARIANT | {
        "models": ["mobilenet-v3-large", "resnet-152"], "variants": 12, "apps": ["classify-street-signs"] * 2, "serving": True, "metric": "top1",
        "format": "torchscript", "created": 1.7e9, "inputs": [spec], "outputs": [spec], "slo_target": 0.999, "attainment_1h": 0.98765,
        "min_instances": 1, "member": "mobilenet-v3-large:12", "weight": 0.123456, "probability": 0.5, "n": 123_456, "stage_of": ["social"],
    }  # fmt: skip
    print_table([item], columns, "none")
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if len(line) > 80] == []


def test_registrations_fit_80_columns(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    item = VARIANT | {
        "variants": ["a"], "state": "profiling", "progress": 0.5, "step": "building 12 variants on worker-17" * 3,
        "registration": "r-0123456789abcdef",
    }  # fmt: skip
    print_table([item], lists._REGISTRATIONS, "none")
    said = capsys.readouterr().out
    assert "r-0123456789abcdef" in said
    assert [line for line in said.splitlines() if len(line) > 80] == []


async def _never() -> None:
    await asyncio.Event().wait()


def test_status_and_doctor_say_what_is_missing_before_anything_else_and_do_not_wait_for_the_lists(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said: list[str] = []

    @asynccontextmanager
    async def connected(**_: object) -> AsyncIterator[None]:
        said.append(capsys.readouterr().out)
        yield

    monkeypatch.setattr(doctor, "missing_of", lambda _: ["dispatcher-0: silent for 1.0 s"])
    monkeypatch.setattr(doctor, "connect", connected)
    monkeypatch.setattr(lists, "overview", lambda *_: _never())
    doctor.status(json=True)
    assert json.loads(capsys.readouterr().out) == {
        "ready": False,
        "missing": ["dispatcher-0: silent for 1.0 s"],
        "lacks": {},
    }

    line = "not ready, missing: dispatcher-0: silent for 1.0 s\n"
    monkeypatch.setattr(doctor, "BACKENDS", ((),))
    monkeypatch.setattr(doctor, "check_machine", lambda _: said.append(capsys.readouterr().out) or [])
    monkeypatch.setattr(doctor, "_check_system", lambda _: [])
    doctor.doctor()
    assert said == ["", line]


async def test_the_doctor_listens_on_only_while_a_kind_of_process_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in {"LISTEN_S": 1e6, "HEARD_S": 0.01, "AGAIN_S": 0.0}.items():
        monkeypatch.setattr(doctor, name, seconds)
    bus, subjects = Broker().connect(), Subjects()
    asked = asyncio.create_task(doctor._listen(bus, subjects))
    dispatcher = DispatcherHeartbeat(dispatcher="d0", incarnation=1, at=0.0)
    worker = WorkerHeartbeat(worker="w0", hardware="cpu", incarnation=1, at=0.0, devices=[], instances=[])

    for _ in range(10):
        bus.publish(subjects.dispatcher_heartbeat("d0"), encode(dispatcher))
        await asyncio.sleep(0.01)
    assert not asked.done(), "no worker says anything"

    def heard() -> bool:
        bus.publish(subjects.worker_heartbeat("w0"), encode(worker))
        return asked.done()

    await until(heard)
    assert ({*asked.result().workers}, asked.result().dispatchers) == ({"w0"}, {"d0"})


@pytest.mark.parametrize("looks", [[[], ["x: silent"]], [["x: silent"], []]])
def test_the_doctor_tells_what_is_missing_when_it_begins_or_ends(
    looks: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = iter(looks)
    monkeypatch.setattr(doctor, "missing_now", lambda _: next(found))
    nobody = SystemAddress("nats://127.0.0.1:1", "postgresql://127.0.0.1:1/none", metrics="http://127.0.0.1:1/metrics")
    checks = {one.check: one for one in asyncio.run(doctor.check_system(nobody))}
    assert checks["parts"].state == "failed"
    assert "x: silent" in checks["parts"].detail


# -- `infaas query`: what is printed of an answer.


def shown(capsys: pytest.CaptureFixture[str], **fields: object) -> list[str]:
    got = read_answer(msgpack.packb({**answer({"inputs": [[1.0], [2.0]]}), **fields}))
    assert not isinstance(got, Refused)
    _render(got)
    return capsys.readouterr().out.splitlines()


def test_answers_name_variant_query_or_members(capsys: pytest.CaptureFixture[str]) -> None:
    lines = shown(capsys, query="0f", cached=True)
    assert any(line.startswith("variant    adder-v1 (model") for line in lines)
    assert any(line.startswith("latency") and line.endswith("from the cache") for line in lines)
    assert lines[-1] == "query      0f"
    assert not any(line.startswith(("members", "confidence")) for line in lines)
    several = {"members": ["a@1", "b@2"], "missing": 1, "confidence": 1 / 3, "confidences": [2 / 3, 1 / 3]}
    lines = shown(capsys, model="", version="", variant="", hardware="", worker="", **several)
    assert "members    a@1, b@2 (1 missing)" in lines
    assert "confidence 0.3333 (0.6667, 0.3333)" in lines
    assert not any(line.startswith(("variant", "ran on")) for line in lines)


def test_an_explanation_shows_members_before_variants(capsys: pytest.CaptureFixture[str]) -> None:
    chosen = {"variant": "a1", "state": "Active", "hardware": "cpu", "why_not": ""}
    row = {
        "member": "a@1",
        "probability": 0.625,
        "weight": None,
        "variant": "a1",
        "why": "one member is asked, by chance",
    }
    _render_explain({"chosen": chosen, "candidates": [chosen], "members": [row]}, wide=True)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["member", "probability", "weight", "variant", "why"]
    assert lines[1].split() == ["a@1", "0.625", "-", "a1", *row["why"].split()]
    assert "the best for its model" in lines[-1]
    named = {**chosen, "model": "a", "version": "1", "functions": "before o.py:f (1.25 ms)"}
    _render_explain({"chosen": named, "candidates": [named]}, wide=True)
    assert (
        capsys.readouterr()
        .out.splitlines()[-1]
        .startswith("functions of its owner: a 1: before o.py:f (1.25 ms), in the sandbox")
    )


def test_an_explanation_of_a_pipeline_shows_its_stages_before_their_variants(
    capsys: pytest.CaptureFixture[str],
) -> None:
    first = {"variant": "a1", "state": "Active", "hardware": "cpu", "why_not": "", "stage": "cheap"}
    other = {**first, "variant": "b1", "stage": "dear", "why_not": "accuracy 0.5000 is below 0.8"}
    stage = {
        "vertex": "cheap", "app": "digits", "share_ms": 150.0, "accuracy": None, "when": [], "variant": "a1",
        "planned": False, "waiting": 0, "why": "it is being loaded, and in time",
    }  # fmt: skip
    unmet = {**stage, "vertex": "dear", "accuracy": 0.8, "when": ["cheap: y > 0.5", "x is visited"], "variant": None}
    _render_explain({"chosen": first, "candidates": [first, other], "stages": [stage, unmet]}, wide=True)
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split()[:6] == ["cheap", "digits", "150", "-", "always", "a1"]
    assert "cheap: y > 0.5 or x is visited" in lines[2]
    assert ">= 0.8" in lines[2]
    assert lines[-1].split()[:2] == ["dear", "b1"]
    assert "what its stage would get" in lines[-2]

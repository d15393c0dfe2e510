"""The user commands as processes, against a small peer that answers by the contract on a real NATS server."""

import asyncio
import json
import os
import sys
import time
from contextlib import AbstractAsyncContextManager

import numpy as np
import psycopg
import pytest

from bus.messages.events import AppObjective
from bus.natsbus import NatsBus
from services.recorder.events import EventWriter
from services.shell.store import Store
from tests.support.clients.responders import Responder, answer, refusal
from tests.support.data.events import event, message, outcome

CLOSEST = {"model": "m", "variant": "m-v1", "accuracy": 0.9, "latency_ms": 12.0, "cost": 0.25}
APP = {
    "app": "digits",
    "models": ["mlp"],
    "variants": 2,
    "latency_ms": 20.0,
    "slo_target": 0.999,
    "min_instances": 1,
    "inputs": [{"name": "x", "datatype": "FP32", "shape": [4]}],
    "outputs": [{"name": "y", "datatype": "FP32", "shape": [-1]}],
}
UNKNOWN = {
    "attainment_1h": None,
    "attainment_5m": None,
    "forecast": None,
    "headroom": None,
    "drift": [],
}  # without a database
VARIANT = {
    "app": "digits",
    "model": "mlp",
    "variant": "mlp-v1-ort-fp32-t1-b8",
    "hardware": "cpu",
    "accuracy": 0.93,
    "latency_ms": 0.05,
    "load_ms": 12.5,
    "memory_mb": 31.0,
    "saturation_qps": 81234.0,
    "price_per_hour": 0.04,
    "cost_per_1000": 0.0000123,
    "state": "Active",
    "instances": 2,
    "reclaimable": 1,
    "simulated": False,
}
WORKER = {
    "worker": "w0",
    "kind": "plain", "state": "Ready",
    "devices": [
        {
            "device": "cpu", "kind": "cpu", "alive": True, "utilisation": 0.25, "cores": 2, "cores_used": 0.5,
            "memory_mb": 8000.0, "memory_used_mb": 500.0, "price_per_hour": 0.1, "simulated": False,
        }
    ],
    "instances": [
        {"variant": VARIANT["variant"], "device": "cpu", "state": "Active", "reclaimable": True, "queued": 3, "load": 5.0, "latency_ms": 1.0, "mean_batch": 2.0}
    ],
}  # fmt: skip
EXPLANATION = {
    "chosen": {"variant": "mlp-v1-ort-fp32-t1-b8"},
    "candidates": [
        {"variant": "mlp-v1-ort-fp32-t1-b8", "state": "Active", "worker": "w0", "accuracy": 0.93, "latency_ms": 1.0, "load_ms": 0.0, "cost_per_1000": 0.1, "why_not": ""},
        {"variant": "other", "state": "Inactive", "worker": None, "hardware": "cpu", "accuracy": 0.5, "latency_ms": 1.0, "load_ms": 9.0, "cost_per_1000": 0.1, "why_not": "accuracy 0.5 is below 0.9"},
    ],
}  # fmt: skip


def behave(body, n):
    if body.get("accuracy") == 1:
        return refusal("unsatisfiable", "no variant is that accurate", closest=CLOSEST, retry_after_ms=40)
    if body.get("model") == "classifier":
        scores = np.eye(10, dtype="<f4")[[7, 2]]
        return answer(body, outputs={"scores": {"datatype": "FP32", "shape": [2, 10], "data": scores.tobytes()}})
    return answer(body)


class Commands(AbstractAsyncContextManager):
    """Runs commands against this test's own peer."""

    def __init__(self, directory, url, prefix, sql="postgresql://nobody@127.0.0.1:1/none"):
        self.directory = directory
        self.url = url
        self.prefix = prefix
        places = {"nats": url, "sql": sql, "prefix": prefix, "running": True}
        (directory / "endpoints.json").write_text(json.dumps(places))

    async def __aenter__(self):
        self.bus = await NatsBus.connect(self.url, name="peer")
        self.queries = await Responder(self.bus, behave).listen(f"{self.prefix}.query.*")
        await Responder(self.bus, lambda body, n: EXPLANATION).listen(f"{self.prefix}.explain.digits")
        for what, items in (("apps", [APP]), ("models", []), ("variants", [VARIANT]), ("workers", [WORKER])):
            await Responder(self.bus, lambda body, n, items=items: {"items": items}).listen(
                f"{self.prefix}.list.{what}"
            )
        return self

    async def __aexit__(self, *exc):
        await self.bus.close()

    async def __call__(self, *arguments):
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-m", "infaas.cli", *map(str, arguments), "--data-dir", str(self.directory)),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": os.getcwd()},
        )
        out, err = await asyncio.wait_for(process.communicate(), 60)
        assert b"Traceback" not in err, err.decode()
        return process.returncode, out.decode(), err.decode()


@pytest.fixture
def infaas(tmp_path, nats_url, prefix):
    return Commands(tmp_path, nats_url, prefix)


async def test_query_prints_the_answer(infaas):
    code, out, err = await infaas(
        "query", "--app", "a", "--json-input", "[[1, 2]]", "--latency-ms", 20, "--model", "classifier"
    )
    assert (code, err) == (0, "")
    assert "class 7 (1), 2 (1)" in out
    for part in ("adder-v1", "1.5 ms", "US$ 0.001", "missed     nothing"):
        assert part in out
    assert infaas.queries.heard[0]["latency_ms"] == 20


async def test_query_of_a_file_as_json(infaas, tmp_path):
    np.save(tmp_path / "x.npy", np.ones((3, 5), np.float32))

    code, out, err = await infaas("query", "--app", "a", "--input", tmp_path / "x.npy", "--id", "mine", "--json")
    assert (code, err) == (0, "")
    told = json.loads(out)
    assert told["outputs"] == {"sum": [5.0, 5.0, 5.0]}
    assert (told["id"], told["batch"], told["missed"]) == ("mine", 3, [])


async def test_a_refused_query_exits_1_with_the_offer(infaas):
    code, out, err = await infaas("query", "--app", "a", "--json-input", "[[1]]", "--accuracy", 1)
    assert (code, out) == (1, "")
    assert err.count("\n") == 1
    for part in (
        "unsatisfiable: no variant is that accurate",
        "m-v1 (accuracy 0.9, latency 12 ms, US$ 0.25 per 1,000 queries",
        "again in 40 ms",
    ):
        assert part in err
    code, out, err = await infaas("query", "--app", "a", "--json-input", "[[1]]", "--accuracy", 1, "--json")
    assert (code, json.loads(out)["error"]["closest"]) == (1, CLOSEST)


async def test_lists(infaas):
    for command, shown, items in (
        ("apps", ["digits", "mlp", "x: FP32[n, 4]", "y: FP32[n, any]", "20", "99.9 %"], [{**APP, **UNKNOWN}]),
        (
            "variants",
            ["mlp-v1-ort-fp32-t1-b8", "Active (x2, 1 reclaimable)", "81,234", "1.23e-05", "0.93"],
            [VARIANT],
        ),
        ("workers", ["w0", "plain", "25%", "0.5 of 2", "500 of 8000", "Active (reclaimable)"], [WORKER]),
        ("models", ["no models yet"], []),
    ):
        code, out, err = await infaas(command, "--wide")
        assert (code, err) == (0, ""), command
        assert [part for part in shown if part not in out] == []
        code, out, err = await infaas(command, "--json")
        assert (code, json.loads(out), err) == (0, {"items": items}, "")


async def test_status_is_one_page(infaas, prefix):
    registrations = await infaas.bus.key_value(f"{prefix}-status")
    import msgpack

    await registrations.put(
        "registration.r1", msgpack.packb({"app": "a", "model": "m", "state": "building", "progress": 0.4})
    )
    await registrations.put(
        "registration.r2", msgpack.packb({"app": "a", "model": "bad", "state": "failed", "reason": "no ONNX file"})
    )
    await registrations.put("registration.r3", msgpack.packb({"app": "a", "model": "good", "state": "done"}))
    code, out, err = await infaas("status", "--wide")
    assert (code, err) == (0, "")
    for part in (
        "1 of 1 workers ready, 1 apps, 1 variants, 1 instances",
        "cpu 25%, 1 instances (1 reclaimable)",
        "1 Active",
        "registering m for a: building, 40 %",
        "no ONNX file",
    ):
        assert part in out
    assert "good" not in out
    code, out, _ = await infaas("status", "--json")
    assert json.loads(out)["apps"] == [{**APP, **UNKNOWN}]


async def test_targets_stand_beside_what_was_reached_and_is_expected(
    tmp_path, nats_url, prefix, database_dsn, reader_dsn, superuser_dsn
):
    now = time.time()
    store = Store(database_dsn, "test")
    ok, late = outcome(time=now - 1), outcome(time=now - 2, outcome="late")
    before = [outcome(time=now - 900 + i, outcome="refused") for i in range(2)]
    long_ago = [outcome(time=now - 4000, outcome="refused")]
    newest = event(AppObjective, time=now - 1, forecast=1234.0, headroom=1.75)
    older = event(AppObjective, time=now - 3, forecast=1.0, headroom=9.5)
    EventWriter(store).write([message(ok, late, *before, *long_ago), message(newest, older)])
    store.close()

    async with Commands(tmp_path, nats_url, prefix, reader_dsn) as infaas:
        _, out, _ = await infaas("apps", "--json")
        assert json.loads(out)["items"] == [
            {**APP, "attainment_1h": 0.25, "attainment_5m": 0.5, "forecast": 1234.0, "headroom": 1.75, "drift": []}
        ]
        for command, shown in (
            ("apps", ["99.9 %", "25 %", "50 %"]),
            ("status", ["99.9 %", "50 %", "1,234", "2,160"]),
        ):
            code, out, err = await infaas(command, "--wide")
            assert (code, err) == (0, "")
            assert [part for part in shown if part not in out] == [], out

        with psycopg.connect(superuser_dsn) as owner:  # as an older version's database has it
            owner.execute("DROP VIEW infaas.drift_events")
        _, out, _ = await infaas("status", "--json")
        shown = json.loads(out)
        assert (shown["apps"][0]["attainment_5m"], shown["apps"][0]["headroom"]) == (0.5, 1.75)
        assert list(shown["lacks"]) == ["drift"]
        _, out, _ = await infaas("status", "--wide")
        assert 'no drift: relation "infaas.drift_events" does not exist: python -m services.shell.store prepare' in out
        assert "1,234" in out


async def test_explain_names_the_chosen_and_why_not_the_others(infaas):
    code, out, err = await infaas("explain", "--app", "digits", "--accuracy", 0.9, "--wide")
    assert (code, err) == (0, "")
    chosen = next(line for line in out.splitlines() if line.startswith("->"))
    assert "mlp-v1-ort-fp32-t1-b8" in chosen
    assert "accuracy 0.5 is below 0.9" in out
    code, out, _ = await infaas("explain", "--app", "digits", "--json")
    assert json.loads(out) == EXPLANATION


async def test_bench_closed_open_and_trace(infaas, tmp_path):
    (tmp_path / "trace.txt").write_text("5\n5\n")

    common = ("--app", "digits", "--seconds", 2, "--warmup", 0.1, "--latency-ms", 5000, "--json")
    code, out, _ = await infaas("bench", *common, "--closed", 4)
    closed = json.loads(out)
    assert (code, closed["mode"]) == (0, "closed loop of 4")
    assert closed["answered"] == closed["offered"] > 0
    assert closed["variants"] == {"adder-v1": closed["answered"]}
    code, out, _ = await infaas("bench", *common, "--rate", 100, "--arrivals", "gamma", "--cv", 2)
    opened = json.loads(out)
    assert "gamma with CV 2" in opened["mode"]
    assert (opened["refused"], opened["failed"], opened["effective_accuracy"]) == (0, 0, pytest.approx(0.9))
    code, out, err = await infaas(
        "bench", "--app", "digits", "--seconds", 1, "--warmup", 0, "--trace", tmp_path / "trace.txt"
    )
    assert code == 0
    assert "5: 5 answered" in out
    assert "trace.txt" in err
    several = (
        "--app",
        "other",
        "--shares",
        "0.7,0.3",
        "--arrivals",
        "mmpp",
        "--rates",
        "50,400",
        "--dwell",
        "0.1,0.1",
    )
    code, out, _ = await infaas("bench", *common, *several)
    spread = json.loads(out)
    assert (code, spread["app"], list(spread["apps"])) == (0, "digits,other", ["digits", "other"])
    assert spread["apps"]["digits"]["offered"] > spread["apps"]["other"]["offered"] > 0
    assert sum(part["answered"] for part in spread["apps"].values()) == spread["answered"] == spread["offered"]
    bodies = [body for body in infaas.queries.heard if body["inputs"] != infaas.queries.heard[0]["inputs"]]
    assert bodies, "the inputs are all the same"
    assert {tuple(body["inputs"]["x"]["shape"]) for body in infaas.queries.heard} == {(1, 4)}


async def test_bench_says_why_nothing_can_be_measured(infaas):
    code, out, err = await infaas("bench", "--app", "digits", "--accuracy", 1, "--seconds", 1)
    assert (code, out) == (1, "")
    assert "unsatisfiable" in err

"""Engines on other machines as variants of a whole system: an INFaaS gateway, and a stock server that dies, hangs and comes back."""

import asyncio
import json
import subprocess
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import infaas
from infaas.demo import digits
from infaas.errors import Refused
from tests.support.clients.retrying import insist
from tests.support.models import tiny_models
from tests.support.servers.engine import StockEngine
from tests.support.servers.nats import free_port
from tests.support.servers.processes import eventually, program
from tests.support.servers.system import APP, Whole, running, talk

PRICE = 0.36  # US$ per hour of an instance
CONFIG = """
[executor]
remote_hosts = ["127.0.0.1"]
watchdog_least_s = 5.0
[prices.per_hour]
remote = {price}
"""


def served(port: int) -> AbstractContextManager["subprocess.Popen[str]"]:
    """The stock engine, as a process that can be killed."""
    return program("tests.support.servers.engine", str(port), patience=0.0)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("remote")
    digits.save_validation(made / "validation.npz")
    (made / "infaas.toml").write_text(CONFIG.format(price=PRICE))
    return made


@pytest.fixture(scope="module")
def whole(place: Path) -> Iterator[Whole]:
    with running(place / "data", "--no-dashboard", "--config", str(place / "infaas.toml")) as made:
        yield made


@pytest.fixture(scope="module")
def register(whole: Whole, place: Path) -> Callable[..., "subprocess.CompletedProcess[str]"]:
    def run(what: str, app: str, model: str) -> "subprocess.CompletedProcess[str]":
        about = ("--app", app, "--model", model, "--validation", str(place / "validation.npz"))
        return whole.command("register", what, *about, "--json")

    return run


@pytest.fixture(scope="module")
def here(whole: Whole, register: Callable[..., Any]) -> Whole:
    """With an app of its own, whose variants answer the same."""
    file = whole.directory.parent / "exact.onnx"
    file.write_bytes(tiny_models.exact(digits.models()["mlp-s"].read_bytes()))
    assert register(str(file), APP, "mlp-s").returncode == 0
    return whole


def ask(whole: Whole, app: str, x: np.ndarray, **needs: Any) -> Any:
    return talk(whole, lambda client: client.query(app, x, **needs))


def refused(whole: Whole, app: str, x: np.ndarray, **needs: Any) -> Refused:
    with pytest.raises(Refused) as found:
        ask(whole, app, x, **needs)
    return found.value


def test_a_gateway_of_infaas_is_an_engine(here: Whole, register: Callable[..., Any]) -> None:
    done = register(f"{here.gateway}/v2/models/{APP}", "far", "far")
    assert done.returncode == 0, done.stderr
    near, far = (ask(here, app, here.x[:16], latency_ms=60_000) for app in (APP, "far"))
    assert near.variant != far.variant
    assert np.allclose(*(next(iter(answer.outputs.values())) for answer in (near, far)), rtol=1e-4, atol=1e-6)
    assert (far.hardware, far.missed) == ("remote", [])
    for item in here.told("variants", "--app", "far"):
        assert (item["hardware"], item["framework"], item["simulated"]) == ("remote", "remote", False)
        assert item["engine"] == here.gateway.removeprefix("http://")
        assert item["price_per_hour"] == pytest.approx(PRICE)
        assert item["accuracy"] > 0.9
        assert item["latency_ms"] > 0
    table = here.done("variants", "--app", "far", "--wide")
    assert f"remote ({here.gateway.removeprefix('http://')})" in table
    assert far.cost == pytest.approx(PRICE / 3600 * far.compute_ms / 1000 * 16 / far.batch, rel=0.5)


def test_what_it_costs_is_booked_by_the_instance(here: Whole, register: Callable[..., Any]) -> None:
    rows: list[tuple[Any, ...]] = []

    def booked() -> bool:
        ask(here, "far", here.x[:1], latency_ms=60_000)
        rows[:] = here.rows(
            "SELECT app, sum(cost), sum(seconds) FROM infaas.cost_events WHERE hardware = 'remote' GROUP BY app"
        )
        return any(app == "far" and seconds > 5 for app, _, seconds in rows)

    assert eventually(booked)
    for app, cost, seconds in rows:
        assert cost == pytest.approx(PRICE / 3600 * seconds if app == "far" else 0.0, abs=1e-9)


def test_an_engine_that_dies_costs_queries_and_comes_back(here: Whole, register: Callable[..., Any]) -> None:
    port = free_port()
    with served(port) as process:
        url = f"http://127.0.0.1:{port}/v2/models/digits"
        assert eventually(lambda: register(url, "stock", "stock").returncode == 0)
        assert ask(here, "stock", here.x[:8], latency_ms=60_000).hardware == "remote"
        process.kill()
        process.wait()
        for _ in range(3):
            gone = refused(here, "stock", here.x[:2], latency_ms=60_000)
            assert gone.code == "model_error"
            assert f"the engine at 127.0.0.1:{port} cannot be used" in gone.message
        assert ask(here, "far", here.x[:2], latency_ms=60_000).hardware == "remote", "another engine's app is as before"
    with served(port):
        assert eventually(lambda: _answers(here, "stock"))


def _answers(whole: Whole, app: str) -> bool:
    try:
        return bool(ask(whole, app, whole.x[:1], latency_ms=60_000).outputs)
    except Refused:
        return False


def test_an_engine_that_hangs_or_answers_garbage_costs_its_own_queries(
    here: Whole, register: Callable[..., Any]
) -> None:
    stock = StockEngine()
    stock.start()
    try:
        assert register(stock.url("digits"), "bad", "bad").returncode == 0
        assert eventually(lambda: _answers(here, "bad"))
        for mode, words in (
            ("garbage", "cannot be read"), ("error", "on fire"), ("redirect", "redirects"), ("wide", "FP32"), ("cut", "cut off"),
            ("nan", "returned NaN"), ("many", "rows"),
        ):  # fmt: skip
            stock.mode = mode

            def says(words: str = words) -> bool:
                """An engine on a machine that stands still is one that hangs."""
                error = refused(here, "bad", here.x[:1], latency_ms=60_000)
                assert error.code == "model_error"
                assert words in error.message or "took too long" in error.message, error.message
                return words in error.message

            assert eventually(says)
        stock.mode = "hang"

        async def beside() -> list[BaseException | Any]:
            async with await infaas.connect(here.nats) as client:
                hung = [asyncio.ensure_future(client.query("bad", here.x[:1], latency_ms=60_000)) for _ in range(3)]
                await asyncio.sleep(0.3)
                for _ in range(5):
                    assert (await client.query("far", here.x[:1], latency_ms=60_000)).hardware == "remote"
                return await asyncio.gather(*hung, return_exceptions=True)

        ends = asyncio.run(beside())
        assert [getattr(end, "code", end) for end in ends] == ["model_error"] * 3
        assert "took too long" in str(ends[0])
        stock.mode = ""
        assert eventually(lambda: _answers(here, "bad"))
    finally:
        stock.stop()


async def test_many_at_once_get_their_own_answers(here: Whole) -> None:
    async with await infaas.connect(here.nats) as client:
        expected = next(iter((await client.query(APP, here.x[:64], latency_ms=60_000)).outputs.values()))
        sent = [client.query("far", here.x[i : i + 2], latency_ms=60_000) for i in range(0, 64, 2)]
        for i, answer in enumerate(await asyncio.gather(*sent)):
            (found,) = answer.outputs.values()
            assert np.allclose(found, expected[2 * i : 2 * i + 2], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("http://localhost:{port}/v2/models/digits", "executor.remote_hosts"),
        ("http://169.254.169.254/v2/models/digits", "executor.remote_hosts"),
        ("http://user:word@127.0.0.1:{port}/v2/models/digits", "credentials"),
        ("http://127.0.0.1:{port}/metrics", "URL of a model"),
        ("http://127.0.0.1:{port}/v2/models/nothing", "answered 40"),
    ],
)
def test_what_is_no_engine_is_refused_with_the_reason(
    here: Whole, register: Callable[..., Any], url: str, words: str
) -> None:
    done = register(url.format(port=here.gateway.rpartition(":")[2]), "none", "none")
    assert done.returncode == 1
    assert words in done.stderr
    assert "Traceback" not in done.stderr


PIPELINE = """
[pipeline]
name = "twice"
latency_ms = 5000
[[vertex]]
name = "near"
app = "digits"
inputs = {{ {x} = "$.{x}" }}
[[vertex]]
name = "far"
app = "far"
inputs = {{ {x} = "$.{x}" }}
[[edge]]
from = "near"
to = "far"
[output]
first = "near.{y}"
second = "far.{y}"
[[load]]
rate = 10
arrivals = "poisson"
"""


def test_a_stage_of_a_pipeline_may_be_remote(here: Whole, place: Path) -> None:
    """Visited, planned and deployed like any other."""
    (app,) = (one for one in here.told("apps") if one["app"] == APP)
    file = place / "twice.toml"
    file.write_text(PIPELINE.format(x=app["inputs"][0]["name"], y=app["outputs"][0]["name"]))
    here.done("pipeline", "add", str(file))

    def both() -> bool:
        answer = insist(partial(ask, here, "twice", here.x[:8], latency_ms=60_000))
        assert np.allclose(answer.outputs["first"], answer.outputs["second"], rtol=1e-4, atol=1e-6)
        return True

    assert both()
    plan = here.told("pipeline", "plan", str(file))
    assert {name: one["hardware"] for name, one in plan["vertices"].items()} == {
        "near": "cpu",
        "far": "remote",
    }
    (place / "plan.json").write_text(json.dumps(plan))
    here.done("pipeline", "deploy", str(place / "plan.json"))

    def loaded() -> bool:
        (one,) = here.told("pipeline", "list")
        return all(stage["instances"] >= stage["replicas"] >= 1 for stage in one["vertices"])

    assert eventually(loaded)
    assert both()

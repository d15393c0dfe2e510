"""`infaas.serve`, which serves in the process that calls it, and `infaas up --fused`, which has a query's way in one process."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import infaas
from infaas.client import Client
from infaas.errors import BadInput, Refused
from infaas.serving import LACKS, Served
from services.shell.host.process import child_pids, free_port
from tests.support.clients.responders import until
from tests.support.models import tiny_models
from tests.support.servers.processes import environ, eventually, fetched, pids_of
from tests.support.servers.system import running, talk

pytest.importorskip("onnxruntime")
SCRIPT = """
import sys
import infaas, numpy as np
data = np.load("validation.npz")
system = infaas.serve("model.onnx", data["x"], data["y"], app="digits")
answer = system.query("digits", data["x"][:3])
assert answer.output.shape[0] == 3, answer
print("answered by", answer.variant, "; nats" if "nats" in sys.modules else "")
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a model and its validation set."""
    found = tmp_path_factory.mktemp("serve")
    x, y = tiny_models.digits()
    (found / "model.onnx").write_bytes(tiny_models.exact(tiny_models.mlp()))
    (found / "validation.npz").write_bytes(tiny_models.npz(x=x, y=y))
    return found


def arrays(place: Path) -> tuple[np.ndarray, np.ndarray]:
    with np.load(place / "validation.npz") as stored:
        return stored["x"], stored["y"]


@pytest.fixture(scope="module")
def served(place: Path) -> Iterator[Served]:
    x, y = arrays(place)
    with infaas.serve(place / "model.onnx", x, y, app="digits", port=free_port()) as system:
        yield system


@pytest.mark.parametrize("how", ["script", "stdin"])
def test_a_fresh_interpreter_serves_and_ends_without_close(place: Path, how: str) -> None:
    """As a script, and typed line by line as in a notebook. No server is started, and nothing is left behind."""
    (place / "served.py").write_text(SCRIPT)
    words = [sys.executable, "served.py"] if how == "script" else [sys.executable, "-i", "-q", "-"]
    done = subprocess.run(
        words, check=False, cwd=place, input=SCRIPT, capture_output=True, text=True, timeout=120, env=environ()
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("answered by digits-v1-"), done
    assert "; nats" not in done.stdout


def test_a_model_that_cannot_be_served_leaves_nothing_behind(place: Path) -> None:
    x, y = arrays(place)
    with pytest.raises(infaas.BadInput):
        infaas.serve(place / "validation.npz", x, y)
    with pytest.raises(infaas.InfaasError):
        infaas.serve(place / "model.onnx", x[:, :3], y)
    assert not any(b"sandbox" in Path(f"/proc/{pid}/cmdline").read_bytes() for pid in child_pids())
    assert eventually(lambda: "watchdog" not in {thread.name for thread in threading.enumerate()})


def test_it_is_asked_like_a_system(served: Served, place: Path) -> None:
    x, _ = arrays(place)
    answer = served.query("digits", x[:2], accuracy=0.5, latency_ms=10_000)
    assert answer.output.shape == (2, 4)
    assert not answer.missed
    with pytest.raises(Refused, match="unsatisfiable"):
        served.query("digits", x[:1], cost=1e-15)
    assert served.query("nobody", x[:1], raise_refused=False).code == "unknown_app"
    assert served.explain("digits")["chosen"]["worker"] == "here"
    assert [one["app"] for one in served.apps()] == ["digits"]
    assert eventually(lambda: any(one["outcome"] == "refused" for one in served.outcomes("digits")))
    (row,) = [one for one in served.outcomes("digits") if one["outcome"] == "refused"]
    assert (row["code"], row["cost_limit"]) == ("unsatisfiable", 1e-15)
    status = served.status()
    assert status["lacks"].keys() == LACKS.keys()
    assert status["outcomes"]["unsatisfiable"] == 1


def test_its_gateway_answers_over_http(served: Served, place: Path) -> None:
    x, _ = arrays(place)
    tensor = {"name": "x", "shape": [1, *x.shape[1:]], "datatype": "FP32", "data": x[0].tolist()}
    _, said = fetched(f"{served.url}/v2/models/digits/infer", {"inputs": [tensor]})
    assert json.loads(said)["model_name"] == "digits"
    _, said = fetched(f"{served.url}/v2/models/digits/stats")
    assert json.loads(said)["model_stats"][0]["inference_count"] >= 1
    port = int(served.url.rpartition(":")[2])
    with pytest.raises(BadInput, match=f"port: {port} is in use"):
        Served(port)


def test_ensembles_caches_and_pipelines_work_as_the_actors_are_the_same(served: Served, place: Path) -> None:
    x, y = arrays(place)
    done = served.register(place / "model.onnx", x, y, app="second")
    assert done["state"] == "done"
    served.admin("link-model", app="digits", model="second")
    served.admin("set-selection", app="digits", policy="exp4")
    served.admin("set-selection", app="second", cache_mb=1.0)
    head, vertex = {"name": "both", "latency_ms": 10_000.0}, {"name": "one", "app": "second", "inputs": {"x": "$.x"}}
    served.admin("set-pipeline", pipeline=head, vertex=[vertex], output={"scores": "one.scores"})
    assert eventually(lambda: served.query("digits", x[:1]).query is not None)
    answer = served.query("digits", x[:1])
    served.feedback("digits", int(y[0]), query=answer.query)
    assert {one["member"]: one["n"] for one in served.selection("digits")} == {"digits": 1, "second": 1}
    assert served.query("both", x[:1]).output.shape[0] == 1
    assert eventually(lambda: served.query("second", x[:1]).cached)


def test_a_fused_system_answers_or_refuses_what_its_only_process_had_and_serves_again(
    place: Path, tmp_path: Path
) -> None:
    """It is killed under load. Over the bus each query has its answer or a refusal; over HTTP what was under way breaks."""
    x, _ = arrays(place)
    with running(tmp_path / "data", "--fused", "--no-dashboard") as whole:
        whole.register("digits", (place / "model.onnx").read_bytes(), *arrays(place))
        assert whole.told("status")["lacks"].keys() == {"fail-over"}
        assert "no fail-over" in whole.done("status")
        assert len(pids_of(whole.directory, "dispatcher")) == len(pids_of(whole.directory, "registrar")) == 1

        async def work(client: Client) -> Counter[str]:
            counts: Counter[str] = Counter()
            crossed: list[str] = []
            prepared = await client.prepare("digits", x[:1])
            await client.bus.subscribe("infaas.execute.>", lambda delivery: crossed.append(delivery.subject))
            ended = asyncio.Event()

            async def ask() -> None:
                while not ended.is_set():
                    reply = await client.ask(prepared, raise_refused=False)
                    counts["refused" if isinstance(reply, Refused) else "answered"] += 1

            asking = [asyncio.create_task(ask()) for _ in range(16)]
            await until(lambda: counts["answered"] > 100)
            assert not crossed
            (old,) = pids_of(whole.directory, "dispatcher")
            os.kill(old, signal.SIGKILL)
            before = counts["answered"] + 16  # what was on its way back may count yet
            await until(
                lambda: counts["answered"] > before + 100 and [old] != pids_of(whole.directory, "dispatcher"), 60.0
            )
            ended.set()
            await asyncio.gather(*asking)
            return counts

        assert talk(whole, work)["answered"] > 200
        tensor = {"name": "x", "shape": [1, *x.shape[1:]], "datatype": "FP32", "data": x[0].tolist()}
        assert fetched(f"{whole.gateway}/v2/models/digits/infer", {"inputs": [tensor]})[0] == 200

"""Offline jobs on a real system: everything comes out once and in order, whatever is killed meanwhile."""

import asyncio
import json
import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import msgpack
import numpy as np
import pytest

import infaas
from bus.messages.jobs import JobStatus
from bus.natsbus import NatsBus
from tests.support.data import offline_inputs
from tests.support.models import tiny_models
from tests.support.servers.nats import run
from tests.support.servers.processes import eventually
from tests.support.servers.system import Whole, running

APP = "honest"
X = tiny_models.digits(500)[0]
Y = np.maximum(X @ tiny_models.weights()[0], 0) @ tiny_models.weights()[1]
CLASSES = ["north", "east", "south", "west"]
# Small chunks, so that a job lasts; and a busy machine under the tests is no reason to wait.
CONFIG = """
[registrar]
threads = [1]
max_batches = [8]
[autoscaler]
policy = "off"
[jobs]
chunk_items = 2
utilisation_below = 1.0
latency_ratio = 1000.0
"""


class System(Whole):
    """A running `infaas up` with an honest model, asked with X, FP32 [n, 16], of which it says Y, FP32 [n, 4]."""

    @property
    def files(self) -> Path:
        return self.directory / "jobs"

    def kill(self, service: str) -> None:
        assert eventually(lambda: len(self.pids(service)) == 1)
        os.kill(self.pids(service)[0], signal.SIGKILL)

    def is_right(self, name: str) -> bool:
        """Every output, in order, and none twice."""
        found = offline_inputs.read(self.files / name)
        return found.shape == Y.shape and bool(np.abs(found - Y).max() < 1e-4 * np.abs(Y).max())

    def outcomes(self, job: str) -> tuple[int, int, float]:
        """Queries, items and cost that SQL has of a job."""
        [(count, items, cost)] = self.rows(
            "SELECT count(*), coalesce(sum(items), 0), coalesce(sum(cost), 0) FROM infaas.query_outcomes"
            " WHERE policy = 'offline' AND outcome = 'ok' AND id LIKE %s",
            f"{job}/%",
        )
        return count, int(items), cost


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    directory = tmp_path_factory.mktemp("jobs") / "data"
    config = directory.parent / "infaas.toml"
    config.write_text(CONFIG)
    with running(directory, "--no-dashboard", "--no-gateway", "--config", str(config)) as whole:
        whole.register(APP, tiny_models.exact(tiny_models.mlp()), None, None, "--labels", ",".join(CLASSES))
        yield System(*whole)


def test_500_come_out_in_order_and_once_although_every_process_is_killed(system: System) -> None:
    source = offline_inputs.write(system.files / "in.npy", X)
    kills = {20: "executor", 60: "registrar", 120: "monitor"}  # far from the end, which a slow client may see first

    async def main() -> JobStatus:
        async with infaas.connect(data_dir=system.directory) as client:
            job = await client.submit(APP, str(source), str(system.files / "out.npy"))
            seen = []

            def progress(status: JobStatus) -> None:
                seen.append(status.done)
                for done in [done for done in kills if done <= status.done < 500]:
                    system.kill(kills.pop(done))

            status = await client.wait_job(job, on_progress=progress, timeout=400)
            assert status.state == "done", status
            assert (status.total, status.done, status.failed, status.progress) == (500, 500, 0, 1.0)
            assert seen == sorted(seen)
            assert [item["state"] for item in await client.jobs(app=APP) if item["job"] == job] == ["done"]
            return status

    status = run(main())
    assert kills == {}, "the job was through before everything was killed"
    assert system.is_right("out.npy")
    assert eventually(lambda: sorted(os.listdir(system.files)) == ["in.npy", "out.npy"]), os.listdir(system.files)
    assert eventually(lambda: system.outcomes(status.job)[:2] == (250, 500)), system.outcomes(status.job)
    time.sleep(0.5)  # a second outcome of a chunk would be on its way now
    assert system.outcomes(status.job)[:2] == (250, 500)
    assert system.outcomes(status.job)[2] > 0
    row = "SELECT state, total, done, failed, input, finished > started FROM infaas.jobs WHERE job = %s"
    assert eventually(lambda: system.rows(row, status.job) == [("done", 500, 500, 0, source.as_uri(), True)])
    offline_in_slo = "SELECT coalesce(sum(queries), 0) FROM infaas.slo_by_app_minutely WHERE app = %s"
    assert system.rows(offline_in_slo, APP) == [(0,)]


async def test_commands_move_a_job_through_the_object_store_and_from_anywhere(system: System) -> None:
    source = offline_inputs.write(system.directory.parent / "in.jsonl", X)
    target = system.directory.parent / "out.msgpack"

    bus = await NatsBus.connect(system.nats, name="test")
    await (await bus.object_store("things")).put("in.jsonl", source)
    await bus.close()
    asked = ("--input", "nats://things/in.jsonl", "--output", "nats://things/out.msgpack", "--accuracy", "0.5")
    done = system.command("submit", "--app", APP, *asked, "--id", "mine", "--json")
    assert (done.returncode, json.loads(done.stdout)) == (0, {"job": "mine"}), done.stderr
    waited = system.command("jobs", "--wait", "--timeout", "400", "--json")
    assert waited.returncode == 0, waited.stderr
    document = json.loads(system.command("jobs", "mine", "--wait", "--json").stdout)
    assert (document["state"], document["done"]) == ("done", 500)
    assert json.loads(waited.stdout)["items"] in ([document], [])  # it may have been over when the command began
    all_over = system.command("jobs", "--wait", "--json")
    assert (all_over.returncode, json.loads(all_over.stdout)) == (0, {"items": []})
    listed = json.loads(system.command("jobs", "--json").stdout)["items"]
    assert [item for item in listed if item["job"] == "mine"] == [document]
    bus = await NatsBus.connect(system.nats, name="test")
    await (await bus.object_store("things", create=False)).get_to("out.msgpack", target)
    await bus.close()
    found = offline_inputs.read(target)
    assert np.abs(found - Y).max() < 1e-4 * np.abs(Y).max()
    with target.open("rb") as file:
        assert [item["label"] for item in msgpack.Unpacker(file)] == [CLASSES[one] for one in Y.argmax(axis=1)]
    assert eventually(lambda: os.listdir(system.directory / "spool" / "jobs") == [])
    own = str(offline_inputs.write(system.directory.parent / "own.npy", X))
    job = system.command("submit", APP, "--input", own, "--output", str(target.with_name("back.npy"))).stdout.strip()
    fetched = system.command("jobs", job, "--wait", "--output", str(target.with_name("back.npy")))
    assert fetched.returncode == 0, fetched.stderr
    assert np.abs(np.load(target.with_name("back.npy")) - Y).max() < 1e-4 * np.abs(Y).max()


def test_a_cancelled_job_leaves_nothing_behind(system: System) -> None:
    source = offline_inputs.write(system.files / "long.msgpack", np.tile(X, (20, 1)))
    target = system.files / "never.msgpack"

    async def main() -> str:
        async with infaas.connect(data_dir=system.directory) as client:
            job = await client.submit(APP, str(source), str(target))
            begun = asyncio.Event()

            def progress(status: JobStatus) -> None:
                if status.done:
                    begun.set()

            waiting = asyncio.create_task(client.wait_job(job, on_progress=progress, timeout=400))
            await begun.wait()
            await client.cancel_job(job)
            assert (await waiting).state == "cancelled"
            with pytest.raises(infaas.Refused, match="none with the id"):
                await client.cancel_job("nonsense")
            return job

    job = run(main())
    left = {"in.npy", "out.npy", "long.msgpack"}
    assert eventually(lambda: set(os.listdir(system.files)) <= left), os.listdir(system.files)
    again = system.command("jobs", job, "--wait")
    assert again.returncode == 1
    assert "cancelled" in again.stderr


def test_a_bad_item_fails_the_job_by_number_and_what_came_before_is_kept(system: System) -> None:
    x = X.copy()
    x[217, 3] = np.nan
    offline_inputs.write(system.files / "nan.npy", x)
    target = system.files / "nan-out.npy"
    exact = f"{APP}-v1-ort-fp32-t1-b8"
    source = str(system.files / "nan.npy")
    done = system.command(
        "submit", "--app", APP, "--input", source, "--output", str(target), "--variant", exact, "--wait"
    )
    assert done.returncode == 1
    assert "items 216 to 217: bad_request" in done.stderr
    assert f"the first 216 outputs are in {target.as_uri()}.partial" in done.stderr
    kept = np.load(target.with_name("nan-out.npy.partial"))
    assert np.abs(kept - Y[:216]).max() < 1e-4 * np.abs(Y).max()
    assert not target.exists()


async def test_what_cannot_be_done_is_refused_with_the_field(system: System) -> None:
    files = system.files
    good, out = offline_inputs.write(files / "good.npy", X[:4]).as_uri(), (files / "fresh.npy").as_uri()
    offline_inputs.write(files / "narrow.npy", X[:, :15])
    (files / "text.jsonl").write_text('["a"]\n')
    (files / "empty.msgpack").write_bytes(b"")
    (files / "taken.npy").write_bytes(b"")
    (files / "out").symlink_to(system.directory)
    (files / "secret.npy").symlink_to(system.directory.parent / "m.onnx")
    cases = {
        "input: there is no": {"input": "nats://nowhere/in.npy"},
        "No such file": {"input": (files / "missing.npy").as_uri()},
        "input: .*shape \\[15\\], the model takes \\[16\\]": {"input": (files / "narrow.npy").as_uri()},
        "input: item 0: ": {"input": (files / "text.jsonl").as_uri()},
        "input: the file is empty": {"input": (files / "empty.msgpack").as_uri()},
        "input: .* must begin with": {"input": "http://host/in.npy"},
        "input: the name must end in": {"input": "file:///in.csv"},
        "input: .*jobs.roots": {"input": "file:///etc/hosts.npy"},
        "input: .*jobs.roots adds": {"input": (files / "secret.npy").as_uri()},
        "may not contain": {"input": f"{files.as_uri()}/../../v.npy"},
        "output: .*jobs.roots": {"output": (files / "out" / "x.npy").as_uri()},
        "output: .* exists already": {"output": (files / "taken.npy").as_uri()},
        "output: cannot open the directory": {"output": (files / "no" / "x.npy").as_uri()},
        "output: the bucket infaas-artifacts": {"output": "nats://infaas-artifacts/x.npy"},
        "s3:// needs the package boto3": {"input": "s3://bucket/in.npy"},
        "unknown_app": {"app": "nobody"},
        "unknown_model: model: ": {"model": "nothing"},
        "variant: ": {"variant": "nothing"},
        "`accuracy` is 7": {"accuracy": 7.0},
        "job .no name. is no name": {"job": "no name"},
        "job: this id is in use": {"job": "mine"},
    }

    said = {}
    async with infaas.connect(data_dir=system.directory) as client:
        for pattern, wrong in cases.items():
            asked = {"app": APP, "input": good, "output": out} | wrong
            try:
                said[pattern] = f"accepted: {await client.submit(**asked)}"
            except infaas.Refused as refused:
                said[pattern] = str(refused)
        late = offline_inputs.write(files / "late.jsonl", X[:300]).read_text().splitlines()
        late[217] = "[1.0]"
        (files / "late.jsonl").write_text("\n".join(late))
        job = await client.submit(APP, (files / "late.jsonl").as_uri(), (files / "late.npy").as_uri())
        status = await client.wait_job(job, timeout=400)
        assert (status.state, status.done) == ("failed", 0)
        said["input: item 217: has shape \\[1\\], the model takes \\[16\\]"] = status.reason
    assert {pattern: text for pattern, text in said.items() if not re.search(pattern, text)} == {}
    assert not (files / "fresh.npy").exists()

"""The coordinator with its real edge on the memory bus: a worker of the test's own computes sums, in whatever order it likes."""

import asyncio
import contextlib
import os
import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from bus.codec import decode, encode
from bus.memory import Broker
from bus.messages.catalog import Signature, TensorSpec
from bus.messages.events import JobEvent
from bus.messages.jobs import Chunk, JobRecord, JobStatus, Part, PartStored, RunnerNote
from bus.messages.public import Error, Refusal, Tensor
from bus.port import Bus, Consumer, Delivery
from bus.subjects import Subjects
from bus.tensors import from_array, to_array
from infaas import following
from infaas.client import Client
from infaas.errors import BadInput, Refused
from services.core.actor import Publish, Record
from services.core.catalog import key_of
from services.core.settings import JobsSettings
from services.jobs.actor import Coordinator
from services.jobs.edge import JobsEdge, part_key
from services.jobs.files import Files, JobFiles
from services.jobs.job import RECORD_S, JobStatuses
from services.shell.runtime.runtime import Runtime
from tests.support.clients.responders import until
from tests.support.data import offline_inputs
from tests.support.simulated.fleet import PRICES, catalogue, variant

S = Subjects()
SIGNATURE = Signature(
    inputs=[TensorSpec(name="x", datatype="FP32", shape=[3])], outputs=[TensorSpec(name="y", datatype="FP32", shape=[])]
)
X = np.arange(300, dtype="f4").reshape(100, 3)


class Scene:
    """A bus, a directory, coordinators that can be killed, and a worker."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.files = directory / "jobs"
        self.files.mkdir()
        self.broker = Broker()
        self.bus = self.broker.connect("test")
        self.running: dict[str, tuple[Runtime, Bus]] = {}
        self.computed: list[int] = []

    async def open(self) -> None:
        catalog = await self.bus.key_value(S.catalog_bucket)
        for record in catalogue(variant(signature=SIGNATURE)):
            changed = (
                record if not hasattr(record, "signature") else msgspec.structs.replace(record, signature=SIGNATURE)
            )
            await catalog.put(key_of(changed), encode(changed))
        await self.bus.key_value(S.jobs_bucket)

    async def start(self, name: str, **settings: Any) -> None:
        bus = self.broker.connect(name)
        files = JobFiles(Files([self.files]), self.directory / "spool")
        edge = await JobsEdge.open(bus, S, files, 2**20)
        given = JobsSettings(**({"chunk_items": 3, "window": 8} | settings))

        def make() -> Coordinator:
            return Coordinator(name, S, given, PRICES, lambda: "made", tick_s=0.1, silence_s=0.3)

        runtime = Runtime("jobs", make, bus, S, edge)
        await runtime.start()
        self.running[name] = (runtime, bus)

    async def kill(self, name: str) -> None:
        """As kill -9: no goodbye, and nothing that was under way goes on."""
        runtime, bus = self.running.pop(name)
        await bus.close()
        runtime._live = False
        for task in list(runtime._tasks):
            task.cancel()
        await asyncio.gather(*runtime._tasks, return_exceptions=True)
        await runtime._drop_timers_and_tasks()
        runtime._outbox._task.cancel()  # type: ignore[union-attr]

    async def close(self) -> None:
        for name in list(self.running):
            await self.kill(name)
        await self.bus.close()

    # -- the worker

    async def consumer(self) -> Consumer:
        while True:
            with contextlib.suppress(Exception):
                return await self.bus.consumer(S.job_stream, "runners", ack_wait_s=1.0)
            await asyncio.sleep(0.01)

    async def work(self, *, bad: int = -1, shuffled: bool = False, most: int = 10**9, twice: bool = False) -> None:
        """Compute chunks until cancelled, or so many; bad: the chunk with this item fails."""
        consumer = await self.consumer()
        store = await self.bus.object_store(S.parts_bucket)
        chooser = random.Random(1)
        while most > 0:
            batch = await consumer.fetch(8 if shuffled else 1, 0.05)
            if shuffled:
                chooser.shuffle(batch)
            for stored in batch:
                chunk = decode(Chunk, stored.data)
                for _ in range(1 + twice):
                    await store.put(part_key(chunk.job, chunk.number), encode(self.part(chunk, bad)))
                    stored_part = PartStored(job=chunk.job, number=chunk.number)
                    self.bus.publish(S.offline("part"), encode(stored_part))
                await stored.ack()
                most -= 1

    def part(self, chunk: Chunk, bad: int) -> Part:
        self.computed.append(chunk.number)
        x = to_array(msgspec.msgpack.decode(chunk.body, type=dict[str, Tensor])["inputs"], "inputs")
        failed = chunk.first <= bad < chunk.first + chunk.items
        outputs = msgspec.Raw(encode({} if failed else {"y": from_array(x.sum(axis=1))}))
        fields: dict[str, Any] = {"job": chunk.job, "number": chunk.number, "items": chunk.items, "worker": "w0"}
        return Part(outputs=outputs, variant="v", cost=0.5, error="model_error: no" if failed else "", **fields)

    async def submit(self, source: str = "in.npy", target: str = "out.npy", **more: Any) -> str:
        return await following.submit(self.bus, S, "app", str(self.files / source), str(self.files / target), **more)

    async def end(self, job: str) -> JobStatus:
        return await following.Jobs(self.bus, S, None).wait(job, timeout=120)


@contextlib.asynccontextmanager
async def staged(tmp_path: Path) -> AsyncIterator[Scene]:
    scene = Scene(tmp_path)
    await scene.open()
    offline_inputs.write(scene.files / "in.npy", X)
    try:
        async with asyncio.timeout(30):
            yield scene
    finally:
        await scene.close()


@contextlib.asynccontextmanager
async def working(scene: Scene, **how: Any) -> Any:
    task = asyncio.create_task(scene.work(**how))
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@pytest.mark.parametrize(("shuffled", "twice"), [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("form", ["npy", "jsonl", "msgpack"])
async def test_outputs_are_in_order_whatever_order_they_come_in(
    tmp_path: Path, form: str, shuffled: bool, twice: bool
) -> None:
    async with staged(tmp_path) as scene:
        await scene.start("c1")
        async with working(scene, shuffled=shuffled, twice=twice):
            status = await scene.end(await scene.submit(target=f"out.{form}"))
        assert (status.state, status.total, status.done, status.failed) == ("done", 100, 100, 0)
        assert (status.cost, status.variants) == (pytest.approx(34 * 0.5), ["v"])
        assert offline_inputs.read(scene.files / f"out.{form}", "y").reshape(-1).tolist() == X.sum(axis=1).tolist()
        assert sorted(os.listdir(scene.files)) == ["in.npy", f"out.{form}"]
        store = await scene.bus.object_store(S.parts_bucket)
        assert twice or await store.keys() == []


@pytest.mark.parametrize("remote", [False, True])
@pytest.mark.parametrize("after", [0, 1, 7, 20, 33])
async def test_another_coordinator_goes_on_where_one_died(tmp_path: Path, after: int, remote: bool) -> None:
    async with staged(tmp_path) as scene:
        await scene.start("c1")
        store = await scene.bus.object_store("things")
        await store.put("in.npy", scene.files / "in.npy")
        source, target = ("nats://things/in.npy", "nats://things/out.npy") if remote else ("in.npy", "out.npy")
        job = await following.submit(
            scene.bus, S, "app", *(url if remote else str(scene.files / url) for url in (source, target))
        )
        await asyncio.wait_for(scene.work(most=after), 120)
        await scene.kill("c1")
        await scene.start("c2")
        async with working(scene, shuffled=True):
            status = await scene.end(job)
        assert (status.state, status.done) == ("done", 100), status
        assert status.cost == pytest.approx(34 * 0.5)  # each chunk once, also where it was computed twice
        if remote:
            await store.get_to("out.npy", scene.files / "out.npy")
        assert np.load(scene.files / "out.npy").tolist() == X.sum(axis=1).tolist()


async def test_two_coordinators_share_the_jobs_and_inherit_them_all(tmp_path: Path) -> None:
    async with staged(tmp_path) as scene:
        for name in ("c1", "c2"):
            await scene.start(name)
        names = [await scene.submit(target=f"out{n}.npy", job=f"j{n}") for n in range(6)]
        records = await scene.bus.key_value(S.jobs_bucket)
        owners = {decode(JobRecord, (await records.get(name)).value or b"").owner for name in names}
        assert owners == {"c1", "c2"}
        async with working(scene, most=60, shuffled=True) as first:
            await first
        for name in names:  # whoever answers knows all of them
            assert (await following.Jobs(scene.bus, S, None).status(name)).job == name
        await scene.kill("c1")
        async with working(scene, shuffled=True):
            ends = [await scene.end(name) for name in names]
        assert [(end.state, end.done, end.cost) for end in ends] == [("done", 100, 17.0)] * 6
        for n in range(6):
            assert np.load(scene.files / f"out{n}.npy").tolist() == X.sum(axis=1).tolist()


async def test_no_more_chunks_are_queued_than_the_window_holds(tmp_path: Path) -> None:
    async with staged(tmp_path) as scene:
        await scene.start("c1", window=4)
        await scene.submit()
        consumer = await scene.consumer()
        found: set[int] = set()  # what is not acknowledged comes again
        while len(found) < 4:
            found |= {decode(Chunk, stored.data).number for stored in await consumer.fetch(100, 1.0)}
        found |= {decode(Chunk, stored.data).number for stored in await consumer.fetch(100, 0.2)}
        assert found == {0, 1, 2, 3}


async def test_a_chunk_that_failed_ends_the_job_and_what_came_before_is_kept(tmp_path: Path) -> None:
    async with staged(tmp_path) as scene:
        await scene.start("c1")
        async with working(scene, bad=50):
            status = await scene.end(await scene.submit())
        assert (status.state, status.done, status.failed) == ("failed", 48, 3)
        assert status.reason.startswith("items 48 to 50: model_error: no; the first 48 outputs are in file://")
        assert np.load(scene.files / "out.npy.partial").tolist() == X[:48].sum(axis=1).tolist()
        assert sorted(os.listdir(scene.files)) == ["in.npy", "out.npy.partial"]


async def test_a_cancelled_job_stops_and_leaves_nothing(tmp_path: Path) -> None:
    async with staged(tmp_path) as scene:
        await scene.start("c1")
        job = await scene.submit()
        await asyncio.wait_for(scene.work(most=5), 120)
        await following.Jobs(scene.bus, S, None).cancel(job)
        status = await scene.end(job)
        assert (status.state, status.reason) == ("cancelled", "cancelled")
        await until(lambda: os.listdir(scene.files) == ["in.npy"])
        await following.Jobs(scene.bus, S, None).cancel(job)  # once more is harmless
        again = await scene.submit(target="out.npy")
        async with working(scene):
            assert (await scene.end(again)).state == "done"
        with pytest.raises(Refused, match="is done already"):
            await following.Jobs(scene.bus, S, None).cancel(again)


async def test_an_input_that_changes_meanwhile_ends_the_job(tmp_path: Path) -> None:
    async with staged(tmp_path) as scene:
        await scene.start("c1", window=4)
        job = await scene.submit()
        await asyncio.wait_for(scene.work(most=1), 120)
        offline_inputs.write(scene.files / "in.npy", X + 1)
        async with working(scene):
            status = await scene.end(job)
        assert (status.state, status.reason) == ("failed", status.reason)
        assert "input: the file was changed" in str(status.reason)


async def test_what_was_written_and_is_gone_is_computed_anew_by_another_coordinator(tmp_path: Path) -> None:
    """As on another machine: the record is there, the growing output is not."""
    async with staged(tmp_path) as scene:
        await scene.start("c1")
        job = await scene.submit()
        await asyncio.wait_for(scene.work(most=8), 120)
        records = await scene.bus.key_value(S.jobs_bucket)

        async def appended() -> bool:
            return decode(JobRecord, (await records.get(job)).value or b"").checkpoint.chunks == 8

        await until(appended)
        await scene.kill("c1")
        for path in scene.files.glob(".out*"):
            path.unlink()
        await scene.start("c2")
        async with working(scene):
            status = await scene.end(job)
        assert (status.state, status.done, status.cost) == ("done", 100, 17.0), status
        assert np.load(scene.files / "out.npy").tolist() == X.sum(axis=1).tolist()
        assert decode(JobRecord, (await records.get(job)).value or b"").checkpoint.generation == 1


async def test_a_job_whose_app_is_gone_when_its_coordinator_starts_again_fails(tmp_path: Path) -> None:
    async with staged(tmp_path) as scene:
        await scene.start("c1")
        job = await scene.submit()
        await scene.kill("c1")
        await (await scene.bus.key_value(S.catalog_bucket)).delete("app.app")
        await scene.start("c2")
        status = await scene.end(job)
        assert (status.state, status.reason) == ("failed", "app: app was deleted, or has no models any more")


async def test_ids_outputs_and_questions(tmp_path: Path) -> None:
    async with staged(tmp_path) as scene:
        await scene.start("c1")
        assert await scene.submit(job="mine") == "mine"
        assert await scene.submit(job="mine") == "mine"  # the same job, asked for again
        with pytest.raises(Refused, match="job: this id is in use"):
            await scene.submit(target="other.npy", job="mine")
        with pytest.raises(Refused, match="output: job mine writes there"):
            await scene.submit(job="yours")
        for other in (f"//localhost{scene.files}/out.npy", f"//{scene.files}//%6fut.npy"):
            with pytest.raises(Refused, match="output: job mine writes there"):
                await following.submit(scene.bus, S, "app", str(scene.files / "in.npy"), f"file:{other}", job="yours")
        with pytest.raises(Refused, match="there is none with the id nobody"):
            await following.Jobs(scene.bus, S, None).status("nobody")
        note = RunnerNote(worker="w0", why="cpu is used 90% by other work")
        scene.bus.publish(S.offline("note"), encode(note))
        await until(lambda: _step(scene, "mine", "w0: cpu is used 90%"))
        reply = await scene.bus.request(S.list("jobs"), encode({"app": "other"}), 5.0)
        assert msgspec.msgpack.decode(reply.data) == {"items": []}
        reply = await scene.bus.request(S.list("jobs"), b"", 5.0)
        assert [item["job"] for item in msgspec.msgpack.decode(reply.data)["items"]] == ["mine"]
        bad = await scene.bus.request(S.job("app"), encode({"input": 5}), 5.0)
        error: Error = decode(Refusal, bad.data).error
        assert error.code == "bad_request"
        assert "input" in error.message


async def _step(scene: Scene, job: str, text: str) -> bool:
    return text in (await following.Jobs(scene.bus, S, None).status(job)).step


async def test_ended_jobs_are_forgotten_in_the_end(tmp_path: Path) -> None:
    async with staged(tmp_path) as scene:
        await scene.start("c1", keep=1)
        async with working(scene):
            for n in range(3):
                await scene.end(await scene.submit(target=f"out{n}.npy", job=f"j{n}"))
        records = await scene.bus.key_value(S.jobs_bucket)

        async def kept() -> bool:
            return await records.keys() == ["j2"]

        await until(kept)


# -- Ids of jobs, which clients may choose and others may know.


async def test_two_who_choose_the_same_id_at_once_are_not_mixed_up(tmp_path: Path) -> None:
    async with staged(tmp_path) as scene:
        await scene.start("c1")
        offline_inputs.write(scene.files / "in.npy", X)
        heard: dict[str, Any] = {}

        def hear(delivery: Delivery) -> None:
            heard[delivery.subject] = msgspec.msgpack.decode(delivery.data)

        await scene.bus.subscribe("mine.*", hear)
        source = (scene.files / "in.npy").as_uri()
        for name in ("one", "two"):
            ask = {"job": "nightly", "input": source, "output": (scene.files / f"{name}.npy").as_uri()}
            scene.bus.publish(S.job("app"), encode(ask), f"mine.{name}")
        await until(lambda: len(heard) == 2)
        assert heard["mine.one"] == {"job": "nightly"}
        assert "in use already" in heard["mine.two"]["error"]["message"]


async def test_clients_of_other_apps_learn_of_no_such_job(tmp_path: Path) -> None:
    async with staged(tmp_path) as scene:
        await scene.start("c1")
        job = await scene.submit()
        heard: dict[str, Any] = {}

        def hear(delivery: Delivery) -> None:
            heard[delivery.subject.rpartition(".")[2]] = msgspec.msgpack.decode(delivery.data)

        await scene.bus.subscribe("_INBOX_.>", hear)
        for number, subject in enumerate((S.job_status(job), S.job_cancel(job))):
            scene.bus.publish(subject, b"", f"_INBOX_.numbers.thief.x.{number}")
        await until(lambda: len(heard) == 2)
        assert all("there is none" in heard[key]["error"]["message"] for key in ("0", "1"))
        assert (await following.Jobs(scene.bus, S, None).status(job)).state not in ("cancelled", "failed")
        scene.bus.publish(S.job_status(job), b"", "_INBOX_.app.phone.x.2")
        scene.bus.publish(S.job_cancel(job), b"", "_INBOX_.@.operator.x.3")
        await until(lambda: len(heard) == 4)
        assert heard["2"]["job"] == job
        assert "error" not in heard["3"]


# -- The status of a job that waits, on the bus and in history.


def published(statuses: JobStatuses, status: JobStatus, now: float) -> tuple[JobStatus, JobEvent]:
    publish, record = statuses.publish(status, now)
    assert isinstance(publish, Publish)
    assert isinstance(record, Record)
    assert isinstance(publish.message, JobStatus)
    assert isinstance(record.event, JobEvent)
    return publish.message, record.event


def test_what_keeps_a_job_waiting_is_in_history_while_it_does() -> None:
    statuses = JobStatuses(Subjects("t"))
    status = JobStatus(job="j", app="a", input="i", output="o", state="running", total=8, created=1.0)
    statuses.note(RunnerNote(worker="w0", why="cpu is used 90 % by other work"), 10.0)
    shown, event = published(statuses, status, 10.0)
    assert shown.step == event.reason == "w0: cpu is used 90 % by other work"
    statuses.note(RunnerNote(worker="w0", why=""), 10.0 + RECORD_S)
    shown, event = published(statuses, status, 10.0 + RECORD_S)
    assert event.reason is None
    assert shown.step == status.step
    statuses.note(RunnerNote(worker="w0", why="", jobs={"j": "computes k first"}), 13.0)
    assert statuses.with_notes(status, 13.0).step == "w0: computes k first"
    statuses.note(RunnerNote(worker="w1", why=""), 13.0)
    assert statuses.with_notes(status, 13.0).step == status.step
    assert statuses.with_notes(status, 20.0).step.startswith("no worker has spoken")


async def test_a_table_from_anywhere_is_computed_and_its_output_comes_back(tmp_path: Path) -> None:
    """Also in a cluster that knows nobody's directories; what was uploaded goes with the job."""
    async with staged(tmp_path) as scene:
        await scene.start("c1")
        uploads = await scene.bus.object_store(S.uploads_bucket)
        apps = encode({"items": [{"app": "app", "inputs": SIGNATURE.inputs}]})
        await scene.bus.subscribe(S.list("apps"), lambda one: scene.bus.publish(one.reply, apps))
        table, out = tmp_path / "rows.csv", tmp_path / "sums.npy"
        table.write_text("a,b,c\n" + "".join(f"{a},{b},{c}\n" for a, b, c in X.tolist()))
        async with await Client(scene.bus).open() as client, working(scene):
            job = await client.submit("app", table, out)
            status = await client.wait_job(job, timeout=20)
            assert (status.state, status.done) == ("done", 100)
            assert np.array_equal(np.load(out), X.sum(axis=1))
            assert await uploads.keys() == [f"jobs/app/{job}.npy"]
            await client.save_output(job, tmp_path / "again.npy")
            assert (tmp_path / "again.npy").read_bytes() == out.read_bytes()
            with pytest.raises(BadInput, match="exists already"):
                await client.submit("app", table, out)
            with pytest.raises(Refused, match="the system's own"):
                await client.submit("other", status.input, str(scene.files / "x.npy"))
            with pytest.raises(Refused, match="unknown_app"):
                await client.submit("nobody", X.tolist(), tmp_path / "never.npy")
            assert await uploads.keys() == [f"jobs/app/{job}.npy"]

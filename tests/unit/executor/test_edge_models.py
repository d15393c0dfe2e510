"""Moving a loaded model to other cores: real frameworks, real threads, an in-process object store."""

import asyncio
import hashlib
import os
import resource
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from msgspec.structs import replace

from bus.codec import encode
from bus.memory import MemoryBus
from bus.messages.catalog import Functions, Signature, TensorSpec, VariantRecord
from bus.messages.flow import Route
from bus.subjects import Subjects
from bus.tensors import from_array, to_array
from services.core.settings import ExecutorSettings
from services.executor.backends import pt2
from services.executor.backends.base import BackendError, LoadFailed
from services.executor.backends.remote_http import SILENCE_S
from services.executor.commands import (
    BatchResult,
    LoadedModel,
    LoadModel,
    MeasureProcess,
    MoveModel,
    RunBatch,
    UnloadModel,
)
from services.executor.edge import ExecutorEdge, RemoteEdge
from services.executor.queue import queued_query
from tests.support.clients.responders import until
from tests.support.data.events import variant_record
from tests.support.models import tiny_models
from tests.support.models.gpu_stand_ins import SIGNATURE
from tests.support.servers.engine import engine

pytest.importorskip("onnxruntime")
if not hasattr(os, "sched_getaffinity"):
    pytest.skip("this operating system cannot keep a thread to some cores", allow_module_level=True)

SUBJECTS = Subjects("t")
CORE = max(os.sched_getaffinity(0))
X, CLASSES = tiny_models.digits(8)


def record(artifact: bytes, threads: int = 1, framework: str = "ort", format: str = "onnx") -> VariantRecord:
    return variant_record(
        variant="tiny", model="tiny", framework=framework, threads=threads, max_batch=8, format=format,
        artifact=hashlib.sha256(artifact).hexdigest(), signature=SIGNATURE,
    )  # fmt: skip


class LoadedEdge:
    """An executor's edge with one model loaded as instance "i"."""

    def __init__(self, bus: MemoryBus, directory: Path, variant: VariantRecord) -> None:
        self.bus = bus
        self.variant = variant
        self.cache = directory
        self.edge = ExecutorEdge(bus, SUBJECTS, "cpu", 2, directory, ExecutorSettings())

    async def do(self, command: Any) -> Any:
        return await self.edge.perform(command)

    async def move(self, *cores: int) -> str:
        proof: str = (await self.do(MoveModel("i", self.variant, cores))).proof
        return proof

    def batch(self, *, inline: bool = True) -> RunBatch:
        route = Route(b"u" * 16, 0, 0, "inbox", 2e9, 0.0, "d", "i", "app", len(X), "q")
        body = msgspec.Raw(encode(from_array(X)))
        return RunBatch("i", [queued_query(route, body, body)], 0.001, inline)

    async def right(self) -> bool:
        """Whether a batch comes out as the model says."""
        result: BatchResult = await self.do(self.batch(inline=False))
        assert result.errors is None, result.errors
        [outputs] = result.outputs
        return bool((to_array(outputs["scores"], "scores").argmax(1) == CLASSES).all())


@asynccontextmanager
async def with_edge(tmp_path: Path, artifact: bytes, **fields: Any) -> AsyncIterator[LoadedEdge]:
    bus = MemoryBus()
    variant = record(artifact, **fields)
    store = await bus.object_store(SUBJECTS.artifacts_bucket)
    await store.put(variant.artifact, artifact)
    loaded_edge = LoadedEdge(bus, tmp_path, variant)
    try:
        await loaded_edge.do(LoadModel("i", variant))
        await store.delete(variant.artifact)  # nothing is fetched a second time
        yield loaded_edge
    finally:
        await loaded_edge.do(UnloadModel("i"))
        await bus.close()


@pytest.mark.parametrize("threads", [1, 2, 3])
async def test_all_threads_of_a_model_run_on_its_cores(tmp_path: Path, threads: int) -> None:
    async with with_edge(tmp_path, tiny_models.mlp(), threads=threads) as loaded_edge:
        proof = await loaded_edge.move(CORE)
        assert f"{threads} thread{'s' * (threads > 1)} kept to core {CORE} by the system" in proof
        assert await loaded_edge.right()


@pytest.mark.slow
async def test_torch_too(tmp_path: Path) -> None:
    tiny_models.exported(tmp_path / "made.pt2", pytest.importorskip("torch"))
    pt2.reduce(tmp_path / "made.pt2", tmp_path / "reduced.pt2", 2**30)
    async with with_edge(
        tmp_path, (tmp_path / "reduced.pt2").read_bytes(), framework="torch", format="pt2", threads=2
    ) as loaded_edge:
        assert f"kept to core {CORE} by the system" in await loaded_edge.move(CORE)
        assert await loaded_edge.right()


async def test_what_is_kept_to_cores_never_runs_on_the_loop_and_may_be_let_free_again(tmp_path: Path) -> None:
    async with with_edge(tmp_path, tiny_models.mlp()) as loaded_edge:
        assert isinstance(loaded_edge.edge.inline(loaded_edge.batch()), BatchResult)
        await loaded_edge.move(CORE)
        assert loaded_edge.edge.inline(loaded_edge.batch()) is NotImplemented
        assert "kept" not in await loaded_edge.move()
        assert isinstance(loaded_edge.edge.inline(loaded_edge.batch()), BatchResult)


async def test_batches_come_out_right_all_the_while_it_moves(tmp_path: Path) -> None:
    async with with_edge(tmp_path, tiny_models.mlp()) as loaded_edge:
        moving = True
        done = 0

        async def serve() -> None:
            nonlocal done
            while moving:
                assert await loaded_edge.right()
                done += 1

        serving = asyncio.create_task(serve())
        for cores in ([CORE], [], [CORE], [CORE], []):
            before = done
            await loaded_edge.move(*cores)
            await until(lambda before=before: done > before or serving.done())
        moving = False
        await serving


async def test_what_is_unloaded_or_moved_meanwhile_stays_so(tmp_path: Path) -> None:
    async with with_edge(tmp_path, tiny_models.mlp()) as loaded_edge:
        first, second = await asyncio.gather(loaded_edge.move(CORE), loaded_edge.move(CORE), return_exceptions=True)
        assert [type(each) for each in (first, second)].count(str) == 1, "two orders at once: one of them holds"
        assert await loaded_edge.right()
        moving = asyncio.create_task(loaded_edge.move(CORE))
        await asyncio.sleep(0)
        await loaded_edge.do(UnloadModel("i"))
        with pytest.raises(BackendError, match="unloaded"):
            await moving
        result = await loaded_edge.do(loaded_edge.batch(inline=False))
        assert result.errors == ["the model is no longer loaded"]
        with pytest.raises(BackendError, match="not loaded any more"):
            await loaded_edge.move(CORE)


async def test_cores_are_those_there_are_and_instances_may_be_loaded_on_them(tmp_path: Path) -> None:
    async with with_edge(tmp_path, tiny_models.mlp()) as loaded_edge:
        with pytest.raises(BackendError, match="cannot run on core 4000"):
            await loaded_edge.move(4000)
        assert await loaded_edge.right()
    async with with_edge(tmp_path, tiny_models.mlp()) as loaded_edge:
        loaded = await loaded_edge.do(LoadModel("j", loaded_edge.variant, (CORE,)))
        assert f"kept to core {CORE} by the system" in loaded.proof
        assert loaded_edge.edge.inline(replace(loaded_edge.batch(), instance="j")) is NotImplemented
        await loaded_edge.do(UnloadModel("j"))


# -- Loads at once: none waits for a slow one.


async def put(bus: MemoryBus, artifact: bytes) -> VariantRecord:
    variant = record(artifact)
    await (await bus.object_store(SUBJECTS.artifacts_bucket)).put(variant.artifact, artifact)
    return variant


async def test_others_are_loaded_moved_and_unloaded_while_one_loads_slowly(tmp_path: Path) -> None:
    async with with_edge(tmp_path, tiny_models.mlp()) as loaded_edge:
        edge, bus = loaded_edge.edge, loaded_edge.bus
        slow, quick = await put(bus, tiny_models.slow_to_load(12)), await put(bus, tiny_models.mlp(seed=1))
        loading = asyncio.create_task(edge.perform(LoadModel("slow", slow)))
        await asyncio.sleep(0.2)
        started = time.perf_counter()
        for number in range(5):
            beside = await edge.perform(LoadModel(f"q{number}", quick))
            assert beside.load_ms < 1000.0 * (time.perf_counter() - started), "without the wait for others"
            assert beside.memory_mb == 0.0, "what grew may be the other's"
            await edge.perform(UnloadModel(f"q{number}"))
        await loaded_edge.move(CORE)
        assert await loaded_edge.right()
        meanwhile = time.perf_counter() - started
        assert not loading.done()
        found: LoadedModel = await loading
        assert found.load_ms > 1000.0 * meanwhile
        assert found.memory_mb == 0.0, "what grew may be the others'"
        assert isinstance(await edge.perform(replace(loaded_edge.batch(inline=False), instance="slow")), BatchResult)
        await edge.perform(UnloadModel("slow"))


async def test_many_loads_at_once_all_come_out_right(tmp_path: Path) -> None:
    tiny_models.exported(tmp_path / "made.pt2", pytest.importorskip("torch"))
    pt2.reduce(tmp_path / "made.pt2", tmp_path / "reduced.pt2", 2**30)
    program = (tmp_path / "reduced.pt2").read_bytes()
    async with with_edge(tmp_path, tiny_models.mlp()) as loaded_edge:
        edge = loaded_edge.edge
        other = await put(loaded_edge.bus, program)
        other = replace(other, framework="torch", format="pt2")
        names = [f"i{n}" for n in range(6)]
        variants = [loaded_edge.variant if n % 2 else other for n in range(6)]
        found = await asyncio.gather(*(edge.perform(LoadModel(*one)) for one in zip(names, variants, strict=True)))
        assert len(found) == len(names)
        for name in names:
            result = await edge.perform(replace(loaded_edge.batch(inline=False), instance=name))
            assert (to_array(result.outputs[0]["scores"], "scores").argmax(1) == CLASSES).all()
        await asyncio.gather(*(edge.perform(UnloadModel(name)) for name in names))
        result = await edge.perform(replace(loaded_edge.batch(inline=False), instance=names[0]))
        assert result.errors == ["the model is no longer loaded"]


# -- What is loaded is the file that was registered, byte for byte.


async def test_another_file_under_the_artifact_s_name_is_not_loaded(tmp_path: Path) -> None:
    good = tiny_models.mlp()
    variant = replace(record(good), artifact=hashlib.sha256(good).hexdigest())
    bus = MemoryBus()
    store = await bus.object_store(SUBJECTS.artifacts_bucket)
    await store.put(variant.artifact, tiny_models.mlp() + b"\0")
    edge = ExecutorEdge(bus, SUBJECTS, "cpu", 2, tmp_path, ExecutorSettings())
    with pytest.raises(BackendError, match=r"cannot be read: what is stored as .* is another one"):
        await edge.perform(LoadModel("i", variant))
    assert not any(file.is_file() for file in tmp_path.rglob("*"))  # noqa: ASYNC240
    await store.put(variant.artifact, good)
    await edge.perform(LoadModel("i", variant))
    await bus.close()


# -- engines on other machines


@pytest.mark.parametrize("mode", ["hang", "drip", "error", ""])
async def test_a_remote_engine_is_loaded_soon_whatever_it_does(tmp_path: Path, mode: str) -> None:
    bus = MemoryBus()
    store = await bus.object_store(SUBJECTS.artifacts_bucket)
    with engine() as stock:
        artifact = msgspec.json.encode({"url": stock.url("tiny")})
        variant = record(artifact, framework="remote", format="remote")
        outputs = [replace(variant.signature.outputs[0], name="y")]
        variant = replace(variant, hardware="remote", signature=replace(variant.signature, outputs=outputs))
        await store.put(variant.artifact, artifact)
        edge = RemoteEdge(bus, SUBJECTS, f"127.0.0.1:{stock.port}", 4, tmp_path, ExecutorSettings())
        stock.mode = mode
        started = time.monotonic()
        found = await edge.perform(LoadModel("i", variant))
        assert time.monotonic() - started < SILENCE_S, "it is not waited until the engine has been silent for too long"
        assert (found.memory_mb, (await edge.perform(MeasureProcess())).memory_mb) == (0.0, 0.0)
        stock.mode = ""
        batch = LoadedEdge.batch(LoadedEdge(bus, tmp_path, variant))
        assert edge.inline(batch) is NotImplemented
        result = await edge.perform(batch)
        assert result.errors is None
        assert (to_array(result.outputs[0]["y"], "y").argmax(1) == CLASSES).all()
        await edge.perform(UnloadModel("i"))
    await bus.close()


async def test_a_full_disk_is_said_and_nothing_is_left_of_the_file(tmp_path: Path) -> None:
    bus = MemoryBus()
    artifact = tiny_models.mlp()
    variant = await put(bus, artifact)
    edge = LoadedEdge(bus, tmp_path, variant)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(artifact) // 2, hard))
    try:
        with pytest.raises(LoadFailed, match=r"the disk has no room.* set data_dir to a larger disk"):
            await edge.do(LoadModel("one", variant))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not [name for _, _, names in os.walk(tmp_path) for name in names]
    assert await edge.do(LoadModel("one", variant))
    await edge.do(UnloadModel("one"))
    await bus.close()


AROUND = """
import struct
def decode(item):
    if item[:2] != b"\\xff\\xd8":
        raise ValueError("no picture")
    return struct.unpack("<16f", item[2:])
def name(scores):
    return {"class": "nesw"[scores.argmax()]}
"""


async def test_functions_of_the_owner_make_of_bytes_the_name_of_a_class_and_refuse_what_is_wrong(
    tmp_path: Path,
) -> None:
    bus, artifact = MemoryBus(), tiny_models.mlp()
    signature = Signature(
        inputs=[TensorSpec(name="x", datatype="BYTES", shape=[], binary=True)],
        outputs=[TensorSpec(name="class", datatype="BYTES", shape=[])],
    )
    functions = Functions(before="o.py:decode", after="o.py:name", sources={"o.py": AROUND}, model=SIGNATURE)
    variant = replace(record(artifact), signature=signature, functions=functions)
    await (await bus.object_store(SUBJECTS.artifacts_bucket)).put(variant.artifact, artifact)
    edge = ExecutorEdge(bus, SUBJECTS, "cpu", 2, tmp_path, ExecutorSettings())
    loaded = await edge.perform(LoadModel("i", variant))
    assert loaded.memory_mb > 5.0
    pictures = [b"\xff\xd8" + one.astype("<f4").tobytes() for one in X]

    def batch(*queries: list[bytes]) -> RunBatch:
        found = []
        for items in queries:
            route = Route(b"u" * 16, 0, 0, "inbox", 2e9, 0.0, "d", "i", "app", len(items), "q")
            body = msgspec.Raw(encode(from_array(np.array(items, object))))
            found.append(queued_query(route, body, body))
        return RunBatch("i", found, 0.001, True)

    words = ["nesw"[one] for one in CLASSES]
    for cores in ((), (CORE,)):
        await edge.perform(MoveModel("i", variant, cores))
        assert edge.inline(batch(pictures[:1])) is NotImplemented, "nothing of the owner's runs on the loop"
        result = await edge.perform(batch(pictures[:3], pictures[3:4]))
        assert (result.errors, result.labels) == (None, [words[:3], words[3:4]])
        assert to_array(result.outputs[1]["class"], "class").tolist() == words[3:4]
        assert min(result.functions_s) > 0.0
    refused = await edge.perform(batch([pictures[0], b"a text"]))
    assert (refused.errors, refused.unfit) == (["o.py:decode: ValueError: no picture"], True)
    (memory_mb, cpu_s), whole = edge._models.beside(), await edge.perform(MeasureProcess())
    assert 5.0 < memory_mb < whole.memory_mb
    assert 0.0 < cpu_s < whole.cpu_s, "no work of the owner's functions is taken for that of strangers"
    assert refused.functions_s[0] > 0.0 == refused.functions_s[1], "its seconds are not the next batch's"
    await edge.perform(UnloadModel("i"))
    with pytest.raises(LoadFailed, match="its file cannot be run: SyntaxError"):
        await edge.perform(
            LoadModel("j", replace(variant, functions=replace(functions, sources={"o.py": "no python"})))
        )
    await bus.close()


async def alone(tmp_path: Path, artifact: bytes, signature: Signature, inputs: Any, items: int) -> Any:
    """What becomes of a query of a variant whose largest batch is 1."""
    variant = replace(record(artifact), max_batch=1, signature=signature)
    bus = MemoryBus()
    await (await bus.object_store(SUBJECTS.artifacts_bucket)).put(variant.artifact, artifact)
    edge = ExecutorEdge(bus, SUBJECTS, "cpu", 2, tmp_path, ExecutorSettings())
    await edge.perform(LoadModel("i", variant))
    route = Route(b"u" * 16, 0, 0, "inbox", 2e9, 0.0, "d", "i", "app", items, "q")
    body = msgspec.Raw(encode(inputs))
    result = await edge.perform(RunBatch("i", [queued_query(route, body, body)], 0.001, False))
    await edge.perform(UnloadModel("i"))
    await bus.close()
    return result


@pytest.mark.parametrize("names", [("x",), ("a", "b")])
async def test_a_variant_of_single_items_computes_each_item_of_a_query_alone(
    tmp_path: Path, names: tuple[str, ...]
) -> None:
    """Along the batch, the softmax of one item is 1 everywhere."""
    artifact = tiny_models.along_the_batch("Softmax") if len(names) == 1 else tiny_models.two_mixed()
    specs = [TensorSpec(name=name, datatype="FP32", shape=[tiny_models.FEATURES]) for name in names]
    signature = Signature(inputs=specs, outputs=[replace(specs[0], name="scores")])
    inputs = from_array(X) if len(names) == 1 else {name: from_array(X) for name in names}
    result = await alone(tmp_path, artifact, signature, inputs, len(X))
    assert result.errors is None, result.errors
    scores = to_array(result.outputs[0]["scores"], "scores")
    assert scores == pytest.approx(1.0 + (X if len(names) > 1 else 0.0 * X), abs=1e-6)


async def test_items_whose_outputs_differ_in_shape_need_a_query_each_which_is_no_fault_of_the_model(
    tmp_path: Path,
) -> None:
    nodes = "places = NonZero(x)  found = Unsqueeze(places, first)"
    artifact = tiny_models.made(f"(float[1, 4] x) => (int64[1, 2, k] found) <int64[1] first = {{0}}> {{{nodes}}}")
    given = TensorSpec(name="x", datatype="FP32", shape=[4])
    signature = Signature(inputs=[given], outputs=[TensorSpec(name="found", datatype="INT64", shape=[2, -1])])
    for last, errors in ((1.0, 0), (0.0, 1)):
        x = np.array([[1, 0, 1, 0], [1, 0, last, 0]], "f4")
        result = await alone(tmp_path, artifact, signature, from_array(x), 2)
        assert (len(result.errors or ()), result.unfit) == (errors, bool(errors))
        assert all("ask one item a query" in one for one in result.errors or ())

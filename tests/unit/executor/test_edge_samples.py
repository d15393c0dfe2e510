"""A sample of the queries leaves the executor as counts, and as nothing else. Queries are kept with their answers after they are answered.

A real framework, an in-process bus.
"""

import hashlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from zlib import decompress

import msgspec
import numpy as np
import pytest
from msgspec.structs import replace

from bus.codec import decode, encode
from bus.memory import MemoryBus
from bus.messages.flow import Origin, Payload, Route, payload_key
from bus.messages.jobs import OFFLINE
from bus.messages.scaling import QueriesSampled
from bus.port import Delivery
from bus.subjects import Subjects
from bus.tensors import from_array, to_array
from services.core.drift import CELLS, Array, Distribution, measure
from services.core.settings import ExecutorSettings, Settings
from services.executor import edge_samples
from services.executor.commands import BatchResult, LoadModel, RunBatch
from services.executor.edge import ExecutorEdge
from services.executor.queue import QueuedQuery, queued_query
from tests.support.clients.responders import until
from tests.support.data.events import variant_record
from tests.support.models import tiny_models
from tests.support.models.gpu_stand_ins import SIGNATURE

pytest.importorskip("onnxruntime")
SUBJECTS = Subjects("t")
X, CLASSES = tiny_models.digits(400)
MODEL = tiny_models.mlp()


def known() -> Distribution:
    scores = np.eye(10, dtype=np.float32)[CLASSES]
    return Distribution.of(SIGNATURE, measure(SIGNATURE, {"x": X}, {"scores": scores}, b""), b"")


class SampledEdge:
    """An executor's edge that samples this share, with a model whose distribution is stored."""

    def __init__(self, bus: MemoryBus, directory: Path, share: float) -> None:
        self.edge = ExecutorEdge(bus, SUBJECTS, "cpu", 2, directory, ExecutorSettings(), sample_share=share)
        self.told: list[QueriesSampled] = []

    def heard(self, delivery: Delivery) -> None:
        self.told.append(decode(QueriesSampled, delivery.data))

    async def compute(self, count: int, *, policy: str = "infaas", app: str = "hid") -> None:
        """So many queries of three items, in batches of four."""
        for at in range(0, count, 4):
            compute(self.edge, *(query(i, policy=policy, app=app) for i in range(at, min(at + 4, count))))

    def items(self, app: str = "hid") -> int:
        return sum(int(counts_of(one)[0].sum()) for one in self.told if one.app == app)


def query(i: int, *, app: str = "hid", id: str | None = "q", origin: Route | None = None, **of: Any) -> QueuedQuery:
    """Of three items. of: its route."""
    body = msgspec.Raw(encode(from_array(X[np.arange(3 * i, 3 * i + 3) % len(X)])))
    route = Route(i.to_bytes(16, "big"), 0, 0, "inbox", 2e9, 0.0, "d", "i", app, 3, id, **of)
    return queued_query(replace(route, origin=None if origin is None else Origin(origin)), body, body)


def compute(edge: ExecutorEdge, *queries: QueuedQuery) -> BatchResult:
    result = edge.inline(RunBatch("i", list(queries), 0.001, inline=True))
    assert isinstance(result, BatchResult)
    assert result.errors is None, result.errors
    return result


async def load(bus: MemoryBus, edge: ExecutorEdge, distribution: bytes = b"") -> None:
    """distribution: of the model's answers, packed; empty: it has none."""
    store = await bus.object_store(SUBJECTS.artifacts_bucket)
    digest = hashlib.sha256(distribution).hexdigest() if distribution else ""
    variant = replace(
        variant_record(variant="tiny", model="tiny", max_batch=64, signature=SIGNATURE),
        artifact=hashlib.sha256(MODEL).hexdigest(),
        distribution=digest,
    )
    await store.put(variant.artifact, MODEL)
    if digest:
        await store.put(digest, distribution)
    await edge.perform(LoadModel("i", variant))


def counts_of(told: QueriesSampled) -> Array:
    return np.frombuffer(decompress(told.counts), np.int64).reshape(-1, CELLS)


@asynccontextmanager
async def sampling(tmp_path: Path, share: float, distribution: bytes | None = None) -> AsyncIterator[SampledEdge]:
    bus = MemoryBus()
    found = SampledEdge(bus, tmp_path, share)
    await bus.subscribe(SUBJECTS.controller("sampled"), found.heard)
    try:
        await load(bus, found.edge, encode(known()) if distribution is None else distribution)
        yield found
    finally:
        await found.edge.ended()
        await bus.close()


async def test_as_large_a_share_as_the_settings_say_is_counted(tmp_path: Path) -> None:
    """quality.sample_share: of queries, one item each."""
    assert Settings().quality.sample_share == 0.5
    async with sampling(tmp_path, 1.0) as sampled:
        await sampled.compute(120)
        await until(lambda: sampled.items() > 0)
        assert sampled.items() == 120
    async with sampling(tmp_path, 0.5) as sampled:
        await sampled.compute(400)
        await until(lambda: sampled.items() > 0)
        assert 150 < sampled.items() < 250
    async with sampling(tmp_path, 0.0) as sampled:
        await sampled.compute(120)
        assert sampled.edge._samples._task is None


async def test_the_counts_are_those_of_the_queries_and_offline_work_is_left_out(tmp_path: Path) -> None:
    async with sampling(tmp_path, 1.0) as sampled:
        await sampled.compute(30, policy=OFFLINE)
        await sampled.compute(100)
        await until(lambda: sampled.items() > 0)
        assert sampled.items() == 100
        (told,) = sampled.told
        assert (told.app, told.model) == ("hid", "tiny")
        found, seen = counts_of(told), known().seen
        assert found.shape == seen.shape
        assert (found.sum(axis=1) == 100).all()
        assert (found[seen.sum(axis=0, keepdims=True).repeat(len(seen), 0) == 0] == 0).all()


async def test_no_more_is_copied_than_a_second_allows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(edge_samples, "MOST_ROWS", 70)
    async with sampling(tmp_path, 1.0) as sampled:
        await sampled.compute(400)
        await until(lambda: sampled.items() > 0)
        assert sampled.items() == 70


async def test_without_a_distribution_that_can_be_read_queries_are_answered_all_the_same(tmp_path: Path) -> None:
    async with sampling(tmp_path, 1.0, b"nothing") as sampled:
        await sampled.compute(100)
        samples = sampled.edge._samples
        await until(lambda: samples._known != {} and samples._count == 0)
        await sampled.compute(100)
        assert sampled.told == []


pytest.importorskip("onnxruntime")
SUBJECTS = Subjects("t")
X, _ = tiny_models.digits(400)
MODEL = tiny_models.mlp()


@asynccontextmanager
async def keeping(directory: Path, *, payloads: bool = True) -> AsyncIterator[tuple[MemoryBus, ExecutorEdge]]:
    bus = MemoryBus()
    await bus.key_value(SUBJECTS.payloads_bucket)
    edge = ExecutorEdge(bus, SUBJECTS, "cpu", 2, directory, ExecutorSettings(), payloads=payloads)
    await load(bus, edge)
    yield bus, edge
    await bus.close()


async def kept(bus: MemoryBus) -> dict[str, Payload]:
    bucket = await bus.key_value(SUBJECTS.payloads_bucket)
    return {key: decode(Payload, (await bucket.get(key)).value or b"") for key in await bucket.keys()}


async def test_what_its_dispatcher_has_chosen_of_a_batch_is_kept_as_it_was_computed(tmp_path: Path) -> None:
    async with keeping(tmp_path) as (bus, edge):
        asked = replace(query(9, id="client's").route, uid=b"q" * 16)
        result = compute(edge, query(0, id="one", keep=True), query(1), query(2, origin=asked, keep=True))

        async def both() -> bool:
            return len(await kept(bus)) == 2

        await until(both)
        found = await kept(bus)
        await edge.ended()
    first = found[payload_key("hid", bytes(16).hex(), "one", bytes(16).hex())]
    part = found[payload_key("hid", (b"q" * 16).hex(), "client's", (2).to_bytes(16, "big").hex())]
    assert (first.id, first.variant) == ("one", "tiny")
    assert (part.id, part.query) == ("client's", (b"q" * 16).hex())
    for payload, at in ((first, 0), (part, 2)):
        assert np.array_equal(to_array(payload.inputs["x"], "x"), X[3 * at : 3 * at + 3])
        assert payload.outputs["scores"].data == result.outputs[at]["scores"].data


async def test_what_waits_is_kept_at_the_end_and_no_more_than_there_is_room_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    size = 3 * 4 * (tiny_models.FEATURES + tiny_models.CLASSES)
    monkeypatch.setattr(edge_samples, "MOST_WAITING", 2 * size)
    async with keeping(tmp_path) as (bus, edge):
        compute(edge, *(query(i, keep=True) for i in range(5)))
        await edge.ended()
        assert len(await kept(bus)) == 2
    assert "3 payloads were not kept" in caplog.text


async def test_where_a_model_serves_in_a_program_of_its_user_nothing_is_kept(tmp_path: Path) -> None:
    async with keeping(tmp_path, payloads=False) as (bus, edge):
        compute(edge, query(0, keep=True))
        await edge.ended()
        assert await kept(bus) == {}

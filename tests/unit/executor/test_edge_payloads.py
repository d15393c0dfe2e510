"""Queries are kept with their answers after they are answered: a real framework, an in-process bus."""

import hashlib
from pathlib import Path

import msgspec
import numpy as np
import pytest
from msgspec.structs import replace

from bus.codec import decode, encode
from bus.memory import MemoryBus
from bus.messages.flow import Origin, Payload, Route, payload_key
from bus.subjects import Subjects
from bus.tensors import from_array, to_array
from services.core.settings import ExecutorSettings
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
X, _ = tiny_models.digits(400)
MODEL = tiny_models.mlp()


def query(i: int, *, keep: bool = True, id: str | None = None, origin: Route | None = None) -> QueuedQuery:
    """Of items 3 i to 3 i + 2."""
    body = msgspec.Raw(encode(from_array(X[3 * i : 3 * i + 3])))
    route = Route(i.to_bytes(16, "big"), 0, 0, "inbox", 2e9, 0.0, "d", "i", "hid", 3, id, keep=keep)
    return queued_query(replace(route, origin=None if origin is None else Origin(origin)), body, body)


async def loaded(bus: MemoryBus, directory: Path, *, payloads: bool = True) -> ExecutorEdge:
    store = await bus.object_store(SUBJECTS.artifacts_bucket)
    await bus.key_value(SUBJECTS.payloads_bucket)
    variant = replace(
        variant_record(variant="tiny", model="tiny", max_batch=64, signature=SIGNATURE),
        artifact=hashlib.sha256(MODEL).hexdigest(),
    )
    await store.put(variant.artifact, MODEL)
    edge = ExecutorEdge(bus, SUBJECTS, "cpu", 2, directory, ExecutorSettings(), payloads=payloads)
    await edge.perform(LoadModel("i", variant))
    return edge


def compute(edge: ExecutorEdge, *queries: QueuedQuery) -> BatchResult:
    result = edge.inline(RunBatch("i", list(queries), 0.001, inline=True))
    assert isinstance(result, BatchResult)
    assert result.errors is None, result.errors
    return result


async def kept(bus: MemoryBus) -> dict[str, Payload]:
    bucket = await bus.key_value(SUBJECTS.payloads_bucket)
    return {key: decode(Payload, (await bucket.get(key)).value or b"") for key in await bucket.keys()}


async def test_what_its_dispatcher_has_chosen_of_a_batch_is_kept_as_it_was_computed(tmp_path: Path) -> None:
    bus = MemoryBus()
    edge = await loaded(bus, tmp_path)
    asked = replace(query(9, id="client's").route, uid=b"q" * 16)
    result = compute(edge, query(0, id="one"), query(1, keep=False), query(2, origin=asked))

    async def both() -> bool:
        return len(await kept(bus)) == 2

    await until(both)
    found = await kept(bus)
    first = found[payload_key("hid", bytes(16).hex(), "one", bytes(16).hex())]
    part = found[payload_key("hid", (b"q" * 16).hex(), "client's", (2).to_bytes(16, "big").hex())]
    assert (first.id, first.variant) == ("one", "tiny")
    assert (part.id, part.query) == ("client's", (b"q" * 16).hex())
    for payload, at in ((first, 0), (part, 2)):
        assert np.array_equal(to_array(payload.inputs["x"], "x"), X[3 * at : 3 * at + 3])
        assert payload.outputs["scores"].data == result.outputs[at]["scores"].data
    await edge.ended()
    await bus.close()


async def test_what_waits_is_kept_at_the_end_and_no_more_than_there_is_room_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    size = 3 * 4 * (tiny_models.FEATURES + tiny_models.CLASSES)
    monkeypatch.setattr(edge_samples, "MOST_WAITING", 2 * size)
    bus = MemoryBus()
    edge = await loaded(bus, tmp_path)
    compute(edge, *(query(i) for i in range(5)))
    await edge.ended()
    assert len(await kept(bus)) == 2
    assert "3 payloads were not kept" in caplog.text
    await bus.close()


async def test_where_a_model_serves_in_a_program_of_its_user_nothing_is_kept(tmp_path: Path) -> None:
    bus = MemoryBus()
    edge = await loaded(bus, tmp_path, payloads=False)
    compute(edge, query(0))
    await edge.ended()
    assert await kept(bus) == {}
    await bus.close()

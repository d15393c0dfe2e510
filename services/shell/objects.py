"""Large tensors in the object store: outputs that no message can hold, and where they are read again."""

from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any

import msgspec
from msgspec import Raw

from bus.codec import encode
from bus.messages.flow import TensorRef
from bus.messages.public import ObjectRef, TensorHead
from bus.port import Bus, NotFound
from bus.tensors import BadTensor

MOST_LARGE = 256 * 2**20  # bytes of an object with tensors
KEPT_S = 600.0  # s for which outputs can be fetched

_tensor = msgspec.msgpack.Decoder(TensorHead).decode
_named = msgspec.msgpack.Decoder(dict[str, Raw]).decode


async def fetch(bus: Bus, bucket: str, key: str) -> bytes:
    """An object. Raises NotFound, and BadTensor if it is too large."""
    store = await bus.object_store(bucket, create=False)
    data = await store.get(key)
    if len(data) > MOST_LARGE:
        raise BadTensor(f"the object holds {len(data)} bytes, at most {MOST_LARGE} are taken")
    return data


async def fetch_tensors(bus: Bus, refs: Iterable[TensorRef]) -> dict[str, Raw]:
    """Encoded tensors by the names that they get. Each object is read once. Raises NotFound and BadTensor."""
    objects: dict[tuple[str, str], bytes] = {}
    found: dict[str, Raw] = {}
    for ref in refs:
        where = (ref.bucket, ref.key)
        data = objects.get(where)
        if data is None:
            data = objects[where] = await fetch(bus, *where)
        found[ref.name] = _tensor_of(data, ref)
    return found


def _tensor_of(data: bytes, ref: TensorRef) -> Raw:
    try:
        _tensor(data)
        return Raw(data)
    except msgspec.DecodeError:
        pass  # a map of tensors, or a nested list
    try:
        named = _named(data)
    except msgspec.DecodeError:
        return Raw(data)
    if ref.tensor not in named:
        raise BadTensor(f"the object {ref.key} holds no {ref.tensor!r}; it holds {', '.join(named)[:200]}")
    return named[ref.tensor]


async def store_outputs(bus: Bus, bucket: str, key: str, outputs: Mapping[str, Any]) -> ObjectRef:
    """Put a map of tensors into the object store. bucket: that of outputs."""
    store = await bus.object_store(bucket, max_age_s=KEPT_S)
    data = encode(dict(outputs))
    await store.put(key, data)
    return ObjectRef(bucket=bucket, key=key, bytes=len(data))


async def delete_all(bus: Bus, bucket: str, keys: Iterable[str]) -> None:
    """Delete objects of a bucket, as far as they are there."""
    with suppress(NotFound):
        store = await bus.object_store(bucket, create=False)
        for key in keys:
            with suppress(NotFound):
                await store.delete(key)

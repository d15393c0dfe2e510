"""Queries that were kept with their answers (`set-app --payloads`): read, joined with their labels, made into arrays, deleted."""

import asyncio
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from bus.codec import decode
from bus.messages.flow import Payload, id_digest
from bus.port import KeyValue, NotFound
from bus.tensors import BadTensor, to_array
from infaas.client import Client
from infaas.errors import BadInput
from infaas.queries import check_name

Array = np.ndarray[Any, Any]
Label = Any  # what JSON can say
LABELS = "labels"
OTHERS = (LABELS, "query", "item", "id", "time", "variant")  # arrays of the file beside inputs and outputs
OUTPUTS = "outputs."  # before the name of an output
TOGETHER = 200  # values that are asked for at a time
FEEDBACK = (
    "SELECT query, id, item, label FROM infaas.feedback WHERE app = %s AND time >= to_timestamp(%s) ORDER BY time"
)


class KeptItems(NamedTuple):
    """arrays: of all items, by their names in the file. left_out: items whose shapes differ from most others'."""

    arrays: dict[str, Array]
    left_out: int

    @property
    def items(self) -> int:
        return len(self.arrays["item"])


async def _bucket(client: Client) -> KeyValue:
    return await client.bus.key_value(client.subjects.payloads_bucket, create=False)


async def read(client: Client, app: str) -> list[Payload]:
    """What is kept of an app, the oldest first. Raises BusError, also Forbidden: operators alone may."""
    bucket = await _bucket(client)
    keys = await bucket.keys(check_name(app, "app"))

    async def one(key: str) -> Payload | None:
        try:
            return decode(Payload, (await bucket.get(key)).value or b"")
        except NotFound:  # its time was over
            return None

    found: list[Payload] = []
    for at in range(0, len(keys), TOGETHER):
        found += filter(None, await asyncio.gather(*map(one, keys[at : at + TOGETHER])))
    return sorted(found, key=lambda payload: payload.time)


async def delete(client: Client, app: str, id: str | None = None) -> int:
    """Delete what is kept of an app, or of the queries with this id, the client's own or the `query` that answers named. Returns how many there were."""
    bucket = await _bucket(client)
    keys = await bucket.keys(check_name(app, "app"))
    if id is not None:
        keys = [key for key in keys if id == key.split(".")[1] or id_digest(id) == key.split(".")[2]]
    for at in range(0, len(keys), TOGETHER):
        await asyncio.gather(*map(bucket.delete, keys[at : at + TOGETHER]))
    return len(keys)


def labels_of(
    rows: Iterable[tuple[Any, str | None, int, str]], payloads: Sequence[Payload]
) -> dict[tuple[str, int], Label]:
    """The last label of each query's items. rows: what FEEDBACK selects."""
    by_id = {payload.id: payload.query for payload in payloads if payload.id is not None}
    found = {}
    for uid, known_as, item, label in rows:
        query = uid.hex if uid is not None else by_id.get(known_as or "")
        if query is not None:
            found[query, item] = json.loads(label)
    return found


def arrays_of(payloads: Sequence[Payload], labels: Mapping[tuple[str, int], Label], *, labelled: bool) -> KeptItems:
    """Items as arrays: inputs and `outputs.NAME` by their names, `labels`, and what they are items of. labelled: only those with a label."""
    shapes = Counter[Any]()
    groups: dict[Any, list[tuple[Payload, dict[str, Array], list[int]]]] = {}
    for payload in payloads:
        arrays = _named(payload)
        count = len(next(iter(arrays.values())))
        places = [i for i in range(count) if not labelled or (payload.query, i) in labels]
        alike = tuple((name, one.dtype.kind, one.shape[1:]) for name, one in arrays.items())
        shapes[alike] += len(places)
        groups.setdefault(alike, []).append((payload, arrays, places))
    rows = groups[max(shapes, key=lambda alike: shapes[alike])] if shapes else []
    found = (
        {name: np.concatenate([arrays[name][places] for _, arrays, places in rows]) for name in rows[0][1]}
        if rows
        else {}
    )
    items = [(payload, i) for payload, _, places in rows for i in places]
    found[LABELS] = label_array([labels.get((payload.query, i)) for payload, i in items])
    found["query"] = np.array([payload.query for payload, _ in items], dtype=np.str_)
    found["item"] = np.array([i for _, i in items], dtype=np.int64)
    found["id"] = np.array([payload.id or "" for payload, _ in items], dtype=np.str_)
    found["time"] = np.array([payload.time for payload, _ in items], dtype=np.float64)
    found["variant"] = np.array([payload.variant for payload, _ in items], dtype=np.str_)
    return KeptItems(found, shapes.total() - len(items))


def label_array(values: Sequence[Label | None]) -> Array:
    """Numbers, NaN where there is none; else texts, empty where there is none."""
    known = [value for value in values if value is not None]
    if all(isinstance(value, int) for value in known) and len(known) == len(values):
        return np.array(values, dtype=np.int64)
    if all(isinstance(value, int | float) for value in known):
        return np.array(values, dtype=np.float64)
    sizes = {len(value) if isinstance(value, list) else 0 for value in known}
    if len(sizes) == 1 and sizes != {0} and all(isinstance(one, int | float) for value in known for one in value):
        (size,) = sizes
        return np.array([[None] * size if value is None else value for value in values], dtype=np.float64)
    return np.array(
        ["" if value is None else value if isinstance(value, str) else json.dumps(value) for value in values],
        dtype=np.str_,
    )


def numbered(labels: Array, classes: Sequence[str]) -> Array:
    """Class numbers in place of the names of a model's classes. Raises BadInput."""
    if labels.dtype.kind != "U" or not classes:
        return labels
    place = {name: number for number, name in enumerate(classes)}
    if unknown := sorted(set(labels.tolist()) - place.keys()):
        raise BadInput(f"label: the model has no class {unknown[0]!r}; its classes are {', '.join(classes)}")
    return np.array([place[one] for one in labels.tolist()], dtype=np.int64)


def _named(payload: Payload) -> dict[str, Array]:
    inputs = {name: _array(name, one) for name, one in payload.inputs.items()}
    taken = {name: "x" if len(inputs) == 1 else f"x.{name}" for name in inputs if name in OTHERS}
    found = {taken.get(name, name): one for name, one in inputs.items()}
    return found | {f"{OUTPUTS}{name}": _array(name, one) for name, one in payload.outputs.items()}


def _array(name: str, tensor: Any) -> Array:
    """Texts, or bytes that are none, without Python's objects."""
    try:
        array = to_array(tensor, name, empty=True)
        return array.astype(np.str_) if array.dtype.kind == "O" else array
    except BadTensor:
        return to_array(tensor, name, binary=True).astype(np.bytes_)

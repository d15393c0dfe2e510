"""Whether queries still look like the validation set: how many items of both fell into each cell, and tests that hold for all of them together.

Each column of an item, and of its answer, is one number. The edges of a column's cells are quantiles of the validation set; all that is kept of
queries is how many fell into each cell, which adds up over processes and time. Both sides are samples: whether a cell holds more of one than
its share is Fisher's hypergeometric test, which is exact for validation sets of any size. An edge is an order statistic of the validation set
and belongs to the cell below it, so that the test is exact or errs towards silence. LEVEL is spent over columns, cells, sizes of windows
and windows: the probability of ever finding a drift where there is none is LEVEL at most, for each model of an app.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from math import log, prod
from typing import Any, Self
from zlib import crc32

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from bus.codec import BadMessage, decode
from bus.datatypes import DATATYPES
from bus.messages.catalog import Signature, TensorSpec

Array = NDArray[Any]

LEVEL = 0.01
EDGES = 15  # of a column: just below the least value, 13 quantiles, the greatest value
CELLS = EDGES + 2  # below, between and above them; the last one counts NaN
MOST_ELEMENTS = 1024  # of a tensor, that are columns of their own; of larger ones these at equal distances
WHOLE = 16  # elements of a tensor that is described as a whole, too
MOST_TEXTS = 64  # of an item
MOST_ITEMS, MOST_VALUES = 20_000, 4_000_000  # of a validation set that are read
ITEMS = 2**14  # bits: that of each item of a window is one (linear counting of those that differ: Whang et al., 1990)
FEW = 0.02  # of a validation set's items; where more are like another one, items that come again are no sign of dependence
WORDS = 2**15  # bits: that of each word of the validation set is one

# -- an item's columns

_GROUPS = np.arange(EDGES) + 0.5  # edges where values are numbers of groups


def columns_of(signature: Signature) -> list[str]:
    """The names of the columns, in the order of `measure`."""
    found = [name for spec in signature.inputs for name in _named(spec)]
    return found + [f"outputs.{name}" for spec in signature.outputs for name in _given(spec)]


def measure(signature: Signature, inputs: Mapping[str, Array], outputs: Mapping[str, Array], words: bytes) -> Array:
    """The items' numbers, [items, columns]. inputs, outputs: by name, [items, ...]. words: bits of the known ones."""
    parts = [part for spec in signature.inputs for part in _measured(spec, inputs[spec.name], words)]
    parts += [part for spec in signature.outputs for part in _answered(spec, outputs[spec.name])]
    items = len(next(iter(inputs.values())))
    return np.column_stack([np.zeros((items, 0)), *parts])


def _named(spec: TensorSpec) -> Iterator[str]:
    size = _size(spec)
    if DATATYPES[spec.datatype].kind == "O":
        for place in range(size if 0 < size <= MOST_TEXTS else 0):
            name = _element(spec, place)
            yield from (f"{name} length", f"{name} words", f"{name} unknown words", f"{name} group")
        return
    yield from (_element(spec, place) for place in _places(size))
    if _whole(size):
        yield from (f"{spec.name} {what}" for what in ("mean", "spread", "roughness", "elements"))
        for channel in range(_channels(spec)[1]):
            yield from (f"{spec.name} channel {channel} {what}" for what in ("mean", "spread"))


def _measured(spec: TensorSpec, array: Array, words: bytes) -> Iterator[Array]:
    size = _size(spec)
    items = len(array)
    if DATATYPES[spec.datatype].kind == "O":
        if 0 < size <= MOST_TEXTS:
            texts = array.reshape(items * size).tolist()
            yield np.array([_text(one, words) for one in texts]).reshape(items, 4 * size)
        return
    flat = array.reshape(items, -1).astype(np.float64)
    if places := _places(size):
        yield flat[:, places]
    if _whole(size):
        yield _coarse(np.stack(_described(flat), axis=1))
        axis, count = _channels(spec)
        for channel in range(count):
            one = np.take(array, channel, axis=axis).reshape(items, -1).astype(np.float64)
            yield _coarse(np.stack([one.mean(axis=1), one.std(axis=1)], axis=1))


def _described(flat: Array) -> list[Array]:
    if not flat.shape[1]:
        return [np.zeros(len(flat))] * 4
    with np.errstate(all="ignore"):
        rough = np.abs(np.diff(flat, axis=1)).mean(axis=1) if flat.shape[1] > 1 else np.zeros(len(flat))
        return [flat.mean(axis=1), flat.std(axis=1), rough, np.full(len(flat), flat.shape[1])]


def _given(spec: TensorSpec) -> Sequence[str]:
    size, kind = _size(spec), DATATYPES[spec.datatype].kind
    if kind == "f" and len(spec.shape) == 1 and size > 1:
        return f"{spec.name} class", f"{spec.name} confidence"
    if size == 1:
        return (spec.name,) if kind == "f" else (f"{spec.name} group",)
    return () if kind == "O" else (f"{spec.name} mean", f"{spec.name} spread")


def _answered(spec: TensorSpec, array: Array) -> Iterator[Array]:
    size, kind, items = _size(spec), DATATYPES[spec.datatype].kind, len(array)
    flat = array.reshape(items, -1)
    if kind == "f" and len(spec.shape) == 1 and size > 1:
        yield flat.argmax(axis=1) % (EDGES + 1)
        yield _coarse(flat.max(axis=1))
    elif size == 1:
        whole = np.array([_group(one) for one in flat[:, 0].tolist()]) if kind == "O" else flat[:, 0]
        yield _coarse(whole) if kind == "f" else whole.astype(np.int64) % (EDGES + 1)
    elif kind != "O":
        yield _coarse(np.stack(_described(flat.astype(np.float64))[:2], axis=1))


def _text(text: str | bytes, words: bytes) -> tuple[float, float, float, float]:
    found = _words(text)
    unknown = sum(not words[bit >> 3] >> (bit & 7) & 1 for bit in found) if words else 0
    return len(text), len(found), unknown / max(1, len(found)), _group(text)


def _words(text: str | bytes) -> list[int]:
    """Each word's bit; bytes, as of a picture's file, have none."""
    return [crc32(word.encode()) % WORDS for word in text.lower().split()] if isinstance(text, str) else []


def _group(text: str | bytes) -> int:
    """A category's cell."""
    return crc32(text if isinstance(text, bytes) else str(text).encode()) % (EDGES + 1)


def _coarse(values: Array) -> Array:
    """To 11 bits, since the same is not computed to the last bit in batches of different sizes."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.int32)
    with np.errstate(over="ignore"):
        return np.where(np.isfinite(values), ((bits + 0x800) & ~0xFFF).view(np.float32), values).astype(np.float64)


def _size(spec: TensorSpec) -> int:
    """Elements of an item; negative or 0: they differ."""
    return -1 if -1 in spec.shape else prod(spec.shape)


def _places(size: int) -> list[int]:
    if size <= MOST_ELEMENTS:
        return [*range(max(0, size))]
    return [i * size // MOST_ELEMENTS for i in range(MOST_ELEMENTS)]


def _whole(size: int) -> bool:
    return size < 0 or size >= WHOLE


def _channels(spec: TensorSpec) -> tuple[int, int]:
    """The axis of an array of pictures that counts channels, and how many there are; none: 0."""
    shape = spec.shape
    for axis in (0, 2) if len(shape) == 3 else ():
        if 1 < shape[axis] <= 4:
            return axis + 1, shape[axis]
    return 0, 0


def _element(spec: TensorSpec, place: int) -> str:
    if spec.columns and len(spec.shape) == 1:
        return spec.columns[place]
    if spec.shape in ([], [1]):
        return spec.name
    return f"{spec.name}[{', '.join(map(str, np.unravel_index(place, spec.shape)))}]"


# -- what is kept of the validation set


class Distribution(Struct, frozen=True, kw_only=True):
    """A validation set, and a model's answers to it. columns: their names. edges: float64 [columns, EDGES], padded with infinity; counts: int64
    [columns, CELLS], as bytes. words: bits of the words of its first half; empty: it has no texts. The other half counts unknown ones.
    repeats: many of its items are alike, as where there are few values.
    """

    signature: Signature
    columns: list[str]
    edges: bytes
    counts: bytes
    words: bytes = b""
    repeats: bool = False

    @classmethod
    def of(cls, signature: Signature, values: Array, words: bytes) -> Self:
        """values: of `measure`; words: of the first half of these items."""
        columns = columns_of(signature)
        counted = np.zeros((len(columns), CELLS), np.int64)
        edges = np.full((len(columns), EDGES), np.inf)
        for i, name in enumerate(columns):
            column = values[len(values) // 2 :, i] if name.endswith(" unknown words") else values[:, i]
            found = _GROUPS if name.endswith((" group", " class")) else _edges(column)
            edges[i, : len(found)] = found
            counted[i] = _count(column[:, None], edges[i : i + 1])[0]
        repeats = len(set(_digests(values))) < (1.0 - FEW) * len(values)
        return cls(
            signature=signature,
            columns=columns,
            edges=edges.tobytes(),
            counts=counted.tobytes(),
            words=words,
            repeats=repeats,
        )

    @classmethod
    def read(cls, data: bytes) -> Self:
        """Raises BadMessage for what is none."""
        found = decode(cls, data)
        n = len(found.columns)
        if columns_of(found.signature) != found.columns or len(found.words) not in (0, WORDS // 8):
            raise BadMessage("it is of another release")
        if (len(found.edges), len(found.counts)) != (8 * n * EDGES, 8 * n * CELLS):
            raise BadMessage("its cells are not those of its columns")
        return found

    @property
    def seen(self) -> Array:
        """Items of the validation set, [columns, CELLS]."""
        return np.frombuffer(self.counts, np.int64).reshape(-1, CELLS)

    def count(self, inputs: Mapping[str, Array], outputs: Mapping[str, Array]) -> Array:
        """Items in each cell, [columns, CELLS]."""
        return self.tally(inputs, outputs, 0.0, 0.0).counts

    def tally(
        self, inputs: Mapping[str, Array], outputs: Mapping[str, Array], start: float, end: float
    ) -> "CountedWindow":
        """These items, which came in this time."""
        values = measure(self.signature, inputs, outputs, self.words)
        bits = np.zeros(ITEMS, bool)
        bits[[one % ITEMS for one in _digests(values)]] = True
        counts = _count(values, np.frombuffer(self.edges).reshape(-1, EDGES))
        return CountedWindow(start, end, counts, np.packbits(bits))

    def independent(self, window: "CountedWindow") -> Array:
        """A window's counts, as of no more items than differ: the same few again and again say no more than once."""
        items = int(window.counts[0].sum()) if len(window.counts) else 0
        if self.repeats or window.items is None or not items:
            return window.counts
        free = ITEMS - int(np.unpackbits(window.items).sum())
        share = min(1.0, ITEMS * log(ITEMS / max(1, free)) / items)
        return np.asarray(np.floor(window.counts * share + 1e-9).astype(np.int64)) if share < 1 - FEW else window.counts


def samples_of(signature: Signature, samples: int) -> int:
    """How many of a validation set's samples its distribution is made of."""
    return min(samples, MOST_ITEMS, max(1000, MOST_VALUES // max(1, len(columns_of(signature)))))


def words_of(signature: Signature, inputs: Mapping[str, Array]) -> bytes:
    """The bits of the words in these items; empty: the model takes no texts."""
    bits = bytearray(WORDS // 8)
    texts = [spec.name for spec in signature.inputs if DATATYPES[spec.datatype].kind == "O"]
    for name in texts:
        for text in inputs[name].reshape(-1).tolist():
            for bit in _words(text):
                bits[bit >> 3] |= 1 << (bit & 7)
    return bytes(bits) if texts else b""


def _digests(values: Array) -> list[int]:
    """Of the items."""
    return [crc32(row) for row in np.ascontiguousarray(values)]


def _edges(column: Array) -> Array:
    ordered = np.sort(column[np.isfinite(column)])
    if not len(ordered):
        return ordered
    ranks = np.ceil(np.arange(1, EDGES) * len(ordered) / (EDGES - 1)).astype(int) - 1
    return np.unique([np.nextafter(ordered[0], -np.inf), *ordered[ranks]])


def _count(values: Array, edges: Array) -> Array:
    cells = np.zeros(values.shape, np.int64)
    for edge in edges.T:
        cells += values > edge
    cells[np.isnan(values)] = CELLS - 1
    n = len(edges)
    return np.bincount((cells + CELLS * np.arange(n)).reshape(-1), minlength=n * CELLS).reshape(n, CELLS)


# -- the test

_CUTS = CELLS + EDGES - 1  # a column's cells, and the sets of its lowest ones


@lru_cache(4)
def _log_factorials(size: int) -> Array:
    found: Array = np.concatenate([[0.0], np.cumsum(np.log(np.arange(1, size)))])
    return found


def evidence(seen: Array, found: Array) -> Array:
    """-log of a bound on each column's p-value: that the items found come from what those seen came from. Both [columns, CELLS]."""
    n, m = seen.sum(axis=1, keepdims=True), found.sum(axis=1, keepdims=True)
    a, b = (np.hstack([one, one[:, : CELLS - 1].cumsum(axis=1)[:, 1:-1]]) for one in (seen, found))
    logs = _log_factorials(1 << int((n + m).max() + 2).bit_length())
    both, rest = a + b, n + m - a - b
    probability = logs[both] - logs[a] - logs[b] + logs[rest] - logs[n - a] - logs[m - b]
    probability -= logs[n + m] - logs[n] - logs[m]
    # The distribution is log-concave: beyond b its terms fall at least as fast as from b to the next one.
    more = a * (m - b) / ((b + 1.0) * (n - a + 1.0))
    less = b * (n - a) / ((a + 1.0) * (m - b + 1.0))
    ratio = np.minimum(more, less)
    with np.errstate(divide="ignore"):
        tail = np.where(ratio < 1.0, probability - np.log1p(-np.minimum(ratio, 1.0)), 0.0)
    return np.asarray(np.maximum(0.0, -tail.min(axis=1) - log(2 * _CUTS)))


def distance(seen: Array, found: Array) -> Array:
    """The total variation distance of each column, 0..1: the share of the items that would have to lie elsewhere."""
    shares = [one / np.maximum(1, one.sum(axis=1, keepdims=True)) for one in (seen, found)]
    return np.asarray(np.abs(shares[0] - shares[1]).sum(axis=1) / 2)


# -- windows

LEAST = 64  # items of a window of the smallest size
SIZES = 7  # each is made of two of the size before
_SPENT = 2.12  # at least the sum of 1 / (t ln(t)^2) from t = 2 on
BACK = log(1 / 0.05)  # below, a window looks like the validation set


class CountedWindow(Struct):
    """start, end: Unix seconds. counts: as of `Distribution.count`. items: bits of the items, packed; None: all differ."""

    start: float
    end: float
    counts: Array
    items: Array | None = None

    def with_(self, other: "CountedWindow") -> "CountedWindow":
        """Both together."""
        items = None if self.items is None or other.items is None else self.items | other.items
        start, end = min(self.start, other.start), max(self.end, other.end)
        return CountedWindow(start, end, self.counts + other.counts, items)


class Windows:
    """The windows of one model's queries: of LEAST items, and of twice as many again and again. tests: made so far, by size."""

    def __init__(self, tests: Sequence[int] = ()) -> None:
        self.tests = [*tests, *[0] * (SIZES - len(tests))]
        self._filling: CountedWindow | None = None
        self._halves: list[CountedWindow | None] = [None] * SIZES

    def add(self, more: CountedWindow) -> Iterator[tuple[int, CountedWindow]]:
        """The windows that are full with these items, by size, each of which is tested once."""
        if self._filling is not None:
            more = self._filling.with_(more)
        full = more.counts[0].sum() >= LEAST if len(more.counts) else False
        self._filling = None if full else more
        for size in range(SIZES if full else 0):
            self.tests[size] += 1
            yield size, more
            half, self._halves[size] = self._halves[size], None
            if half is None:
                self._halves[size] = more
                return
            more = half.with_(more)

    def bound(self, size: int, columns: int) -> float:
        """The evidence of a column from which a window of this size, the last one, shows a drift."""
        t = self.tests[size] + 1
        return log(SIZES * columns * _SPENT * t * log(t) ** 2 / LEVEL)

    def forget(self) -> None:
        """What came until now is part of no window to come."""
        self._filling, self._halves = None, [None] * SIZES

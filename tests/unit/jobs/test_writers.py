"""Outputs in every format: what numpy and stock packages read is what the model returned."""

import io
import json
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bus.messages.jobs import Checkpoint
from bus.tensors import from_array
from services.jobs.items import BadItem, nested
from services.jobs.npy import HEADER, read_header, write_header
from services.jobs.writers import rendered


def written(form: str, chunks: list[dict[str, np.ndarray]]) -> bytes:
    """A whole file, chunk by chunk, as the coordinator appends it."""
    total = sum(len(next(iter(chunk.values()))) for chunk in chunks)
    data, checkpoint = b"", Checkpoint()
    for chunk in chunks:
        items = len(next(iter(chunk.values())))
        tensors = {name: from_array(array) for name, array in chunk.items()}
        more, after = rendered(form, tensors, items, checkpoint, total)
        data += more
        checkpoint = Checkpoint(items=checkpoint.items + items, datatype=after.datatype, shape=after.shape)
    return data


@given(
    sizes=st.lists(st.integers(1, 5), min_size=1, max_size=5),
    datatype=st.sampled_from(["f4", "f8", "f2", "i8", "u1", "?"]),
    shape=st.lists(st.integers(1, 3), max_size=2),
)
def test_all_formats_hold_the_same(sizes: list[int], datatype: str, shape: list[int]) -> None:
    whole = np.arange(sum(sizes) * int(np.prod(shape)), dtype="i8").astype(datatype).reshape(-1, *shape)
    chunks = [{"y": part} for part in np.split(whole, np.cumsum(sizes)[:-1])]
    loaded = np.load(io.BytesIO(written("npy", chunks)))
    assert (loaded.dtype, loaded.tolist()) == (whole.dtype, whole.tolist())
    lines = written("jsonl", chunks).splitlines()
    assert [json.loads(line)["y"] for line in lines] == whole.tolist()
    items = list(msgpack.Unpacker(io.BytesIO(written("msgpack", chunks))))
    assert [item["y"]["shape"] for item in items] == [[1, *shape]] * len(whole)
    assert b"".join(item["y"]["data"] for item in items) == whole.tobytes()


def test_texts_and_several_outputs_need_lines_or_objects() -> None:
    chunk: dict[str, Any] = {"label": np.array(["ä", "b"], dtype=object), "score": np.array([0.5, np.nan], "f4")}
    assert [json.loads(line) for line in written("jsonl", [chunk]).splitlines()] == [
        {"label": "ä", "score": 0.5},
        {"label": "b", "score": None},
    ]
    items = list(msgpack.Unpacker(io.BytesIO(written("msgpack", [chunk]))))
    assert items[0]["label"]["data"] == b"\x02\0\0\0" + "ä".encode()
    with pytest.raises(BadItem, match=r"the model returns label, score: \.npy holds one array"):
        written("npy", [chunk])
    with pytest.raises(BadItem, match=r"\.npy holds no BYTES"):
        written("npy", [{"label": chunk["label"]}])


def test_outputs_that_change_their_shape_do_not_fit_one_array() -> None:
    chunks = [{"y": np.zeros((2, 3), "f4")}, {"y": np.zeros((2, 4), "f4")}]
    with pytest.raises(BadItem, match="outputs changed"):
        written("npy", chunks)
    assert len(written("jsonl", chunks).splitlines()) == 4


def test_an_output_with_another_number_of_items_is_noticed() -> None:
    with pytest.raises(BadItem, match="for 3 items"):
        rendered("jsonl", {"y": from_array(np.zeros((2, 1), "f4"))}, 3, Checkpoint(), 3)


@given(st.integers(0, 2**40), st.lists(st.integers(1, 10**6), max_size=6))
def test_our_headers_are_numpys_and_always_of_one_length(items: int, shape: list[int]) -> None:
    header = write_header("FP32", items, shape)
    assert len(header) == HEADER
    version = np.lib.format.read_magic(file := io.BytesIO(header))
    assert version == (1, 0)
    assert np.lib.format.read_array_header_1_0(file) == ((items, *shape), False, np.dtype("<f4"))
    size = HEADER + items * 4 * int(np.prod(shape, dtype=object))
    found = read_header(io.BytesIO(header), size)
    assert (found.datatype, found.items, found.shape, found.start) == ("FP32", items, shape, HEADER)


def test_brain_floats_are_widened() -> None:
    halves = (np.array([1.0, -2.5, 3e38], "<f4").view("<u4") >> 16).astype("<u2").tobytes()
    assert nested("BF16", [3], halves)[:2] == [1.0, -2.5]
    assert nested("FP32", [], np.float32(2.0).tobytes()) == 2.0

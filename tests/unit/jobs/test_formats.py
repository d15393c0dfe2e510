"""Chunks of every format: all items, in order, each once, the same ones after a restart anywhere."""

import io
import json
from pathlib import Path
from typing import Any

import msgpack
import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bus.messages.catalog import Signature, TensorSpec
from bus.messages.jobs import Checkpoint, Position
from bus.messages.public import Tensor
from bus.tensors import from_array, to_array
from services.jobs.formats import (
    BadItem,
    BadJobInput,
    Cut,
    Reader,
    nested,
    open_reader,
    read_header,
    rendered,
    write_header,
)
from tests.support.data.offline_inputs import tensor, write

VECTOR = Signature(inputs=[TensorSpec(name="x", datatype="FP32", shape=[3])], outputs=[])
TOKENS = Signature(inputs=[TensorSpec(name="ids", datatype="INT64", shape=[-1])], outputs=[])
PAIR = Signature(
    inputs=[TensorSpec(name="a", datatype="FP32", shape=[2]), TensorSpec(name="t", datatype="BYTES", shape=[1])],
    outputs=[],
)


def reader(form: str, data: bytes, signature: Signature = VECTOR) -> Reader:
    return open_reader(form, io.BytesIO(data), len(data), signature)


def cuts(form: str, data: bytes, signature: Signature, most: int, most_bytes: int = 2**20) -> list[Cut]:
    """All chunks, each read by a reader of its own, as after a restart."""
    total = reader(form, data, signature).count()
    found: list[Cut] = []
    position, first = Position(), 0
    while first < total:
        cut = reader(form, data, signature).cut(position, first, min(most, total - first), most_bytes)
        found.append(cut)
        position, first = cut.next, first + cut.items
    assert first == total
    return found


def array(cut: Cut) -> np.ndarray:
    return to_array(msgspec.msgpack.decode(cut.body, type=Tensor), "inputs")


def file_of(form: str, x: np.ndarray, object_items: int, directory: Path) -> bytes:
    return write(directory / f"in.{form}", x, object_items=object_items).read_bytes()


@given(
    form=st.sampled_from(["npy", "jsonl", "msgpack"]),
    items=st.integers(1, 40),
    most=st.integers(1, 12),
    most_bytes=st.sampled_from([1, 30, 2**20]),
    object_items=st.integers(1, 9),
)
def test_every_item_comes_once_and_in_order(
    tmp_path_factory: pytest.TempPathFactory, form: str, items: int, most: int, most_bytes: int, object_items: int
) -> None:
    x = np.arange(items * 3, dtype="f4").reshape(items, 3)
    data = file_of(form, x, object_items, tmp_path_factory.mktemp("x"))
    found = cuts(form, data, VECTOR, most, most_bytes)
    assert all(1 <= cut.items <= most for cut in found)
    assert all(cut.items == 1 or cut.items * 12 <= most_bytes for cut in found)
    assert np.concatenate([array(cut) for cut in found]).tolist() == x.tolist()


@given(st.lists(st.integers(1, 4), min_size=1, max_size=20), st.integers(1, 6))
def test_only_items_of_equal_length_share_a_chunk(lengths: list[int], most: int) -> None:
    rows = [list(range(length)) for length in lengths]
    lines = "".join(json.dumps(row) + "\n" for row in rows).encode()
    packed = b"".join(msgpack.packb(tensor(np.array([row], "i8"))) for row in rows)
    for form, data in (("jsonl", lines), ("msgpack", packed)):
        found = [array(cut).tolist() for cut in cuts(form, data, TOKENS, most)]
        assert [row for chunk in found for row in chunk] == rows


def test_several_inputs_and_texts_come_by_name() -> None:
    lines = "".join(json.dumps({"t": [f"text {i}"], "a": [i, i]}) + "\n" for i in range(5)).encode()
    objects = b"".join(msgpack.packb({"a": [[i, i]], "t": [[f"text {i}"]]}) for i in range(5))
    for form, data in (("jsonl", lines), ("msgpack", objects)):
        found = cuts(form, data, PAIR, 4)
        assert [cut.items for cut in found] == [4, 1]
        inputs = msgspec.msgpack.decode(found[0].body, type=dict[str, Tensor])
        assert to_array(inputs["a"], "a").tolist() == [[i, i] for i in range(4)]
        assert to_array(inputs["t"], "t").tolist() == [[f"text {i}"] for i in range(4)]


def test_a_line_may_be_a_row_of_a_table() -> None:
    lines = b'{"town": "Ulm", "age": 3}\n{"age": 4.5, "town": "Bonn"}\n'
    apart = [TensorSpec(name="age", datatype="FP32", shape=[1]), TensorSpec(name="town", datatype="BYTES", shape=[1])]
    (found,) = cuts("jsonl", lines, Signature(inputs=apart, outputs=[]), 4)
    inputs = msgspec.msgpack.decode(found.body, type=dict[str, Tensor])
    assert [to_array(inputs[name], name).tolist() for name in ("age", "town")] == [[[3.0], [4.5]], [["Ulm"], ["Bonn"]]]
    whole = Signature(inputs=[TensorSpec(name="x", datatype="FP32", shape=[2], columns=["a", "b"])], outputs=[])
    assert array(cuts("jsonl", b'{"b": 2, "a": 1, "c": 9}\n[3, 4]\n', whole, 4)[0]).tolist() == [[1.0, 2.0], [3.0, 4.0]]
    with pytest.raises(BadJobInput, match="item 1: column 'b' is missing: give each line a, b"):
        reader("jsonl", b'[1, 2]\n{"a": 1}\n', whole).count()


def npy(x: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, x)
    return buffer.getvalue()


GOOD = "[1,2,3]\n" * 217


@pytest.mark.parametrize(
    ("form", "data", "says"),
    [
        ("jsonl", GOOD + "[1,2]\n", r"item 217: has shape \[2\], the model takes \[3\]"),
        ("jsonl", GOOD + "[1,2,null]\n", "item 217: holds null"),
        ("jsonl", GOOD + '[1,2,"3"]\n', "item 217: holds str '3' where the model takes FP32"),
        ("jsonl", GOOD + "[1,2,true]\n", "item 217: holds bool"),
        ("jsonl", GOOD + "[1,2,[3]]\n", "item 217: is nested deeper"),
        ("jsonl", GOOD + "5\n", "item 217: has 0 axes"),
        ("jsonl", GOOD + '{"y":[1,2,3]}\n', "item 217: lacks the input 'x'"),
        ("jsonl", GOOD + '{"x":[1,2,3],"y":1}\n', "item 217: has an input 'y' too much"),
        ("jsonl", GOOD + "[1,2,", "item 217: the line is no JSON"),
        ("jsonl", GOOD + "[1,2,1e999]\n", "item 217: "),
        ("msgpack", msgpack.packb([[1, 2, 3]] * 216 + [[1, 2]]), r"item 216: has shape \[2\]"),
        ("msgpack", msgpack.packb(tensor(np.zeros((2, 4), "f4"))), r"item 0: has items of shape \[4\]"),
        ("msgpack", msgpack.packb(tensor(np.zeros((2, 3), "f4")) | {"shape": [3, 3]}), "item 0: has 24 bytes of data"),
        ("msgpack", msgpack.packb(tensor(np.zeros((2, 3), "f4")) | {"shape": [10**12, 3]}), "item 0: has 24 bytes"),
        ("msgpack", msgpack.packb(tensor(np.zeros((2, 3), "f4")) | {"datatype": "FP31"}), "item 0: is no tensor"),
        ("msgpack", msgpack.packb({"datatype": "BYTES", "shape": [1, 3], "data": b"\1\0\0\0a" * 3}), "has datatype BYTES"),
        ("msgpack", msgpack.packb([[1, 2, 3]]) + msgpack.packb([[1, 2, 3]])[:-1], "item 1: the file ends within"),
        ("msgpack", msgpack.packb([]), "item 0: the first axis counts items"),
        ("msgpack", b"\xc1", "item 0: no MessagePack object"),
        ("msgpack", msgpack.packb("text"), "item 0: is neither a tensor nor a nested list"),
        ("npy", b"nonsense", "the file is no .npy file"),
        ("npy", npy(np.zeros((3, 3), "f4"))[:-1], "its header speaks of"),
        ("npy", npy(np.zeros((3, 4), "f4")), r"its items have shape \[4\], the model takes \[3\]"),
        ("npy", npy(np.zeros((4, 3), "f4", order="F")), "is in Fortran order"),
        ("npy", npy(np.zeros((3, 3), ">f4")), "only little-endian"),
        ("npy", npy(np.zeros((3, 3), "U2")), "texts go into .jsonl"),
        ("npy", npy(np.zeros((3, 3), "?")), "the file holds BOOL, the model takes FP32"),
        ("npy", npy(np.float32(1.0)), "has no axis"),
        ("npy", b"\x93NUMPY\x01\x00\x10\x00__import__('os')", "header that is not understood"),
        ("npy", b"\x93NUMPY\x01\x00\x10\x00" + b"(" * 16, "header that is not understood"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_named_by_item(form: str, data: bytes | str, says: str) -> None:
    with pytest.raises(BadJobInput, match=says):
        reader(form, data.encode() if isinstance(data, str) else data).count()


def test_numbers_must_fit_and_bare_ones_are_items() -> None:
    small = Signature(inputs=[TensorSpec(name="x", datatype="UINT8", shape=[1])], outputs=[])
    with pytest.raises(BadJobInput, match="item 1: holds a number that does not fit UINT8"):
        reader("jsonl", b"[255]\n[256]\n", small).count()
    scalar = Signature(inputs=[TensorSpec(name="x", datatype="FP32", shape=[])], outputs=[])
    assert array(cuts("jsonl", b"1\n2.5\n", scalar, 8)[0]).tolist() == [1.0, 2.5]
    assert array(cuts("npy", npy(np.array([1, 2], "f4")), scalar, 8)[0]).tolist() == [1.0, 2.0]
    halves = (np.array([1.0, -2.5, 3e38], "<f4").view("<u4") >> 16).astype("<u2").tobytes()
    assert nested("BF16", [3], halves)[:2] == [1.0, -2.5]
    assert nested("FP32", [], np.float32(2.0).tobytes()) == 2.0


@pytest.mark.parametrize("datatype", ["f8", "f2", "u1", "i8"])
def test_npy_of_other_numbers_is_taken_where_nothing_is_lost(datatype: str) -> None:
    x = np.arange(6, dtype=datatype).reshape(2, 3)
    assert array(cuts("npy", npy(x), VECTOR, 8)[0]).tolist() == x.tolist()


# -- outputs: what numpy and stock packages read is what the model returned


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


@pytest.mark.parametrize(("output", "label"), [("scores", "b"), ("label", 2.0)])
def test_an_items_class_stands_beside_its_outputs(output: str, label: str | float) -> None:
    outputs = {output: from_array(np.array([1, 2], "f4"))}
    lines, _ = rendered("jsonl", outputs, 2, Checkpoint(), 2, ["a", "b"])
    assert json.loads(lines.splitlines()[1])["label"] == label
    objects, _ = rendered("msgpack", outputs, 2, Checkpoint(), 2, ["a", "b"])
    found = list(msgpack.Unpacker(io.BytesIO(objects)))[1]["label"]
    assert found == label or found["data"] == np.float32(label).tobytes()


def test_outputs_that_do_not_fit_one_array_are_noticed() -> None:
    chunks = [{"y": np.zeros((2, 3), "f4")}, {"y": np.zeros((2, 4), "f4")}]
    with pytest.raises(BadItem, match="outputs changed"):
        written("npy", chunks)
    assert len(written("jsonl", chunks).splitlines()) == 4
    with pytest.raises(BadItem, match="for 3 items"):
        rendered("jsonl", {"y": from_array(np.zeros((2, 1), "f4"))}, 3, Checkpoint(), 3)


@given(st.integers(0, 2**40), st.integers(0, 2**40), st.lists(st.integers(1, 10**6), max_size=6))
def test_a_header_is_as_long_for_every_number_of_items(items: int, others: int, shape: list[int]) -> None:
    header = write_header("FP32", items, shape)
    assert len(header) == len(write_header("FP32", others, shape))
    size = len(header) + items * 4 * int(np.prod(shape, dtype=object))
    found = read_header(io.BytesIO(header), size)
    assert (found.datatype, found.items, found.shape, found.start) == ("FP32", items, shape, len(header))

"""What is sent is read back with the stock msgpack package: the wire form is the contract's, not ours."""

import io
import sys
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from bus.messages.catalog import TensorSpec
from bus.tensors import from_array
from infaas.errors import BadInput, Refused
from infaas.inputs import as_arrays, in_turn, random_items, read_arrays, read_file, read_input, read_json
from infaas.queries import (
    INPUTS,
    LARGE,
    Prepared,
    check_name,
    check_needs,
    encode,
    encode_inputs,
    head,
    head_before,
    input_parts,
)


def sent(x):
    return msgpack.unpackb(encode_inputs(x))


@given(
    hnp.arrays(
        dtype=st.sampled_from(["f4", "f8", "f2", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "?", ">f4", ">i8"]),
        shape=hnp.array_shapes(min_dims=1, max_dims=4, max_side=5),
    )
)
def test_arrays_travel_bit_for_bit(array):
    tensor = sent(array)
    little = array.dtype.newbyteorder("<")
    back = np.frombuffer(tensor["data"], little).reshape(tensor["shape"])
    assert back.tobytes() == array.astype(little).tobytes()
    assert tensor["datatype"].startswith({"f": "FP", "i": "INT", "u": "UINT", "b": "BOOL"}[array.dtype.kind])


def test_arrays_and_plain_lists_travel_in_their_own_order_and_form() -> None:
    tensor = sent(np.arange(6, dtype=np.float32).reshape(2, 3).T)
    assert tensor["shape"] == [3, 2]
    assert np.frombuffer(tensor["data"], "<f4").tolist() == [0, 3, 1, 4, 2, 5]
    tensor = sent([np.zeros(3, np.float32), np.ones(3, np.float32)])
    assert (tensor["datatype"], tensor["shape"]) == ("FP32", [2, 3])
    assert sent([[1, 2.5], [3, 4]]) == [[1, 2.5], [3, 4]]
    assert sent(((1, 2), (3, 4))) == [[1, 2], [3, 4]]
    assert sent([[np.float32(1.5)], [np.int64(2)]])["shape"] == [2, 1]
    assert sent([[1.5, np.float32(2.5)]]) == [[1.5, 2.5]]
    assert sent([]) == []


def test_maps_tensors_texts_and_scalars_travel_as_the_contract_has_them() -> None:
    both = sent({"image": np.zeros((2, 4), np.uint8), "scale": [1.0, 2.0]})
    assert both["image"] == {"datatype": "UINT8", "shape": [2, 4], "data": bytes(8)}
    assert both["scale"] == [1.0, 2.0]
    tensor = {"datatype": "FP32", "shape": [1, 1], "data": b"\0\0\0\0"}
    assert sent(tensor) == tensor
    tensor = sent(["hello", "wörld"])
    assert tensor == {"datatype": "BYTES", "shape": [2], "data": b"\5\0\0\0hello\6\0\0\0w\xc3\xb6rld"}
    value = {"a": np.float64(0.5), "b": np.int32(3), "c": np.bool_(True), "d": np.array(2.0)}
    assert msgpack.unpackb(encode(value, "it")) == {"a": 0.5, "b": 3, "c": True, "d": 2.0}


@pytest.mark.parametrize(
    ("x", "says"),
    [
        (np.float32(3), "first axis counts the items"),
        (5, "first axis counts the items"),
        (np.array([object()]), "object"),
        (np.zeros(2, complex), "complex"),
        ([np.zeros(2), np.zeros(3)], "no array"),
        ({"a": np.zeros(1, complex)}, "inputs.a"),
        ([2**70], "cannot be sent"),
        ([1, object()], "cannot be sent"),
    ],
)
def test_what_cannot_be_sent_is_said_before_anything_is_sent(x, says):
    with pytest.raises(BadInput, match=says):
        encode_inputs(x)


def test_keys_come_last_and_are_fresh_each_time() -> None:
    prepared = Prepared(
        "infaas.query.a", head({"id": "x", "latency_ms": None, "accuracy": np.float32(0.5)}, b"\x91\x01"), 1.0, None
    )
    first, second = (msgpack.unpackb(prepared.body()) for _ in range(2))
    assert len(first["retry_key"]) == 16
    assert first.pop("retry_key") != second.pop("retry_key")
    assert first == second == {"id": "x", "accuracy": 0.5, "inputs": [1]}
    x = {"datatype": "UINT8", "shape": [LARGE], "data": bytes(LARGE)}
    prepared = Prepared("q", head_before({"id": "a", "accuracy": None}), 1.0, None, rest=[INPUTS, *input_parts(x)])
    one, two = whole(prepared), whole(prepared)
    assert list(one) == ["id", "retry_key", "inputs"]
    assert one["inputs"] == x
    assert one["retry_key"] != two["retry_key"]


@pytest.mark.parametrize("name", ["", "../etc", "a b", "a.b", ">", "*", "a\0", "-a", "x" * 65, None, 7, "é"])
def test_what_is_no_name_is_refused_as_the_system_would(name):
    with pytest.raises(Refused) as caught:
        check_name(name, "app")
    assert caught.value.code == "bad_request"
    assert "`app`" in caught.value.message


@pytest.mark.parametrize("name", ["a", "A-1_b", "x" * 64, "0"])
def test_names(name):
    assert check_name(name, "app") == name


def test_a_misspelt_requirement_is_a_programming_error():
    with pytest.raises(TypeError, match="latency_mss"):
        check_needs({"latency_mss": 3})


def test_an_error_in_the_unit_of_the_labels_is_a_need():
    assert check_needs({"mae": 60, "cost": None}) == {"accuracy": 1 / 61, "cost": None, "metric": "mae"}
    assert check_needs({"rmse": 0.0}) == {"accuracy": 1.0, "metric": "rmse"}
    assert check_needs({"r2": -1.0}) == {"accuracy": 1 / 3, "metric": "r2"}
    assert check_needs({"map50": 0.4}) == {"accuracy": 0.4, "metric": "map50"}  # a user's own
    assert check_needs({"counted": 0.9}) == {"accuracy": 0.9, "metric": "counted"}, "though context is near"
    assert check_needs({"word_error": 3}) == {"accuracy": 0.25, "metric": "word_error"}
    for wrong, says in (
        ({"mae": 1, "rmse": 1}, "give one of"),
        ({"mae": 1, "accuracy": 0.5}, "give one of"),
        ({"mae": -1}, "at least 0"),
        ({"f1_macro": 2}, "from 0 to 1"),
    ):
        with pytest.raises(Refused, match=says):
            check_needs(wrong)


def whole(prepared: Prepared) -> dict:
    return msgpack.unpackb(prepared.body() + b"".join(prepared.rest))


@given(st.lists(st.integers(0, 3 * LARGE), min_size=1, max_size=3), st.booleans(), st.booleans())
def test_large_tensors_travel_like_small_ones_and_are_not_copied(sizes: list[int], named: bool, split: bool) -> None:
    data = [bytes([number]) * size for number, size in enumerate(sizes)]
    pieces = [[piece[: len(piece) // 2], memoryview(piece)[len(piece) // 2 :]] if split else piece for piece in data]
    tensors = [
        {"datatype": "UINT8", "shape": [len(one)], "data": given} for one, given in zip(data, pieces, strict=True)
    ]
    parts = input_parts(dict(zip("abc", tensors, strict=False)) if named else tensors[0])
    plain = [{**tensor, "data": one} for tensor, one in zip(tensors, data, strict=True)]
    assert msgpack.unpackb(b"".join(parts)) == (dict(zip("abc", plain, strict=False)) if named else plain[0])
    for one, sent_ in zip(data if named else data[:1], pieces if named else pieces[:1], strict=True):
        if not split and len(one) >= LARGE:
            assert any(part is sent_ for part in parts)


def test_npy_and_npz_are_read_by_key_and_never_unpickled(tmp_path) -> None:
    np.save(tmp_path / "x.npy", np.eye(3, dtype=np.float32))
    assert read_file(tmp_path / "x.npy").tolist() == np.eye(3).tolist()
    np.save(tmp_path / "bad.npy", np.array([{"a": 1}], dtype=object), allow_pickle=True)
    np.savez(tmp_path / "bad.npz", x=np.array([{"a": 1}], dtype=object))
    for name in ("bad.npy", "bad.npz"):
        with pytest.raises(BadInput, match="Python objects"):
            read_file(tmp_path / name)
    np.savez(tmp_path / "one.npz", x=np.arange(3))
    np.savez(tmp_path / "two.npz", x=np.arange(3), y=np.ones(2))
    assert read_file(tmp_path / "one.npz").tolist() == [0, 1, 2]
    assert {name: array.tolist() for name, array in read_file(tmp_path / "two.npz").items()} == {
        "x": [0, 1, 2],
        "y": [1, 1],
    }
    assert read_file(tmp_path / "two.npz", key="y").tolist() == [1, 1]
    with pytest.raises(BadInput, match="only x, y"):
        read_file(tmp_path / "two.npz", key="z")


@pytest.mark.parametrize("content", [b"", b"hello", b"PK\3\4 not a zip", b"\x93NUMPY\1\0", b"\x80\4N."])
def test_other_files_are_said_to_be_none(tmp_path, content):
    (tmp_path / "x.npy").write_bytes(content)
    with pytest.raises(BadInput, match=r"x\.npy"):
        read_file(tmp_path / "x.npy")


def test_a_file_that_is_not_there_or_has_nothing(tmp_path):
    with pytest.raises(BadInput, match="No such file"):
        read_file(tmp_path / "none.npy")
    np.savez(tmp_path / "empty.npz")
    with pytest.raises(BadInput, match="no array"):
        read_file(tmp_path / "empty.npz")
    np.save(tmp_path / "x.npy", np.ones(1))
    with pytest.raises(BadInput, match="without a name"):
        read_file(tmp_path / "x.npy", key="x")


def test_tables_and_pictures_are_read_by_their_ending(tmp_path: Path) -> None:
    table = tmp_path / "people.csv"
    table.write_text("\ufeffage, city\n31,Bonn\n,Köln\n")
    assert read_input(table) == {"age": [31.0, None], "city": ["Bonn", "Köln"]}
    rows = tmp_path / "people.json"
    rows.write_text('[{"age": 31, "city": "Bonn"}]')
    assert read_input(rows) == [{"age": 31, "city": "Bonn"}]
    lines = tmp_path / "people.jsonl"
    lines.write_text('{"age": 31, "city": "Bonn"}\n\n{"age": 4, "city": "Ulm"}\n')
    assert read_input(lines) == [{"age": 31, "city": "Bonn"}, {"age": 4, "city": "Ulm"}]
    picture = tmp_path / "cat.PNG"
    picture.write_bytes(b"pixels")
    assert read_input(picture) == [b"pixels"]
    table.write_text("age,city\n31\n")
    torn, hollow = tmp_path / "torn.jsonl", tmp_path / "hollow.ndjson"
    torn.write_text("[1]\n[2\n")
    hollow.write_text("\n")
    for path, key, says in (
        (table, None, "row 2 has 1 values, and the first line names 2 columns"),
        (rows, "age", "leave out the key"),
        (lines, "age", "leave out the key"),
        (torn, None, "torn.jsonl: line 2 is no JSON .*: each line is an item"),
        (hollow, None, "hollow.ndjson is empty: each line is an item"),
        (tmp_path / "none.csv", None, "cannot read"),
    ):
        with pytest.raises(BadInput, match=says):
            read_input(path, key=key)
    table.write_text("age,city\n")
    with pytest.raises(BadInput, match="has no rows"):
        read_input(table)


def test_json_and_lists_become_arrays() -> None:
    assert read_json("[[1, 2.5]]") == [[1, 2.5]]
    assert read_json('{"a": [1]}') == {"a": [1]}
    for bad in ("", "[1", "3", '"x"', "[" * 100_000):
        with pytest.raises(BadInput):
            read_json(bad)
    assert as_arrays([[1.5]]).dtype == "float32"
    assert as_arrays([[1]]).dtype.kind == "i"
    assert {name: one.tolist() for name, one in as_arrays({"a": [[True]]}).items()} == {"a": [[True]]}
    with pytest.raises(BadInput, match="same number"):
        as_arrays([[1], [1, 2]])


def test_queries_in_turn_go_through_the_items_and_start_again():
    x = np.arange(5)
    assert [query.tolist() for query in in_turn(x, 2, 64)] == [[0, 1], [2, 3], [4, 0]]
    assert [query.tolist() for query in in_turn(x, 2, 1)] == [[0, 1]]
    assert [query.tolist() for query in in_turn(x, 7, 64)] == [[0, 1, 2, 3, 4, 0, 1]]
    named = in_turn({"a": x, "b": x * 10}, 5, 64)
    assert [{name: part.tolist() for name, part in query.items()} for query in named] == [
        {"a": [0, 1, 2, 3, 4], "b": [0, 10, 20, 30, 40]}
    ]
    for bad in (np.zeros((0, 3)), np.float32(1), {"a": x, "b": x[:2]}):
        with pytest.raises(BadInput, match="same number of items"):
            in_turn(bad if isinstance(bad, dict) else np.asarray(bad), 1, 1)


@pytest.mark.parametrize("datatype", ["FP32", "FP64", "FP16", "INT64", "UINT8", "BOOL", "BYTES"])
def test_random_items_fit_what_they_are_for(datatype):
    specs = [TensorSpec(name="x", datatype=datatype, shape=[3, -1])]
    items = random_items(specs, 4, np.random.default_rng(0))
    assert items["x"].shape == (4, 3, 16)
    sent = from_array(items["x"])
    assert (sent.datatype, sent.shape) == (datatype, [4, 3, 16])


def test_arrays_by_name(tmp_path):
    np.savez(tmp_path / "one.npz", image=np.ones((2, 3)))
    assert [(name, array.shape) for name, array in read_arrays(tmp_path / "one.npz").items()] == [("image", (2, 3))]
    np.save(tmp_path / "one.npy", np.ones(3))
    with pytest.raises(BadInput, match="holds one array without a name: save it as"):
        read_arrays(tmp_path / "one.npy")
    with pytest.raises(BadInput, match="cannot read"):
        read_arrays(tmp_path / "none.npz")


@pytest.mark.parametrize(("key", "said"), [(None, [[1.5, 2.0]]), ("b", [[3.0, 4.0]])])
def test_standard_input_may_be_a_numpy_file_or_json(
    key: str | None, said: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = np.array([[1.5, 2.0]], "float32"), np.array([[3.0, 4.0]], "float32")
    packed = io.BytesIO()
    if key is None:
        np.save(packed, first)
    else:
        np.savez(packed, a=first, b=second)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(packed.getvalue())))
    assert read_input("-", key=key).tolist() == said


def test_standard_input_that_is_neither_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for data, why in (
        (b"", "is empty"),
        (b"\xff\xfe\x00", "no JSON"),
        (b"{", "not valid JSON"),
        (b"PK\x03\x04rest", "standard input"),
    ):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
        with pytest.raises(BadInput, match=why):
            read_input("-")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b" [[1, 2.5]]")))
    assert read_input("-") == [[1, 2.5]]

import io
import sys
from typing import Any

import numpy as np
import pytest

from bus.messages.catalog import TensorSpec
from bus.tensors import from_array
from infaas.errors import BadInput
from infaas.inputs import as_arrays, in_turn, random_items, read_arrays, read_file, read_input, read_json


def test_npy(tmp_path):
    np.save(tmp_path / "x.npy", np.eye(3, dtype=np.float32))
    assert read_file(tmp_path / "x.npy").tolist() == np.eye(3).tolist()


def test_npz_of_one_of_several_and_by_key(tmp_path):
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


def test_python_objects_are_never_unpickled(tmp_path):
    np.save(tmp_path / "bad.npy", np.array([{"a": 1}], dtype=object), allow_pickle=True)
    np.savez(tmp_path / "bad.npz", x=np.array([{"a": 1}], dtype=object))
    for name in ("bad.npy", "bad.npz"):
        with pytest.raises(BadInput, match="Python objects"):
            read_file(tmp_path / name)


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


def test_json():
    assert read_json("[[1, 2.5]]") == [[1, 2.5]]
    assert read_json('{"a": [1]}') == {"a": [1]}
    for bad in ("", "[1", "3", '"x"', "[" * 100_000):
        with pytest.raises(BadInput):
            read_json(bad)


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
    for given, why in (
        (b"", "is empty"),
        (b"\xff\xfe\x00", "no JSON"),
        (b"{", "not valid JSON"),
        (b"PK\x03\x04rest", "standard input"),
    ):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(given)))
        with pytest.raises(BadInput, match=why):
            read_input("-")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b" [[1, 2.5]]")))
    assert read_input("-") == [[1, 2.5]]


def test_lists_become_arrays() -> None:
    assert as_arrays([[1.5]]).dtype == "float32"
    assert as_arrays([[1]]).dtype.kind == "i"
    assert {name: one.tolist() for name, one in as_arrays({"a": [[True]]}).items()} == {"a": [[True]]}
    with pytest.raises(BadInput, match="same number"):
        as_arrays([[1], [1, 2]])

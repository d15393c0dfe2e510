"""What is sent is read back with the stock msgpack package: the wire form is the contract's, not ours."""

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from infaas.errors import BadInput, Refused
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


def test_a_transposed_array_travels_in_its_own_order():
    array = np.arange(6, dtype=np.float32).reshape(2, 3).T
    tensor = sent(array)
    assert tensor["shape"] == [3, 2]
    assert np.frombuffer(tensor["data"], "<f4").tolist() == [0, 3, 1, 4, 2, 5]


def test_plain_lists_travel_as_they_are():
    assert sent([[1, 2.5], [3, 4]]) == [[1, 2.5], [3, 4]]
    assert sent(((1, 2), (3, 4))) == [[1, 2], [3, 4]]
    assert sent([[np.float32(1.5)], [np.int64(2)]])["shape"] == [2, 1]
    assert sent([[1.5, np.float32(2.5)]]) == [[1.5, 2.5]]
    assert sent([]) == []


def test_a_list_of_arrays_is_one_tensor():
    tensor = sent([np.zeros(3, np.float32), np.ones(3, np.float32)])
    assert (tensor["datatype"], tensor["shape"]) == ("FP32", [2, 3])


def test_a_map_names_its_tensors():
    both = sent({"image": np.zeros((2, 4), np.uint8), "scale": [1.0, 2.0]})
    assert both["image"] == {"datatype": "UINT8", "shape": [2, 4], "data": bytes(8)}
    assert both["scale"] == [1.0, 2.0]


def test_a_tensor_as_the_contract_spells_it_goes_through():
    tensor = {"datatype": "FP32", "shape": [1, 1], "data": b"\0\0\0\0"}
    assert sent(tensor) == tensor


def test_texts_travel_as_bytes_tensors():
    tensor = sent(["hello", "wörld"])
    assert tensor == {"datatype": "BYTES", "shape": [2], "data": b"\5\0\0\0hello\6\0\0\0w\xc3\xb6rld"}


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


def test_the_key_comes_last_and_differs_each_time():
    prepared = Prepared(
        "infaas.query.a", head({"id": "x", "latency_ms": None, "accuracy": np.float32(0.5)}, b"\x91\x01"), 1.0, None
    )
    first, second = (msgpack.unpackb(prepared.body()) for _ in range(2))
    assert len(first["retry_key"]) == 16
    assert first.pop("retry_key") != second.pop("retry_key")
    assert first == second == {"id": "x", "accuracy": 0.5, "inputs": [1]}


def test_numpy_scalars_are_numbers():
    value = {"a": np.float64(0.5), "b": np.int32(3), "c": np.bool_(True), "d": np.array(2.0)}
    assert msgpack.unpackb(encode(value, "it")) == {"a": 0.5, "b": 3, "c": True, "d": 2.0}


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
    assert check_needs({"mae": 60, "cost": None}) == {"accuracy": 1 / 61, "cost": None}
    assert check_needs({"rmse": 0.0}) == {"accuracy": 1.0}
    for wrong, says in (
        ({"mae": 1, "rmse": 1}, "give one of"),
        ({"mae": 1, "accuracy": 0.5}, "give one of"),
        ({"mae": -1}, "at least 0"),
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
    x = dict(zip("abc", tensors, strict=False)) if named else tensors[0]
    parts = input_parts(x)
    plain = [{**tensor, "data": one} for tensor, one in zip(tensors, data, strict=True)]
    assert msgpack.unpackb(b"".join(parts)) == (dict(zip("abc", plain, strict=False)) if named else plain[0])
    for one, sent_ in zip(data if named else data[:1], pieces if named else pieces[:1], strict=True):
        if not split and len(one) >= LARGE:
            assert any(part is sent_ for part in parts)


def test_the_key_of_a_query_with_large_inputs_is_fresh_each_time() -> None:
    x = {"datatype": "UINT8", "shape": [LARGE], "data": bytes(LARGE)}
    prepared = Prepared("q", head_before({"id": "a", "accuracy": None}), 1.0, None, rest=[INPUTS, *input_parts(x)])
    one, two = whole(prepared), whole(prepared)
    assert list(one) == ["id", "retry_key", "inputs"]
    assert one["inputs"] == x
    assert one["retry_key"] != two["retry_key"]

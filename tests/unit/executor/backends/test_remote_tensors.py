"""Bodies of the Open Inference Protocol, read back by the gateway's own reader; descriptions and replies that are wrong."""

import json

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from bus.datatypes import ARRAYS
from bus.messages.public import TensorView
from bus.tensors import to_array
from services.executor.backends.base import LoadFailed, RunFailed
from services.executor.backends.remote import (
    error_of,
    infer_outputs,
    infer_request,
    model_of,
    offers_binary,
)
from services.gateway.oip.infer import read

SHAPES = arrays.array_shapes(max_dims=3, max_side=4)
NUMBERS = st.sampled_from(sorted(set(ARRAYS))).flatmap(
    lambda name: arrays.arrays(
        name, SHAPES, elements={"allow_nan": False, "allow_infinity": False} if "f" in name else None
    )
)
TEXTS = arrays.arrays(object, SHAPES, elements=st.text(max_size=5), fill=st.nothing())


@given(first=NUMBERS | TEXTS, second=NUMBERS, binary=st.booleans())
def test_a_server_reads_what_is_sent(first: np.ndarray, second: np.ndarray, binary: bool) -> None:
    body, head = infer_request({"a": first, "b": second}, ("y", "z"), binary=binary)
    asked = read(body, head, None)
    for name, sent in (("a", first), ("b", second)):
        fields = asked.inputs[name]
        found = to_array(TensorView(fields["datatype"], list(fields["shape"]), memoryview(fields["data"])), name)
        assert (found.shape, found.tolist()) == (sent.shape, sent.tolist())
    assert asked.outputs == {"y": binary, "z": binary}


def reply(raw: dict[str, np.ndarray], listed: dict[str, np.ndarray]) -> tuple[bytes, int | None]:
    """As a server writes it."""

    def spec(name: str, array: np.ndarray) -> dict[str, object]:
        return {"name": name, "datatype": ARRAYS[array.dtype.str], "shape": list(array.shape)}

    outputs = [{**spec(n, a), "parameters": {"binary_data_size": a.nbytes}} for n, a in raw.items()]
    outputs += [{**spec(n, a), "data": a.tolist()} for n, a in listed.items()]
    text = msgspec.json.encode({"model_name": "m", "outputs": outputs})
    return text + b"".join(a.tobytes() for a in raw.values()), len(text) if raw else None


@given(raw=NUMBERS, other=NUMBERS, listed=NUMBERS)
def test_the_outputs_of_a_reply(raw: np.ndarray, other: np.ndarray, listed: np.ndarray) -> None:
    for some, rest in (({"r": raw, "o": other}, {"l": listed}), ({}, {"l": listed, "r": raw})):
        found = infer_outputs(*reply(some, rest))
        for name, array in {**some, **rest}.items():
            assert np.array_equal(found[name], array), name
            assert found[name].dtype == array.dtype


@given(body=st.binary(max_size=200), head=st.none() | st.integers(-5, 300))
def test_bytes_that_are_no_reply_are_one_failed_run(body: bytes, head: int | None) -> None:
    with pytest.raises(RunFailed, match="reply"):
        infer_outputs(body, head)


@given(data=st.data())
def test_a_reply_that_is_cut_off_anywhere_is_one_failed_run(data: st.DataObject) -> None:
    body, head = reply({"y": np.ones((3, 4), "<f4")}, {})
    at = data.draw(st.integers(0, len(body) - 1))
    with pytest.raises(RunFailed):
        infer_outputs(body[:at], head)


@pytest.mark.parametrize(
    "output",
    [
        {"datatype": "FP32", "shape": [2], "data": [1.0]},
        {"datatype": "FP32", "shape": [-1], "data": [1.0]},
        {"datatype": "FP32", "shape": [], "data": [1.0]},
        {"datatype": "FP32", "shape": [1], "data": ["a"]},
        {"datatype": "FP32", "shape": [1]},
        {"datatype": "INT8", "shape": [1], "data": [300]},
        {"datatype": "UINT64", "shape": [1], "data": [-1]},
        {"datatype": "FLOAT", "shape": [1], "data": [1]},
        {"datatype": "BYTES", "shape": [1], "data": [1]},
        {"datatype": "FP32", "shape": [2, 2], "data": [[1.0], [1.0, 2.0]]},
        {"datatype": "FP32", "shape": [1], "parameters": {"binary_data_size": 4}},
        {"datatype": "FP32", "shape": [1], "parameters": {"binary_data_size": "4"}},
    ],
)
def test_an_output_that_is_no_tensor_is_named(output: dict[str, object]) -> None:
    with pytest.raises(RunFailed, match="output 'y'"):
        infer_outputs(json.dumps({"outputs": [{"name": "y", **output}]}).encode(), None)


def test_texts_come_as_a_list() -> None:
    body = json.dumps({"outputs": [{"name": "y", "datatype": "BYTES", "shape": [2, 1], "data": [["a"], ["é"]]}]})
    assert infer_outputs(body.encode(), None)["y"].tolist() == [["a"], ["é"]]


def metadata(shape: list[int], datatype: str = "FP32") -> bytes:
    return json.dumps(
        {
            "name": "m",
            "inputs": [{"name": "x", "datatype": datatype, "shape": shape}],
            "outputs": [{"name": "y", "datatype": "FP32", "shape": [-1, 3]}],
        }
    ).encode()


def test_what_an_engine_says_of_a_model() -> None:
    found = model_of(metadata([-1, 4, -1]), b'{"max_batch_size": 16, "name": "m"}')
    assert (found.fixed, found.most) == (False, 16)
    (x,), (y,) = found.signature.inputs, found.signature.outputs
    assert (x.name, x.datatype, x.shape) == ("x", "FP32", [4, -1])
    assert (y.name, y.shape) == ("y", [3])
    assert model_of(metadata([1, 4]), None).fixed
    assert model_of(metadata([-1, 4]), b'{"max_batch_size": 1}').fixed
    assert model_of(metadata([-1, 4]), b"no json").most == 0


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"<html>", "cannot be read"),
        (b"{}", "inputs and outputs"),
        (metadata([16]), "must count items"),
        (metadata([]), "must count items"),
        (metadata([-1, 0]), "lengths"),
        (metadata([-1, -2]), "lengths"),
        (metadata([-1], "BF16"), "not supported"),
        (metadata([-1], "FLOAT"), "not supported"),
    ],
)
def test_descriptions_that_do_not_do(body: bytes, words: str) -> None:
    with pytest.raises(LoadFailed, match=words):
        model_of(body, None)


def test_what_an_engine_says_of_itself() -> None:
    assert offers_binary(b'{"name":"t","extensions":["classification","binary_tensor_data"]}')
    assert not any(map(offers_binary, (b'{"name":"t"}', b'{"extensions":null}', b"", b"[1]")))
    assert error_of(b'{"error": "no such\\nmodel"}') == "no such model"
    assert not any(map(error_of, (b"<html>", b'{"error": 3}', b"")))

import json

import msgpack
import numpy as np
import pytest

from infaas.answers import Answer, read_answer, read_map
from infaas.errors import InfaasError, Refused
from tests.support.clients.responders import answer, refusal


def read(reply):
    return read_answer(msgpack.packb(reply))


def test_an_answer_gives_arrays_and_all_its_fields():
    got = read(answer({"id": "q", "inputs": [[1, 2], [3, 4]]}, confidence=0.8, missed=["latency"]))
    assert isinstance(got, Answer)
    assert read(answer({}, error=None)).variant == "adder-v1"
    assert got.output.tolist() == [3.0, 7.0]
    assert got.output.dtype == np.float32
    assert (got.id, got.variant, got.batch, got.missed, got.confidence, got.members) == (
        "q",
        "adder-v1",
        2,
        ["latency"],
        0.8,
        None,
    )


def test_outputs_belong_to_the_caller():
    got = read(answer({"inputs": [[1.0]]}))
    got.output[0] = 5
    assert got.outputs["sum"].tolist() == [5.0]


def test_plain_lists_are_tensors_too():
    assert read(answer({}, outputs={"y": [[1, 2]]})).output.tolist() == [[1, 2]]


def test_several_outputs_have_to_be_named():
    got = read(answer({}, outputs={"a": [1.0], "b": [2.0]}))
    assert got.outputs["b"].tolist() == [2.0]
    with pytest.raises(InfaasError, match="a, b"):
        _ = got.output


def test_the_map_is_json_without_what_does_not_apply():
    nan = {"datatype": "FP32", "shape": [1, 2], "data": np.array([[np.nan, 1]], "<f4").tobytes()}
    shown = read(answer({"id": "q"}, outputs={"y": nan}, accuracy=None)).to_map()
    assert json.loads(json.dumps(shown, allow_nan=False))["outputs"] == {"y": [[None, 1.0]]}
    assert shown["accuracy"] is None
    assert "confidence" not in shown
    assert "outputs_ref" not in shown


def test_a_refusal_is_one():
    got = read(refusal("overloaded", "full", retry_after_ms=5))
    assert isinstance(got, Refused)
    assert (got.code, got.retry_after_ms) == ("overloaded", 5)


@pytest.mark.parametrize(
    "reply", [b"", b"\xc1", b"\x93", msgpack.packb([1]), msgpack.packb({}), msgpack.packb({"outputs": 3})]
)
def test_what_is_neither_is_said_so(reply):
    with pytest.raises(InfaasError, match="reply"):
        read_answer(reply)


def test_a_broken_output_names_itself():
    short = {"datatype": "FP32", "shape": [3], "data": b"1234"}
    with pytest.raises(InfaasError, match=r"outputs\.y"):
        _ = read(answer({}, outputs={"y": short})).outputs


def test_other_replies():
    assert read_map(msgpack.packb({"items": []})) == {"items": []}
    with pytest.raises(Refused, match="unknown_app"):
        read_map(msgpack.packb(refusal("unknown_app")))
    with pytest.raises(InfaasError, match="reply"):
        read_map(msgpack.packb([1]))

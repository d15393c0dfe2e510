"""Large requests are split without a copy of their tensors; invalid requests, and those that need too much memory, are refused."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.gateway.errors import BadRequest, RequestFailed
from services.gateway.rpc import infer
from services.gateway.rpc.messages import INFERENCE


def request(*raw: bytes) -> bytes:
    found = INFERENCE.ModelInferRequest(model_name="digits", id="7", raw_input_contents=raw)
    found.inputs.add(name="x", datatype="FP32", shape=[1])
    found.parameters["cost"].double_param = 0.5
    return found.SerializeToString()


@pytest.mark.parametrize("size", [0, 1, infer.SMALL, 3 * infer.SMALL])
def test_raw_contents_and_the_rest(size: int) -> None:
    body = request(b"a" * size, b"b")
    head, raw = infer.read_request(body)
    assert [bytes(data) for data in raw] == [b"a" * size, b"b"]
    assert (head.model_name, head.id, head.inputs[0].name, head.parameters["cost"].double_param) == (
        "digits",
        "7",
        "x",
        0.5,
    )


def test_large_raw_contents_are_views_of_what_came() -> None:
    body = request(b"a" * 100_000)
    head, raw = infer.read_request(body)
    assert raw[0].obj is body
    assert not head.raw_input_contents


def test_a_response_is_joined_as_protobuf_would_write_it() -> None:
    response = INFERENCE.ModelInferResponse(model_name="digits", raw_output_contents=[b"a" * 300, b""])
    whole = response.SerializeToString()
    del response.raw_output_contents[:]
    assert infer.write_response(response, [memoryview(b"a" * 300), b""]) == whole


@given(number=st.integers(0, 2**64 - 1))
def test_varints(number: int) -> None:
    message = INFERENCE.StatisticDuration(count=number)
    assert (b"\x08" + infer.varint(number) if number else b"") == message.SerializeToString()


@given(head=st.binary(max_size=40), tail=st.binary(max_size=40))
def test_any_bytes_are_a_request_or_refused(head: bytes, tail: bytes) -> None:
    for body in (head + tail, head + b"\x3a\x80\x80\x04" + bytes(infer.SMALL) + tail):
        try:
            found, raw = infer.read_request(body)
        except RequestFailed:
            continue
        whole = INFERENCE.ModelInferRequest.FromString(body)
        assert [bytes(data) for data in raw] == list(whole.raw_input_contents)
        del whole.raw_input_contents[:], found.raw_input_contents[:]
        assert found.SerializeToString(deterministic=True) == whole.SerializeToString(deterministic=True)


def test_many_empty_fields_are_too_large() -> None:
    with pytest.raises(RequestFailed, match="more than 4096 fields"):
        infer.read_request(b"\x2a\x00" * infer.SMALL)


def test_typed_contents_have_a_limit_of_their_own() -> None:
    found = INFERENCE.ModelInferRequest()
    found.inputs.add(name="x").contents.fp32_contents.extend([0.5] * (infer.MAX_HEAD // 4))
    with pytest.raises(RequestFailed, match="raw_input_contents"):
        infer.read_request(found.SerializeToString())


@pytest.mark.parametrize("end", [b"\x3a\xff", b"\x3b", b"\x3a" + b"\xff" * 11, b"\x0d\x00", b"\x3a\x05ab", b"\x80"])
def test_what_breaks_off_is_unreadable(end: bytes) -> None:
    with pytest.raises(BadRequest, match="not a ModelInferRequest"):
        infer.read_request(request(bytes(infer.SMALL)) + end)

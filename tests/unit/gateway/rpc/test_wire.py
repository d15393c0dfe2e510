"""Large requests are split without a copy of their tensors; invalid requests, and those that need too much memory, are refused."""

import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bus.datatypes import DATATYPES
from bus.messages.public import TensorView
from bus.tensors import BadTensor, pack_texts
from infaas.errors import Refused
from services.core.settings import GatewaySettings
from services.gateway.actor import RequestCounts
from services.gateway.errors import BadRequest, RequestFailed
from services.gateway.http.access import AccessControl
from services.gateway.rpc import infer
from services.gateway.rpc.calls import Calls
from services.gateway.rpc.infer import INFERENCE, fill, to_data


def request(*raw: bytes) -> bytes:
    found = INFERENCE.ModelInferRequest(model_name="digits", id="7", raw_input_contents=raw)
    found.inputs.add(name="x", datatype="FP32", shape=[1])
    found.parameters["cost"].double_param = 0.5
    return found.SerializeToString()


@pytest.mark.parametrize("size", [0, 1, infer.SMALL, 3 * infer.SMALL])
def test_raw_contents_and_the_rest(size: int) -> None:
    head, raw = infer.read_request(request(b"a" * size, b"b"))
    assert [bytes(data) for data in raw] == [b"a" * size, b"b"]
    assert (head.model_name, head.id, head.inputs[0].name, head.parameters["cost"].double_param) == (
        "digits",
        "7",
        "x",
        0.5,
    )


def test_requests_are_views_and_responses_joined_as_protobuf_would() -> None:
    body = request(b"a" * 100_000)
    head, raw = infer.read_request(body)
    assert raw[0].obj is body
    assert not head.raw_input_contents
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


def test_many_fields_and_typed_contents_have_limits() -> None:
    with pytest.raises(RequestFailed, match="more than 4096 fields"):
        infer.read_request(b"\x2a\x00" * infer.SMALL)
    found = INFERENCE.ModelInferRequest()
    found.inputs.add(name="x").contents.fp32_contents.extend([0.5] * (infer.MAX_HEAD // 4))
    with pytest.raises(RequestFailed, match="raw_input_contents"):
        infer.read_request(found.SerializeToString())


@pytest.mark.parametrize("end", [b"\x3a\xff", b"\x3b", b"\x3a" + b"\xff" * 11, b"\x0d\x00", b"\x3a\x05ab", b"\x80"])
def test_what_breaks_off_is_unreadable(end: bytes) -> None:
    with pytest.raises(BadRequest, match="not a ModelInferRequest"):
        infer.read_request(request(bytes(infer.SMALL)) + end)


# -- Typed contents and bytes are the same elements.
NUMBERS = [name for name, row in DATATYPES.items() if row.code and row.contents]


@pytest.mark.parametrize("datatype", NUMBERS)
@given(data=st.binary(min_size=8, max_size=64))
def test_numbers_go_in_and_come_out(datatype: str, data: bytes) -> None:
    dtype = np.dtype(DATATYPES[datatype].array)
    data = data[: len(data) // dtype.itemsize * dtype.itemsize]
    if datatype == "BOOL":
        data = bytes(byte & 1 for byte in data)
    array = np.frombuffer(data, dtype)
    contents = INFERENCE.InferTensorContents()
    fill(contents, TensorView(datatype, [len(array)], memoryview(data)))
    read = INFERENCE.InferTensorContents.FromString(contents.SerializeToString())
    held = np.array(list(getattr(read, DATATYPES[datatype].contents)), dtype)
    np.testing.assert_array_equal(held, array)
    assert to_data(read, datatype, [len(array)], "x") == data


@given(pieces=st.lists(st.binary(max_size=9), min_size=1, max_size=9))
def test_texts_go_in_and_come_out(pieces: list[bytes]) -> None:
    data = pack_texts(pieces)
    contents = INFERENCE.InferTensorContents()
    fill(contents, TensorView("BYTES", [len(pieces)], memoryview(data)))
    assert list(contents.bytes_contents) == pieces
    assert to_data(contents, "BYTES", [len(pieces)], "x") == data


def test_contents_are_read_tag_by_tag_without_unknown_fields() -> None:
    contents = INFERENCE.InferTensorContents.FromString(b"\x32\x04\0\0\x80\x3f" + b"\x4a\x02hi")
    assert to_data(contents, "FP32", [1], "x") == struct.pack("<f", 1.0)
    contents = INFERENCE.InferTensorContents.FromString(b"\x35\0\0\x80\x3f\x35\0\0\0\x40")
    assert to_data(contents, "FP32", [2], "x") == struct.pack("<ff", 1.0, 2.0)


@pytest.mark.parametrize(
    ("datatype", "shape", "given", "words"),
    [
        ("FP32", [2], {"fp32_contents": [1.0]}, "x.contents.fp32_contents` has 1 elements"),
        ("FP32", [1], {"int_contents": [1]}, "x.contents.int_contents`: the elements of FP32 belong into `fp32_contents`"),
        ("FP32", [1], {"fp32_contents": [1.0], "fp64_contents": [1.0]}, "x.contents.fp64_contents`"),
        ("INT8", [1], {"int_contents": [128]}, "integers that do not fit INT8"),
        ("UINT8", [1], {"uint_contents": [256]}, "integers that do not fit UINT8"),
        ("FP16", [1], {"fp32_contents": [1.0]}, "cannot hold FP16"),
        ("BF16", [1], {}, "cannot hold BF16"),
        ("INT64", [2**31 - 1] * 3, {"int64_contents": [1]}, "needs 9903520300447984"),
        ("INT64", [-1], {"int64_contents": [1]}, r"shape\[0\]` is -1"),
        ("INT64", [2**31], {"int64_contents": [1]}, r"shape\[0\]` is 2147483648"),
        ("INT64", [], {"int64_contents": [1]}, "has 0 axes"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_told(datatype: str, shape: list[int], given: dict[str, list[float]], words: str) -> None:
    with pytest.raises(BadTensor, match=words):
        to_data(INFERENCE.InferTensorContents(**given), datatype, shape, "x")


# -- How requests of a stream are counted, whatever becomes of them.


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (BadTensor("x"), "INVALID_ARGUMENT"),
        (RequestFailed(None, "x", code="too_large"), "RESOURCE_EXHAUSTED"),
        (Refused("deadline", "x"), "DEADLINE_EXCEEDED"),
        (KeyError("nobody has foreseen this"), "INTERNAL"),
    ],
)
async def test_a_request_of_a_stream_counts_with_the_status_that_its_client_is_told(
    error: Exception, status: str
) -> None:
    settings, counts = GatewaySettings(), RequestCounts()
    calls = Calls(AccessControl(settings), settings, counts)

    async def fails() -> bytes:
        raise error

    with pytest.raises(RequestFailed):
        await calls.counted(b"body", fails)
    assert counts.requests == {("grpc", status): 1}
    assert (calls.running, calls.buffered) == (0, 0)

"""Triton's stock HTTP client against a gateway: every datatype, raw and as JSON, compressed, with parameters; and its errors."""

import json
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import tritonclient.http as triton
from tritonclient.utils import InferenceServerException, np_to_triton_dtype

from services.shell.http import protocol
from tests.support.gateways.echo_gateway import DATATYPES, Echoing, stage
from tests.support.gateways.tensors import sample

__all__ = ["stage"]  # a fixture


# gevent complains of clients that are collected on another thread than theirs
KEPT: list[triton.InferenceServerClient] = []


@pytest.fixture(scope="module")
def client(stage: Echoing) -> Iterator[triton.InferenceServerClient]:
    found = triton.InferenceServerClient(stage.url)
    KEPT.append(found)
    yield found
    found.close()


def given(array: np.ndarray, datatype: str, name: str = "x", *, raw: bool = True) -> triton.InferInput:
    found = triton.InferInput(name, list(array.shape), datatype)
    found.set_data_from_numpy(array, binary_data=raw)
    return found


def back(result: triton.InferResult, name: str = "x") -> np.ndarray:
    found = result.as_numpy(name)
    if found.dtype == np.object_:
        return np.array([[one if isinstance(one, str) else one.decode() for one in row] for row in found], np.object_)
    return found


WAYS = [
    (datatype, raw, raw_reply)
    for datatype in DATATYPES
    for raw in (True, False)
    for raw_reply in (True, False)
    if datatype != "BF16" or (raw and raw_reply)  # tritonclient takes BF16 as raw data only
]


@pytest.mark.parametrize(("datatype", "raw", "raw_reply"), WAYS)
def test_a_tensor_comes_back_as_it_went(
    client: triton.InferenceServerClient, stage: Echoing, datatype: str, raw: bool, raw_reply: bool
) -> None:
    array = sample(datatype)
    wanted = [triton.InferRequestedOutput("x", binary_data=raw_reply)]
    result = client.infer(datatype.lower(), [given(array, datatype, raw=raw)], outputs=wanted)
    found = back(result)
    assert found.dtype == array.dtype
    assert found.shape == array.shape
    assert found.tolist() == array.tolist()
    assert stage.heard["inputs"]["datatype"] == datatype
    assert result.get_response()["model_name"] == datatype.lower()


def test_an_objective_counts_from_when_the_request_had_been_read_however_busy_the_gateway_is(
    client: triton.InferenceServerClient, stage: Echoing, monkeypatch: pytest.MonkeyPatch
) -> None:
    long_ago = time.time() - 20.0
    monkeypatch.setattr(protocol, "unix_now", lambda: long_ago)
    array = sample("FP32")
    client.infer("fp32", [given(array, "FP32")], parameters={"latency_ms": 30_000})
    assert stage.heard["latency_ms"] == 30_000
    assert stage.heard["deadline"] == pytest.approx(long_ago + 30.0, abs=1e-3)
    client.infer("fp32", [given(array, "FP32")])  # without an objective there is nothing to count
    assert "deadline" not in stage.heard


@pytest.mark.parametrize("coding", ["gzip", "deflate"])
@pytest.mark.parametrize("raw", [True, False])
def test_compressed_both_ways(client: triton.InferenceServerClient, coding: str, raw: bool) -> None:
    array = np.zeros((4, 25_000), np.float32)
    array[1] = 0.5
    result = client.infer(
        "fp32",
        [given(array, "FP32", raw=raw)],
        request_compression_algorithm=coding,
        response_compression_algorithm=coding,
    )
    assert (back(result) == array).all()


def test_several_inputs_raw_and_not_with_outputs_in_the_order_asked_for(
    client: triton.InferenceServerClient, stage: Echoing
) -> None:
    a, b = np.ones((2, 2), np.float32), np.array([[1, 2, 3], [4, 5, 6]], np.int64)
    c = np.array([["x"], ["y"]], np.object_)
    inputs = [given(c, "BYTES", "c", raw=False), given(a, "FP32", "a"), given(b, "INT64", "b")]
    outputs = [triton.InferRequestedOutput("b", binary_data=False), triton.InferRequestedOutput("a", binary_data=True)]
    result = client.infer("several", inputs, outputs=outputs)
    assert [output["name"] for output in result.get_response()["outputs"]] == ["b", "a"]
    assert back(result, "b").tolist() == b.tolist()
    assert back(result, "a").tolist() == a.tolist()
    assert result.as_numpy("c") is None
    assert set(stage.heard["inputs"]) == {"a", "b", "c"}


def test_a_default_is_one_of_the_outputs_that_it_has(client: triton.InferenceServerClient) -> None:
    inputs = [
        given(np.ones((1, 2), np.float32), "FP32", "a"),
        given(np.ones((1, 1), np.int64), "INT64", "b"),
        given(np.array([["x"]], np.object_), "BYTES", "c"),
    ]
    late = {"context": "default"}
    result = client.infer("several", inputs, outputs=[triton.InferRequestedOutput("a")], parameters=late)
    assert result.get_response()["parameters"]["default"] is True
    assert [one["name"] for one in client.infer("several", inputs, parameters=late).get_response()["outputs"]] == ["a"]
    with pytest.raises(InferenceServerException) as caught:
        client.infer("several", inputs, outputs=[triton.InferRequestedOutput("b")], parameters=late)
    assert caught.value.status() == "504"
    assert "default output" in caught.value.message()
    assert "it is late" in caught.value.message()


def test_parameters_become_needs_and_the_answer_parameters(
    client: triton.InferenceServerClient, stage: Echoing
) -> None:
    requirements = {"latency_ms": 20, "accuracy": "0.9", "cost": 1.5, "sequence": 3}
    result = client.infer(
        "fp32.m-fp32.fp32-v1",
        [given(sample("FP32"), "FP32")],
        model_version="1",
        request_id="me",
        parameters=requirements,
        priority=2,
        timeout=5_000_000,
    )
    heard = {name: value for name, value in stage.heard.items() if name not in ("inputs", "deadline")}
    assert heard == {
        "latency_ms": 20.0, "accuracy": 0.9, "cost": 1.5, "priority": 2, "model": "m-fp32", "variant": "fp32-v1",
        "version": "1", "id": "me",
    }  # fmt: skip
    assert stage.heard["deadline"] > 0
    response = result.get_response()
    assert response["id"] == "me"
    told = response["parameters"]
    assert told["variant"] == "fp32-v1"
    assert told["missed"] == "latency,cost"
    assert told["ignored"] == "sequence"
    assert told["accuracy"] == 0.9


def test_what_there_is(client: triton.InferenceServerClient) -> None:
    assert client.is_server_live()
    assert client.is_server_ready()
    assert "modelless" in client.get_server_metadata()["extensions"]
    for name in ("several", "several.m-several", "several.m-several.several-v1"):
        assert client.is_model_ready(name)
        assert client.is_model_ready(name, "1")
        described = client.get_model_metadata(name)
        assert described["name"] == name
        assert described["versions"] == ["1"]
        assert described["inputs"][1] == {"name": "b", "datatype": "INT64", "shape": [-1, -1]}
        assert described["outputs"][2] == {"name": "c", "datatype": "BYTES", "shape": [-1, 1]}
        config = client.get_model_config(name)
        assert config["max_batch_size"] == 8
        assert config["input"][2]["data_type"] == "TYPE_STRING"
    for name in ("nix", "several.nix", "several.m-several.nix", "a.b.c.d", "..", "fp32.m-several"):
        assert not client.is_model_ready(name)
    assert not client.is_model_ready("several", "2")
    names = {entry["name"] for entry in client.get_model_repository_index()}
    assert {"fp32", "fp32.m-fp32", "fp32.m-fp32.fp32-v1"} <= names


def test_statistics_count(client: triton.InferenceServerClient) -> None:
    def counted() -> dict[str, Any]:
        return client.get_inference_statistics("int8")["model_stats"][0]

    before = counted()
    client.infer("int8", [given(sample("INT8"), "INT8")])
    with pytest.raises(InferenceServerException):
        client.infer("int8", [given(sample("INT8"), "INT8")], parameters={"context": "overloaded"})
    after = counted()
    assert after["inference_count"] - before["inference_count"] == 2
    stats = after["inference_stats"]
    assert stats["success"]["count"] - before["inference_stats"]["success"]["count"] == 1
    assert stats["fail"]["count"] - before["inference_stats"]["fail"]["count"] == 1
    everything = client.get_inference_statistics()["model_stats"]
    assert {"int8", "int8.m-int8.int8-v1"} <= {entry["name"] for entry in everything}


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("bad_request", 400), ("unknown_app", 404), ("unknown_model", 404), ("unsatisfiable", 422), ("deadline", 504),
        ("overloaded", 503), ("model_error", 500), ("too_large", 413), ("forbidden", 403), ("a-code-of-tomorrow", 500),
    ],
)  # fmt: skip
def test_refusals_keep_their_words_and_have_their_status(
    client: triton.InferenceServerClient, code: str, status: int
) -> None:
    with pytest.raises(InferenceServerException) as caught:
        client.infer("fp32", [given(sample("FP32"), "FP32")], parameters={"context": code})
    assert caught.value.message() == f"it is {code}"
    assert caught.value.status() == str(status)


def test_a_refusal_says_when_to_come_back(client: triton.InferenceServerClient) -> None:
    body = json.dumps({"inputs": [one()], "parameters": {"context": "overloaded"}}).encode()
    response = client._post("v2/models/fp32/infer", body, {}, None)
    assert response.status_code == 503
    assert response.get("Retry-After") == "3"
    told = json.loads(response.read())
    assert told == {"error": "it is overloaded", "code": "overloaded", "retry_after_ms": 2500.0}


def ask(client: triton.InferenceServerClient, body: Any, **headers: str) -> tuple[int, str]:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    response = client._post("v2/models/fp32/infer", data, headers, None)
    return response.status_code, response.read().decode()


def one(**changes: Any) -> dict[str, Any]:
    tensor = {"name": "x", "shape": [1, 2], "datatype": "FP32", "data": [1, 2.5]}
    return {name: value for name, value in (tensor | changes).items() if value is not ...}


def raw(size: Any, *, behind: bytes = b"", **changes: Any) -> tuple[bytes, str]:
    head = json.dumps({"inputs": [one(data=..., parameters={"binary_data_size": size}, **changes)]}).encode()
    return head + behind, str(len(head))


WRONG = {
    "empty": (b"", "the body is empty: send a JSON object"),
    "no JSON": (b"{", "the body is not JSON: it ends too early"),
    "not a number": (b'{"inputs": [NaN]}', "JSON has no NaN and no Infinity (byte 12)"),
    "byte-order mark": (b"\xef\xbb\xbf{}", "send it as UTF-8, without a byte-order mark"),
    "single quotes": (b"{'inputs': []}", "names stand in double quotation marks"),
    "raw data without its header": (b'{"inputs": []}xx', "raw data behind it needs the header Inference-Header-Content-Length"),
    "inputs misspelt": ({"instances": [one()]}, "or rows; nothing reads 'instances'"),
    "a need null": ({"inputs": [one()], "parameters": {"accuracy": None}}, "accuracy must be a number, not null"),
    "no object": (b"[]", "must be a map of fields"),
    "no inputs": ({}, "inputs"),
    "inputs empty": ({"inputs": []}, "inputs"),
    "inputs no list": ({"inputs": one()}, "inputs"),
    "no name": ({"inputs": [one(name=...)]}, "field `inputs[0].name` is missing"),
    "name a number": ({"inputs": [one(name=1)]}, "name"),
    "no shape": ({"inputs": [one(shape=...)]}, "shape"),
    "shape empty": ({"inputs": [one(shape=[])]}, "x.shape"),
    "shape negative": ({"inputs": [one(shape=[-1, 2])]}, "x.shape[0]"),
    "shape zero": ({"inputs": [one(shape=[0, 2])]}, "x.shape[0]"),
    "shape a fraction": ({"inputs": [one(shape=[1.5, 2])]}, "shape[0]` must be a whole number, not a fraction"),
    "shape a text": ({"inputs": [one(shape=["1", 2])]}, "shape"),
    "shape huge": ({"inputs": [one(shape=[2**31, 2])]}, "x.shape[0]"),
    "shape beyond 64 bits": ({"inputs": [one(shape=[2**70, 2])]}, "shape"),
    "shape's product huge": ({"inputs": [one(shape=[2**30] * 20)]}, "x.data"),
    "too many axes": ({"inputs": [one(shape=[1] * 33)]}, "x.shape"),
    "no datatype": ({"inputs": [one(datatype=...)]}, "datatype"),
    "unknown datatype": ({"inputs": [one(datatype="float32")]}, "BYTES; did you mean FP32?"),
    "no data": ({"inputs": [one(data=...)]}, "x.data"),
    "data no list": ({"inputs": [one(data=1)]}, "x.data"),
    "too little data": ({"inputs": [one(data=[1])]}, "x.data"),
    "too much data": ({"inputs": [one(data=[1, 2, 3])]}, "x.data"),
    "nested otherwise": ({"inputs": [one(data=[[1], [2]])]}, "x.data"),
    "ragged": ({"inputs": [one(shape=[2, 2], data=[[1, 2], [3]])]}, "x.data"),
    "partly nested": ({"inputs": [one(data=[[1, [2]]])]}, "x.data"),
    "a text among numbers": ({"inputs": [one(data=[1, "2"])]}, "x.data"),
    "null": ({"inputs": [one(data=[1, None])]}, "x.data"),
    "a truth among numbers": ({"inputs": [one(data=[1, True])]}, "x.data"),
    "NaN": (b'{"inputs":[{"name":"x","shape":[1,2],"datatype":"FP32","data":[1,NaN]}]}', ""),
    "Infinity": (b'{"inputs":[{"name":"x","shape":[1,2],"datatype":"FP32","data":[1,Infinity]}]}', ""),
    "too large for the type": ({"inputs": [one(data=[1, 1e39])]}, "x.data"),
    "too large for any type": (b'{"inputs":[{"name":"x","shape":[1,1],"datatype":"FP32","data":[1e999]}]}', ""),
    "a fraction for INT8": ({"inputs": [one(datatype="INT8", data=[1, 1.5])]}, "x.data"),
    "too large for INT8": ({"inputs": [one(datatype="INT8", data=[1, 200])]}, "x.data"),
    "negative for UINT64": ({"inputs": [one(datatype="UINT64", data=[1, -1])]}, "x.data"),
    "numbers for BOOL": ({"inputs": [one(datatype="BOOL", data=[1, 0])]}, "x.data"),
    "numbers for BYTES": ({"inputs": [one(datatype="BYTES", data=[1, 0])]}, "x.data"),
    "two of a name": ({"inputs": [one(), one()]}, "'x'"),
    "a name twice": (b'{"inputs":[{"name":"x","name":"x","shape":[1,1],"datatype":"FP32","data":[1]}]}', "'name' twice"),
    "a name twice, escaped": (
        b'{"inputs":[{"name":"x","\\u006eame":"x","shape":[1,1],"datatype":"FP32","data":[1]}]}',
        "'name' twice",
    ),
    "inputs twice": (
        b'{"inputs":[],"inputs":[{"name":"x","shape":[1,1],"datatype":"FP32","data":[1]}]}',
        "'inputs' twice",
    ),
    "a parameter twice": (
        b'{"inputs":[{"name":"x","shape":[1,1],"datatype":"FP32","data":[1]}],"parameters":{"cost":1,"cost":2}}',
        "'cost' twice",
    ),
    "id endless": ({"inputs": [one()], "id": "i" * 1025}, "id may have"),
    "context endless": ({"inputs": [one()], "parameters": {"context": "c" * 1025}}, "context must be at most 1000 characters long"),
    "id a number": ({"inputs": [one()], "id": 7}, "id"),
    "an unknown output": ({"inputs": [one()], "outputs": [{"name": "y"}]}, "outputs.y"),
    "an output twice": ({"inputs": [one()], "outputs": [{"name": "x"}, {"name": "x"}]}, "'x' twice"),
    "an output without name": ({"inputs": [one()], "outputs": [{}]}, "name"),
    "binary_data no truth": ({"inputs": [one()], "outputs": [{"name": "x", "parameters": {"binary_data": 1}}]}, "binary_data"),
    "binary_data_output no truth": ({"inputs": [one()], "parameters": {"binary_data_output": "yes"}}, "binary_data_output"),
    "classification": ({"inputs": [one()], "outputs": [{"name": "x", "parameters": {"classification": 3}}]}, "classification"),
    "shared memory": ({"inputs": [one(parameters={"shared_memory_region": "a"})]}, "shared memory"),
    "parameters no object": ({"inputs": [one()], "parameters": []}, "parameters"),
    "a sequence": ({"inputs": [one()], "parameters": {"sequence_id": 3}}, "sequence_id"),
    "reserved": ({"inputs": [one()], "parameters": {"triton_x": 3}}, "triton_x"),
    "priority too low": ({"inputs": [one()], "parameters": {"priority": 10}}, "priority"),
    "priority a fraction": ({"inputs": [one()], "parameters": {"priority": 1.5}}, "priority"),
    "timeout negative": ({"inputs": [one()], "parameters": {"timeout": -1}}, "timeout"),
    "latency no number": ({"inputs": [one()], "parameters": {"latency_ms": "soon"}}, "latency_ms"),
    "latency NaN in a text": ({"inputs": [one()], "parameters": {"latency_ms": "nan"}}, "latency_ms"),
    "accuracy true": ({"inputs": [one()], "parameters": {"accuracy": True}}, "accuracy"),
    "model no text": ({"inputs": [one()], "parameters": {"model": 1}}, "model"),
    "a parameter of parts": ({"inputs": [one()], "parameters": {"else": [1]}}, "else"),
    "deep": (b'{"inputs":[{"name":"x","shape":[1],"datatype":"FP32","data":' + b"[" * 10**5 + b"]" * 10**5 + b"}]}", ""),
    "deeper": (b"[" * 10**6, ""),
    "lone surrogates": (b'{"inputs":[{"name":"\\ud800","shape":[1,1],"datatype":"FP32","data":[1]}]}', ""),
    "not UTF-8": (b'{"inputs":[{"name":"\xff","shape":[1,1],"datatype":"FP32","data":[1]}]}', ""),
}  # fmt: skip


# with the length of the head
WRONG_RAW = {
    "more than there is": (*raw(9, behind=bytes(8)), "binary_data_size"),
    "less than there is": (*raw(7, behind=bytes(8)), "x.data` has 7 bytes"),
    "something left": (*raw(8, behind=bytes(9)), "9 bytes follow"),
    "negative": (*raw(-8, behind=bytes(8)), "binary_data_size"),
    "a text": (*raw("8", behind=bytes(8)), "binary_data_size"),
    "a truth": (*raw(True, behind=bytes(1)), "binary_data_size"),
    "huge": (*raw(2**63, behind=bytes(8)), "binary_data_size"),
    "a texts' count too large": (*raw(8, behind=bytes(8), datatype="BYTES", shape=[100]), "100 texts"),
    "head longer than the body": (b"{}", "3", "Inference-Header-Content-Length"),
    "head negative": (b"{}", "-2", "Inference-Header-Content-Length"),
    "head no number": (b"{}", "x", "Inference-Header-Content-Length"),
    "head huge": (b"{}", "9" * 30, "Inference-Header-Content-Length"),
    "nothing but data for a shape that varies": (bytes(8), "0", "fixed shape"),
}


@pytest.mark.parametrize("name", [*WRONG, *WRONG_RAW])
def test_what_is_wrong_is_refused_with_the_field_named(client: triton.InferenceServerClient, name: str) -> None:
    body, *length, field = (WRONG | WRONG_RAW)[name]
    status, text = ask(client, body, **dict(zip(["Inference-Header-Content-Length"], length, strict=False)))
    assert status == 400, text
    assert field in json.loads(text)["error"]


def test_contradictions_are_refused(client: triton.InferenceServerClient) -> None:
    head = json.dumps({"inputs": [one(parameters={"binary_data_size": 8})]}).encode()
    status, text = ask(client, head + bytes(8), **{"Inference-Header-Content-Length": str(len(head))})
    assert status == 400
    assert "only one of them" in text
    with pytest.raises(InferenceServerException, match=r"parameters\.model"):
        client.infer("fp32.m-fp32", [given(sample("FP32"), "FP32")], parameters={"model": "other"})


def test_bodies_of_data_and_large_tensors_go_by_the_object_store_and_back(
    client: triton.InferenceServerClient, stage: Echoing
) -> None:
    data = np.arange(6, dtype=np.float32).tobytes()
    headers = {"Inference-Header-Content-Length": "0"}
    response = client._post("v2/models/fixed/infer", data, headers, None)
    assert response.status_code == 200
    assert stage.heard["inputs"] == {"datatype": "FP32", "shape": [2, 3], "data": data}
    length = int(response.get("Inference-Header-Content-Length"))
    assert response.read()[length:] == data
    assert client._post("v2/models/fixed/infer", data[:-1], headers, None).status_code == 400
    array = np.random.default_rng(1).random((2, 100_000), np.float32)
    assert np_to_triton_dtype(array.dtype) == "FP32"
    assert (back(client.infer("fp32", [given(array, "FP32")])) == array).all()
    assert stage.heard["inputs"]["data"] == array.tobytes()


def test_traces_go_on(client: triton.InferenceServerClient, stage: Echoing) -> None:
    trace = "0af7651916cd43dd8448eb211c80319c"
    client.infer("fp32", [given(sample("FP32"), "FP32")], headers={"traceparent": f"00-{trace}-b7ad6b7169203331-01"})
    assert stage.headers["traceparent"].split("-")[1] == trace
    assert stage.headers["traceparent"].split("-")[2] != "b7ad6b7169203331"  # the gateway's own span is between
    body = json.dumps({"inputs": [one()]}).encode()
    reply = client._post("v2/models/fp32/infer", body, {"traceparent": f"00-{trace}-b7ad6b7169203331-01"}, None)
    assert reply.get("traceparent").split("-")[1] == trace
    client.infer("fp32", [given(sample("FP32"), "FP32")], headers={"traceparent": "nonsense"})
    assert "traceparent" not in stage.headers

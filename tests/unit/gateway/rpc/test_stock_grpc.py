"""Triton's stock gRPC clients against a gateway: every datatype, requirements and parameters, descriptions of models, streams, and errors."""

import asyncio
import queue
import threading
import time
from collections.abc import Iterator
from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton
import tritonclient.grpc.aio as triton_aio
from tritonclient.grpc import service_pb2, service_pb2_grpc
from tritonclient.utils import InferenceServerException

from bus.datatypes import DATATYPES as TABLE
from tests.support.gateways.echo_gateway import DATATYPES, Echoing, stage
from tests.support.gateways.tensors import sample

__all__ = ["stage"]  # a fixture


@pytest.fixture(scope="module")
def client(stage: Echoing) -> Iterator[triton.InferenceServerClient]:
    with triton.InferenceServerClient(stage.grpc_url) as found:
        yield found


@pytest.fixture(scope="module")
def stub(stage: Echoing) -> Iterator[Any]:
    with grpc.insecure_channel(stage.grpc_url) as channel:
        yield service_pb2_grpc.GRPCInferenceServiceStub(channel)


def given(array: np.ndarray, datatype: str = "FP32", name: str = "x") -> triton.InferInput:
    found = triton.InferInput(name, list(array.shape), datatype)
    found.set_data_from_numpy(array)
    return found


def request(model: str = "fp32", **parts: Any) -> Any:
    """A request for one item, raw; parts: of the message, instead."""
    found = service_pb2.ModelInferRequest(model_name=model, **parts)
    if "inputs" not in parts:
        found.inputs.add(name="x", datatype="FP32", shape=[1, 2])
    if not found.raw_input_contents and not any(one.HasField("contents") for one in found.inputs):
        found.raw_input_contents.append(bytes(8))
    return found


def calls_of(stage: Echoing) -> Any:
    """What the gateway's gRPC server knows of calls."""
    edge: Any = stage.runtimes[0].edge
    (found,) = [server.calls for server in edge._open if hasattr(server, "calls")]
    return found


X = np.array([[1.5, -2.5]], np.float32)


@pytest.mark.parametrize("datatype", DATATYPES)
def test_a_tensor_comes_back_as_it_went(client: triton.InferenceServerClient, datatype: str) -> None:
    array = sample(datatype)
    result = client.infer(datatype.lower(), [given(array, datatype)])
    back = result.as_numpy("x")
    if datatype == "BYTES":
        back = np.array([[piece.decode() for piece in row] for row in back], np.object_)
    assert back.dtype == array.dtype
    np.testing.assert_array_equal(back, array)
    assert result.get_output("x").datatype == datatype
    assert list(result.get_output("x").shape) == list(array.shape)


@pytest.mark.parametrize("datatype", [name for name, row in TABLE.items() if row.contents])
def test_typed_contents_are_answered_with_typed_contents(stub: Any, datatype: str) -> None:
    elements = {"BYTES": [b"", b"\xff"], "BOOL": [True, False], "FP32": [0.5, -1.0], "FP64": [0.1, 1e300]}.get(
        datatype, [0, 7]
    )
    tensor = {"name": "x", "datatype": datatype, "shape": [1, 2], "contents": {TABLE[datatype].contents: elements}}
    reply = stub.ModelInfer(request(datatype.lower(), inputs=[tensor]))
    assert not reply.raw_output_contents
    assert list(getattr(reply.outputs[0].contents, TABLE[datatype].contents)) == elements
    wanted = request(datatype.lower(), inputs=[tensor])
    wanted.parameters["binary_data_output"].bool_param = True
    reply = stub.ModelInfer(wanted)
    assert len(reply.raw_output_contents) == 1
    assert not reply.outputs[0].HasField("contents")


def test_several_inputs_and_chosen_outputs(client: triton.InferenceServerClient) -> None:
    a, b, c = np.ones((1, 2), np.float32), np.arange(3).reshape(1, 3), np.array([["text"]], np.object_)
    inputs = [given(a, "FP32", "a"), given(b, "INT64", "b"), given(c, "BYTES", "c")]
    result = client.infer(
        "several", inputs, outputs=[triton.InferRequestedOutput("c"), triton.InferRequestedOutput("b")]
    )
    assert [one.name for one in result.get_response().outputs] == ["c", "b"]
    np.testing.assert_array_equal(result.as_numpy("b"), b)
    assert result.as_numpy("c").tolist() == [[b"text"]]
    assert result.as_numpy("a") is None


@pytest.mark.parametrize("size", [2**14, 2**17])
def test_large_tensors_go_through(client: triton.InferenceServerClient, size: int) -> None:
    array = np.random.default_rng(0).random((1, size), np.float32)
    np.testing.assert_array_equal(client.infer("fp32", [given(array)]).as_numpy("x"), array)


def test_needs_are_passed_on_and_the_answer_is_told(client: triton.InferenceServerClient, stage: Echoing) -> None:
    before = time.time()
    requirements = {"latency_ms": 20, "accuracy": "0.75", "cost": "0.5", "tag": "mine"}
    result = client.infer(
        "fp32.m-fp32", [given(X)], request_id="7", priority=3, timeout=500_000_000, parameters=requirements
    )
    heard = dict(stage.heard)
    assert before + 499 < heard.pop("deadline") < time.time() + 500
    del heard["inputs"]
    assert heard == {"latency_ms": 20.0, "accuracy": 0.75, "cost": 0.5, "priority": 3, "model": "m-fp32", "id": "7"}
    reply = result.get_response()
    assert (reply.id, reply.model_name, reply.model_version) == ("7", "fp32.m-fp32", "1")
    told = {name: getattr(value, value.WhichOneof("parameter_choice")) for name, value in reply.parameters.items()}
    assert told == {
        "model": "m-fp32", "variant": "fp32-v1", "hardware": "cpu", "accuracy": "0.9", "latency_ms": "1.5", "queue_ms": "0.5",
        "compute_ms": "1.0", "batch": 1, "cost": "0.001", "cached": False, "simulated": False, "missed": "latency,cost", "ignored": "tag",
    }  # fmt: skip


def test_parameters_are_any_kind_of_number_and_the_wait_is_the_deadline(stub: Any, stage: Echoing) -> None:
    asked = request()
    asked.parameters["latency_ms"].double_param = 12.5
    asked.parameters["priority"].uint64_param = 2
    stub.ModelInfer(asked)
    assert (stage.heard["latency_ms"], stage.heard["priority"]) == (12.5, 2)
    before = time.time()
    stub.ModelInfer(request(), timeout=300.0)
    assert before + 299 < stage.heard["deadline"] < time.time() + 301  # gRPC rounds it up
    stub.ModelInfer(request())
    assert "deadline" not in stage.heard


def test_traces_go_on_and_come_back(stub: Any, stage: Echoing) -> None:
    given = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    _, call = stub.ModelInfer.with_call(request(), metadata=[("traceparent", given)])
    assert stage.headers["traceparent"][:36] == given[:36]
    assert ("traceparent", given) in [tuple(pair) for pair in call.trailing_metadata()]
    stub.ModelInfer(request(), metadata=[("traceparent", "nonsense")])
    assert "traceparent" not in stage.headers


def test_what_is_told_of_the_server_and_its_models(client: triton.InferenceServerClient) -> None:
    assert client.is_server_live()
    assert client.is_server_ready()
    server = client.get_server_metadata()
    assert server.name == "infaas"
    assert "modelless" in server.extensions
    assert client.is_model_ready("fixed")
    assert client.is_model_ready("fixed.m-fixed.fixed-v1", "1")
    assert not client.is_model_ready("nobodys")
    described = client.get_model_metadata("fixed")
    assert (described.name, list(described.versions), list(described.inputs[0].shape)) == ("fixed", ["1"], [-1, 3])
    config = client.get_model_config("bytes").config
    assert (config.name, config.max_batch_size, config.input[0].data_type) == ("bytes", 8, 13)
    names = {(model.name, model.state) for model in client.get_model_repository_index().models}
    assert {("fixed", "READY"), ("fixed.m-fixed", "READY"), ("fixed.m-fixed.fixed-v1", "READY")} <= names


def test_queries_are_counted(client: triton.InferenceServerClient) -> None:
    def counted(name: str) -> tuple[int, int]:
        (first, *_) = client.get_inference_statistics(name).model_stats
        return first.inference_count, first.inference_stats.fail.count

    items, failed = counted("fixed")
    client.infer("fixed", [given(np.ones((4, 3), np.float32))])
    with pytest.raises(InferenceServerException):
        client.infer("fixed", [given(np.ones((4, 3), np.float32))], parameters={"context": "overloaded"})
    assert counted("fixed") == (items + 4, failed + 1)
    assert counted("fixed.m-fixed.fixed-v1")[0] == items + 4
    assert any(one.name == "fixed" for one in client.get_inference_statistics().model_stats)


def test_the_asyncio_client(stage: Echoing) -> None:
    async def main() -> list[Any]:
        async with triton_aio.InferenceServerClient(stage.grpc_url) as client:
            assert await client.is_server_ready()
            arrays = [X + n for n in range(32)]
            found = await asyncio.gather(*(client.infer("fp32", [given(array)]) for array in arrays))
            for array, result in zip(arrays, found, strict=True):
                np.testing.assert_array_equal(result.as_numpy("x"), array)
            return found

    assert len(asyncio.run(main())) == 32


def test_a_stream_answers_in_order_and_outlives_errors(client: triton.InferenceServerClient) -> None:
    replies: queue.Queue[tuple[Any, Any]] = queue.Queue()
    client.start_stream(lambda result, error: replies.put((result, error)))
    try:
        for n in range(5):
            client.async_stream_infer("fp32", [given(X + n)], request_id=str(n))
        client.async_stream_infer("fp32", [given(X)], parameters={"context": "unsatisfiable"})
        client.async_stream_infer("fp32", [given(X)], request_id="last")
        found = [replies.get(timeout=60) for _ in range(7)]
    finally:
        client.stop_stream()
    assert [result.get_response().id for result, _ in found[:5]] == ["0", "1", "2", "3", "4"]
    np.testing.assert_array_equal(found[4][0].as_numpy("x"), X + 4)
    assert found[5][0] is None
    assert found[5][1].message() == "it is unsatisfiable"
    assert found[6][0].get_response().id == "last"


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("bad_request", "INVALID_ARGUMENT"),
        ("unknown_app", "NOT_FOUND"),
        ("unknown_model", "NOT_FOUND"),
        ("unsatisfiable", "FAILED_PRECONDITION"),
        ("deadline", "DEADLINE_EXCEEDED"),
        ("overloaded", "RESOURCE_EXHAUSTED"),
        ("model_error", "INTERNAL"),
        ("too_large", "RESOURCE_EXHAUSTED"),
        ("forbidden", "PERMISSION_DENIED"),
        ("internal", "INTERNAL"),
        ("of_the_future", "INTERNAL"),
    ],
)
def test_refusals_have_their_status(stub: Any, code: str, status: str) -> None:
    asked = request()
    asked.parameters["context"].string_param = code
    with pytest.raises(grpc.RpcError) as caught:
        stub.ModelInfer(asked)
    assert (caught.value.code().name, caught.value.details()) == (status, f"it is {code}")
    trailing = dict(tuple(pair) for pair in caught.value.trailing_metadata())
    assert trailing["infaas-code"] == code
    assert trailing["grpc-retry-pushback-ms"] == "2500"


INPUT = {"name": "x", "datatype": "FP32", "shape": [1, 2]}
TYPED = {**INPUT, "contents": {"fp32_contents": [1.0, 2.0]}}
RAW = bytes(8)
WRONG = {
    "no inputs": ({"inputs": []}, "inputs is empty"),
    "both forms": ({"inputs": [TYPED], "raw_input_contents": [RAW]}, "inputs.x has contents and raw_input_contents"),
    "too few raw": ({"inputs": [INPUT, {**INPUT, "name": "y"}], "raw_input_contents": [RAW]}, "raw_input_contents has 1 elements"),
    "too many raw": ({"inputs": [INPUT], "raw_input_contents": [RAW, RAW]}, "raw_input_contents has 2 elements"),
    "one form each": ({"inputs": [TYPED, {**INPUT, "name": "y"}]}, "inputs.y has neither contents nor"),
    "twice": ({"inputs": [INPUT, INPUT], "raw_input_contents": [RAW, RAW]}, "two tensors named 'x'"),
    "datatype": ({"inputs": [{**INPUT, "datatype": "FP31"}]}, "inputs.x.datatype` is 'FP31'"),
    "short raw": ({"inputs": [INPUT], "raw_input_contents": [b"abc"]}, "inputs.x.data` has 3 bytes of data"),
    "few elements": ({"inputs": [{**INPUT, "contents": {"fp32_contents": [1.0]}}]}, "`inputs.x.contents.fp32_contents` has 1 elements"),
    "another's field": ({"inputs": [{**INPUT, "contents": {"int_contents": [1, 2]}}]}, "belong into `fp32_contents`"),
    "no axes": ({"inputs": [{**INPUT, "shape": []}]}, "inputs.x.shape"),
    "negative": ({"inputs": [{**INPUT, "shape": [-1, 2]}]}, "inputs.x.shape[0]` is -1"),
    "2^31": ({"inputs": [{**INPUT, "shape": [2**31, 2]}]}, "inputs.x.shape[0]` is 2147483648"),
    "2^63": ({"inputs": [{**INPUT, "shape": [2**63 - 1]}]}, "inputs.x.shape[0]"),
    "more than memory": ({"inputs": [{**INPUT, "shape": [2**31 - 1] * 4}]}, "inputs.x.data` has 8 bytes"),
    "33 axes": ({"inputs": [{**INPUT, "shape": [1] * 33}]}, "has 33 axes"),
    "shared memory": ({"inputs": [{**INPUT, "parameters": {"shared_memory_region": {"string_param": "r"}}}]}, "shared memory"),
    "unknown output": ({"outputs": [{"name": "y"}]}, "outputs.y: the model has x"),
    "output twice": ({"outputs": [{"name": "x"}, {"name": "x"}]}, "outputs has 'x' twice"),
    "classification": ({"outputs": [{"name": "x", "parameters": {"classification": {"int64_param": 3}}}]}, "outputs.x.parameters.classification"),
    "no value": ({"parameters": {"cost": {}}}, "parameters.cost has no value"),
    "no number": ({"parameters": {"cost": {"string_param": "cheap"}}}, "parameters.cost must be a number, not 'cheap'"),
    "no boolean": ({"parameters": {"cost": {"bool_param": True}}}, "parameters.cost must be a number"),
    "not a number": ({"parameters": {"accuracy": {"double_param": float("nan")}}}, "parameters.accuracy must be a number"),
    "priority": ({"parameters": {"priority": {"uint64_param": 2**64 - 1}}}, "parameters.priority must be"),
    "sequence": ({"parameters": {"sequence_id": {"int64_param": 1}}}, "parameters.sequence_id"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_with_a_request_is_named(stub: Any, name: str) -> None:
    parts, words = WRONG[name]
    with pytest.raises(grpc.RpcError) as caught:
        stub.ModelInfer(request(**parts))
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert words in caught.value.details()


@pytest.mark.parametrize("name", ["", "../etc", "a.b.c.d", "a b", "é", "x" * 65, "*", "a.>"])
@pytest.mark.parametrize("method", ["ModelInfer", "ModelMetadata", "ModelConfig", "ModelReady"])
def test_names_that_are_none(stub: Any, name: str, method: str) -> None:
    asked = request(name) if method == "ModelInfer" else getattr(service_pb2, f"{method}Request")(name=name)
    with pytest.raises(grpc.RpcError) as caught:
        getattr(stub, method)(asked)
    assert caught.value.code() == grpc.StatusCode.NOT_FOUND


@pytest.mark.parametrize("method", ["ModelMetadata", "ModelConfig", "ModelStatistics"])
def test_models_that_are_not_there(stub: Any, method: str) -> None:
    with pytest.raises(grpc.RpcError, match="no model 'nobodys' is registered") as caught:
        getattr(stub, method)(getattr(service_pb2, f"{method}Request")(name="nobodys"))
    assert caught.value.code() == grpc.StatusCode.NOT_FOUND


def test_a_client_that_leaves_leaves_nothing_behind(stub: Any, stage: Echoing) -> None:
    stage.delay = 30.0
    calls = calls_of(stage)
    try:
        leaving = stub.ModelInfer.future(request())
        with pytest.raises(grpc.RpcError) as caught:
            stub.ModelInfer(request(), timeout=0.5)
        assert caught.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
        leaving.cancel()
        until = time.monotonic() + 60
        while (calls.running or calls._awaited) and time.monotonic() < until:
            time.sleep(0.01)
        assert (calls.running, calls.buffered, calls._awaited, calls._ended) == (0, 0, {}, {})
    finally:
        stage.delay = 0.0
    stub.ModelInfer(request())


def test_many_threads(stub: Any) -> None:
    failed: list[BaseException] = []

    def work(number: int) -> None:
        try:
            for _ in range(10):
                assert stub.ModelInfer(request(id=str(number))).id == str(number)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed

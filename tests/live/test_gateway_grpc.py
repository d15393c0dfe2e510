"""Whole systems, asked with Triton's stock clients: real models answer, needs are met; and a gateway that is sent anything by gRPC lives."""

import random
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton
import tritonclient.http
from tritonclient.grpc import service_pb2, service_pb2_grpc
from tritonclient.utils import InferenceServerException

from tests.support.clients.retrying import insist
from tests.support.gateways.gateway_process import gateway
from tests.support.gateways.http2_frames import call, exchange
from tests.support.servers.processes import eventually
from tests.support.servers.system import APP, MODELS, Whole

PATIENCE_S = 60  # far more than anything takes: a large message that is read in quadratic time takes longer
LATER = ("StatusCode.DEADLINE_EXCEEDED", "StatusCode.RESOURCE_EXHAUSTED", "StatusCode.UNAVAILABLE", "503", "504")
SERVICE = "/inference.GRPCInferenceService/"


@pytest.fixture(scope="module")
def client(system: Whole) -> Iterator[triton.InferenceServerClient]:
    with triton.InferenceServerClient(system.gateway_grpc) as found:
        yield found


def given(x: np.ndarray, of: Any = triton) -> Any:
    found = of.InferInput("x", list(x.shape), "FP32")
    found.set_data_from_numpy(x.astype(np.float32))
    return found


def infer(client: Any, x: np.ndarray, name: str = APP, of: Any = triton, **needs: Any) -> Any:
    return insist(lambda: client.infer(name, [given(x, of)], **needs), LATER)


def told(result: Any) -> dict[str, Any]:
    response = result.get_response()
    if isinstance(response, dict):
        return response["parameters"]
    return {name: getattr(value, value.WhichOneof("parameter_choice")) for name, value in response.parameters.items()}


@pytest.mark.parametrize("of", [tritonclient.http, triton])
def test_real_answers_by_app_model_and_variant(of: Any, system: Whole) -> None:
    x, y = system.x[:32], system.y[:32]
    with of.InferenceServerClient(
        system.gateway_grpc if of is triton else system.gateway.removeprefix("http://")
    ) as client:
        result = infer(client, x, of=of)
        assert (result.as_numpy("scores").argmax(1) == y).mean() > 0.8
        by_model = infer(client, x, f"{APP}.{MODELS[1]}", of)
        variant = told(by_model)["variant"]
        assert told(by_model)["model"] == MODELS[1]
        again = infer(client, x, f"{APP}.{MODELS[1]}.{variant}", of, model_version="1")
        assert told(again)["variant"] == variant
        np.testing.assert_allclose(again.as_numpy("scores"), by_model.as_numpy("scores"), rtol=1e-4, atol=1e-4)


def test_inputs_larger_than_a_message_of_the_bus(client: triton.InferenceServerClient, system: Whole) -> None:
    x = np.concatenate([system.x[:512]] * 8)  # 12 MB
    y = np.concatenate([system.y[:512]] * 8)
    assert (infer(client, x).as_numpy("scores").argmax(1) == y).mean() > 0.8


def test_a_pipeline_is_asked_like_any_app(client: triton.InferenceServerClient, system: Whole, tmp_path: Path) -> None:
    file = tmp_path / "straight.toml"
    file.write_text(
        f"""[pipeline]
        name = "straight"
        latency_ms = 20000
        [[vertex]]
        name = "only"
        app = "{APP}"
        inputs = {{ x = "$.picture" }}
        [output]
        classes = "only.scores"
        """
    )
    system.done("pipeline", "add", str(file))
    try:
        assert eventually(lambda: client.is_model_ready("straight"))
        described = client.get_model_metadata("straight")
        (picture,), (classes,) = described.inputs, described.outputs
        assert (picture.name, picture.datatype, list(picture.shape)) == ("picture", "FP32", [-1, 784])
        assert (classes.name, classes.datatype, list(classes.shape)) == ("classes", "FP32", [-1, 10])
        assert "straight" in {one.name for one in client.get_model_repository_index().models}
        asked = triton.InferInput("picture", [32, 784], "FP32")
        asked.set_data_from_numpy(system.x[:32].astype(np.float32))
        result = insist(lambda: client.infer("straight", [asked]), LATER)
        assert (result.as_numpy("classes").argmax(1) == system.y[:32]).mean() > 0.8
    finally:
        system.done("pipeline", "remove", "straight")


def test_a_gateway_that_stops_finishes_what_it_has(system: Whole, tmp_path: Path) -> None:
    with gateway(system, tmp_path, drain_s="15") as gate:
        seen: list[str] = []
        with triton.InferenceServerClient(f"127.0.0.1:{gate.grpc_port}") as client:

            def keep_asking() -> None:
                while True:
                    try:
                        client.infer(APP, [given(system.x[:1])])
                        seen.append("OK")
                    except InferenceServerException as error:
                        seen.append(str(error.status()))
                        if seen[-1] == "StatusCode.UNAVAILABLE":
                            return

            asking = threading.Thread(target=keep_asking)
            asking.start()
            assert eventually(lambda: "OK" in seen)
            gate.process.send_signal(signal.SIGTERM)
            assert eventually(lambda: not client.is_server_ready())
            assert client.is_server_live()
            assert gate.process.wait(60) == 0
            asking.join(60)
        assert set(seen) <= {"OK", *LATER}, set(seen)
        assert seen[-1] == "StatusCode.UNAVAILABLE"


METHODS = (
    "ModelInfer",
    "ModelStreamInfer",
    "ModelMetadata",
    "ModelConfig",
    "ModelStatistics",
    "RepositoryIndex",
    "ModelReady",
)


def bodies(draw: random.Random) -> Iterator[bytes]:
    """Bytes as messages: any, broken ones of the right kind, and some that ask for memory."""
    right = service_pb2.ModelInferRequest(model_name=APP, raw_input_contents=[bytes(4 * 784)])
    right.inputs.add(name="x", datatype="FP32", shape=[1, 784])
    whole = right.SerializeToString()
    head = whole[:40]
    for _ in range(150):
        yield draw.randbytes(draw.choice([0, 1, 7, 60, 5000]))
        broken = bytearray(whole[: draw.randrange(len(whole))] if draw.random() < 0.3 else whole)
        for _ in range(draw.choice([1, 1, 3, 20])):
            broken[draw.randrange(min(len(broken), 60) or 1) : 0] = draw.randbytes(draw.choice([1, 2, 9]))
        yield bytes(broken)
    for piece in (b"\x2a\0", b"\x3a\0", b"\x22\0", b"\x32\0", b"\xf8\x01\0", b"\x2a\x02\x2a\0", b"\x22\x02\x12\0"):
        yield head + piece * 2**20
    yield b"\x2a\xfe\xff\xff\x07" + bytes(2**20)
    many = b"\x01" * (4 * 2**20 - 4096)
    size = bytes([len(many) & 127 | 128, len(many) >> 7 & 127 | 128, len(many) >> 14 & 127 | 128, len(many) >> 21])
    yield b"\x2a" + size + b"\x1a" + size + many  # as a shape


def test_anything_may_be_sent(system: Whole, tmp_path: Path) -> None:
    """Random bytes, broken and hostile messages, metadata and frames: the gateway answers with a status, keeps its memory, and lives."""
    draw = random.Random(20)
    path = SERVICE.encode() + b"ModelInfer"
    with gateway(system, tmp_path) as gate:
        target = f"127.0.0.1:{gate.grpc_port}"
        with grpc.insecure_channel(target, [("grpc.max_send_message_length", -1)]) as channel:
            stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
            grpc.channel_ready_future(channel).result(PATIENCE_S)
            before = gate.resident_mb()
            codes: set[str] = set()
            for body in bodies(draw):
                method = SERVICE + draw.choice(METHODS) if len(body) < 10_000 else SERVICE + "ModelInfer"
                try:
                    if method.endswith("Stream"):
                        list(channel.stream_stream(method)(iter([body]), timeout=PATIENCE_S))
                    else:
                        channel.unary_unary(method)(body, timeout=PATIENCE_S)
                    codes.add("OK")
                except grpc.RpcError as error:
                    codes.add(error.code().name)
                    assert error.code().name not in ("UNKNOWN", "CANCELLED", "UNAVAILABLE"), error.details()
                    assert len(body) < 10_000 or error.code().name != "DEADLINE_EXCEEDED", error.details()
            assert codes <= {
                "OK",
                "INVALID_ARGUMENT",
                "NOT_FOUND",
                "RESOURCE_EXHAUSTED",
                "INTERNAL",
                "DEADLINE_EXCEEDED",
            }
            for _ in range(100):
                data = bytearray(call(path, (b"a", draw.randbytes(20)), end=draw.randbytes(30)))
                for _ in range(draw.choice([0, 1, 5])):
                    data[draw.randrange(24, len(data))] = draw.randrange(256)
                exchange(gate.grpc_port, bytes(data), b"grpc-status", 0.05)
            asked = service_pb2.ModelInferRequest(model_name=APP, raw_input_contents=[bytes(4 * 784)])
            asked.inputs.add(name="x", datatype="FP32", shape=[1, 784])

            def answered() -> bool:
                try:
                    return bool(stub.ModelInfer(asked, timeout=PATIENCE_S).outputs[0].name == "scores")
                except grpc.RpcError as error:
                    assert str(error.code()) in LATER, error.details()
                    return False

            assert eventually(answered)
            assert gate.resident_mb() - before < 64
        assert gate.alive
        assert "Traceback" not in gate.log.read_text()

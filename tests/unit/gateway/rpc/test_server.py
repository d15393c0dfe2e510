"""The gRPC server: rights, health, limits, TLS, stopping, and requests that no client library would send."""

import queue
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from tritonclient.grpc import service_pb2, service_pb2_grpc

from bus.memory import Broker
from infaas.client import Client
from infaas.credentials import CertificateError, certify
from services.core.settings import GatewaySettings
from services.gateway.edge import GatewayService
from services.gateway.http.access import AccessControl
from services.gateway.rpc.infer import HEALTH, INFERENCE, REFLECTIONS
from services.gateway.rpc.server import FILES, GrpcServer
from tests.support.clients.responders import until
from tests.support.gateways.echo_gateway import Echoing, echoing
from tests.support.gateways.http2_frames import call, exchange
from tests.support.servers.nats import run
from tests.support.servers.processes import eventually
from tests.unit.gateway.rpc.test_stock_grpc import calls_of, request


@pytest.fixture(scope="module")
def stage() -> Iterator[Echoing]:
    with echoing(tokens=("alice:secret",), body_timeout_s=0.2, max_body=2**20, in_flight=4, max_header=4096) as found:
        yield found


@pytest.fixture(scope="module")
def channel(stage: Echoing) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(stage.grpc_url, [("grpc.max_send_message_length", -1)]) as found:
        yield found


def stub(channel: grpc.Channel) -> Any:
    return service_pb2_grpc.GRPCInferenceServiceStub(channel)


def health(channel: grpc.Channel, service: str = "", **more: Any) -> int:
    check = channel.unary_unary(
        "/grpc.health.v1.Health/Check",
        HEALTH.HealthCheckRequest.SerializeToString,
        HEALTH.HealthCheckResponse.FromString,
    )
    return int(check(HEALTH.HealthCheckRequest(service=service), timeout=60, **more).status)


def status(code: str, call: Any, *given: Any, **more: Any) -> str:
    """The sentence with which the call is refused with this status."""
    with pytest.raises(grpc.RpcError) as caught:
        call(*given, **{"timeout": 60, **more})
    assert caught.value.code().name == code, caught.value.details()
    return str(caught.value.details())


TOKEN = [("authorization", "Bearer secret")]


# -- rights


def test_asking_needs_a_token_and_whether_it_lives_does_not(channel: grpc.Channel) -> None:
    found = stub(channel)
    assert "Authorization: Bearer" in status("UNAUTHENTICATED", found.ModelInfer, request())
    assert "not known" in status(
        "UNAUTHENTICATED", found.ModelInfer, request(), metadata=[("authorization", "Bearer x")]
    )
    status("UNAUTHENTICATED", found.ServerMetadata, service_pb2.ServerMetadataRequest())
    status(
        "UNAUTHENTICATED",
        found.RepositoryIndex,
        service_pb2.RepositoryIndexRequest(),
        metadata=[("authorization", "secret")],
    )
    with pytest.raises(grpc.RpcError, match="UNAUTHENTICATED"):
        list(found.ModelStreamInfer(iter([request()])))
    assert found.ServerLive(service_pb2.ServerLiveRequest()).live
    assert found.ServerReady(service_pb2.ServerReadyRequest()).ready
    assert health(channel) == HEALTH.HealthCheckResponse.ServingStatus.SERVING
    assert found.ModelInfer(request(), metadata=TOKEN).model_name == "fp32"
    assert found.ServerMetadata(service_pb2.ServerMetadataRequest(), metadata=TOKEN).name == "infaas"


# -- health, reflection


def test_health_of_services(channel: grpc.Channel) -> None:
    assert health(channel, "inference.GRPCInferenceService") == 1
    assert "no service 'other'" in status("NOT_FOUND", lambda **_: health(channel, "other"))
    watch = channel.unary_stream(
        "/grpc.health.v1.Health/Watch",
        HEALTH.HealthCheckRequest.SerializeToString,
        HEALTH.HealthCheckResponse.FromString,
    )
    watching = watch(HEALTH.HealthCheckRequest(service="other"), timeout=30)
    assert next(watching).status == HEALTH.HealthCheckResponse.ServingStatus.SERVICE_UNKNOWN
    watching.cancel()


@pytest.mark.parametrize("schema", REFLECTIONS)
def test_reflection_tells_what_there_is(channel: grpc.Channel, schema: Any) -> None:
    ask, told = schema.ServerReflectionRequest, schema.ServerReflectionResponse
    package = schema.ServerReflectionRequest.DESCRIPTOR.file.package
    call = channel.stream_stream(
        f"/{package}.ServerReflection/ServerReflectionInfo", ask.SerializeToString, told.FromString
    )
    questions = [
        ask(list_services=""), ask(file_containing_symbol="inference.GRPCInferenceService.ModelInfer"),
        ask(file_by_filename=INFERENCE.descriptor.name), ask(file_containing_symbol="nothing"), ask(),
    ]  # fmt: skip
    services, symbol, name, nothing, empty = call(iter(questions), metadata=TOKEN, timeout=30)
    assert {"inference.GRPCInferenceService", "grpc.health.v1.Health"} <= {
        one.name for one in services.list_services_response.service
    }
    written = INFERENCE.descriptor.serialized_pb
    assert list(symbol.file_descriptor_response.file_descriptor_proto) == [written]
    assert list(name.file_descriptor_response.file_descriptor_proto) == [written]
    assert nothing.error_response.error_code == empty.error_response.error_code == 5
    assert all(list(file.descriptor.dependencies) == [] for file in FILES)


# -- limits


def test_more_requests_than_may_be_under_way(channel: grpc.Channel, stage: Echoing) -> None:
    found = stub(channel)
    stage.hold()
    try:
        ends = [found.ModelInfer.future(request(), metadata=TOKEN, timeout=300) for _ in range(8)]
        assert eventually(lambda: sum(end.done() for end in ends) == 4)
        assert found.ServerLive(service_pb2.ServerLiveRequest(), timeout=60).live
        stage.release()
        codes = sorted(end.code().name for end in ends)
    finally:
        stage.release()
    assert codes == ["OK"] * 4 + ["RESOURCE_EXHAUSTED"] * 4


def test_messages_that_are_too_large(channel: grpc.Channel) -> None:
    found = stub(channel)
    large = request(raw_input_contents=[bytes(2**20 + 70_000)])
    assert "larger than max" in status("RESOURCE_EXHAUSTED", found.ModelInfer, large, metadata=TOKEN)
    bomb = request(raw_input_contents=[bytes(2**26)])
    words = status("RESOURCE_EXHAUSTED", found.ModelInfer, bomb, metadata=TOKEN, compression=grpc.Compression.Gzip)
    assert "larger than max" in words


def test_large_metadata_compression_and_unknown_methods(channel: grpc.Channel) -> None:
    status("RESOURCE_EXHAUSTED", stub(channel).ModelInfer, request(), metadata=[*TOKEN, ("a", "b" * 8192)])
    asked = request(raw_input_contents=[bytes(80_000)])
    asked.inputs[0].shape[:] = [1, 20_000]
    for coding in (grpc.Compression.Gzip, grpc.Compression.Deflate):
        assert len(stub(channel).ModelInfer(asked, metadata=TOKEN, compression=coding).raw_output_contents[0]) == 80_000
    words = status("UNIMPLEMENTED", stub(channel).TraceSetting, service_pb2.TraceSettingRequest(), metadata=TOKEN)
    assert words == "there is no such method"


@pytest.mark.slow
def test_a_message_that_does_not_come_is_not_waited_for(stage: Echoing) -> None:
    path = b"/inference.GRPCInferenceService/ModelInfer"
    token = (b"authorization", b"Bearer secret")
    for part in (b"", b"\0\0\0\x10\0abc"):
        data = call(path, token, end=b"")
        if part:
            data += b"\0\0" + bytes([len(part)]) + b"\0\0\0\0\0\x01" + part
        assert b"did not come in time" in exchange(stage.grpc_port, data, b"in time")
    calls = calls_of(stage)
    assert eventually(lambda: (calls._awaited, calls._ended, calls.running) == ({}, {}, 0))


# -- invalid requests


@pytest.mark.parametrize(
    "path", [b"/\xff\xfe/x", b"/inference.GRPCInferenceService/\xff", b"/", b"*", b"/a/b/c", b"//", b"x"]
)
def test_methods_that_are_none(channel: grpc.Channel, stage: Echoing, path: bytes) -> None:
    """One whose name is not UTF-8 would end grpcio's own server, for all."""
    exchange(stage.grpc_port, call(path), b"grpc-status")
    assert health(channel) == 1


def test_metadata_of_any_bytes(channel: grpc.Channel, stage: Echoing) -> None:
    path = b"/inference.GRPCInferenceService/ServerLive"
    for pair in (
        (b"authorization", b"Bearer \xff\xfe"),
        (b"traceparent", b"\xff"),
        (b"a-bin", b"!!"),
        (b"traceparent-bin", b""),
    ):
        exchange(stage.grpc_port, call(path, pair), b"grpc-status")
    path = b"/inference.GRPCInferenceService/ModelInfer"
    assert b"grpc-status\x0216" in exchange(
        stage.grpc_port, call(path, (b"authorization", b"Bearer \xff\xfe")), b"grpc-status\x02"
    )
    assert health(channel) == 1


@pytest.mark.parametrize("data", [b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", b"\x16\x03\x01\x02\0\x01\0\x01", bytes(1000)])
def test_other_protocols(channel: grpc.Channel, stage: Echoing, data: bytes) -> None:
    exchange(stage.grpc_port, data, b"\0never", 2.0)
    assert health(channel) == 1


# -- start and stop


def test_a_port_that_is_taken_is_told() -> None:
    async def main(port: int) -> None:
        settings = GatewaySettings(grpc_port=port)
        service = GatewayService(settings, Client(Broker().connect("nobody")))
        server = GrpcServer(service, AccessControl(settings), settings)
        with pytest.raises(OSError, match=f"cannot listen on 127.0.0.1:{port}, for gRPC"):
            await server.open()
        await server.close(1.0)

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        run(main(taken.getsockname()[1]))


def test_what_is_wrong_with_a_long_name_fits_into_a_status(channel: grpc.Channel) -> None:
    asked = request()
    asked.parameters["triton_" + "é" * 15_000].int64_param = 1
    told = status("INVALID_ARGUMENT", stub(channel).ModelInfer, asked, metadata=TOKEN)
    assert told.startswith("parameters.triton_éé")
    assert told.endswith("é…")


def test_whoever_watches_and_streams_is_told_before_it_stops() -> None:
    told: queue.Queue[Any] = queue.Queue()
    with echoing(drain_s=1.0) as stage, grpc.insecure_channel(stage.grpc_url) as channel:
        watch = channel.unary_stream(
            "/grpc.health.v1.Health/Watch",
            HEALTH.HealthCheckRequest.SerializeToString,
            HEALTH.HealthCheckResponse.FromString,
        )

        def follow(replies: Any) -> None:
            try:
                for reply in replies:
                    told.put(reply.status)
            except grpc.RpcError as error:
                told.put(error.code().name)

        watching = threading.Thread(target=follow, args=(watch(HEALTH.HealthCheckRequest()),))
        watching.start()
        assert told.get(timeout=60) == 1
        asked: queue.Queue[Any] = queue.Queue()
        replies = stub(channel).ModelStreamInfer(iter(asked.get, None))
        asked.put(request())
        assert next(replies).infer_response.model_name == "fp32"
        stage.hold()
        stage.grace = 60.0
        last = stub(channel).ModelInfer.future(request(id="last"))
        run(until(lambda: stage.heard.get("id") == "last"))
        stage.stop()
        assert told.get(timeout=60) == 2
        stage.release()
        assert last.result(60).model_name == "fp32"
        assert told.get(timeout=60) == "UNAVAILABLE"
        with pytest.raises(grpc.RpcError) as caught:
            next(replies)
        assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
        assert "being stopped" in caught.value.details()
        asked.put(None)
        watching.join(60)


def test_tls(tmp_path: Path) -> None:
    try:
        certify(tmp_path, ["localhost", "127.0.0.1"])
    except CertificateError as error:
        pytest.skip(str(error))
    given = {"tls_certificate": str(tmp_path / "server.pem"), "tls_key": str(tmp_path / "server.key")}
    trusted = grpc.ssl_channel_credentials((tmp_path / "ca.pem").read_bytes())
    with echoing(**given) as stage:
        with grpc.secure_channel(stage.grpc_url, trusted) as channel:
            assert stub(channel).ModelInfer(request(), timeout=60).model_name == "fp32"
        with grpc.secure_channel(stage.grpc_url, grpc.ssl_channel_credentials()) as channel:
            status("UNAVAILABLE", stub(channel).ModelInfer, request(), timeout=60)
        with grpc.insecure_channel(stage.grpc_url) as channel:
            status("UNAVAILABLE", stub(channel).ModelInfer, request(), timeout=60)

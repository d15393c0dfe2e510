"""services/gateway/rpc/infer.py against the descriptors of a stock client."""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from services.gateway.rpc import infer
from services.gateway.rpc.infer import HEALTH, INFERENCE

pytest.importorskip("tritonclient.grpc", reason="tritonclient[grpc], of the extra dev, is not installed")

from tritonclient.grpc import model_config_pb2, service_pb2


def nested(message: Any) -> Iterator[Any]:
    yield message
    for part in message.nested_types:
        yield from nested(part)


def enums(file: Any) -> Iterator[Any]:
    yield from file.enum_types_by_name.values()
    for message in file.message_types_by_name.values():
        for part in nested(message):
            yield from part.enum_types


def layout(field: Any) -> tuple[Any, ...]:
    """What decides how a field is written and read."""
    kind = field.message_type or field.enum_type
    oneof = field.containing_oneof
    return (
        field.number,
        field.type,
        field.is_repeated,
        field.is_packed,
        kind.full_name if kind is not None else None,
        oneof.name if oneof is not None else None,
    )


def everything(*files: Any) -> dict[str, Any]:
    return {
        part.full_name: part
        for file in files
        for message in file.message_types_by_name.values()
        for part in nested(message)
    }


THEIRS = everything(service_pb2.DESCRIPTOR, model_config_pb2.DESCRIPTOR)
OURS = {name: part for name, part in everything(INFERENCE.descriptor).items() if not name.endswith(".PropertiesEntry")}
BEYOND = {"inference.ModelMetadataResponse": {"properties"}}  # of the protocol's own file, which Triton's lacks
IN_PART = {"ModelConfig", "ModelInput", "ModelOutput", "ModelDynamicBatching", "ModelStatistics", "ModelVersionPolicy"}


def test_every_field_is_the_standards() -> None:
    for name, ours in OURS.items():
        known = {field.name: layout(field) for field in THEIRS[name].fields}
        fields = {field.name: layout(field) for field in ours.fields if field.name not in BEYOND.get(name, ())}
        if name.removeprefix("inference.") in IN_PART:
            assert fields.items() <= known.items(), name
        else:
            assert fields == known, name
        assert ours.GetOptions().map_entry == THEIRS[name].GetOptions().map_entry, name


def test_every_enum_and_method_is_the_standards() -> None:
    theirs = {enum.full_name: enum for file in (service_pb2, model_config_pb2) for enum in enums(file.DESCRIPTOR)}
    ours = list(enums(INFERENCE.descriptor))
    assert [enum.full_name for enum in ours] == ["inference.DataType"]
    for enum in ours:
        assert [(v.name, v.number) for v in enum.values] == [(v.name, v.number) for v in theirs[enum.full_name].values]
    theirs = service_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"].methods_by_name
    methods = INFERENCE.descriptor.services_by_name["GRPCInferenceService"].methods
    assert len(methods) == 10
    for method in methods:
        known = theirs[method.name]
        assert method.input_type.full_name == known.input_type.full_name
        assert method.output_type.full_name == known.output_type.full_name
        assert (method.client_streaming, method.server_streaming) == (known.client_streaming, known.server_streaming)


def test_what_a_stock_client_writes_is_read() -> None:
    request = service_pb2.ModelInferRequest(model_name="digits", id="7", raw_input_contents=[b"\0" * 4])
    request.parameters["latency_ms"].double_param = 12.5
    request.inputs.add(name="x", datatype="FP32", shape=[1, 1]).parameters["a"].bool_param = True
    ours = INFERENCE.ModelInferRequest.FromString(request.SerializeToString())
    assert (ours.model_name, ours.id, list(ours.inputs[0].shape)) == ("digits", "7", [1, 1])
    assert ours.parameters["latency_ms"].WhichOneof("parameter_choice") == "double_param"
    assert ours.SerializeToString(deterministic=True) == request.SerializeToString(deterministic=True)


def test_a_generated_module_of_the_same_names_may_be_loaded_before_and_after() -> None:
    for lines in (("service_pb2", "messages"), ("messages", "service_pb2")):
        program = "\n".join(
            "from tritonclient.grpc import service_pb2"
            if line == "service_pb2"
            else "import services.gateway.rpc.infer"
            for line in lines
        )
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr


def test_the_health_protocol() -> None:
    """Against the bytes of health.proto, which nobody here has a generated module of: SERVING is field 1, number 1."""
    assert HEALTH.HealthCheckRequest(service="a").SerializeToString() == b"\x0a\x01a"
    assert HEALTH.HealthCheckResponse(status="SERVING").SerializeToString() == b"\x08\x01"
    assert HEALTH.HealthCheckResponse(status="NOT_SERVING").SerializeToString() == b"\x08\x02"
    assert HEALTH.HealthCheckResponse(status="SERVICE_UNKNOWN").SerializeToString() == b"\x08\x03"
    check, watch = HEALTH.descriptor.services_by_name["Health"].methods
    assert (check.name, check.client_streaming, check.server_streaming) == ("Check", False, False)
    assert (watch.name, watch.client_streaming, watch.server_streaming) == ("Watch", False, True)


def test_unknown_messages_are_refused() -> None:
    with pytest.raises(AttributeError, match="has no message Nothing"):
        _ = INFERENCE.Nothing


@pytest.mark.parametrize("package", sorted(infer.SCHEMAS))
def test_the_descriptors_are_those_of_the_files(package: str) -> None:
    """All but their datatypes, which clients' own files have above."""
    there = Path(infer.__file__).parent / "proto" / f"{package}.proto"
    file = infer.SCHEMAS[package].descriptor
    parts = [one for one in everything(file).values() if not one.GetOptions().map_entry]
    found = [(one.name, one.number) for part in parts for one in part.fields]
    found += [(one.name, one.number) for enum in enums(file) for one in enum.values]
    said = re.findall(r"(\w+) = (\d+);", there.read_text())
    assert sorted(said) == sorted((name, str(number)) for name, number in found)
    methods = [one.name for service in file.services_by_name.values() for one in service.methods]
    assert re.findall(r"rpc (\w+)", there.read_text()) == methods

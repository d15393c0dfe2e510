"""The messages and services of the gateway's gRPC, as tables from which protobuf's classes are made.

Names and field numbers are those of the Open Inference Protocol (`inference.GRPCInferenceService`, with the extensions of Triton's
grpc_service.proto and the part of its model_config.proto that are served here), of `grpc.health.v1` and of `grpc.reflection`. A test
compares them with those of a stock client. They are tables and not generated modules because the classes need a descriptor pool of
their own: in protobuf's default pool they would collide with generated modules for the same names, such as tritonclient's or KServe's.

A table has a message, an enum or a service in each line:

    Point: 1 x double; 2 y double; 3 tags *string; 4 extra {Value}      a message: number, name, type; * repeated, {} map from strings
    Value: 1 number?either double; 2 text?either string                 both in the oneof `either`
    Line.End: 1 at Point                                                nested in Line; a type that starts with a dot, too
    enum Colour: RED GREEN                                              numbered from 0
    service Canvas: Draw; Follow PointQuery *Point                      DrawRequest -> DrawResponse; * is a stream
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
    ServiceDescriptorProto,
)
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass

_KINDS = ("bool", "int32", "int64", "uint32", "uint64", "float", "double", "string", "bytes")
_SCALARS = {name: FieldDescriptorProto.Type.Value(f"TYPE_{name.upper()}") for name in _KINDS}


class Method(NamedTuple):
    """A method of a service. request, response: classes of messages; streams: whether there are several of each."""

    name: str
    request: Any
    response: Any
    request_streams: bool
    response_streams: bool


class Schema:
    """The classes of one protobuf package: `schema.Point` is the class of its message Point, `schema["Line.End"]` of a nested one.

    Raises TypeError where the table lacks a type that it uses.
    """

    def __init__(self, package: str, table: str) -> None:
        self._package = package
        self._file = FileDescriptorProto(name=f"infaas/{package}.proto", package=package, syntax="proto3")
        self._messages: dict[str, DescriptorProto] = {}
        self._enums: set[str] = set()
        lines = [line.partition(":")[::2] for line in table.strip().splitlines()]
        for head, _ in lines:
            self._declare(*head.split())
        for head, body in lines:
            self._define(*head.split(), parts=[part.split() for part in body.split(";") if part.strip()])
        pool = DescriptorPool()
        pool.AddSerializedFile(self._file.SerializeToString())
        self._pool = pool
        self.descriptor = pool.FindFileByName(self._file.name)
        self._classes = {
            name: GetMessageClass(pool.FindMessageTypeByName(f"{package}.{name}")) for name in self._messages
        }

    def __getitem__(self, name: str) -> Any:
        return self._classes[name]

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["_classes"][name]
        except KeyError:
            raise AttributeError(f"{self.__dict__.get('_package')} has no message {name}") from None

    def methods(self, service: str) -> Iterator[Method]:
        """The methods of a service."""
        for method in self.descriptor.services_by_name[service].methods:
            request, response = GetMessageClass(method.input_type), GetMessageClass(method.output_type)
            yield Method(method.name, request, response, method.client_streaming, method.server_streaming)

    def has(self, symbol: str) -> bool:
        """Whether there is a message or service of this full name, or a field or method of one."""
        for name in (symbol, symbol.rpartition(".")[0]):
            try:
                self._pool.FindFileContainingSymbol(name)
            except KeyError:
                continue
            return True
        return False

    def _declare(self, kind: str, name: str = "") -> None:
        if kind == "enum":
            self._enums.add(name)
        elif kind != "service":
            self._messages[kind] = self._nest(kind).add(name=kind.rpartition(".")[2])

    def _nest(self, name: str, enums: bool = False) -> Any:
        """The list for a message or an enum of this name: its parent's, or the file's."""
        parent = name.rpartition(".")[0]
        if not parent:
            return self._file.enum_type if enums else self._file.message_type
        return self._messages[parent].enum_type if enums else self._messages[parent].nested_type

    def _define(self, kind: str, name: str = "", *, parts: list[list[str]]) -> None:
        if kind == "enum":
            enum = self._nest(name, enums=True).add(name=name.rpartition(".")[2])
            for number, value in enumerate(parts[0]):
                enum.value.add(name=value, number=number)
        elif kind == "service":
            service = self._file.service.add(name=name)
            for part in parts:
                self._method(service, *part)
        else:
            for part in parts:
                self._field(kind, *part)

    def _method(self, service: ServiceDescriptorProto, name: str, request: str = "", response: str = "") -> None:
        request, response = request or f"{name}Request", response or f"{name}Response"
        service.method.add(
            name=name,
            input_type=f".{self._package}.{request.lstrip('*')}",
            output_type=f".{self._package}.{response.lstrip('*')}",
            client_streaming=request.startswith("*"),
            server_streaming=response.startswith("*"),
        )

    def _field(self, message: str, number: str, name: str, kind: str) -> None:
        owner = self._messages[message]
        name, _, oneof = name.partition("?")
        field = owner.field.add(name=name, number=int(number), label=FieldDescriptorProto.LABEL_OPTIONAL)
        if oneof:
            if oneof not in (declared := [one.name for one in owner.oneof_decl]):
                owner.oneof_decl.add(name=oneof)
                declared.append(oneof)
            field.oneof_index = declared.index(oneof)
        bare = kind.strip("*{}")
        if kind != bare:
            field.label = FieldDescriptorProto.LABEL_REPEATED
        if kind.startswith("{"):
            entry = "".join(word.capitalize() for word in field.name.split("_")) + "Entry"
            whole = self._messages[f"{message}.{entry}"] = owner.nested_type.add(name=entry)
            whole.options.map_entry = True
            self._field(f"{message}.{entry}", "1", "key", "string")
            self._field(f"{message}.{entry}", "2", "value", bare)
            bare = f".{entry}"
        if bare in _SCALARS:
            field.type = _SCALARS[bare]
            return
        known = message + bare if bare.startswith(".") else bare
        field.type = FieldDescriptorProto.TYPE_ENUM if known in self._enums else FieldDescriptorProto.TYPE_MESSAGE
        field.type_name = f".{self._package}.{known}"


# -- The messages and services

INFERENCE = Schema(
    "inference",
    """
ServerLiveRequest
ServerLiveResponse: 1 live bool
ServerReadyRequest
ServerReadyResponse: 1 ready bool
ModelReadyRequest: 1 name string; 2 version string
ModelReadyResponse: 1 ready bool
ServerMetadataRequest
ServerMetadataResponse: 1 name string; 2 version string; 3 extensions *string
ModelMetadataRequest: 1 name string; 2 version string
ModelMetadataResponse: 1 name string; 2 versions *string; 3 platform string; 4 inputs *.TensorMetadata; 5 outputs *.TensorMetadata; \
6 properties {string}
ModelMetadataResponse.TensorMetadata: 1 name string; 2 datatype string; 3 shape *int64
InferParameter: 1 bool_param?parameter_choice bool; 2 int64_param?parameter_choice int64; \
3 string_param?parameter_choice string; 4 double_param?parameter_choice double; 5 uint64_param?parameter_choice uint64
InferTensorContents: 1 bool_contents *bool; 2 int_contents *int32; 3 int64_contents *int64; 4 uint_contents *uint32; \
5 uint64_contents *uint64; 6 fp32_contents *float; 7 fp64_contents *double; 8 bytes_contents *bytes
ModelInferRequest: 1 model_name string; 2 model_version string; 3 id string; 4 parameters {InferParameter}; \
5 inputs *.InferInputTensor; 6 outputs *.InferRequestedOutputTensor; 7 raw_input_contents *bytes
ModelInferRequest.InferInputTensor: 1 name string; 2 datatype string; 3 shape *int64; 4 parameters {InferParameter}; \
5 contents InferTensorContents
ModelInferRequest.InferRequestedOutputTensor: 1 name string; 2 parameters {InferParameter}
ModelInferResponse: 1 model_name string; 2 model_version string; 3 id string; 4 parameters {InferParameter}; \
5 outputs *.InferOutputTensor; 6 raw_output_contents *bytes
ModelInferResponse.InferOutputTensor: 1 name string; 2 datatype string; 3 shape *int64; 4 parameters {InferParameter}; \
5 contents InferTensorContents
ModelStreamInferResponse: 1 error_message string; 2 infer_response ModelInferResponse
ModelConfigRequest: 1 name string; 2 version string
ModelConfigResponse: 1 config ModelConfig
ModelConfig: 1 name string; 2 platform string; 17 backend string; 3 version_policy ModelVersionPolicy; 4 max_batch_size int32; 5 input *ModelInput; \
6 output *ModelOutput; 11 dynamic_batching?scheduling_choice ModelDynamicBatching; 14 parameters {ModelParameter}
ModelVersionPolicy: 1 latest?policy_choice .Latest
ModelVersionPolicy.Latest: 1 num_versions uint32
ModelInput: 1 name string; 2 data_type DataType; 4 dims *int64
ModelOutput: 1 name string; 2 data_type DataType; 3 dims *int64
ModelDynamicBatching: 1 preferred_batch_size *int32; 2 max_queue_delay_microseconds uint64; \
4 priority_levels uint64; 5 default_priority_level uint64
ModelParameter: 1 string_value string
ModelStatisticsRequest: 1 name string; 2 version string
ModelStatisticsResponse: 1 model_stats *ModelStatistics
ModelStatistics: 1 name string; 2 version string; 3 last_inference uint64; 4 inference_count uint64; 5 execution_count uint64; \
6 inference_stats InferStatistics; 7 batch_stats *InferBatchStatistics
InferStatistics: 1 success StatisticDuration; 2 fail StatisticDuration; 3 queue StatisticDuration; \
4 compute_input StatisticDuration; 5 compute_infer StatisticDuration; 6 compute_output StatisticDuration; \
7 cache_hit StatisticDuration; 8 cache_miss StatisticDuration
InferBatchStatistics: 1 batch_size uint64; 2 compute_input StatisticDuration; 3 compute_infer StatisticDuration; \
4 compute_output StatisticDuration
StatisticDuration: 1 count uint64; 2 ns uint64
RepositoryIndexRequest: 1 repository_name string; 2 ready bool
RepositoryIndexResponse: 1 models *.ModelIndex
RepositoryIndexResponse.ModelIndex: 1 name string; 2 version string; 3 state string; 4 reason string
enum DataType: TYPE_INVALID TYPE_BOOL TYPE_UINT8 TYPE_UINT16 TYPE_UINT32 TYPE_UINT64 TYPE_INT8 TYPE_INT16 TYPE_INT32 TYPE_INT64 \
TYPE_FP16 TYPE_FP32 TYPE_FP64 TYPE_STRING TYPE_BF16
service GRPCInferenceService: ServerLive; ServerReady; ModelReady; ServerMetadata; ModelMetadata; ModelInfer; \
ModelStreamInfer *ModelInferRequest *ModelStreamInferResponse; ModelConfig; ModelStatistics; RepositoryIndex
""",
)
HEALTH = Schema(
    "grpc.health.v1",
    """
HealthCheckRequest: 1 service string
HealthCheckResponse: 1 status .ServingStatus
enum HealthCheckResponse.ServingStatus: UNKNOWN SERVING NOT_SERVING SERVICE_UNKNOWN
service Health: Check HealthCheckRequest HealthCheckResponse; Watch HealthCheckRequest *HealthCheckResponse
""",
)
_REFLECTION = """
ServerReflectionRequest: 1 host string; 3 file_by_filename?message_request string; 4 file_containing_symbol?message_request string; \
5 file_containing_extension?message_request ExtensionRequest; 6 all_extension_numbers_of_type?message_request string; \
7 list_services?message_request string
ExtensionRequest: 1 containing_type string; 2 extension_number int32
ServerReflectionResponse: 1 valid_host string; 2 original_request ServerReflectionRequest; \
4 file_descriptor_response?message_response FileDescriptorResponse; \
5 all_extension_numbers_response?message_response ExtensionNumberResponse; \
6 list_services_response?message_response ListServiceResponse; 7 error_response?message_response ErrorResponse
FileDescriptorResponse: 1 file_descriptor_proto *bytes
ExtensionNumberResponse: 1 base_type_name string; 2 extension_number *int32
ListServiceResponse: 1 service *ServiceResponse
ServiceResponse: 1 name string
ErrorResponse: 1 error_code int32; 2 error_message string
service ServerReflection: ServerReflectionInfo *ServerReflectionRequest *ServerReflectionResponse
"""
REFLECTIONS = tuple(Schema(package, _REFLECTION) for package in ("grpc.reflection.v1", "grpc.reflection.v1alpha"))

"""The messages and services that we speak over gRPC, as tables; `schema.py` says how these are written.

Names and field numbers are those of the Open Inference Protocol (`inference.GRPCInferenceService`, with the extensions of
Triton's grpc_service.proto and the part of its model_config.proto that are served here) and of `grpc.health.v1`.
"""

from services.gateway.rpc.schema import Schema

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
ModelMetadataResponse: 1 name string; 2 versions *string; 3 platform string; 4 inputs *.TensorMetadata; 5 outputs *.TensorMetadata
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

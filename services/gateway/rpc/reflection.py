"""Server reflection, v1 and v1alpha: tools such as grpcurl ask it what there is and need no .proto files."""

from typing import Any

import grpc
from google.protobuf.descriptor_pb2 import FileDescriptorProto

from services.gateway.http.access import Right
from services.gateway.rpc.calls import Calls, Next, Write
from services.gateway.rpc.messages import HEALTH, INFERENCE, REFLECTIONS
from services.gateway.rpc.schema import Schema
from services.gateway.rpc.wire import read

FILES = (INFERENCE, HEALTH, *REFLECTIONS)


def handlers(schema: Schema, calls: Calls) -> dict[str, Any]:
    """The methods of one of the two, which differ in their package's name only."""

    async def answer(following: Next, write: Write, _: Any) -> None:
        while (body := await following()) is not None:
            request = read(body, schema.ServerReflectionRequest)
            await write(reply_to(schema, request).SerializeToString())

    return {"ServerReflectionInfo": calls.stream(answer, Right.ASK)}


def reply_to(schema: Schema, request: Any) -> Any:
    """The reply to one question."""
    reply = schema.ServerReflectionResponse(valid_host=request.host, original_request=request)
    asked = request.WhichOneof("message_request")
    if asked == "list_services":
        names = sorted(service.full_name for file in FILES for service in file.descriptor.services_by_name.values())
        reply.list_services_response.service.extend(schema.ServiceResponse(name=name) for name in names)
        return reply
    found = None
    if asked == "file_by_filename":
        found = next((file for file in FILES if file.descriptor.name == request.file_by_filename), None)
    elif asked == "file_containing_symbol":
        found = next((file for file in FILES if file.has(request.file_containing_symbol)), None)
    if found is None:
        code, _ = grpc.StatusCode.NOT_FOUND.value
        reply.error_response.error_code = code
        reply.error_response.error_message = "there is nothing of this name"
        return reply
    written = FileDescriptorProto()
    found.descriptor.CopyToProto(written)
    reply.file_descriptor_response.file_descriptor_proto.append(written.SerializeToString())
    return reply

"""The messages and services of the gateway's gRPC: protobuf's classes of the files in proto/.

They are made of protoc's descriptors and not generated modules because they need a descriptor pool of their own: in protobuf's default
pool they would collide with generated modules for the same names, such as tritonclient's or KServe's. After a change of a file, with the
package grpcio-tools, in proto/:

    python -m grpc_tools.protoc -I . --descriptor_set_out=services.binpb *.proto
"""

from importlib.resources import files
from typing import Any

from google.protobuf.descriptor_pb2 import FileDescriptorProto, FileDescriptorSet
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass


class Schema:
    """The classes of one file: `schema.Point` is the class of its message Point."""

    def __init__(self, file: FileDescriptorProto) -> None:
        file.name = f"infaas/{file.name}"
        self._pool = DescriptorPool()
        self._pool.Add(file)
        self.descriptor = self._pool.FindFileByName(file.name)
        for name, message in self.descriptor.message_types_by_name.items():
            setattr(self, name, GetMessageClass(message))

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"{self.descriptor.package} has no message {name}")

    def requests(self, service: str) -> dict[str, Any]:
        """The classes of the requests of a service's methods, by their names."""
        return {one.name: GetMessageClass(one.input_type) for one in self.descriptor.services_by_name[service].methods}

    def has(self, symbol: str) -> bool:
        """Whether there is a message or service of this full name, or a field or method of one."""
        for name in (symbol, symbol.rpartition(".")[0]):
            try:
                self._pool.FindFileContainingSymbol(name)
            except KeyError:
                continue
            return True
        return False


_FILES = FileDescriptorSet.FromString((files(__package__) / "proto" / "services.binpb").read_bytes()).file
SCHEMAS = {file.package: Schema(file) for file in _FILES}
INFERENCE, HEALTH = SCHEMAS["inference"], SCHEMAS["grpc.health.v1"]
REFLECTIONS = SCHEMAS["grpc.reflection.v1"], SCHEMAS["grpc.reflection.v1alpha"]

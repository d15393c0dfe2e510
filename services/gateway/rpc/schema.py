"""Protobuf classes from a table, in a descriptor pool of their own.

A program that has loaded somebody's generated modules for the same names (tritonclient's, KServe's) may load these beside them:
two of a name collide only in protobuf's default pool.

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
    """One of a service's. request, response: message classes; streams: whether there are many of each."""

    name: str
    request: Any
    response: Any
    request_streams: bool
    response_streams: bool


class Schema:
    """The classes of one protobuf package: `schema.Point` is the class of its message Point, `schema["Line.End"]` of a nested one.

    Raises TypeError for a table whose types are not all there.
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
        """All methods of one of its services."""
        for method in self.descriptor.services_by_name[service].methods:
            request, response = GetMessageClass(method.input_type), GetMessageClass(method.output_type)
            yield Method(method.name, request, response, method.client_streaming, method.server_streaming)

    def has(self, symbol: str) -> bool:
        """Whether a message or service of this full name is in here, or one of its fields or methods."""
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
        """Where a message or an enum of this name goes: into its parent, or into the file."""
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

"""JSON Schema (2020-12) of message types as they travel in MessagePack: maps with these names, or arrays in this order."""

import inspect
from collections.abc import Iterable
from enum import Enum
from typing import Any

import msgspec
from msgspec import inspect as typed

from bus.datatypes import DATATYPES
from bus.fields import Field, fields_of

Schema = dict[str, Any]

TENSORS: Schema = {
    "description": "A tensor, or for small inputs a plain nested list of numbers.",
    "anyOf": [{"$ref": "#/components/schemas/Tensor"}, {"type": "array"}],
}
# Fields whose type says less than the contract does.
KNOWN: dict[tuple[str, str], Schema] = {
    ("QueryHead", "inputs"): {
        "description": "A tensor, a nested list, or a map of input name to either; left out when inputs_ref is given.",
        "anyOf": [*TENSORS["anyOf"], {"type": "object", "additionalProperties": TENSORS}],
    },
    ("Answer", "outputs"): {
        "description": "Output name to tensor; n items in, n items out, in order.",
        "type": "object",
        "additionalProperties": TENSORS,
    },
    ("Tensor", "datatype"): {
        "type": "string",
        "description": f"Open Inference Protocol datatype: {', '.join(DATATYPES)}",
    },
    ("Execute", "body"): {"$ref": "#/components/schemas/QueryHead"},
    ("HandBack", "body"): {"$ref": "#/components/schemas/QueryHead"},
}


def schemas(messages: Iterable[type]) -> dict[str, Schema]:
    """Schemas by type name, of these message types and all that they contain, sorted by name."""
    found: dict[str, Schema] = {}
    for message in messages:
        schema_of(message, found)
    return dict(sorted(found.items()))


def schema_of(kind: Any, found: dict[str, Schema]) -> Schema:
    """The schema of any type. Those of the structs in it go to `found`, by name."""
    return _convert(typed.type_info(kind), found)


def _struct(info: typed.StructType, found: dict[str, Schema]) -> Schema:
    name = info.cls.__name__
    if name not in found:
        found[name] = {}  # first: a type may contain itself
        schema: Schema = {"description": _words(info.cls)}
        fields = {
            field.encode_name: KNOWN.get((name, field.encode_name))
            or _field(field, fields_of(info.cls)[field.name], found)
            for field in info.fields
        }
        if info.array_like:
            schema |= {
                "type": "array",
                "prefixItems": [{"title": key, **value} for key, value in fields.items()],
                "minItems": sum(field.required for field in info.fields),
            }
        else:
            schema |= {"type": "object", "properties": fields}
            required = [field.encode_name for field in info.fields if field.required]
            if required:
                schema["required"] = required
        found[name] = schema
    return {"$ref": f"#/components/schemas/{name}"}


def _field(field: typed.Field, stated: Field, found: dict[str, Schema]) -> Schema:
    schema = _convert(field.type, found)
    if "$ref" in schema:
        return schema
    if stated.rule is not None and schema.get("type") == "array":
        schema["items"] |= stated.rule.schema
    elif stated.rule is not None:
        schema |= stated.rule.schema
    default = {"default": field.default} if isinstance(field.default, bool | int | float | str) else {}
    return {**schema, **default, **({"description": stated.meaning} if stated.meaning else {})}


def _convert(info: typed.Type, found: dict[str, Schema]) -> Schema:
    match info:
        case typed.StructType():
            return _struct(info, found)
        case typed.UnionType():
            kinds = [_convert(kind, found) for kind in info.types if not isinstance(kind, typed.NoneType)]
            optional = any(isinstance(kind, typed.NoneType) for kind in info.types)
            if len(kinds) == 1 and not optional:
                return kinds[0]
            if len(kinds) == 1 and "type" in kinds[0]:
                return kinds[0] | {"type": [kinds[0]["type"], "null"]}
            return {"anyOf": [*kinds, {"type": "null"}] if optional else kinds}
        case typed.LiteralType():
            return {"enum": list(info.values)}
        case typed.ListType() | typed.VarTupleType():
            return {"type": "array", "items": _convert(info.item_type, found)}
        case typed.DictType():
            return {"type": "object", "additionalProperties": _convert(info.value_type, found)}
        case typed.BytesType() | typed.ByteArrayType() | typed.MemoryViewType():
            return {"type": "string", "format": "binary"}
        case typed.EnumType():
            return {"enum": [member.value for member in info.cls if isinstance(member, Enum)]}
    for kind, word in _SIMPLE.items():
        if isinstance(info, kind):
            return {"type": word}
    return {}


_SIMPLE: dict[type, str] = {
    typed.BoolType: "boolean",
    typed.IntType: "integer",
    typed.FloatType: "number",
    typed.StrType: "string",
    typed.NoneType: "null",
}


def _words(message: type) -> str:
    """The type's own docstring on one line; msgspec writes none of its own."""
    own = message.__doc__ if message.__doc__ and issubclass(message, msgspec.Struct) else ""
    return " ".join(inspect.cleandoc(own or "").split())

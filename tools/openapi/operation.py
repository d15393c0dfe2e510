"""One method of one path: what the document says of it. Pure."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from tools.asyncapi.schema import schema_of

Schema = Mapping[str, Any]

OBJECT: Schema = {"type": "object"}
TEXT: Schema = {"type": "string"}
NUMBER: Schema = {"type": "number"}
WHOLE: Schema = {"type": "integer"}
FLAG: Schema = {"type": "boolean"}
RAW: Schema = {"type": "string", "format": "binary"}

# Errors that every request may get.
ALWAYS = {
    400: "The request is malformed: its head, its path or its content.",
    401: "A token is needed, or the one sent is not known.",
    403: "The token does not suffice, or the request comes from a page of another origin.",
    421: "The gateway does not serve this host.",
    500: "The gateway failed; the reason is in its log, under the id in the reply.",
    503: "No connection to the system, or too many requests. Retry-After says when to try again.",
}
BODY = {
    408: "The body did not come in time.",
    413: "The body is too large, compressed or not.",
    415: "Content-Encoding is neither gzip nor deflate.",
}


def ref(name: str) -> Schema:
    """A schema of the document's components."""
    return {"$ref": f"#/components/schemas/{name}"}


def array(items: Schema) -> Schema:
    return {"type": "array", "items": items}


def record(*required: str, **properties: Schema) -> Schema:
    """An object with these properties."""
    return {"type": "object", "properties": properties, **({"required": list(required)} if required else {})}


def schema(kind: Any) -> Schema:
    """The schema of a type, by the annotations of its fields; those of structs are the document's components (`FOUND`)."""
    return schema_of(kind, FOUND)


FOUND: dict[str, dict[str, Any]] = {}


def properties(kind: Any) -> dict[str, Schema]:
    """The schemas of a struct's fields by name, where the struct itself is no component."""
    found: dict[str, dict[str, Any]] = {}
    schema_of(kind, found)
    return dict(found[kind.__name__]["properties"])


class Operation(NamedTuple):
    """path: as in its route. reply, error: schemas of the good reply and of all others. body: of the request; None: it has none.

    statuses: beside ALWAYS, BODY and 200. raw: media types of bodies that are no JSON. headers, queries: parameters by name.
    """

    method: str
    path: str
    tag: str
    summary: str
    reply: Schema
    body: Schema | None = None
    statuses: Mapping[int, str] = {}
    error: Schema = ref("Error")
    raw: tuple[str, ...] = ()
    raw_replies: tuple[str, ...] = ()
    headers: Mapping[str, str] = {}
    queries: Mapping[str, Schema] = {}
    operator: bool = False
    open: bool = False
    optional_body: bool = False

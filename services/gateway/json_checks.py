"""Bodies in JSON: the memory that they would take, names that come twice, and objects as messages. Pure."""

import json
import re
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec
from msgspec import NODEFAULT, Struct

from bus.codec import DECODE_ERRORS, explain, in_words
from bus.fields import TYPO, faults, fields_of, meant, unread_keys
from services.gateway.errors import BadRequest, RequestFailed

UNCHECKED_JSON = 2**18  # bytes of JSON that are decoded without an estimate of their memory
MAX_JSON_MEMORY = 48 * 2**20  # bytes of memory that decoded JSON may take, about
LIST, MAP, ITEM = 64, 240, 32  # bytes that each takes in CPython, about
UNKNOWN = -1

_skip = msgspec.json.Decoder(msgspec.Raw).decode  # checks the whole text and keeps nothing


def sized(text: bytes, end: int | None = None) -> bytes:
    """The text. Refuse JSON that would take too much memory: `[],` has three bytes as text, and sixty as an empty list.

    end: bytes of `text` that are JSON; None: all. The estimate counts brackets and commas, inside of strings too: it may be too
    high for such strings, but not by much. Raises RequestFailed: 413, or 400 where the text is not JSON.
    """
    end = len(text) if end is None else end
    if end <= UNCHECKED_JSON:
        return text
    memory = LIST * text.count(b"[", 0, end)
    if memory <= MAX_JSON_MEMORY:
        memory += MAP * text.count(b"{", 0, end)
    if memory <= MAX_JSON_MEMORY:
        memory += ITEM * text.count(b",", 0, end)
    if memory > MAX_JSON_MEMORY:
        try:
            _skip(memoryview(text)[:end])
        except DECODE_ERRORS as error:
            raise BadRequest(json_fault(error, text[:end])) from error
        raise RequestFailed(
            None,
            f"as JSON this would take more than {MAX_JSON_MEMORY // 2**20} MiB of memory: send large tensors as binary data, or in parts",
            code="too_large",
        )
    return text


def json_fault(error: Exception, text: bytes | memoryview) -> str:
    """What a text's decoder found wrong (one of DECODE_ERRORS), in words for its sender."""
    if isinstance(error, RecursionError):
        return "the JSON is nested too deeply"
    if isinstance(error, msgspec.ValidationError):
        return explain(error)
    if not len(text):
        return "the body is empty: send a JSON object"
    why, at = in_words(str(error)), _BYTE.search(str(error))
    if isinstance(error, UnicodeDecodeError) or bytes(text[:2]) in _MARKS:
        why = "send it as UTF-8, without a byte-order mark"
    elif at is not None and _NO_NUMBER.match(bytes(text[max(0, int(at[1]) - 1) : int(at[1]) + 9])):
        why = f"JSON has no NaN and no Infinity (byte {at[1]}): they go as raw data, or as null in rows"
    return f"the body is not JSON: {why}"


_BYTE = re.compile(r"\(byte (\d+)\)")
_MARKS = (b"\xef\xbb", b"\xff\xfe", b"\xfe\xff")
_NO_NUMBER = re.compile(rb".?-?(NaN|Infinity)", re.DOTALL)


_decode = msgspec.json.Decoder().decode
_Message = TypeVar("_Message", bound=Struct)


def read_object(text: bytes) -> dict[str, Any]:
    """The JSON object in a body; {} where that is empty. Raises BadRequest."""
    try:
        found = _decode(text) if text else {}
    except DECODE_ERRORS as error:
        raise BadRequest(json_fault(error, text)) from error
    if not isinstance(found, dict):
        raise BadRequest("the body must be a JSON object")
    if may_have_more_names(text, _quotes(found)) and (again := find_duplicate(text or b"{}")):
        raise BadRequest(again)
    return found


def _quotes(found: Mapping[str, Any]) -> int:
    """The number of quotation marks in an object's JSON, where it holds only scalars and lists of numbers; else UNKNOWN."""
    scalars: dict[str, Any] = {}
    for name, value in found.items():
        first = value
        while isinstance(first, list) and first:
            first = first[0]
        scalars[name] = 0 if isinstance(value, list) and isinstance(first, int | float) else value
    return quotes(scalars)


def fitted(given: Any, kind: type[_Message], key: str = "", *, strict: bool = True) -> _Message:
    """A decoded object as a message, checked by the annotations of its fields. null says nothing of a field.

    key: of the object in the request. strict: a text is no number. Raises BadRequest, which names the field and says what would be right.
    """
    at = f"{key}." if key else ""
    fields = dict(zip(kind.__struct_encode_fields__, fields_of(kind).values(), strict=True))
    if not isinstance(given, dict):
        raise BadRequest(f"{key or 'the body'}: must be an object with {', '.join(fields)}")
    if unread := [name for name in given if name not in fields]:
        near = meant(unread[0], fields.keys() - given.keys(), TYPO) or f"; there are {', '.join(fields)}"
        raise BadRequest(f"{at}{unread[0][:80]}: nothing reads it here{near}")
    if inside := next(unread_keys(given, kind, key), None):
        raise BadRequest(f"{inside[0]}: nothing reads it here" + (f"; did you mean {inside[1]}?" if inside[1] else ""))
    told = {name: value for name, value in given.items() if value is not None}
    for name, field in fields.items():
        if field.default is NODEFAULT and name not in told:
            raise BadRequest(f"{at}{name} is missing. {field.meaning}")
    try:
        found = msgspec.convert(told, kind, strict=strict)
    except msgspec.ValidationError as error:
        wrong = _WHERE.search(text := explain(error))
        name, where = ("", "") if wrong is None else wrong.groups()
        meaning = f". {fields[name].meaning}" if name in fields and fields[name].meaning else ""
        raise BadRequest(f"{at}{where}: {text.removeprefix(f'field `{where}` ')}{meaning}") from error
    for fault in faults(found, key):
        raise BadRequest(f"{fault.key}: {fault.reason}")
    return found


_WHERE = re.compile(r"\bfield `(?=(\w+))([^`]+)`")


class _Duplicate(ValueError):
    pass


def quotes(values: Mapping[str, Any]) -> int:
    """The number of quotation marks in the JSON of an object of scalars; UNKNOWN where it holds anything else."""
    count = 0
    for value in values.values():
        if isinstance(value, str):
            count += 4
        elif isinstance(value, int | float) or value is None:
            count += 2
        else:
            return UNKNOWN
    return count


def may_have_more_names(text: bytes, expected: int) -> bool:
    """Whether a text may hold names that were not read, or one name twice. Only such a text is worth parsing a second time.

    expected: the number of quotation marks around what was read, or UNKNOWN.
    """
    return expected == UNKNOWN or text.count(b'"') != expected or b"\\" in text


def find_duplicate(text: bytes) -> str:
    """A sentence about the first name that occurs twice in one JSON object; "" when there is none.

    Readers differ in which of two values counts, so such requests are refused.
    """
    try:
        json.loads(text, object_pairs_hook=_distinct)
    except _Duplicate as error:
        return f"the JSON has the name {str(error)[:80]!r} twice in one object"
    except (ValueError, RecursionError):
        return "the JSON cannot be read"
    return ""


def _distinct(pairs: list[tuple[str, Any]]) -> None:
    names = set()
    for name, _ in pairs:
        if name in names:
            raise _Duplicate(name)
        names.add(name)

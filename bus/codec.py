"""MessagePack encoding and decoding of typed messages, with errors that name the field."""

import re
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import msgspec

T = TypeVar("T")

_encoder = msgspec.msgpack.Encoder()
encode: Callable[[Any], bytes] = _encoder.encode
NIL = b"\xc0"


def in_two(message: Any) -> tuple[bytes, memoryview]:
    """The encoding of an array-like struct whose last field is a Raw, in two pieces: (beginning, last field). The Raw is not copied."""
    name = message.__struct_fields__[-1]
    beginning = encode(msgspec.structs.replace(message, **{name: msgspec.Raw(NIL)}))
    return beginning[: -len(NIL)], memoryview(getattr(message, name))


def one_array(arrays: Iterable[bytes]) -> bytes:
    """The encoding of one array that holds the elements of all these encoded ones, in order. None is encoded once more."""
    count, elements = 0, []
    for array in arrays:
        first = array[0]  # 0x90 to 0x9F: of so many elements; else their number follows, in two bytes or in four
        begin = 1 if first & 0xF0 == 0x90 else 3 if first == 0xDC else 5
        count += first & 0x0F if begin == 1 else int.from_bytes(array[1:begin], "big")
        elements.append(memoryview(array)[begin:])
    return b"".join([b"\xdd", count.to_bytes(4, "big"), *elements])


class BadMessage(ValueError):
    """The bytes are not MessagePack, or do not fit the message type. The text names the field."""


_decoders: dict[type, Callable[[bytes], Any]] = {}


def decoder(message: type[T]) -> Callable[[bytes], T]:
    """A decoder of one message type. It raises one of DECODE_ERRORS. It is for hot paths that turn the error into a refusal."""
    found = _decoders.get(message)
    if found is None:
        found = _decoders[message] = msgspec.msgpack.Decoder(message).decode
    return found


def decode(message: type[T], data: bytes) -> T:
    """Decode `data` as `message`. Raises BadMessage."""
    try:
        return decoder(message)(data)
    except DECODE_ERRORS as error:
        raise BadMessage(explain(error)) from error


DECODE_ERRORS = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


def decode_kept(message: type[T], value: bytes | None) -> T | None:
    """A bucket's record. None: there is none, or none that can be read, since another release wrote it."""
    try:
        return decoder(message)(value) if value else None
    except DECODE_ERRORS:
        return None


_MISFIT = re.compile("Expected `([^`]+)`, got `([^`]+)`")
_WORDS = {
    "float": "a number", "int": "a whole number", "str": "a text", "bool": "true or false", "array": "a list", "object": "a map", "None": "null",
}  # fmt: skip
# A decoder's other texts, and what they mean: of a value, and of bytes that are no JSON or MessagePack.
_SAID = [
    (r".*out of range", "is out of range: give a number that fits 64 bits"),
    (r"Object contains unknown field `(.+)`", r"has \1, which nothing reads: leave it out"),
    (r"Expected `array` of (?:at least )?length (\d+)(?:, got \d+)?", r"must have \1 entries"),
    (r"Invalid (?:enum )?value (.+)", r"cannot be \1"),
    (r"Input data was truncated", "it ends too early"),
    (r"\S+(?: data)? is malformed: trailing characters \(byte (\d+)\)", r"it ends at byte \1, and more follows"),
    (
        r"\S+(?: data)? is malformed: object keys must be strings(.*)",
        r'names stand in double quotation marks, as in {"name": 1}\1',
    ),
    (r"\S+(?: data)? is malformed: (.*)", r"\1"),
]


def in_words(text: str) -> str:
    """A decoder's text in the words of people. What follows ` - at ` stays."""
    said, at, where = _MISFIT.sub(_said, text).partition(" - at ")
    for pattern, words in _SAID:
        if (found := re.fullmatch(pattern, said)) is not None:
            said = found.expand(words)
            break
    return said + at + where


def _said(misfit: re.Match[str]) -> str:
    wanted, got = (" or ".join(_WORDS.get(kind, kind) for kind in kinds.split(" | ")) for kinds in misfit.groups())
    return f"must be {wanted}, not {'a fraction' if wanted.startswith('a whole number') and got == 'a number' else got}"


def explain(error: Exception, at: str = "") -> str:
    """The text of a decoding error for the sender: the field, and what was expected there. at: the field that was decoded; empty: the body."""
    if isinstance(error, RecursionError):
        return f"{at or 'the body'} is nested too deeply"
    text = "it holds a text that is not UTF-8" if isinstance(error, UnicodeDecodeError) else in_words(str(error))
    if not isinstance(error, msgspec.ValidationError):
        return f"{f'{at}: ' if at else ''}not valid MessagePack: {text}{'' if at else '; send a map of fields'}"
    said, _, where = text.partition(" - at ")
    if where == "`key` in `$`":
        return f"the names of {at or 'fields'} must be texts"
    inside = where.strip("`").removeprefix("$")
    field = f"{at}{inside}" if at else inside.removeprefix(".")
    if (lacks := _LACKS.fullmatch(said)) is not None:
        return f"field `{f'{field}.' if field else ''}{lacks[1]}` is missing"
    if not field:
        return f"the body {said.replace('must be a map', 'must be a map of fields')}"
    return f"field `{field}` {said.replace(' or null,', ',')}"  # a field that may be left out is left out


_LACKS = re.compile("Object missing required field `(.+)`")

"""Large tensors beside their protobuf message: `raw_input_contents` as views of the received bytes, responses joined once. Pure.

protobuf would copy tensors into its message, and out of it again. The rest of a request, its head, must be small: a protobuf message
takes up to fifteen times the memory of its bytes.
"""

from collections.abc import Sequence
from typing import Any

from bus.port import Buffer
from services.gateway.rpc.messages import INFERENCE

SMALL = 64 * 1024  # bytes up to which protobuf parses a whole request
MAX_HEAD = 4 * 2**20  # bytes of a request without its raw contents
MAX_FIELDS = 4096  # fields of a large request: its inputs, their raw contents, its parameters and outputs
_RAW_INPUT = 7 << 3 | 2
_RAW_OUTPUT = bytes([6 << 3 | 2])
_UNREADABLE = "the request is not a ModelInferRequest"


class Unreadable(ValueError):
    """The bytes are not a message of the expected type; the text is for the client."""


class HeadTooLarge(ValueError):
    """There is too much beside the raw contents; the text says what would be accepted."""


def read(body: bytes, kind: Any) -> Any:
    """The message of this class in `body`. Raises Unreadable."""
    try:
        return kind.FromString(body)
    except Exception as error:  # protobuf's DecodeError, and what its implementations raise beside it
        raise Unreadable(f"the request is not a {kind.DESCRIPTOR.name}") from error


def read_request(body: bytes) -> tuple[Any, list[bytes | memoryview]]:
    """A ModelInferRequest and its raw contents, views of `body` where that is large. Raises Unreadable, HeadTooLarge."""
    if len(body) <= SMALL:
        request = read(body, INFERENCE.ModelInferRequest)
        return request, list(request.raw_input_contents)
    head, raw = _split(memoryview(body))
    return read(head, INFERENCE.ModelInferRequest), raw


def write_response(response: Any, raw: Sequence[Buffer]) -> bytes:
    """The bytes of a ModelInferResponse with these raw contents."""
    parts: list[Buffer] = [response.SerializeToString()]
    for data in raw:
        parts += (_RAW_OUTPUT, varint(len(data)), data)
    return b"".join(parts)


def varint(number: int) -> bytes:
    """A number >= 0 as protobuf's varint."""
    written = bytearray()
    while number > 0x7F:
        written.append(number & 0x7F | 0x80)
        number >>= 7
    written.append(number)
    return bytes(written)


def _split(view: memoryview) -> tuple[bytes, list[bytes | memoryview]]:
    at, size, fields, head_bytes = 0, len(view), 0, 0
    head: list[memoryview] = []
    raw: list[bytes | memoryview] = []
    while at < size:
        begins = at
        tag, at = _number(view, at)
        if tag & 7 == 2:
            length, at = _number(view, at)
            begins_data, at = at, at + length
        elif tag & 7 == 0:
            _, at = _number(view, at)
        elif tag & 7 in (1, 5):
            at += 8 if tag & 7 == 1 else 4
        else:
            raise Unreadable(_UNREADABLE)
        fields += 1
        if at > size:
            raise Unreadable(f"{_UNREADABLE}: it ends in the middle of a field")
        if fields > MAX_FIELDS:
            raise HeadTooLarge(f"the request has more than {MAX_FIELDS} fields")
        if tag == _RAW_INPUT:
            raw.append(view[begins_data:at])
            continue
        head.append(view[begins:at])
        head_bytes += at - begins
        if head_bytes > MAX_HEAD:
            raise HeadTooLarge(
                f"the request has more than {MAX_HEAD:,} bytes beside `raw_input_contents`: send large inputs there, not as `contents`"
            )
    return b"".join(head), raw


def _number(view: memoryview, at: int) -> tuple[int, int]:
    """A varint and where it ends."""
    number = shift = 0
    while shift < 70 and at < len(view):
        byte = view[at]
        number |= (byte & 0x7F) << shift
        at += 1
        if byte < 0x80:
            return number, at
        shift += 7
    raise Unreadable(_UNREADABLE)

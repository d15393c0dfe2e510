"""Large tensors beside their message: `raw_input_contents` as views of the bytes that came, answers joined once. Pure.

protobuf would copy them into its message and once more out of it. What is left, the head, is small, and has to be: a message of
protobuf's takes up to fifteen times the memory of its bytes, so that a small request could ask for all there is.
"""

from collections.abc import Sequence
from typing import Any

from bus.port import Buffer
from services.gateway.rpc.messages import INFERENCE

WHOLE = 64 * 1024  # bytes up to which a request is left to protobuf altogether
MOST_HEAD = 4 * 2**20  # bytes of a request without its raw contents
MOST_FIELDS = 4096  # fields of a large request: its inputs, their raw contents, its parameters and outputs
_RAW_INPUT = 7 << 3 | 2
_RAW_OUTPUT = bytes([6 << 3 | 2])
_UNREADABLE = "the request is no ModelInferRequest"


class Unreadable(ValueError):
    """The bytes are not such a message; a sentence for whoever sent them."""


class HeadTooLarge(ValueError):
    """There is too much beside the raw contents; a sentence that says what would do."""


def read(body: bytes, kind: Any) -> Any:
    """The message of this class that `body` is. Raises Unreadable."""
    try:
        return kind.FromString(body)
    except Exception as error:  # protobuf's DecodeError, and what its implementations raise beside it
        raise Unreadable(f"the request is no {kind.DESCRIPTOR.name}") from error


def read_request(body: bytes) -> tuple[Any, list[bytes | memoryview]]:
    """A ModelInferRequest and its raw contents, views of `body` where that is large. Raises Unreadable, HeadTooLarge."""
    if len(body) <= WHOLE:
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
    """A number that is not negative in protobuf's form."""
    written = bytearray()
    while number > 0x7F:
        written.append(number & 0x7F | 0x80)
        number >>= 7
    written.append(number)
    return bytes(written)


def _split(view: memoryview) -> tuple[bytes, list[bytes | memoryview]]:
    at, size, fields, weight = 0, len(view), 0, 0
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
        if fields > MOST_FIELDS:
            raise HeadTooLarge(f"the request has more than {MOST_FIELDS} fields")
        if tag == _RAW_INPUT:
            raw.append(view[begins_data:at])
            continue
        head.append(view[begins:at])
        weight += at - begins
        if weight > MOST_HEAD:
            raise HeadTooLarge(
                f"the request has more than {MOST_HEAD:,} bytes beside `raw_input_contents`: send large inputs there, not as `contents`"
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

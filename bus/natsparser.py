"""A parser of the NATS wire protocol, server to client. It handles each network read in one synchronous pass.

Protocol: https://docs.nats.io/reference/reference-protocols/nats-protocol. The parser of nats-py matches up to seven regular expressions
for each frame, and awaits a coroutine for each message. This parser needs one `bytes.find` for each frame, and calls the handler directly.
"""

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from bus.port import Delivery, DeliveryHandler
from bus.subjects import check_headers

LARGE = 32 * 1024  # bytes: larger payloads that arrive in pieces are joined once, not searched again with every piece
MAX_LINE = 1024 * 1024  # bytes: no NATS server sends a longer control line

_new = tuple.__new__  # creates a Delivery at half the cost of a call of its class
_STATUS_LINE = b"NATS/1.0"


class ProtocolViolation(Exception):
    """The peer does not speak the NATS protocol. The connection is unusable."""


class Parser:
    """Calls a handler for each message, and a callback for each other frame. handlers: by subscription id, as text.

    The input may be split at any byte. If a handler raises an exception, `on_fault` gets it, and the next message follows.
    """

    def __init__(
        self,
        handlers: Mapping[str, DeliveryHandler],
        on_fault: Callable[[str, Exception], None],
        on_ping: Callable[[], None],
        on_pong: Callable[[], None],
        on_info: Callable[[dict[str, Any]], None],
        on_error: Callable[[str], None],
    ) -> None:
        self._handlers = handlers
        self._on_fault = on_fault
        self._on_ping = on_ping
        self._on_pong = on_pong
        self._on_info = on_info
        self._on_error = on_error
        self.reset()

    def reset(self) -> None:
        """Discard an incomplete frame. Called when a new connection begins."""
        self._rest = b""
        self._pieces: list[bytes] = []
        self._missing = 0
        self._head: tuple[str, str, str, int] = ("", "", "", 0)

    def feed(self, data: bytes) -> None:
        """Parse the next bytes. Raises ProtocolViolation."""
        pos = 0
        if self._missing:
            pos = self._continue(data)
            if pos < 0:
                return
        elif self._rest:
            data = self._rest + data
            self._rest = b""
        handlers = self._handlers
        find = data.find
        total = len(data)
        while pos < total:
            line_end = find(b"\r\n", pos)
            if line_end < 0:
                if total - pos > MAX_LINE:
                    raise ProtocolViolation(f"a control line of more than {MAX_LINE} bytes")
                break
            start = line_end + 2
            if data.startswith(b"MSG ", pos):
                try:
                    fields = data[pos + 4 : line_end].decode().split(" ")
                except UnicodeDecodeError:
                    fields = data[pos + 4 : line_end].decode("utf-8", "replace").split(" ")
                try:
                    if len(fields) == 4:
                        subject, sid, reply, size = fields
                    else:
                        subject, sid, size = fields
                        reply = ""
                    stop = start + int(size)
                except ValueError:
                    raise ProtocolViolation(f"malformed MSG: {data[pos:line_end]!r}") from None
                if stop + 2 > total:
                    if stop - start > LARGE:
                        self._begin(data, start, stop, (subject, sid, reply, 0))
                        return
                    break
                pos = stop + 2
                handler = handlers.get(sid)
                if handler is not None:
                    try:
                        handler(_new(Delivery, (subject, data[start:stop], reply, None, "")))
                    except Exception as error:
                        self._on_fault(subject, error)
            elif data.startswith(b"HMSG ", pos):
                try:
                    fields = data[pos + 5 : line_end].decode("utf-8", "replace").split(" ")
                    if len(fields) == 4:
                        fields.insert(2, "")
                    subject, sid, reply, head, size = fields
                    header_size = int(head)
                    stop = start + int(size)
                except ValueError:
                    raise ProtocolViolation(f"malformed HMSG: {data[pos:line_end]!r}") from None
                if stop + 2 > total:
                    if stop - start > LARGE:
                        self._begin(data, start, stop, (subject, sid, reply, header_size))
                        return
                    break
                pos = stop + 2
                self._deliver((subject, sid, reply, header_size), data[start:stop])
            else:
                self._control(data[pos:line_end])
                pos = start
        if pos < total:
            self._rest = data[pos:]

    def _begin(self, data: bytes, start: int, stop: int, head: tuple[str, str, str, int]) -> None:
        """Begin to collect the pieces of a large payload that is incomplete."""
        self._head = head
        self._pieces = [data[start:]]
        self._missing = stop + 2 - len(data)

    def _continue(self, data: bytes) -> int:
        """Take the next piece of a large payload. Returns where the rest of `data` begins, or -1 if no rest is left."""
        take = self._missing
        if len(data) < take:
            self._pieces.append(data)
            self._missing = take - len(data)
            return -1
        if take >= 2:
            self._pieces.append(data[: take - 2])
            payload = b"".join(self._pieces)
        else:  # the closing CRLF itself was split
            payload = b"".join(self._pieces)[:-1]
        self._pieces = []
        self._missing = 0
        self._deliver(self._head, payload)
        return take

    def _deliver(self, head: tuple[str, str, str, int], payload: bytes) -> None:
        subject, sid, reply, header_size = head
        handler = self._handlers.get(sid)
        if handler is None:
            return
        status, headers = "", None
        if header_size:
            status, headers = read_headers(payload[:header_size])
            payload = payload[header_size:]
        try:
            handler(Delivery(subject, payload, reply, headers, status))
        except Exception as error:
            self._on_fault(subject, error)

    def _control(self, line: bytes) -> None:
        if line.startswith(b"PING"):
            self._on_ping()
        elif line.startswith(b"PONG"):
            self._on_pong()
        elif line.startswith(b"+OK"):
            pass
        elif line.startswith(b"-ERR"):
            self._on_error(line[4:].decode("utf-8", "replace").strip(" '"))
        elif line.startswith(b"INFO "):
            try:
                info = msgspec.json.decode(line[5:])
            except msgspec.DecodeError:
                raise ProtocolViolation("malformed INFO") from None
            self._on_info(info)
        else:
            raise ProtocolViolation(f"unknown operation {line[:20]!r}")


def read_headers(raw: bytes) -> tuple[str, dict[str, str] | None]:
    """The status ("" if there is none) and the headers of one header block. The text of a status becomes the header `Description`."""
    lines = raw.decode("utf-8", "replace").split("\r\n")
    first = lines[0][len(_STATUS_LINE) :].strip()
    status, _, description = first.partition(" ")
    headers: dict[str, str] = {}
    for line in lines[1:]:
        name, colon, value = line.partition(":")
        if colon:
            headers[name.strip()] = value.strip()
    if description:
        headers["Description"] = description.strip()
    return status, headers or None


def write_headers(headers: Mapping[str, str]) -> bytes:
    """One header block. Raises BusError for an invalid name, or a value with line breaks."""
    check_headers(headers)
    return "\r\n".join(["NATS/1.0", *(f"{name}: {value}" for name, value in headers.items()), "\r\n"]).encode()

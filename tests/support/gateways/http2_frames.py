"""HTTP/2 by hand, for what no client library would send."""

import socket
import struct

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RESET, SETTINGS, GOAWAY = 0, 1, 3, 4, 7
END_STREAM, END_HEADERS = 1, 4


def frame(kind: int, flags: int, stream: int, body: bytes = b"") -> bytes:
    return struct.pack(">I", len(body))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + body


def literal(name: bytes, value: bytes) -> bytes:
    """A header in HPACK's plainest form; both shorter than 127 bytes."""
    return b"\0" + bytes([len(name)]) + name + bytes([len(value)]) + value


def call(path: bytes, *more: tuple[bytes, bytes], end: bytes = b"\0\0\0\0\0") -> bytes:
    """A connection's first bytes: one gRPC call on stream 1. end: its message, prefixed with its length; empty: the call stays open."""
    pairs = [
        (b":method", b"POST"),
        (b":scheme", b"http"),
        (b":path", path),
        (b":authority", b"x"),
        (b"te", b"trailers"),
    ]
    pairs += [(b"content-type", b"application/grpc"), *more]
    head = frame(HEADERS, END_HEADERS, 1, b"".join(literal(*pair) for pair in pairs))
    return PREFACE + frame(SETTINGS, 0, 0) + head + (frame(DATA, END_STREAM, 1, end) if end else b"")


def exchange(port: int, data: bytes, until: bytes, seconds: float = 60.0) -> bytes:
    """Send it to 127.0.0.1; what came back up to `until`, or the end, or within so many seconds."""
    found = b""
    with socket.create_connection(("127.0.0.1", port), 60) as connection:
        connection.settimeout(seconds)
        try:
            connection.sendall(data)
            while until not in found and (more := connection.recv(65536)):
                found += more
        except (TimeoutError, ConnectionError):
            pass
    return found

"""Compressed bodies, inflated in small steps within limits of size and ratio, so that a small body cannot become a large one. Pure."""

import zlib
from collections.abc import Iterator

STEP = 256 * 2**10  # bytes that one step makes at most
FREE = 4 * 2**20  # bytes that a body may become whatever its ratio
RATIO = 100  # beyond: times what was read of it (deflate itself goes to 1032, tensors rarely beyond 20)
MEMBERS = 64  # of a gzip file

CODINGS = ("gzip", "deflate")


class BadCoding(ValueError):
    """The data is not what its coding says."""


class TooMuch(ValueError):
    """The data becomes larger than it may."""


class Inflater:
    """One body. coding: of CODINGS. limit: bytes that it may become."""

    def __init__(self, coding: str, limit: int) -> None:
        self._gzip = coding == "gzip"
        self._limit = limit
        self._stream = zlib.decompressobj(31) if self._gzip else None
        self._members = 1
        self._taken = 0
        self._made = 0
        self._full = False  # the last step was full: more may lie inside

    def feed(self, data: bytes) -> Iterator[bytes]:
        """What the next part of the compressed body becomes, in steps. Raises BadCoding, TooMuch."""
        self._taken += len(data)
        while data or self._full:
            stream = self._next(data)
            try:
                piece = stream.decompress(data, STEP)
            except zlib.error as error:
                raise BadCoding(f"the body is not {'gzip' if self._gzip else 'deflate'}: {error}") from error
            self._made += len(piece)
            left = stream.unused_data if stream.eof else stream.unconsumed_tail
            if self._made > self._limit:
                raise TooMuch(f"the body becomes more than {self._limit} bytes")
            if self._made > FREE and self._made > RATIO * (self._taken - len(left)):
                raise TooMuch(f"the body becomes more than {RATIO} times its size")
            if piece:
                yield piece
            self._full = len(piece) == STEP and not stream.eof
            data = left

    def end(self) -> None:
        """The body is complete. Raises BadCoding where the compressed data is not."""
        if self._taken and (self._stream is None or not self._stream.eof):
            raise BadCoding("the compressed body ends early")

    def _next(self, data: bytes) -> "zlib._Decompress":
        stream = self._stream
        if stream is None:  # "deflate" is zlib's format, but some send the bare one: its first byte tells
            stream = self._stream = zlib.decompressobj(15 if data[0] & 0x0F == 8 else -15)
        elif stream.eof:
            self._members += 1
            if not self._gzip:
                raise BadCoding("something follows the compressed body")
            if self._members > MEMBERS:
                raise BadCoding(f"the body has more than {MEMBERS} parts")
            stream = self._stream = zlib.decompressobj(31)
        return stream

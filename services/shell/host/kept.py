"""What a process must not take with it when it is killed, in memory that its supervisor shares: its successor finds it there."""

import mmap
import struct
from collections.abc import Iterable

ROOM = 8 << 20  # bytes of each half; only what is written takes memory
SIZE = 8 + 2 * ROOM
_HALF, _LENGTH = (
    struct.Struct("<Q"),
    struct.Struct("<I"),
)  # which half is used; before each entry: its length, 0 if none follows
_NONE = bytes(_LENGTH.size)
_OVER, _WILL = 1 << 31, 1 << 30  # in a length: the entry need not be kept any more; it is a will
_OVER_AT, _OVER_BYTE = _LENGTH.size - 1, 0x80
_SIZE = _WILL - 1


class Kept:
    """Entries by number, of two kinds: rows, and wills, which take at most half of the room. The length of each is written last, so a death at any moment leaves whole ones only. memory, at: where its `SIZE` bytes begin.

    What a process has left before this one is nobody's until `left`.
    """

    def __init__(self, memory: mmap.mmap, at: int = 0) -> None:
        self._memory = memory
        self._at = at
        self._places: dict[int, tuple[int, int]] = {}  # by number: where it begins, and its bytes
        self._counts = 0  # bytes of all that count
        self._number = 0
        self._half: int = _HALF.unpack_from(memory, at)[0] & 1
        self._begin: int = at + _HALF.size + self._half * ROOM
        self._end, self._limit = self._begin, self._begin + ROOM
        while length := _LENGTH.unpack_from(memory, self._end)[0]:
            size = _LENGTH.size + (length & _SIZE)
            if not length & _OVER:
                self._number += 1
                self._places[self._number] = (self._end, size)
                self._counts += size
            self._end += size
        self._nobodys = list(self._places)

    def put(self, body: bytes, *, will: bool = False) -> int:
        """Keep this; returns its number. 0: there is no room."""
        if not self._places and self._end > self._begin:
            _LENGTH.pack_into(self._memory, self._begin, 0)
            self._end = self._begin
        needed = len(body) + 2 * _LENGTH.size + (ROOM // 2 if will else 0)
        if self._end + needed > self._limit:
            over = self._end - self._begin - self._counts
            if self._counts + needed > ROOM or over < ROOM // 4:  # moving costs more than it brings
                return 0
            self._move()
        number = self._number = self._number + 1
        self._write(number, body, len(body) | (_WILL if will else 0))
        return number

    def drop(self, number: int) -> None:
        """It need not be kept any more."""
        place = self._places.pop(number, None)
        if place is not None:
            self._memory[place[0] + _OVER_AT] = _OVER_BYTE
            self._counts -= place[1]

    def leave(self, numbers: Iterable[int]) -> None:
        """Who has kept these ends."""
        self._nobodys.extend(number for number in numbers if number in self._places)

    def left(self, *, wills: bool = False) -> dict[int, bytes]:
        """What is nobody's, by number. It is the caller's from now on."""
        entries = {number: self._entry(number) for number in self._nobodys if number in self._places}
        taken = {number: body for number, (body, length) in entries.items() if bool(length & _WILL) is wills}
        self._nobodys = [number for number in entries if number not in taken]
        return taken

    def _entry(self, number: int) -> tuple[bytes, int]:
        """Its body, and its length with what else that says."""
        place, size = self._places[number]
        return self._memory[place + _LENGTH.size : place + size], _LENGTH.unpack_from(self._memory, place)[0]

    def _write(self, number: int, body: bytes, length: int) -> None:
        place = self._end
        begin = place + _LENGTH.size
        self._end = end = begin + len(body)
        self._memory[begin : end + _LENGTH.size] = body + _NONE
        _LENGTH.pack_into(self._memory, place, length)
        self._places[number] = (place, end - place)
        self._counts += end - place

    def _move(self) -> None:
        """Go on in the other half, which gets what counts."""
        entries = {number: self._entry(number) for number in self._places}
        self._counts = 0
        self._half ^= 1
        self._end = self._begin = self._at + _HALF.size + self._half * ROOM
        self._limit = self._begin + ROOM
        _LENGTH.pack_into(self._memory, self._begin, 0)
        for number, entry in entries.items():
            self._write(number, *entry)
        _HALF.pack_into(self._memory, self._at, self._half)

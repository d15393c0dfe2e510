"""services/gateway/http/inflate.py: what compressed bodies become, and what they may not."""

import gzip
import random
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.gateway.http.inflate import FREE, MEMBERS, RATIO, STEP, BadCoding, Inflater, TooMuch

LIMIT = 8 * 2**20


def inflate(coding: str, *parts: bytes, limit: int = LIMIT) -> bytes:
    inflater = Inflater(coding, limit)
    pieces = [piece for part in parts for piece in inflater.feed(part)]
    inflater.end()
    assert all(len(piece) <= STEP for piece in pieces)
    return b"".join(pieces)


def bare(data: bytes) -> bytes:
    packer = zlib.compressobj(wbits=-15)
    return packer.compress(data) + packer.flush()


def bomb(size: int) -> bytes:
    packer = zlib.compressobj(9, wbits=31)
    zeros = bytes(2**20)
    return b"".join(packer.compress(zeros) for _ in range(size // len(zeros))) + packer.flush()


@given(st.binary(max_size=3000), st.integers(1, 500), st.integers(1, 300))
def test_what_was_compressed_comes_back(data: bytes, times: int, size: int) -> None:
    data = (data * times)[: 2 * STEP + 77]
    for coding, packed in (("gzip", gzip.compress(data)), ("deflate", zlib.compress(data)), ("deflate", bare(data))):
        assert inflate(coding, packed) == data
        assert inflate(coding, *(packed[at : at + size] for at in range(0, len(packed), size))) == data


def test_a_gzip_file_may_have_several_members() -> None:
    assert inflate("gzip", gzip.compress(b"ab") + gzip.compress(b"") + gzip.compress(b"c")) == b"abc"
    with pytest.raises(BadCoding, match="parts"):
        inflate("gzip", gzip.compress(b"") * (MEMBERS + 1))


def test_nothing_is_nothing() -> None:
    assert inflate("gzip", b"") == b""


@pytest.mark.parametrize("coding", ["gzip", "deflate"])
@pytest.mark.parametrize(
    "data",
    [b"x", b"not compressed", gzip.compress(b"abc")[:-5], zlib.compress(b"abc" * 99)[:-5], b"\x1f\x8b\x08" + bytes(99)],
    ids=["a letter", "text", "half a gzip", "half a zlib", "a bad head"],
)
def test_broken_data_is_told(coding: str, data: bytes) -> None:
    with pytest.raises(BadCoding):
        inflate(coding, data)


def test_what_follows_is_told() -> None:
    for coding, data in (("gzip", gzip.compress(b"abc")), ("deflate", zlib.compress(b"abc"))):
        with pytest.raises(BadCoding):
            inflate(coding, data + b"more")


def test_a_bomb_stops_early() -> None:
    inflater, packed = Inflater("gzip", 2**40), bomb(16 * 2**20)
    made = 0
    with pytest.raises(TooMuch, match="times its size"):
        for piece in inflater.feed(packed):
            made += len(piece)
    assert made <= FREE


def test_a_high_ratio_is_fine_while_it_is_small() -> None:
    assert inflate("gzip", gzip.compress(bytes(FREE))) == bytes(FREE)


def test_the_size_is_limited_whatever_the_ratio() -> None:
    data = random.Random(1).randbytes(2**20 + 5)
    packed = zlib.compress(data, 1)
    assert len(data) < RATIO * len(packed)
    assert inflate("deflate", packed, limit=len(data)) == data
    with pytest.raises(TooMuch, match="more than"):
        inflate("deflate", packed, limit=len(data) - 1)


@given(st.binary(max_size=200))
def test_nothing_else_is_raised(data: bytes) -> None:
    for coding in ("gzip", "deflate"):
        for start in (b"", b"\x1f\x8b\x08\x00" + bytes(6), b"\x78\x9c"):
            try:
                inflate(coding, start + data)
            except (BadCoding, TooMuch):
                pass

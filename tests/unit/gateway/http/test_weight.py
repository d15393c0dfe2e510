"""services/gateway/http/weight.py: what JSON would become."""

import json
import tracemalloc

import msgspec
import pytest

from services.gateway.door import Problem
from services.gateway.http.weight import FREE, MOST, weigh


@pytest.mark.parametrize(
    "text",
    [
        b"[" + b"[]," * 2**20 + b"0]",
        b"[" + b"{}," * 2**18 + b"0]",
        b"[" + b"0," * 2**21 + b"0]",
        b"[" + b"0.5," * 2**21 + b"0]",
        json.dumps([{"name": ""}] * 2**18).encode(),
    ],
    ids=["lists", "maps", "zeros", "fractions", "named"],
)
def test_what_grows_is_refused(text: bytes) -> None:
    with pytest.raises(Problem) as told:
        weigh(text)
    assert told.value.status == 413
    weigh(text[:FREE])


@pytest.mark.parametrize("text", [b"[" * 10**6, b'{"a":' * 10**6, b"[" + b"[]," * 2**20], ids=["lists", "maps", "end"])
def test_what_is_no_json_is_told_so(text: bytes) -> None:
    with pytest.raises(Problem) as told:
        weigh(text)
    assert told.value.status == 400


def test_images_and_texts_are_fine() -> None:
    weigh(json.dumps([[[[0.123456789] * 224] * 224] * 3] * 8).encode())
    weigh(json.dumps(["It was the best of times, it was the worst of times, it was ..."] * 20_000).encode())


def test_raw_data_behind_the_json_does_not_count() -> None:
    weigh(b"{}" + b"," * 2**23, 2)


@pytest.mark.parametrize("part", [b"[],", b"{},", b"0.5,", b'{"a":[1.5]},', b'"ab",'])
def test_what_passes_takes_no_more_than_said(part: bytes) -> None:
    times = 2**16
    text = b"[" + part * times + b"0]"
    weigh(text)
    while True:
        try:
            weigh(b"[" + part * times * 2 + b"0]")
        except Problem:
            break
        times *= 2
    text = b"[" + part * times + b"0]"
    tracemalloc.start()
    found = msgspec.json.decode(text)
    used, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(found) == times + 1
    assert used < 2.5 * MOST

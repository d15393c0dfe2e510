"""services/gateway/json_checks.py: JSON that would take too much memory, and duplicate names."""

import json
import tracemalloc
from typing import Annotated, Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Struct

from bus.fields import TOKEN, Number
from services.gateway.errors import BadRequest, RequestFailed
from services.gateway.json_checks import (
    MAX_JSON_MEMORY,
    UNCHECKED_JSON,
    find_duplicate,
    fitted,
    read_object,
    sized,
)
from services.gateway.oip.infer import read


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
    with pytest.raises(RequestFailed) as told:
        sized(text)
    assert told.value.status == 413
    sized(text[:UNCHECKED_JSON])


@pytest.mark.parametrize("text", [b"[" * 10**6, b'{"a":' * 10**6, b"[" + b"[]," * 2**20], ids=["lists", "maps", "end"])
def test_what_is_no_json_is_told_so(text: bytes) -> None:
    with pytest.raises(RequestFailed) as told:
        sized(text)
    assert told.value.status == 400


def test_images_texts_and_raw_data_are_fine() -> None:
    sized(json.dumps([[[[0.123456789] * 224] * 224] * 3] * 8).encode())
    sized(json.dumps(["It was the best of times, it was the worst of times, it was ..."] * 20_000).encode())
    sized(b"{}" + b"," * 2**23, 2)


@pytest.mark.parametrize("part", [b"[],", b"{},", b"0.5,", b'{"a":[1.5]},', b'"ab",'])
def test_what_passes_takes_no_more_than_said(part: bytes) -> None:
    times = 2**16
    text = b"[" + part * times + b"0]"
    sized(text)
    while True:
        try:
            sized(b"[" + part * times * 2 + b"0]")
        except RequestFailed:
            break
        times *= 2
    text = b"[" + part * times + b"0]"
    tracemalloc.start()
    found = msgspec.json.decode(text)
    used, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(found) == times + 1
    assert used < 2.5 * MAX_JSON_MEMORY


NAMES = st.text(max_size=3)
PARAMETERS = st.dictionaries(NAMES, st.integers() | st.text(max_size=3) | st.booleans(), max_size=3)


@given(
    PARAMETERS,
    st.lists(NAMES, max_size=3, unique=True),
    st.booleans(),
    st.lists(st.text(max_size=3), min_size=1, max_size=3),
)
def test_nothing_that_stands_once_is_refused(
    parameters: dict, outputs: list[str], label: bool, texts: list[str]
) -> None:
    parameters.pop("binary_data_output", None)
    request = {
        "inputs": [
            {"name": "a", "shape": [len(texts)], "datatype": "BYTES", "data": texts, "parameters": {"note": "inputs"}},
            {"name": "b", "shape": [1], "datatype": "FP32", "data": [1.5], "unknown": {"name": 1}},
        ],
        "outputs": [{"name": name} for name in outputs],
        "parameters": parameters,
        **({"id": "data"} if label else {}),
    }
    assert set(read(json.dumps(request).encode(), None, None).inputs) == {"a", "b"}


@given(st.dictionaries(NAMES, st.integers() | PARAMETERS, min_size=1, max_size=3), st.data())
def test_what_stands_twice_is_found_wherever_it_is(value: dict, data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(sorted(value)))
    text = json.dumps(value)[:-1] + f", {json.dumps(name)}: 0" + "}"
    assert find_duplicate(f'{{"in": [{text}]}}'.encode())


@pytest.mark.parametrize(
    ("body", "found"),
    [
        (b"{}", {}),
        (b"", {}),
        (b' {"input": [1, 2.5], "version": "1"}', {"input": [1, 2.5], "version": "1"}),
        (b'{"a": {"a": 1}, "b": ["x", {"a": 2}]}', {"a": {"a": 1}, "b": ["x", {"a": 2}]}),
        (b'{"input": "quoted \\" text"}', {"input": 'quoted " text'}),
    ],
)
def test_objects_are_read(body: bytes, found: dict[str, Any]) -> None:
    assert read_object(body) == found


@pytest.mark.parametrize(
    "body",
    [
        b"{", b"[]", b"null", b"7", b"{'a': 1}", b'{"a": NaN}', b'{"a": 1, "a": 2}', b'{"a": {"b": 1, "b": 2}}',
        b'{"input": [1], "input": [2]}', b'{"a": [{"b": 1, "b": 2}]}', b"\xff", b'{"a": "\xff"}', b'{"a":' * 10**5,
        b"[" * 10**5, b'{"a": 1} x', b'{"a": "\\ud800',
    ],
)  # fmt: skip
def test_what_is_no_object_is_refused(body: bytes) -> None:
    with pytest.raises(BadRequest) as failure:
        read_object(body)
    assert failure.value.status == 400


@given(st.binary(max_size=60))
def test_no_bytes_do_anything_else(body: bytes) -> None:
    try:
        assert isinstance(read_object(body), dict)
    except BadRequest as failure:
        assert failure.status == 400


class Point(Struct, frozen=True, kw_only=True):
    x: Annotated[float, Number(1, 2), "Where."]
    names: Annotated[list[str] | None, TOKEN, "What."] = None


def test_an_object_is_read_by_the_annotations_of_its_fields() -> None:
    assert fitted({"x": 1, "names": None}, Point) == Point(x=1.0)
    assert fitted({"x": "1.5"}, Point, strict=False) == Point(x=1.5)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (7, "at: must be an object with x, names"),
        ({}, "at.x is missing. Where."),
        ({"x": None}, "at.x is missing. Where."),
        ({"x": 1, "y": 1}, "at.y: nothing reads it here; there are x, names"),
        ({"x": "1"}, "at.x: must be a number, not a text. Where."),
        ({"x": True}, "at.x: must be a number, not true or false. Where."),
        ({"x": 10**400}, "at.x: is out of range: give a number that fits 64 bits. Where."),
        ({"x": 1, "name": ["a"]}, "at.name: nothing reads it here; did you mean names?"),
        ({"x": 3}, "at.x: must be at least 1 and at most 2, not 3"),
        ({"x": 1, "names": ["a b"]}, "at.names: must be 1 to 64 letters"),
        ({"x": 1, "names": [1]}, "at.names[0]: must be a text, not a whole number. What."),
    ],
)
def test_what_does_not_fit_is_told_with_the_fields_meaning(given: object, text: str) -> None:
    with pytest.raises(BadRequest) as told:
        fitted(given, Point, "at")
    assert told.value.message.startswith(text)


@pytest.mark.parametrize("where", ["top", "input", "parameters", "output"])
def test_a_request_with_a_name_twice_is_refused(where: str) -> None:
    twice = {"top": "", "input": "", "parameters": "", "output": ""} | {where: ', "k": 1, "k": 2'}
    first = ', "k": 1, "k": 2'.replace(", ", "", 1) if where == "parameters" else ""
    text = (
        f'{{"inputs": [{{"name": "x", "shape": [1], "datatype": "FP32", "data": [1]{twice["input"]}}}], '
        f'"outputs": [{{"name": "y"{twice["output"]}}}], "parameters": {{{first}}}{twice["top"]}}}'
    )
    with pytest.raises(BadRequest, match="'k' twice"):
        read(text.encode(), None, None)

"""Bodies of Clipper's requests."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.gateway.clipper.bodies import field, read, version
from services.gateway.clipper.problems import ClipperProblem, error_body


@pytest.mark.parametrize(
    ("body", "found"),
    [
        (b"{}", {}),
        (b' {"input": [1, 2.5], "version": "1"}', {"input": [1, 2.5], "version": "1"}),
        (b'{"a": {"a": 1}, "b": ["x", {"a": 2}]}', {"a": {"a": 1}, "b": ["x", {"a": 2}]}),
        (b'{"input": "quoted \\" text"}', {"input": 'quoted " text'}),
    ],
)
def test_objects_are_read(body: bytes, found: dict[str, Any]) -> None:
    assert read(body) == found


@pytest.mark.parametrize(
    "body",
    [
        b"", b"{", b"[]", b"null", b"7", b"{'a': 1}", b'{"a": NaN}', b'{"a": 1, "a": 2}', b'{"a": {"b": 1, "b": 2}}',
        b'{"input": [1], "input": [2]}', b'{"a": [{"b": 1, "b": 2}]}', b"\xff", b'{"a": "\xff"}', b'{"a":' * 10**5,
        b"[" * 10**5, b'{"a": 1} x', b'{"a": "\\ud800',
    ],
)  # fmt: skip
def test_what_is_no_object_is_a_json_error_with_its_cause(body: bytes) -> None:
    with pytest.raises(ClipperProblem) as problem:
        read(body)
    assert problem.value.status == 400
    told = error_body(problem.value)
    assert told["error"] == "Json error"
    assert "Expected JSON schema" in told["cause"]


@given(st.binary(max_size=60))
def test_no_bytes_do_anything_else(body: bytes) -> None:
    try:
        assert isinstance(read(body), dict)
    except ClipperProblem as problem:
        assert problem.status == 400


def test_fields_have_their_types() -> None:
    body = {"name": "a", "count": 3, "flag": True, "nothing": None}
    assert field(body, "name", str) == "a"
    assert field(body, "count", (int, float)) == 3
    assert field(body, "missing", str, needed=False) is None
    assert version({"v": 2}, "v") == version({"v": "2"}, "v") == "2"
    for name, kind in (("count", str), ("flag", int), ("missing", str), ("nothing", str), ("name", list)):
        with pytest.raises(ClipperProblem, match=name):
            field(body, name, kind)

"""The W3C header of a query, and the ids of our spans."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.core.trace import Trace, read, span_id

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
HEADER = f"00-{TRACE}-{PARENT}-01"


def test_headers_are_read_and_written_again_with_spans_of_their_own() -> None:
    trace = read({"traceparent": HEADER, "tracestate": "a=1,b=2"})
    assert trace == Trace(TRACE, PARENT, 1, "a=1,b=2")
    assert trace.recorded
    assert trace.headers("00f067aa0ba902b7") == {
        "traceparent": f"00-{TRACE}-00f067aa0ba902b7-01",
        "tracestate": "a=1,b=2",
    }
    assert read({"Traceparent": HEADER[:-1] + "0"}) == Trace(TRACE, PARENT, 0)
    assert read({"traceparent": "01" + HEADER[2:] + "-more"}) == Trace(TRACE, PARENT, 1)
    ids = {span_id(uid, part) for uid in (b"\0" * 16, b"\0" * 15 + b"\1") for part in ("dispatch", "execute")}
    assert len(ids) == 4
    assert all(len(one) == 16 for one in ids)
    assert span_id(b"uid", "dispatch") == span_id(b"uid", "dispatch")
    assert read(None) is None
    assert read({}) is None
    assert read({"other": "x"}) is None


@pytest.mark.parametrize(
    "given_header",
    [
        *("", "x", HEADER.upper(), HEADER[:-1], HEADER + "-more", "ff" + HEADER[2:]),
        *(f"00-{'0' * 32}-{PARENT}-01", f"00-{TRACE}-{'0' * 16}-01", HEADER + "\n"),
    ],
)
def test_what_is_no_header_is_no_trace(given_header: str) -> None:
    assert read({"traceparent": given_header}) is None


@given(st.text())
def test_only_what_fits_in_a_header_goes_on(state: str) -> None:
    trace = read({"traceparent": HEADER, "tracestate": state})
    passed = trace.headers(PARENT).get("tracestate", "")
    assert passed in ("", state)
    assert "\n" not in passed
    assert "\r" not in passed

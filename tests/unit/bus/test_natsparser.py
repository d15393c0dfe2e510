"""The wire parser: any bytes, split anywhere, give the same messages; nats-py's own parser is the second opinion."""

import asyncio
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from nats.protocol.parser import Parser as StockParser

from bus.natsparser import LARGE, Parser, ProtocolViolation, read_headers, write_headers
from bus.port import BusError, Delivery

Seen = list[tuple[Any, ...]]


def parse(chunks: list[bytes], sids: tuple[str, ...] = ("1", "22")) -> Seen:
    """What the handlers and hooks were told."""
    seen: Seen = []

    def handler(sid: str) -> Any:
        return lambda delivery: seen.append((sid, delivery))

    parser = Parser(
        {sid: handler(sid) for sid in sids},
        lambda subject, error: seen.append(("fault", subject, error)),
        lambda: seen.append(("PING",)),
        lambda: seen.append(("PONG",)),
        lambda info: seen.append(("INFO", info)),
        lambda text: seen.append(("ERR", text)),
    )
    for chunk in chunks:
        parser.feed(chunk)
    return seen


def message(subject: str, sid: str, reply: str, payload: bytes, headers: dict[str, str] | None = None) -> bytes:
    middle = f"{subject} {sid} {reply} " if reply else f"{subject} {sid} "
    if headers is None:
        return f"MSG {middle}{len(payload)}\r\n".encode() + payload + b"\r\n"
    block = write_headers(headers)
    return f"HMSG {middle}{len(block)} {len(block) + len(payload)}\r\n".encode() + block + payload + b"\r\n"


SCRIPT = b"".join(
    [
        b'INFO {"max_payload":1048576,"server_name":"n1"}\r\n',
        b"PING\r\n",
        message("a.b", "1", "", b""),
        message("a.b", "22", "reply.to", b"MSG a 1 3\r\nabc\r\n"),
        b"+OK\r\n",
        message("a", "1", "r", b"\r\n", {"Nats-Msg-Id": "7", "X": "é: y"}),
        b"HMSG d.1 1 16 16\r\nNATS/1.0 503\r\n\r\n\r\n",
        b"PONG\r\n",
        message("gone", "3", "", b"nobody subscribed this"),
        b"-ERR 'Permissions Violation for Publish to \"x\"'\r\n",
        message("ä", "1", "", bytes(range(256))),
    ]
)
EXPECTED: Seen = [
    ("INFO", {"max_payload": 1048576, "server_name": "n1"}),
    ("PING",),
    ("1", Delivery("a.b", b"")),
    ("22", Delivery("a.b", b"MSG a 1 3\r\nabc\r\n", "reply.to")),
    ("1", Delivery("a", b"\r\n", "r", {"Nats-Msg-Id": "7", "X": "é: y"})),
    ("1", Delivery("d.1", b"", "", None, "503")),
    ("PONG",),
    ("ERR", 'Permissions Violation for Publish to "x"'),
    ("1", Delivery("ä", bytes(range(256)))),
]


def test_a_conversation_in_one_piece_or_split_at_every_byte() -> None:
    assert parse([SCRIPT]) == EXPECTED
    for at in range(1, len(SCRIPT)):
        assert parse([SCRIPT[:at], SCRIPT[at:]]) == EXPECTED, at


@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_a_conversation_in_equal_pieces(size: int) -> None:
    assert parse([SCRIPT[at : at + size] for at in range(0, len(SCRIPT), size)]) == EXPECTED


@pytest.mark.parametrize("headers", [None, {"A": "b"}])
@pytest.mark.parametrize("length", [LARGE - 1, LARGE, LARGE + 1, 3 * LARGE])
def test_a_large_payload_split_around_each_of_its_edges(length: int, headers: dict[str, str] | None) -> None:
    payload = bytes(number % 251 for number in range(length))
    stream = b"PING\r\n" + message("a", "1", "r", payload, headers) + message("b", "22", "", b"next")
    expected: Seen = [("PING",), ("1", Delivery("a", payload, "r", headers)), ("22", Delivery("b", b"next"))]
    end = stream.index(b"MSG b") if headers is None else stream.rindex(b"MSG b")
    edges = {6, 12, 40, 100, end - 3, end - 2, end - 1, end, end + 1, len(stream) - 1}
    for first in sorted(edges):
        assert parse([stream[:first], stream[first:]]) == expected, first
        for second in sorted(edge for edge in edges if edge > first):
            pieces = [stream[:first], stream[first:second], stream[second:]]
            assert parse(pieces) == expected, (first, second)


subjects = st.text(st.characters(exclude_characters=" \t\r\n", codec="utf-8"), min_size=1, max_size=12)
names = st.text("ABCxyz-0189", min_size=1, max_size=8)
values = st.text(st.characters(exclude_characters="\r\n", exclude_categories=("Cs", "Cc", "Zs")), max_size=12)
payloads = st.one_of(
    st.binary(max_size=60),
    st.sampled_from([b"\r\n", b"MSG a 1 2\r\n", b"PING\r\n", b"NATS/1.0\r\n\r\n"]),
    st.integers(LARGE - 2, LARGE + 70).map(bytes),
)
messages = st.tuples(
    subjects,
    st.sampled_from(["1", "22"]),
    st.one_of(st.just(""), subjects),
    payloads,
    st.one_of(st.none(), st.dictionaries(names, values, max_size=3)),
)


@settings(deadline=None)
@given(st.lists(messages, max_size=6), st.data())
def test_any_messages_split_anywhere(
    sent: list[tuple[str, str, str, bytes, dict[str, str] | None]], data: st.DataObject
) -> None:
    stream = b"".join(message(*parts) for parts in sent)
    cuts = sorted(data.draw(st.sets(st.integers(0, len(stream)), max_size=12), label="cuts"))
    chunks = [stream[a:b] for a, b in zip([0, *cuts], [*cuts, len(stream)], strict=True)]
    assert parse(chunks) == [
        (sid, Delivery(subject, payload, reply, headers or None)) for subject, sid, reply, payload, headers in sent
    ]


class Recorder:
    """What nats-py's parser tells its client."""

    def __init__(self) -> None:
        self.seen: Seen = []

    async def _process_msg(self, sid: int, subject: bytes, reply: bytes, payload: bytes, header: bytes | None) -> None:
        status, headers = read_headers(header) if header else ("", None)
        self.seen.append((str(sid), Delivery(subject.decode(), payload, reply.decode(), headers, status)))

    async def _process_ping(self) -> None:
        self.seen.append(("PING",))

    async def _process_pong(self) -> None:
        self.seen.append(("PONG",))

    async def _process_info(self, info: dict[str, Any]) -> None:
        self.seen.append(("INFO", info))

    async def _process_err(self, text: str) -> None:
        self.seen.append(("ERR", text))


ascii_subjects = st.text("abcXYZ019.*>$_-", min_size=1, max_size=12)
frames = st.one_of(
    st.sampled_from([b"PING\r\n", b"PONG\r\n", b"+OK\r\n", b'INFO {"a":1}\r\n']),
    st.builds(
        message,
        ascii_subjects,
        st.sampled_from(["1", "22"]),
        st.one_of(st.just(""), ascii_subjects),
        payloads,
        st.one_of(st.none(), st.dictionaries(names, st.text("abc 12", max_size=6), max_size=2)),
    ),
)


@settings(deadline=None)
@given(st.lists(frames, max_size=8), st.integers(1, 200))
@example([SCRIPT.partition(b"-ERR")[0]], 5)
def test_nats_py_reads_the_same(sent: list[bytes], size: int) -> None:
    stream = b"".join(sent)
    chunks = [stream[at : at + size] for at in range(0, len(stream), size)] if len(stream) < 5000 else [stream]
    recorder = Recorder()
    stock = StockParser(recorder)

    async def feed() -> None:
        for chunk in chunks:
            await stock.parse(chunk)

    asyncio.run(feed())
    known = [seen for seen in recorder.seen if seen[0] != "3"]
    assert parse(chunks) == known


@pytest.mark.parametrize(
    "line",
    [
        b"MSG a 1\r\n",
        b"MSG a 1 r x 3\r\n",
        b"MSG a 1 three\r\n",
        b"HMSG a 1 3\r\n",
        b"HMSG a 1 r 3 x\r\n",
        b"HTTP/1.1 400 Bad Request\r\n",
        b"INFO {nonsense\r\n",
        b"\r\n",
    ],
)
def test_what_is_not_nats_is_a_violation(line: bytes) -> None:
    with pytest.raises(ProtocolViolation):
        parse([line])


def test_endless_lines_are_a_violation_and_invalid_subjects_harm_nobody() -> None:
    with pytest.raises(ProtocolViolation):
        parse([b"MSG " + b"a" * 600_000, b"a" * 600_000])
    seen = parse([b"MSG \xff\xfe 1 2\r\nhi\r\n" + message("fine", "1", "", b"x")])
    assert [delivery.data for _, delivery in seen] == [b"hi", b"x"]


def test_after_a_reset_a_new_conversation_begins() -> None:
    got: list[Delivery] = []
    parser = Parser({"1": got.append}, *[lambda *_: None] * 5)
    for half in (b"MSG a 1 10\r\nabc", b"MSG a 1 %d\r\n" % (2 * LARGE) + bytes(LARGE), b"MSG a"):
        parser.feed(half)
        parser.reset()
        parser.feed(message("b", "1", "", b"whole"))
    assert got == [Delivery("b", b"whole")] * 3


@given(st.dictionaries(names, values, max_size=4))
def test_headers_come_back(headers: dict[str, str]) -> None:
    assert read_headers(write_headers(headers)) == ("", headers or None)


@pytest.mark.parametrize(
    ("raw", "status", "headers"),
    [
        (b"NATS/1.0 503\r\n\r\n", "503", None),
        (b"NATS/1.0 404 No Messages\r\n\r\n", "404", {"Description": "No Messages"}),
        (
            b"NATS/1.0 100 Idle Heartbeat\r\nNats-Last-Consumer: 5\r\n\r\n",
            "100",
            {"Nats-Last-Consumer": "5", "Description": "Idle Heartbeat"},
        ),
        (b"NATS/1.0\r\nA:b\r\nno colon\r\nC:\td \r\n\r\n", "", {"A": "b", "C": "d"}),
        (b"NATS/1.0\r\n\r\n", "", None),
    ],
)
def test_status_lines(raw: bytes, status: str, headers: dict[str, str] | None) -> None:
    assert read_headers(raw) == (status, headers)


@pytest.mark.parametrize("headers", [{"a\nb": "c"}, {"a": "b\rc"}, {"": "x"}, {"ä": "x"}])
def test_headers_that_break_out_are_refused(headers: dict[str, str]) -> None:
    with pytest.raises(BusError, match="header"):
        write_headers(headers)

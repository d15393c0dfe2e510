"""services/shell/http/handler.py and services/gateway/http/app.py: how far a loop is behind, which queries are refused for it, and what a connection makes of that."""

import json
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

from bus.codec import encode
from bus.messages.catalog import AppRecord
from services.core.catalog import Catalog, key_of
from services.core.settings import GatewaySettings
from services.gateway.edge import GatewayService
from services.gateway.http.access import AccessControl
from services.gateway.http.app import HttpApplication, dialects, objective_of
from services.shell.http import handler
from services.shell.http.handler import Turns
from services.shell.http.messages import HttpReply, HttpRequest
from tests.support.clients.responders import until
from tests.support.gateways.web_application import Echo, Reply, read, served, shut
from tests.support.servers.nats import run
from tests.support.simulated.fleet import catalogue, variant

COST = 0.0005  # s that a request takes of the loop of these tests


class Loop:
    """A loop whose turns a test makes, at a clock of its own."""

    def __init__(self) -> None:
        self.now = 100.0
        self.turns = Turns(lambda: self.now)
        self.put: list[Callable[[], None]] = []

    def call_soon(self, call: Callable[..., None], *given: Any) -> None:
        self.put.append(lambda: call(*given))

    def turn(self, reads: int, *, most: float = math.inf, each: float = COST, idle: float = 0.0) -> list[float]:
        """Read so many requests, refuse those whose way is longer than `most`, run the others; the way of each.

        idle: seconds until there is anything to do, where the loop may wait for it.
        """
        if not self.put:
            self.now += idle
        ways = []
        admitted = 0
        for _ in range(reads):
            self.turns.read(self)  # type: ignore[arg-type]
            ways.append(self.turns.way())
            if ways[-1] > most:
                self.turns.refused += 1
            else:
                self.turns.admitted += 1
                admitted += 1
        put, self.put = self.put, []
        for call in put:
            call()
        self.now += each * admitted
        return ways

    def rest(self) -> None:
        """Turns without anything to read, until it may wait."""
        while self.put:
            self.turn(0)


def measured(each: float = COST) -> Loop:
    """A loop that knows what a request takes, and has nothing to do."""
    loop = Loop()
    for _ in range(handler.TURNS):
        loop.turn(10, each=each)
    loop.rest()
    return loop


def test_one_turn_in_which_the_process_stood_still_is_no_measure() -> None:
    loop = measured()
    loop.turn(10, each=1.0)
    loop.rest()
    assert loop.turn(50, idle=60.0)[-1] == pytest.approx(2 * COST * 49)


def test_a_request_alone_is_never_in_anybodys_way() -> None:
    loop = Loop()
    for _ in range(20):
        assert loop.turn(1, each=3.0) == [0.0]
        assert not loop.put, "and nothing of it is measured"


def test_time_without_work_is_not_counted() -> None:
    loop = Loop()
    for _ in range(10):
        loop.turn(50)
        loop.rest()
        assert loop.turn(1, idle=60.0) == [0.0]


def test_what_came_in_a_long_turn_has_waited_for_its_end() -> None:
    loop = Loop()
    loop.turn(100)
    first, second, *_ = loop.turn(100)
    assert first == pytest.approx(100 * COST)
    assert second == pytest.approx(first + 2 * COST)
    assert loop.turns.waited() == pytest.approx(100 * COST), "for what is read next"
    loop.turn(0)
    assert loop.turns.waited() == 0.0


def test_those_ahead_count_there_and_back() -> None:
    loop = measured()
    assert loop.turn(50, idle=60.0) == pytest.approx([2 * COST * ahead for ahead in range(50)])


def test_a_flood_is_admitted_as_far_as_its_turns_stay_short() -> None:
    loop = measured()
    for _ in range(100):
        ways = loop.turn(500, most=0.08)
        assert loop.turns.waited() <= 0.041
    assert 20 < sum(way <= 0.08 for way in ways) < 80


def test_the_first_flood_of_a_gateway_is_not_admitted_as_a_whole_and_one_turn_says_what_a_request_takes() -> None:
    loop = Loop()
    assert sum(way <= 0.08 for way in loop.turn(500, most=0.08, each=4 * COST)) < 100
    loop.turn(10, each=4 * COST)
    first, second = loop.turn(2)
    assert second - first == pytest.approx(2 * 4 * COST)


def test_a_measure_that_no_longer_holds_is_made_again_where_it_refuses() -> None:
    loop = measured(each=0.1)
    assert loop.turn(3, idle=60.0)[-1] > 0.3
    for _ in range(10):
        ways = loop.turn(3, most=handler.SHORT_S, idle=60.0)
    assert max(ways) < handler.SHORT_S


@pytest.mark.parametrize(
    ("body", "of_app", "found"),
    [
        (b"{}", None, None),
        (b"{}", 50.0, 50.0),
        (b'{"parameters": {"latency_ms": 5e3}}', 50.0, 5000.0),
        (b'{"parameters":{"latency_ms":"12.5"}}', None, 12.5),
        (b'{"parameters":{"latency_ms" : 70,"timeout":20000}}' + bytes(5000), None, 20.0),
        (b'{"parameters": {"timeout": 90000}}', 50.0, 50.0),
        (b'{"parameters": {"timeout": 0}}', None, None),
        (b'{"parameters": {"latency_ms": -1}}', None, None),
    ],
)
def test_what_a_query_may_take(body: bytes, of_app: float | None, found: float | None) -> None:
    assert objective_of(body, of_app) == found


# -- the decision


class Behind(Turns):
    """A loop that takes so many seconds."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds

    def way(self) -> float:
        return self.seconds


def gateway(**settings: Any) -> tuple[HttpApplication, GatewayService, list[Any]]:
    """What decides, for apps with an objective of 100 ms, with none, and with a default output; its service; and what was recorded."""
    catalog = Catalog()
    for app, fields in {
        "fast": {"latency_ms": 100.0},
        "slow": {},
        "kind": {"latency_ms": 100.0, "default_output": 1},
    }.items():
        for record in catalogue(variant(), app=app):
            made = replace(record, **fields) if isinstance(record, AppRecord) else record
            catalog.apply(key_of(made), encode(made))
    chosen = GatewaySettings(**settings)
    service = GatewayService(chosen, None)  # type: ignore[arg-type]
    service.actor = SimpleNamespace(catalog=catalog)  # type: ignore[assignment]
    recorded: list[Any] = []
    service.record = recorded.append
    made = HttpApplication(dialects(service), chosen, AccessControl(chosen), service)
    behind(made, 0.09)
    return made, service, recorded


def behind(app: HttpApplication, seconds: float) -> None:
    """The loop takes so many seconds."""
    app.turns = Behind(seconds)


Asked = tuple[bytes, dict[bytes, bytes], str]


def scope(path: bytes, *headers: tuple[bytes, bytes], method: str = "POST") -> Asked:
    return path, {b"host": b"localhost", **dict(headers)}, method


def refused(app: HttpApplication, asked: Asked, body: bytes = b"{}") -> HttpReply | None:
    """The refusal of a query that the checks let pass."""
    request = HttpRequest(asked[2], asked[0], asked[1])
    if app.begin(request) is not None:
        return None
    request.add(body)
    request.end()
    reply = app.refusal(request, fresh=True)
    app.ended(request, reply)
    return reply


INFER = scope(b"/v2/models/fast/infer")
WITH = b'{"parameters": {"latency_ms": 100}}'


@pytest.mark.parametrize(
    ("asked", "protocol", "form"),
    [
        (INFER, "rest", {"error", "code", "retry_after_ms"}),
        (scope(b"/v2/models/fast.m.v/infer"), "rest", {"error", "code", "retry_after_ms"}),
        (scope(b"/fast/predict"), "clipper", {"error", "cause"}),
        (scope(b"/classify?model_name=fast"), "rafiqi", {"error", "code", "retry_after_ms"}),
    ],
)
def test_a_query_that_cannot_be_passed_on_in_time_is_refused_as_its_dialect_has_it(
    asked: Any, protocol: str, form: set[str]
) -> None:
    found, service, recorded = gateway()
    for _ in range(2):
        reply = refused(found, asked)
        assert reply.status == 503
        assert b"retry-after: 1\r\n" in reply.lines
        assert json.loads(bytes(reply.pieces[0])).keys() == form
    assert service.counts.queries == {(protocol, "overloaded"): 2}
    assert service.counts.requests == {(protocol, "503"): 2}
    assert next(service.statistics.of("fast"))[2].failed == 2
    assert [(one.app, one.outcome, one.code, one.slo_ms) for one in recorded] == 2 * [
        ("fast", "refused", "overloaded", 100.0)
    ]
    assert len({one.uid for one in recorded}) == 2
    assert found.turns.refused == 2


@pytest.mark.parametrize(
    ("asked", "body", "is_refused"),
    [
        (scope(b"/v2/models/slow/infer"), WITH, True),
        (scope(b"/v2/models/slow/infer"), b"{}", False),
        (scope(b"/v2/models/slow/infer"), b'{"parameters": {"latency_ms": 1000}}', False),
        (scope(b"/v2/models/kind/infer"), WITH, False),
        (scope(b"/v2/models/nobody/infer"), WITH, False),
        (scope(b"/v2/models/fast"), WITH, False),
        (scope(b"/v2/models/fast/infer", method="GET"), WITH, False),
        (scope(b"/admin/predict", method="GET"), WITH, False),
        (scope(b"/fast/update"), WITH, False),
        (scope(b"/classify"), WITH, False),
        (scope(b"/v2/models/fast/infer", (b"content-encoding", b"gzip")), b"\x1f\x8b", False),
        (scope(b"/v2/models/fast/infer", (b"origin", b"http://evil")), WITH, False),
    ],
)
def test_what_is_looked_at(asked: Any, body: bytes, is_refused: bool) -> None:
    found, service, recorded = gateway()
    assert (refused(found, asked, body) is not None) == is_refused
    assert len(recorded) == sum(service.counts.queries.values()) == is_refused


def test_nothing_is_refused_while_turns_are_short() -> None:
    found, *_ = gateway()
    behind(found, 0.0049)
    assert refused(found, INFER, b'{"parameters": {"latency_ms": 0.001}}') is None


def test_who_may_not_ask_is_not_told_which_apps_there_are() -> None:
    found, *_ = gateway(tokens="secret")
    assert refused(found, INFER) is None
    assert refused(found, scope(b"/v2/models/fast/infer", (b"authorization", b"Bearer no"))) is None
    assert refused(found, scope(b"/v2/models/fast/infer", (b"authorization", b"Bearer secret")))


# -- a connection


LARGE = b"large"  # asks for a reply that no buffer takes


class Picky(Echo):
    """Refuses every request for /no that was read in this turn."""

    def refusal(self, request: HttpRequest, *, fresh: bool) -> HttpReply | None:
        if not fresh or request.path != "/no":
            return super().refusal(request, fresh=fresh)
        return HttpReply([bytes(2**25) if request.body == LARGE else request.body], b"", 503)


def asked(path: bytes, body: bytes = b"", more: bytes = b"", version: bytes = b"1.1") -> bytes:
    return b"POST %s HTTP/%s\r\nHost: h\r\n%sContent-Length: %d\r\n\r\n%s" % (path, version, more, len(body), body)


GET = b"GET /a HTTP/1.1\r\nHost: h\r\n\r\n"
CHUNKED = b"POST /no HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nab\r\n1\r\nc\r\n0\r\nX-T: t\r\n\r\n"
OFFER = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAA\r\n"


def told(*parts: bytes, replies: int) -> tuple[list[Reply], bool]:
    """The replies to these bytes, and whether the connection serves another request afterwards. Each part is sent once the one before was read."""

    async def main() -> tuple[list[Reply], bool]:
        async with served(Picky()) as server:
            reader, writer = await server.connect()
            await until(lambda: bool(server.connections.all))
            (connection,) = server.connections.all
            for at, part in enumerate(parts):
                await until(lambda: connection._began >= at)  # noqa: B023
                writer.write(part)
            found = []
            while len(found) < replies and (reply := await read(reader)) is not None:
                found.append(reply)
            writer.write(GET)
            stays = (after := await read(reader)) is not None and after.body == b"GET /a 0 - h"
            await shut(writer)
            return found, stays

    return run(main())


NO = (503, b"abc")
YES = (200, b"GET /a 0 - h")


@pytest.mark.parametrize(
    ("parts", "replies", "stays"),
    [
        ([asked(b"/no", b"abc")], [NO], True),
        ([asked(b"/no", b"abc") * 3], [NO, NO, NO], True),
        ([asked(b"/no", b"abc") + GET], [NO, YES], True),
        (
            [GET + asked(b"/no", b"abc")],
            [YES, (200, b"POST /no 3 - h")],
            True,
        ),  # it would have to wait for its turn anyhow
        ([CHUNKED], [NO], True),
        ([asked(b"/no", b"abc")[:9], asked(b"/no", b"abc")[9:]], [NO], True),
        ([asked(b"/no", b"abc")[:-1], b"c"], [NO], True),
        ([asked(b"/no", b"abc", b"Expect: 100-continue\r\n")], [NO], True),
        ([asked(b"/no", b"abc", OFFER)], [NO], True),
        ([asked(b"/no", b"abc", b"Connection: close\r\n") + GET], [NO], False),
        ([asked(b"/no", b"abc", version=b"1.0")], [NO], False),
        ([asked(b"/no", b"abc") + b"nonsense\r\n\r\n"], [NO, (400, b"")], False),
    ],
)
def test_a_refusal_is_a_reply_like_any_other(parts: list[bytes], replies: list[tuple[int, bytes]], stays: bool) -> None:
    found, stayed = told(*parts, replies=len(replies))
    assert [(one.status, b"" if one.status == 400 else one.body) for one in found] == replies
    assert stayed == stays
    assert (found[-1].headers.get("connection") == "close") == (not stays)


async def test_who_reads_no_replies_gets_no_more_of_them() -> None:
    async with served(Picky()) as server:
        reader, writer = await server.connect()
        writer.write(asked(b"/no", LARGE))
        await until(lambda: any(one._paused for one in server.connections.all))
        writer.write(asked(b"/no", b"abc"))
        await until(lambda: any(one._ahead for one in server.connections.all))
        found = [await read(reader), await read(reader)]
        assert [reply.status for reply in found if reply is not None] == [503, 200]
        await shut(writer)

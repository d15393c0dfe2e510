"""What a gateway remembers: the catalogue, and which dispatchers send heartbeats. and its metrics: requests by protocol and status, their time,
their bytes, and the queries among them. Pure; the servers are its edge's.
"""

from collections import Counter
from collections.abc import Callable, Iterable

from msgspec import Struct

from bus.messages.fleet import DispatcherHeartbeat
from bus.subjects import Subjects
from services.core.actor import (
    NOTHING,
    After,
    Changed,
    Do,
    Done,
    Effect,
    Envelope,
    Failed,
    Halt,
    Handler,
    Inlet,
    Record,
    Recorded,
    Started,
    Stopping,
    Synced,
    TableActor,
    Watch,
)
from services.core.catalog import Catalog
from services.core.metric import SECONDS, Histogram, MetricFamily, counter, gauge, histogram
from services.core.settings import Settings

MISTAKES = "client errors"
SILENT = 3.0  # s without a heartbeat after which a dispatcher counts as gone
TURN = 0.5  # s between two looks at the clock: where much more has passed, this process has stood still


class TurnDue(Struct, frozen=True):
    """Time to look at the clock."""


class Serve(Struct, frozen=True):
    """Open the servers that are not open yet."""


class AwaitClientErrors(Struct, frozen=True):
    """Wait until requests are refused that were wrong themselves. Result: a list of `ClientError`; empty once the gateway is closed."""


class Close(Struct, frozen=True):
    """Let requests finish within `grace` seconds, then close the servers. succeeded: another gateway has their addresses."""

    grace: float
    succeeded: bool = False


class Gateway(TableActor):
    """catalog: the catalogue's present state. `missing` says why no query can be answered now."""

    def __init__(self, subjects: Subjects) -> None:
        self.catalog = Catalog()
        self.synced = False
        self._closes = False  # it hears no dispatchers any more, and those that it knew answer the last requests
        # dispatcher -> Unix seconds of its last one, and what it lacked
        self._heartbeats: dict[str, tuple[float, str]] = {}
        self._turned: float | None = None  # Unix seconds of the last look at the clock
        self.inlets = (Inlet(subject=subjects.dispatcher_heartbeat(), message=DispatcherHeartbeat),)
        self.watches = (Watch(bucket=subjects.catalog_bucket),)
        self._on: dict[type, Handler] = {
            DispatcherHeartbeat: self._heartbeat,
            TurnDue: self._turn,
            Changed: self._changed,
            Synced: self._synced,
            Started: self._started,
            Stopping: self._stopping,
            Done: self._done,
            Failed: self._failed,
            Recorded: lambda _: NOTHING,
        }

    def missing(self, now: float) -> str:
        """What the gateway lacks to have queries answered, in words; empty when nothing."""
        if not self.synced:
            return "the catalogue"
        if self._closes:
            return ""
        lived = self._lived(now)
        return "" if any(lived - at < SILENT for at, _ in self._heartbeats.values()) else "a running dispatcher"

    def not_ready(self, now: float) -> str:
        """What any dispatcher lacks, too, where none has all: queries are passed on all the same."""
        lived = self._lived(now)
        heard = [lacks for at, lacks in self._heartbeats.values() if lived - at < SILENT]
        return self.missing(now) or min(heard, default="")

    def _lived(self, now: float) -> float:
        """Now, less what this process has stood still since it last looked: that silence is its own, and no dispatcher's."""
        return now if self._turned is None else min(now, self._turned + 2.0 * TURN)

    def _turn(self, envelope: Envelope) -> Iterable[Effect]:
        now, before = envelope.now, self._turned
        self._turned = now
        if before is not None and (gap := now - before) > 2.0 * TURN:
            self._heartbeats = {name: (min(at + gap, now), lacks) for name, (at, lacks) in self._heartbeats.items()}
        return (After("turn", TURN, TurnDue()),)

    def _heartbeat(self, envelope: Envelope) -> Iterable[Effect]:
        heartbeat, now = envelope.message, envelope.now
        if heartbeat.leaving:
            self._heartbeats.pop(heartbeat.dispatcher, None)
            return NOTHING
        if heartbeat.dispatcher not in self._heartbeats:  # seldom: the moment to forget those that are gone
            self._heartbeats = {name: last for name, last in self._heartbeats.items() if now - last[0] < SILENT}
        self._heartbeats[heartbeat.dispatcher] = (now, heartbeat.missing)
        return NOTHING

    def _changed(self, envelope: Envelope) -> Iterable[Effect]:
        self.catalog.apply(envelope.message.key, envelope.message.value)
        return NOTHING

    def _synced(self, _: Envelope) -> Iterable[Effect]:
        self.synced = True
        return NOTHING

    def _started(self, envelope: Envelope) -> Iterable[Effect]:
        return Do("serve", Serve()), Do(MISTAKES, AwaitClientErrors()), *self._turn(envelope)

    def _stopping(self, envelope: Envelope) -> Iterable[Effect]:
        self._closes = envelope.message.succeeded
        return (Do("close", Close(envelope.message.grace, envelope.message.succeeded)),)

    def _done(self, envelope: Envelope) -> Iterable[Effect]:
        done = envelope.message
        if done.id != MISTAKES or not done.result:
            return NOTHING
        return (*map(Record, done.result), Do(MISTAKES, AwaitClientErrors()))

    def _failed(self, envelope: Envelope) -> Iterable[Effect]:
        failed = envelope.message
        return (Halt(f"it cannot listen: {failed.error}"),) if failed.id == "serve" else NOTHING


def make_gateway(settings: Settings) -> Gateway:
    """A gateway's actor."""
    return Gateway(Subjects(settings.prefix))


class RequestCounts:
    """Counts since the gateway started. running: requests under way, by protocol."""

    def __init__(self) -> None:
        self.requests: Counter[tuple[str, str]] = Counter()  # by protocol and status
        self.running: Counter[str] = Counter()
        self.seconds: dict[str, Histogram] = {}
        self.received: Counter[str] = Counter()
        self.sent: Counter[str] = Counter()
        self.queries: Counter[tuple[str, str]] = Counter()  # by protocol, and the code of the refusal or "ok"

    def ended(self, protocol: str, status: str, seconds: float, received: int, sent: int) -> None:
        """Count a request that has its reply. status: HTTP's number, or gRPC's name. received, sent: bytes of bodies."""
        self.requests[protocol, status] += 1
        histogram = self.seconds.get(protocol)
        if histogram is None:
            histogram = self.seconds[protocol] = Histogram(SECONDS)
        histogram.observe(seconds)
        self.received[protocol] += received
        self.sent[protocol] += sent


class GatewayInsight:
    """What Prometheus reads.

    resent: how often the client library has sent a query again. missing: why the gateway is not ready at this time (Unix seconds),
    in words; empty when it is.
    """

    def __init__(self, counts: RequestCounts, resent: Callable[[], int], missing: Callable[[float], str]) -> None:
        self._counts = counts
        self._resent = resent
        self._missing = missing

    def families(self, _actor: Gateway) -> Iterable[MetricFamily]:
        counts = self._counts
        return (
            counter(
                "infaas_gateway_requests_total",
                "Requests that have their reply, by protocol and status; 499: the client left before.",
            ).add_all(counts.requests, "protocol", "status"),
            histogram("infaas_gateway_request_seconds", "A request's head to its reply, by protocol.").add_all(
                counts.seconds, "protocol"
            ),
            counter("infaas_gateway_received_bytes_total", "Bytes of requests' bodies.").add_all(
                counts.received, "protocol"
            ),
            counter("infaas_gateway_sent_bytes_total", "Bytes of replies' bodies.").add_all(counts.sent, "protocol"),
            gauge("infaas_gateway_requests_under_way", "Requests without their reply.").add_all(
                counts.running, "protocol"
            ),
            counter("infaas_gateway_queries_total", "Queries, by protocol and the refusal's code, or ok.").add_all(
                counts.queries, "protocol", "code"
            ),
            counter("infaas_gateway_resent_total", "Times that a query was sent again for want of a reply.").add(
                self._resent()
            ),
        )

    def missing(self, _actor: Gateway, now: float) -> str:
        return self._missing(now)

"""A gateway's metrics: requests by protocol and status, their time, their bytes, and the queries among them. Pure."""

from collections import Counter
from collections.abc import Callable, Iterable

from services.core.metric import SECONDS, Histogram, MetricFamily
from services.gateway.actor import Gateway


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

    def families(self, actor: Gateway) -> Iterable[MetricFamily]:
        del actor
        counts = self._counts
        requests = MetricFamily(
            "infaas_gateway_requests_total",
            "counter",
            "Requests that have their reply, by protocol and status; 499: the client left before.",
        )
        for (protocol, status), count in counts.requests.items():
            requests.add(count, protocol=protocol, status=status)
        seconds = MetricFamily(
            "infaas_gateway_request_seconds", "histogram", "A request's head to its reply, by protocol."
        )
        for protocol, histogram in counts.seconds.items():
            seconds.add(histogram, protocol=protocol)
        received = MetricFamily("infaas_gateway_received_bytes_total", "counter", "Bytes of requests' bodies.")
        for protocol, size in counts.received.items():
            received.add(size, protocol=protocol)
        sent = MetricFamily("infaas_gateway_sent_bytes_total", "counter", "Bytes of replies' bodies.")
        for protocol, size in counts.sent.items():
            sent.add(size, protocol=protocol)
        running = MetricFamily("infaas_gateway_requests_under_way", "gauge", "Requests without their reply.")
        for protocol, count in counts.running.items():
            running.add(count, protocol=protocol)
        queries = MetricFamily(
            "infaas_gateway_queries_total", "counter", "Queries, by protocol and the refusal's code, or ok."
        )
        for (protocol, code), count in counts.queries.items():
            queries.add(count, protocol=protocol, code=code)
        resent = MetricFamily(
            "infaas_gateway_resent_total", "counter", "Times that a query was sent again for want of a reply."
        )
        resent.add(self._resent())
        return requests, seconds, received, sent, running, queries, resent

    def missing(self, actor: Gateway, now: float) -> str:
        del actor
        return self._missing(now)

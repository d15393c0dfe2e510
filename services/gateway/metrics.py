"""What a gateway shows: its requests, by protocol and status, and what became of the queries among them. Pure."""

from collections.abc import Iterable

from services.core.metric import MetricFamily
from services.gateway.actor import Gateway
from services.gateway.door import Door


class GatewayInsight:
    """door: where the counts are."""

    def __init__(self, door: Door) -> None:
        self._door = door

    def families(self, actor: Gateway) -> Iterable[MetricFamily]:
        del actor
        traffic = self._door.traffic
        requests = MetricFamily(
            "infaas_gateway_requests_total",
            "counter",
            "Requests that have their reply, by protocol and status; 499: the client left before.",
        )
        for (protocol, status), count in traffic.requests.items():
            requests.add(count, protocol=protocol, status=status)
        seconds = MetricFamily(
            "infaas_gateway_request_seconds", "histogram", "A request's head to its reply, by protocol."
        )
        for protocol, histogram in traffic.seconds.items():
            seconds.add(histogram, protocol=protocol)
        received = MetricFamily("infaas_gateway_received_bytes_total", "counter", "Bytes of requests' bodies.")
        for protocol, size in traffic.received.items():
            received.add(size, protocol=protocol)
        sent = MetricFamily("infaas_gateway_sent_bytes_total", "counter", "Bytes of replies' bodies.")
        for protocol, size in traffic.sent.items():
            sent.add(size, protocol=protocol)
        running = MetricFamily("infaas_gateway_requests_under_way", "gauge", "Requests without their reply.")
        for protocol, count in traffic.running.items():
            running.add(count, protocol=protocol)
        queries = MetricFamily(
            "infaas_gateway_queries_total", "counter", "Queries passed on, by protocol and the refusal's code, or ok."
        )
        for (protocol, code), count in self._door.asked.items():
            queries.add(count, protocol=protocol, code=code)
        resent = MetricFamily(
            "infaas_gateway_resent_total", "counter", "Times that a query was sent again for want of a reply."
        )
        resent.add(self._door.client.resent)
        return requests, seconds, received, sent, running, queries, resent

    def missing(self, actor: Gateway, now: float) -> str:
        if self._door.draining:
            return "it is being stopped"
        return actor.missing(now) if self._door.listening else "its servers, which do not listen yet"

"""What goes through a gateway, counted for its metrics: requests by protocol and status, their time, their bytes. Pure."""

from collections import Counter

from services.core.metric import SECONDS, Histogram


class Traffic:
    """running: requests under way, by protocol."""

    def __init__(self) -> None:
        self.requests: Counter[tuple[str, str]] = Counter()  # by protocol and status
        self.running: Counter[str] = Counter()
        self.seconds: dict[str, Histogram] = {}
        self.received: Counter[str] = Counter()
        self.sent: Counter[str] = Counter()

    def ended(self, protocol: str, status: str, seconds: float, received: int, sent: int) -> None:
        """A request has its reply. status: HTTP's number, or gRPC's name. received, sent: bytes of bodies."""
        self.requests[protocol, status] += 1
        histogram = self.seconds.get(protocol)
        if histogram is None:
            histogram = self.seconds[protocol] = Histogram(SECONDS)
        histogram.observe(seconds)
        self.received[protocol] += received
        self.sent[protocol] += sent

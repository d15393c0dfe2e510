"""One query as a dispatcher holds it, from arrival to its one end."""

from collections.abc import Mapping

from msgspec import Raw

from bus.messages.catalog import AppRecord
from bus.messages.flow import Route
from bus.messages.public import Error, QueryHead
from services.core.ask import Ask
from services.core.cluster import Instance
from services.core.trace import Trace


class Query:
    """The body as it came, what it asks, and where it is now. times: Unix seconds."""

    __slots__ = (
        "app", "arrived", "ask", "attempt", "body", "crashes", "fallback", "head", "headers", "instance", "items", "reply", "sent", "trace", "uid", "why",
    )  # fmt: skip

    def __init__(
        self, uid: bytes, app: str, head: QueryHead, ask: Ask, reply: str, body: bytes, arrived: float
    ) -> None:
        self.uid = uid
        self.app = app
        self.head = head
        self.ask = ask
        self.items = ask.items
        self.reply = reply
        self.body = body
        self.arrived = arrived
        self.attempt = -1  # of the dispatch under way; the first is 0
        self.crashes = 0  # executors that died with it aboard
        self.instance: Instance | None = None
        self.sent: Route | None = None  # with the last dispatch
        self.trace: Trace | None = None  # of its sender
        self.headers: Mapping[str, str] | None = None  # that go with it, where it is traced
        self.fallback: AppRecord | None = None  # its app, where that has a default output
        self.why: Error | None = None  # it waits: what it would be told now

    def route(self, dispatcher: str, instance: str, policy: str) -> Route:
        """What travels in front of the body, and into the outcome."""
        head = self.head
        latency = self.ask.latency_s
        return Route(
            self.uid,
            0,
            self.attempt,
            self.reply,
            self.ask.deadline,
            self.arrived,
            dispatcher,
            instance,
            self.app,
            self.items,
            head.id,
            latency * 1000.0 if latency < 1e9 else None,
            head.accuracy,
            head.cost,
            head.priority or 5,
            head.context,
            head.input_digest,
            policy,
            None,
            head.model,
            head.version,
            head.variant,
            head.retry_key is not None,
            self.crashes > 0,
            self.ask.length,
            None,
            None,
            self.fallback is not None,
        )

    @property
    def raw(self) -> Raw:
        return Raw(self.body)

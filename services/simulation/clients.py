"""The clients of a simulated system. They send the scenario's loads, and pass the replies on to the report."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from msgspec.structs import replace

from bus.codec import decode, encode
from bus.messages.catalog import Signature
from bus.messages.public import RESENT, Answer, CancelQuery, Feedback, QueryHead, Refusal, Requirements, Tensor
from bus.subjects import Subjects
from services.core.actor import Publish, Undelivered
from services.core.emulation import zeros
from services.simulation.composites import CLASSES, NOTHING, Numbers, QueryItems, wrong_items
from services.simulation.kernel import NETWORK, Environment
from services.simulation.report import RunReport
from services.simulation.scenario.model import NEEDS, Scenario, WorkloadSpec
from services.simulation.workload import arrivals

PRIMING = 1.0  # s between two queries to each app before the scenario begins
PATIENCE = 2 * NETWORK + 1e-6  # s beyond the objective that an answer may take, because it travels to the client
INBOX = "_INBOX.c."
LEFT = "_INBOX.left."  # before a query's inbox: where its client hears whether it was taken back
LABELLED = "_INBOX.labelled."
PRIMED = "_INBOX.primed"
NOBODY = "no_responders"  # in place of a refusal's code, where no dispatcher listened


class QueryTemplate:
    """What all queries of one load to one app have in common. varied: their contents, where several models answer together. within: seconds after which
    the time is that they state as their deadline; None: they state none.
    """

    __slots__ = ("app", "body", "fields", "head", "inputs", "items", "limit", "needs", "subject", "varied", "within")

    def __init__(
        self,
        app: str,
        needs: Requirements,
        items: int,
        subjects: Subjects,
        signature: Signature | None = None,
        *,
        deadline: bool = False,
    ) -> None:
        """signature: None: a BOOL an item."""
        self.within = needs.latency_ms / 1000.0 if deadline and needs.latency_ms is not None else None
        stated = [name for name in NEEDS if not (deadline and name == "latency_ms")]
        fields: dict[str, Any] = {name: value for name in stated if (value := getattr(needs, name)) is not None}
        self.app = app
        self.items = items
        self.varied: QueryItems | None = None
        self.subject = subjects.query(app)
        self.fields = fields
        tensors = {"x": Tensor("BOOL", [items], b"\0" * items)} if signature is None else zeros(signature.inputs, items)
        self.inputs = next(iter(tensors.values())) if len(tensors) == 1 else tensors
        self.needs = needs
        self.body = encode({"inputs": self.inputs, **fields})
        self.head = decode(QueryHead, self.body)
        self.limit = float("inf") if needs.latency_ms is None else needs.latency_ms / 1000.0 + PATIENCE

    def next(self, inbox: str, names: Mapping[str, Any]) -> tuple[QueryHead, bytes]:
        """The next query, whose answer comes to this inbox. names: fields of its own; empty: it has none."""
        if self.varied is not None:
            return self.varied.next(inbox, names)
        if not names:
            return self.head, self.body
        body = encode({"inputs": self.inputs, **self.fields, **names})
        return decode(QueryHead, body), body


@dataclass(slots=True, eq=False)
class ArrivalStream:
    """The arrivals of one load, a chunk at a time. kinds: the query to send, by index of app."""

    chunks: Iterator[tuple[Any, Any]]
    kinds: Sequence[QueryTemplate]
    times: list[float] = field(default_factory=list)
    apps: list[int] = field(default_factory=list)
    at: int = 0

    def next(self) -> float | None:
        """Time of the next query, seconds from the scenario's beginning; None after the last."""
        while self.at >= len(self.times):
            chunk = next(self.chunks, None)
            if chunk is None:
                return None
            self.times, self.apps, self.at = chunk[0].tolist(), chunk[1].tolist(), 0
        return self.times[self.at]


class Clients:
    """Of a scenario. begins: the environment's time at which it begins.

    named: whether each query has an id, its number, and a retry key, as those of infaas.client have. asked: called with each query's inbox. left: with that of
    one that is taken back, and with the answer to that. labelled: with the answer that a label is of, its item, and what became of it (None: it is sent).
    """

    named = False
    asked: Callable[[str, QueryTemplate], None] = staticmethod(lambda _inbox, _kind: None)
    left: Callable[[str, object], None] = staticmethod(lambda _inbox, _answer: None)
    labelled: Callable[[str, Answer, int, object], None] = staticmethod(lambda _app, _answer, _item, _said: None)

    def __init__(
        self, environment: Environment, scenario: Scenario, subjects: Subjects, report: RunReport, begins: float
    ) -> None:
        self.open: dict[str, tuple[float, QueryTemplate]] = {}
        self.others: dict[str, Callable[[Any], None]] = {}  # other inboxes, and what takes their messages
        self.resent: Callable[[str], float | None] | None = None  # s after which a query of this app is sent again
        self.leaves: Callable[[str], float | None] | None = None  # s after which a query of this app is taken back
        self.labels: Callable[[str], float | None] = lambda _: (
            None
        )  # s after which labels of answers of this app are sent
        self._environment = environment
        self._subjects = subjects
        self._report = report
        self._begins = begins
        self._sent = 0
        # Inboxes of queries that may be sent again, and are not since they were refused.
        self._refused: set[str] = set()
        self._streams: list[ArrivalStream] = []
        self._primed: dict[tuple[str, bytes], QueryTemplate] = {}
        apps, needs, loads = {app.app: app for app in scenario.apps}, scenario.needs, scenario.loads
        for load, source in zip(loads, np.random.SeedSequence(scenario.seed).spawn(len(loads)), strict=True):
            kinds = [
                QueryTemplate(
                    app, load.needs or needs[app], load.items, subjects, apps[app].signature, deadline=load.deadline
                )
                for app in load.apps
            ]
            for kind in kinds:
                if apps[kind.app].selection is not None:
                    self._vary(kind, load)
            rng = np.random.default_rng(source)
            self._streams.append(ArrivalStream(arrivals(load, scenario.duration_s, rng), kinds))
            self._primed.update({(kind.app, kind.body): kind for kind in kinds})

    def _vary(self, kind: QueryTemplate, load: WorkloadSpec) -> None:
        """Give the queries contents of their own."""
        if load.context is not None:
            kind.fields["context"] = load.context
        begin = len(self._primed) << 40
        kind.varied = QueryItems(begin, load.items, kind.fields, repeats=load.repeats, feedback=load.feedback)
        kind.head, kind.body = kind.varied.next(PRIMED)

    def prime(self, until: float) -> None:
        """Send each kind of query once a second, uncounted, so that every policy loads what it would for a small load."""
        for kind in self._primed.values():
            self._environment.publish(kind.subject, kind.head, PRIMED, kind.body)
        if self._environment.now + PRIMING < until:
            self._environment.at(PRIMING, self.prime, until)

    def start(self) -> None:
        """Start the loads."""
        for stream in self._streams:
            self._schedule(stream)

    def _schedule(self, stream: ArrivalStream) -> None:
        due = stream.next()
        if due is not None:
            self._environment.at(max(0.0, self._begins + due - self._environment.now), self._send, stream)

    def _send(self, stream: ArrivalStream) -> None:
        kind = stream.kinds[stream.apps[stream.at]]
        stream.at += 1
        self._sent = number = self._sent + 1
        inbox = f"{INBOX}{number}"
        now = self._environment.now
        self.open[inbox] = (now, kind)
        again = None if self.resent is None else self.resent(kind.app)
        names: dict[str, Any] = {"id": str(number)} if self.named else {}
        leaves = None if self.leaves is None else self.leaves(kind.app)
        if self.named or again is not None or leaves is not None:
            names["retry_key"] = number.to_bytes(16, "little")
        if kind.within is not None:
            names["deadline"] = now + kind.within
        head, body = kind.next(inbox, names)
        self.asked(inbox, kind)
        if again is not None:
            self._environment.at(again, self._send_again, (kind, head, inbox, body, now))
        if leaves is not None:
            self._environment.at(leaves, self._take_back, (kind, inbox, names["retry_key"]))
        self._environment.publish(kind.subject, head, inbox, body)
        self._report.offered(kind.app, now - self._begins)
        due = stream.next()
        if due is not None:
            self._environment.at(self._begins + due - now, self._send, stream)

    def _send_again(self, query: tuple[QueryTemplate, QueryHead, str, bytes, float]) -> None:
        kind, head, inbox, body, sent = query
        if inbox in self._refused:
            return  # a client that has been refused does not ask again
        self.asked(inbox, kind)
        mark = {RESENT: str(round(1000.0 * (self._environment.now - sent)))}
        self._environment.publish(kind.subject, head, inbox, body, headers=mark)

    def _take_back(self, query: tuple[QueryTemplate, str, bytes]) -> None:
        """Its client has gone, though it still listens here."""
        kind, inbox, key = query
        answer = f"{LEFT}{inbox}"
        self.others[answer] = lambda said: self.left(inbox, said)
        self.left(inbox, None)
        self._environment.publish(self._subjects.cancel(kind.app), CancelQuery(retry_key=key), answer)

    def received(self, reply: Publish) -> None:
        """Take a reply. The first reply to a query counts, as in infaas.client: an answer may follow the refusal of a query that seemed lost."""
        inbox, message = reply.subject, reply.message
        found = self.open.pop(inbox, None)
        if found is None:
            if inbox in self.others:
                self.others[inbox](message)
            return
        sent, kind = found
        now = self._environment.now
        if type(message) is Answer:
            self._report.answered(
                kind.app, now - self._begins, now - sent, kind.limit, message.accuracy, message.variant
            )
            labels = np.zeros(kind.items, np.int64)
            if kind.varied is not None:
                labels = self._judge(kind, kind.varied, inbox, message)
            late = self.labels(kind.app)
            if late is not None and isinstance(message.query, str):
                for again in (0, 1):
                    self._environment.at(
                        late + again * min(late, 1.0), self._label, (kind.app, inbox, message, labels, again)
                    )
        elif type(message) in (Refusal, Undelivered):
            if type(message) is Refusal and self.resent is not None:
                self._refused.add(inbox)
            code = message.error.code if type(message) is Refusal else NOBODY
            self._report.refused(kind.app, now - self._begins, code)
            if kind.varied is not None:
                kind.varied.ended(inbox)

    def _label(self, what: tuple[str, str, Answer, Numbers, int]) -> None:
        """Send the labels of an answer: twice with the same words, with the same key, or by another name with another label."""
        app, inbox, answer, labels, again = what
        number = int(inbox.removeprefix(INBOX))
        assert isinstance(answer.query, str)
        for item, label in enumerate(labels.tolist()):
            way, other = (number + item) % 3, again == 1
            word = Feedback(query=answer.query, label=label, item=item, inputs=NOTHING)
            if way:
                key = number * 4 + (way == 2 and other)
                word = replace(word, retry_key=item.to_bytes(8, "little") + key.to_bytes(8, "little"))
            if way == 2 and self.named:
                named = {} if other else {"query": None, "id": str(number)}
                word = replace(word, label=(label + 1) % CLASSES if other else label, **named)
            heard = f"{LABELLED}{number}.{item}.{again}"
            self.others[heard] = lambda said, item=item: self.labelled(app, answer, item, said)  # type: ignore[misc]
            self.labelled(app, answer, item, None)
            self._environment.publish(self._subjects.feedback(app), word, heard)

    def _judge(self, kind: QueryTemplate, items: QueryItems, inbox: str, answer: Answer) -> Numbers:
        """Compare an answer with its labels, and send some of them back. Returns them."""
        labels = items.ended(inbox)
        self._report.judged(kind.app, answer, len(labels), wrong_items(answer, labels))
        for lesson in items.lessons(inbox, answer, labels):
            self._environment.publish(self._subjects.feedback(kind.app), lesson)
        return labels

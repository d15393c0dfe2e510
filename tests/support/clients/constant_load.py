"""A steady load of queries that can each be told apart: what every one of them got, how often, and what SQL says of it."""

import asyncio
import itertools
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Any, NamedTuple, Self

import msgpack
import nats
import numpy as np
import psycopg

import infaas
from tests.support.clients.responders import until
from tests.support.models.tiny_models import FEATURES, digits, weights

APP = "honest"
NOTICED = 3.0  # s around a kill in which its victim may have had what nobody else knows: generous, it is a moment
SILENCE = 8.0  # s without a reply after which queries without one are lost, once their deadlines are over
PATIENT_MS = 120_000.0  # an objective that no machine misses
TOLERANCE = 1e-4  # of the largest score: the noise of floats


class Sample(NamedTuple):
    """x: FP32 [1, 16]; scores: what `tests.support.models.tiny_models.mlp()` and its `exact` form answer, FP32 [4]."""

    x: np.ndarray
    scores: np.ndarray


def samples(count: int = 64) -> list[Sample]:
    """Inputs with different answers."""
    x, _ = digits(count, seed=0)
    first, second = weights(0)
    scores = np.maximum(x @ first, 0) @ second
    return [Sample(x[i : i + 1], scores[i]) for i in range(count)]


def is_right(given: np.ndarray, sample: Sample) -> bool:
    """Whether these are the sample's scores."""
    return np.abs(given.reshape(-1) - sample.scores).max() < TOLERANCE * np.abs(sample.scores).max()


class Query(NamedTuple):
    """One query as it was sent: which sample, when, and until when (Unix seconds) it may be answered."""

    sample: Sample
    sent: float
    deadline: float


class Load:
    """Queries at a steady rate, each with an id of its own, while the block runs; at its end all of them have ended.

    latency_ms, every: every so many-th query asks for an answer within latency_ms, the others within the default 30 s.
    """

    def __init__(
        self, tag: str, rate: float, *, app: str = APP, latency_ms: float | None = None, every: int = 1
    ) -> None:
        self.tag = tag
        self.queries: dict[str, Query] = {}
        self._rate = rate
        self._app = app
        self._latency_ms = latency_ms
        self._every = every
        self._samples = samples()
        self._numbers = itertools.count()
        self._sending: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        await self._connect()
        self._sending = asyncio.create_task(self._send_on())
        return self

    async def __aexit__(self, *exc: object) -> None:
        if self._sending is not None:
            self._sending.cancel()
            await asyncio.wait([self._sending])
        if exc[0] is None:
            await self._settle()
        await self._close()

    async def _send_on(self) -> None:
        start, sent = time.monotonic(), 0
        while True:
            for _ in range(int((time.monotonic() - start) * self._rate) - sent):
                sent += 1
                self._next()
            await asyncio.sleep(0.005)

    def _next(self) -> None:
        number = next(self._numbers)
        name = f"{self.tag}-{number}"
        sample = self._samples[number % len(self._samples)]
        limit = self._latency_ms if number % self._every == 0 else None
        now = time.time()
        self.queries[name] = Query(sample, now, now + (30.0 if limit is None else limit / 1000.0))
        self._send(name, sample, limit)

    async def _connect(self) -> None: ...
    def _send(self, name: str, sample: Sample, latency_ms: float | None) -> None: ...
    async def _settle(self) -> None: ...
    async def _close(self) -> None: ...


class LibraryLoad(Load):
    """By the client library, which sends again what nobody answers. ends: by id, the answer, the refusal, or the error."""

    def __init__(self, url: str, tag: str, rate: float, **more: Any) -> None:
        super().__init__(tag, rate, **more)
        self.ends: dict[str, infaas.Answer | infaas.Refused | infaas.InfaasError] = {}
        self._url = url
        self._open: set[asyncio.Task[None]] = set()

    async def _connect(self) -> None:
        self._client = await infaas.connect(self._url).__aenter__()

    def _send(self, name: str, sample: Sample, latency_ms: float | None) -> None:
        task = asyncio.create_task(self._ask(name, sample, latency_ms))
        self._open.add(task)
        task.add_done_callback(self._open.discard)

    async def _ask(self, name: str, sample: Sample, latency_ms: float | None) -> None:
        try:
            needs = {} if latency_ms is None else {"latency_ms": latency_ms, "timeout": 60.0 + latency_ms / 1000.0}
            end = await self._client.query(self._app, sample.x, id=name, raise_refused=False, **needs)
        except infaas.InfaasError as error:
            end = error
        assert name not in self.ends
        self.ends[name] = end

    async def _settle(self) -> None:
        await until(lambda: not self._open)

    async def _close(self) -> None:
        self.resent = self._client.resent
        await self._client.close()

    @property
    def answers(self) -> dict[str, infaas.Answer]:
        return {name: end for name, end in self.ends.items() if isinstance(end, infaas.Answer)}

    @property
    def others(self) -> dict[str, Any]:
        """What was not answered, and what it got instead."""
        return {name: end for name, end in self.ends.items() if not isinstance(end, infaas.Answer)}


class StockLoad(Load):
    """By stock nats-py and msgpack, which send nothing again. replies: by id, each reply as it came, with its Unix time. unserved: ids of which the NATS
    server said at once that nobody takes them.
    """

    def __init__(self, url: str, tag: str, rate: float, **more: Any) -> None:
        super().__init__(tag, rate, **more)
        self.replies: dict[str, list[tuple[float, dict[str, Any]]]] = defaultdict(list)
        self.unserved: set[str] = set()
        self._url = url
        self._published: list[tuple[str, bytes, str]] = []
        self._last = time.monotonic()  # when a reply came

    async def _connect(self) -> None:
        self._nats = await nats.connect(self._url)
        self._inbox = self._nats.new_inbox()
        await self._nats.subscribe(f"{self._inbox}.*", cb=self._heard)
        self._flushing = asyncio.create_task(self._publish_on())

    async def _heard(self, message: Any) -> None:
        self._last = time.monotonic()
        name = message.subject.rpartition(".")[2]
        if message.data:
            self.replies[name].append((time.time(), msgpack.unpackb(message.data)))
        else:  # a status of the server's
            self.unserved.add(name)

    def _send(self, name: str, sample: Sample, latency_ms: float | None) -> None:
        tensor = {"datatype": "FP32", "shape": [1, FEATURES], "data": sample.x.tobytes()}
        body = {"id": name, "inputs": tensor} | ({} if latency_ms is None else {"latency_ms": latency_ms})
        self._published.append((f"infaas.query.{self._app}", msgpack.packb(body), f"{self._inbox}.{name}"))

    async def _publish_on(self) -> None:
        while True:
            while self._published:
                subject, body, reply = self._published.pop(0)
                await self._nats.publish(subject, body, reply=reply)
            await asyncio.sleep(0.005)

    async def _settle(self) -> None:
        """Until all have a reply, or the last one came a while ago and no other is due; and a little more, for a second reply."""
        await until(lambda: not self._published)
        self._last = time.monotonic()

        def settled() -> bool:
            ended = self.replies.keys() | self.unserved
            due = [query.deadline for name, query in self.queries.items() if name not in ended]
            return not due or (time.time() > max(due) and time.monotonic() > self._last + SILENCE)

        await until(settled)
        await asyncio.sleep(0.5)

    async def _close(self) -> None:
        self._flushing.cancel()
        await self._nats.close()

    @property
    def answers(self) -> dict[str, dict[str, Any]]:
        """First replies that are answers."""
        return {name: all_[0][1] for name, all_ in self.replies.items() if "outputs" in all_[0][1]}

    @property
    def refusals(self) -> dict[str, tuple[float, str]]:
        """First replies that are refusals: when they came, and their code."""
        first = {name: all_[0] for name, all_ in self.replies.items()}
        return {name: (at, one["error"]["code"]) for name, (at, one) in first.items() if "error" in one}

    @property
    def repeated(self) -> dict[str, list[tuple[float, dict[str, Any]]]]:
        return {name: all_ for name, all_ in self.replies.items() if len(all_) > 1}


def answers_its_query(given: np.ndarray, query: Query, answer: Any) -> bool:
    return is_right(given, query.sample)


def wrong(
    load: LibraryLoad | StockLoad, right: Callable[[np.ndarray, Query, Any], bool] = answers_its_query
) -> dict[str, Any]:
    """Answers with another query's id, or whose scores are not right. right: is told the scores, the query, and the answer."""
    found = {}
    for name, answer in load.answers.items():
        if isinstance(answer, infaas.Answer):
            given, label = answer.outputs["scores"], answer.id
        else:
            given, label = np.frombuffer(answer["outputs"]["scores"]["data"], "<f4"), answer["id"]
        if label != name or not right(given, load.queries[name], answer):
            found[name] = answer
    return found


def outcomes(sql: str, tag: str) -> dict[str, Counter[str]]:
    """By query id: how many outcomes of each kind SQL has, "outcome/code"."""
    query = (
        "SELECT id, outcome, coalesce(code, ''), count(*) FROM infaas.query_outcomes WHERE id LIKE %s GROUP BY 1, 2, 3"
    )
    found: dict[str, Counter[str]] = defaultdict(Counter)
    with psycopg.connect(sql) as connection:
        for name, outcome, code, count in connection.execute(query, (f"{tag}-%",)):
            found[name][f"{outcome}/{code}"] += count
    return found

"""What every demo shows: a family of models, and pictures that the system has not seen, sent at given times. Each reply is judged and kept."""

import asyncio
import math
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from infaas.answers import Answer
from infaas.client import Client
from infaas.errors import InfaasError, Refused
from infaas.queries import Needs
from services.simulation.scenario.model import WorkloadSpec
from services.simulation.workload import at_once

Progress = Callable[[str, float], None]  # what is being done, and how much of it is done (0..1)
Variants = Iterable[Mapping[str, Any]]  # rows of the list of variants

HEADROOM = 48.0  # cost limit of a query of up to 8 items, as a multiple of what one costs on the cheapest variant that would do


class QueryKind(Struct, frozen=True, kw_only=True):
    """Queries with the same requirements.

    possible: some variant can meet them; if not, each of these queries must be refused. weight: share of all queries, relative
    to the other kinds.
    """

    name: str
    needs: Needs
    possible: bool = True
    weight: float = 1.0


@dataclass(frozen=True)
class Labelled:
    """Labelled pictures: x [n, ...] as the models take them, y int64 [n], the class."""

    x: NDArray[Any]
    y: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.y)


@dataclass(frozen=True, kw_only=True)
class ModelFamily:
    """Models that serve one app, and everything that the demo needs to query them.

    things: the word for the pictures in printed text. models: files by model name, in the order of registration.
    save_validation: writes the validation set (.npz) to a path. unseen: pictures that the system does not get at registration.
    query_kinds: makes the kinds of query from the list of variants. validated: how many different things the validation set shows.
    views: how many consecutive rows of `unseen` show the same thing. rates: queries/s, one phase after the other.
    max_items: pictures in one query, at most. settings: TOML for the demo's system.
    """

    app: str
    things: str
    classes: int
    models: Mapping[str, Path]
    save_validation: Callable[[Path], Path]
    unseen: Labelled
    query_kinds: Callable[[Variants], list[QueryKind]]
    validated: int
    views: int = 1
    rates: Sequence[float] = (50.0, 300.0, 100.0)
    max_items: int = 8
    settings: str = ""


# -- what is sent

ALONE = 0.8  # share of queries with a single picture, where there may be several
RETRY_S = 0.2  # between tries
MAX_PROBLEMS = 5  # shown for one kind of query

Indices = NDArray[np.int64]
# What is wrong with a reply; empty if nothing is. Gets the kind of query, its number of items, its id and the reply.
Judge = Callable[[QueryKind, int, str, Answer | Refused], str]


@dataclass(frozen=True, slots=True)
class DemoReply:
    """What became of a query. pictures, labels: which it held, and what they show. due: seconds since the load began.

    at: Unix time of the reply. took_ms: at the client, from the time at which the query was due.
    """

    kind: str
    pictures: Indices
    labels: Indices
    said: Answer | Refused
    due: float
    took_ms: float
    at: float = 0.0

    @property
    def answer(self) -> Answer | None:
        """None: it was refused."""
        return None if isinstance(self.said, Refused) else self.said

    @property
    def right(self) -> NDArray[np.bool_]:
        """By picture, whether the answer says what it shows; empty without an answer."""
        return np.zeros(0, bool) if self.answer is None else self.answer.outputs["scores"].argmax(axis=1) == self.labels


def arrivals(
    rates: Sequence[tuple[float, float]], kinds: Sequence[QueryKind], seed: int = 0
) -> list[tuple[float, QueryKind]]:
    """Times of a Poisson process in seconds, each with the kind of query that is due. rates: how long each lasts, s, and queries/s."""
    edges = np.cumsum([0.0, *(seconds for seconds, _ in rates)]).round(9).tolist()
    steps = tuple((at, rate) for (_, rate), *ends in zip(rates, edges[:-1], edges[1:], strict=True) for at in ends)
    total = sum(kind.weight for kind in kinds)
    # The generator of arrivals takes each kind of query as an app of a scenario.
    names, shares = tuple(kind.name for kind in kinds), tuple(kind.weight / total for kind in kinds)
    spec = WorkloadSpec(apps=names, shares=shares, rate=steps)
    times, picks = at_once(spec, edges[-1], np.random.default_rng(seed))
    return [(due, kinds[pick]) for due, pick in zip(times.tolist(), picks.tolist(), strict=True)]


def shuffled(count: int, rng: np.random.Generator) -> Iterator[int]:
    """Numbers below `count` in random order, without end; none comes twice before every one came once."""
    while True:
        yield from rng.permutation(count).tolist()


class DemoLoad:
    """Sends queries. queries: all that were sent. wrong: by kind of query. largest: items in one query."""

    def __init__(self, client: Client, app: str, pictures: Labelled, judge: Judge, *, largest: int = 1) -> None:
        self.queries = 0
        self.wrong: defaultdict[str, list[str]] = defaultdict(list)
        self._client = client
        self._app = app
        self._pictures = pictures
        self._judge = judge
        self._largest = largest
        self._rng = np.random.default_rng(0)
        self._sources: defaultdict[str, Iterator[int]] = defaultdict(lambda: shuffled(len(pictures), self._rng))

    async def first(self, kind: QueryKind, within_s: float, right: Callable[[Answer], bool] = lambda _: True) -> None:
        """Ask until there is such an answer, so that what it needs is loaded. Raises InfaasError after `within_s`."""
        began = time.monotonic()
        while True:
            reply = await self._ask(kind, 1, 0.0, began)
            if reply is not None and reply.answer is not None and right(reply.answer):
                return
            waited = time.monotonic() - began
            if reply is None or waited > within_s:
                said = self.wrong[kind.name][-1] if reply is None else reply.said
                raise InfaasError(f"“{kind.name}” was not answered as it should be within {waited:.1f} s: {said}")
            await asyncio.sleep(RETRY_S)

    async def run(
        self,
        arrivals: Iterable[tuple[float, QueryKind]],
        seconds: float,
        on_time: Callable[[float], None] = lambda _: None,
        *,
        under_way: int = 2**15,
        each: Callable[[DemoReply], Awaitable[None]] | None = None,
    ) -> list[DemoReply]:
        """Send at these times, in seconds from now, and wait for the replies: those that are right. It takes `seconds` at least.

        on_time: gets the seconds since the load began. under_way: queries at most; where others hold up a query beyond `seconds`,
        it is not sent. each: what follows a reply.
        """
        start = time.monotonic()
        free = asyncio.Semaphore(under_way)
        replies: list[DemoReply] = []

        async def ask(kind: QueryKind, due: float) -> None:
            items = 1
            if self._largest > 1 and self._rng.random() >= ALONE:
                items = int(self._rng.integers(2, self._largest + 1))
            try:
                reply = await self._ask(kind, items, due, start + due)
            finally:
                free.release()
            if reply is not None:
                replies.append(reply)
                if each is not None:
                    await each(reply)

        async with asyncio.TaskGroup() as group:
            for due, kind in arrivals:
                await asyncio.sleep(max(0.0, start + due - time.monotonic()))
                await free.acquire()
                if time.monotonic() > start + seconds:
                    break
                group.create_task(ask(kind, due))
                on_time(due)
            await asyncio.sleep(max(0.0, start + seconds - time.monotonic()))
        on_time(seconds)
        return replies

    def problems(self) -> list[str]:
        """A few of each kind of query as text, and how many more there are."""
        found = []
        for kind, wrong in self.wrong.items():
            found += [f"{kind}: {problem}" for problem in wrong[:MAX_PROBLEMS]]
            if len(wrong) > MAX_PROBLEMS:
                found.append(f"{kind}: {len(wrong) - MAX_PROBLEMS} more queries went wrong")
        return found

    async def _ask(self, kind: QueryKind, items: int, due: float, intended: float) -> DemoReply | None:
        """None: it ended wrongly. intended: when it was due, by the monotonic clock."""
        pictures = np.fromiter(islice(self._sources[kind.name], items), np.int64)
        name = f"demo-{self.queries}"
        self.queries += 1
        needs: Needs = {**kind.needs, "id": name}
        try:
            said = await self._client.query(self._app, self._pictures.x[pictures], raise_refused=False, **needs)
            took_ms = 1000 * (time.monotonic() - intended)
            problem = self._judge(kind, items, name, said)
        except InfaasError as error:
            problem = f"neither answered nor refused: {error}"
        if problem:
            self.wrong[kind.name].append(problem)
            return None
        return DemoReply(kind.name, pictures, self._pictures.y[pictures], said, due, took_ms, time.time())


def became(replies: Sequence[DemoReply], limit_ms: float = math.inf, wrong: int = 0) -> dict[str, Any]:
    """What became of queries, as the client saw it; shares and means of nothing are None. wrong: how many have no reply here."""
    sent = len(replies) + wrong
    answered = [(one, one.answer) for one in replies if one.answer is not None]
    right = np.concatenate([np.zeros(0, bool), *(one.right for one, _ in answered)])
    took = [one.took_ms for one, _ in answered]
    p50, p99 = np.percentile(took, [50, 99]).tolist() if took else (None, None)
    in_time = sum(one.took_ms <= limit_ms and not answer.missed for one, answer in answered)
    promised = [answer.accuracy for one, answer in answered for _ in one.labels if answer.accuracy is not None]
    paid = sum(answer.cost for _, answer in answered)
    return {
        "sent": sent,
        "answered": len(answered),
        "variants": dict(Counter(answer.variant for _, answer in answered).most_common()),
        "refused": dict(Counter(one.said.code for one in replies if isinstance(one.said, Refused)).most_common()),
        "missed": dict(Counter(what for _, answer in answered for what in answer.missed).most_common()),
        "accuracy": float(right.mean()) if answered else None,
        "promised_accuracy": fmean(promised) if promised else None,
        "p50_ms": p50,
        "p99_ms": p99,
        "slo_attainment": in_time / sent if sent else None,
        "cost_per_1000": 1000 * paid / len(right) if answered else None,
    }


def text(value: float | None, form: str) -> str:
    """The number in this form; empty without one."""
    return "" if value is None else form.format(value)


def counted(counts: Mapping[str, int], between: str = ", ") -> str:
    """Counts in words: "3 × deadline, 1 × overloaded"."""
    return between.join(f"{count} × {what}" for what, count in counts.items())

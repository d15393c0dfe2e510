"""The demo from end to end: start a system, register real models, send real queries at a changing rate, check the records."""

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import infaas
from bus.messages.public import RegistrationStatus
from infaas.client import Client
from infaas.demo.family import Labelled, ModelFamily, Progress, QueryKind
from infaas.demo.results import KindCounts, wrong_answer, wrong_refusal
from infaas.demo.system import DemoSystem, temporary
from infaas.errors import InfaasError, Refused
from infaas.queries import Needs
from services.simulation.scenario.model import WorkloadSpec
from services.simulation.workload import at_once

RECORDED_S = 10.0  # until every outcome must be in SQL. The contract says 5 s; a loaded machine may take longer.
ALONE = 0.8  # share of queries with a single picture
FIRST_ANSWER_S = 20.0  # within which each possible kind of query must be answered once, loading included
RETRY_S = 0.2  # between tries when the refusal names no time

OUTCOMES = """
SELECT coalesce(variant, '-') AS variant, outcome, count(*) AS queries, sum(items) AS items,
       round((percentile_cont(0.5) WITHIN GROUP (ORDER BY latency_ms))::numeric, 2)::float8 AS p50_ms
FROM infaas.query_outcomes WHERE app = '{app}' GROUP BY 1, 2 ORDER BY queries DESC LIMIT 12
"""
STATES = """
SELECT variant, from_state || ' -> ' || to_state AS change, count(*) AS times, min(reason) AS reason
FROM infaas.state_events WHERE app = '{app}' GROUP BY 1, 2 ORDER BY min(time) LIMIT 12
"""
COST = """
SELECT coalesce(app, 'nobody (idle)') AS app, round(sum(busy_seconds)::numeric, 2)::float8 AS busy_s, sum(cost) AS usd
FROM infaas.cost_events GROUP BY 1 ORDER BY usd DESC
"""
COUNT = "SELECT count(*) AS n, count(DISTINCT uid) AS uids FROM infaas.query_outcomes WHERE app = '{app}' AND parent IS NULL"


class PictureSource:
    """Gives pictures in random order; no picture comes twice before every picture came once."""

    def __init__(self, pictures: Labelled, rng: np.random.Generator) -> None:
        self.pictures = pictures
        self._rng = rng
        self._unused: NDArray[np.int64] = np.empty(0, np.int64)

    def draw(self, items: int) -> NDArray[np.int64]:
        """Indices of `items` pictures."""
        if len(self._unused) < items:
            self._unused = np.concatenate([self._unused, self._rng.permutation(len(self.pictures))])
        drawn, self._unused = self._unused[:items], self._unused[items:]
        return drawn


class DemoLoad:
    """Sends queries and counts what becomes of them, by kind."""

    def __init__(
        self,
        client: Client,
        family: ModelFamily,
        kinds: Sequence[QueryKind],
        variants: Mapping[str, Mapping[str, Any]],
        seed: int = 0,
    ) -> None:
        self._client = client
        self._family = family
        self._kinds = kinds
        self._pictures = family.unseen
        self._variants = variants
        self._rng = np.random.default_rng(seed)
        self._sources = [PictureSource(family.unseen, self._rng) for _ in kinds]
        self.counts = [KindCounts(kind, validated=family.validated, views=family.views) for kind in kinds]
        self.sent = 0
        self.first_ms: dict[str, float] = {}

    async def load_variants(self, on_answer: Callable[[], None]) -> None:
        """Send each possible kind of query until it is answered, so that a variant for it is loaded. Keeps how long that took."""
        for kind in self._kinds:
            if kind.possible:
                self.first_ms[kind.name] = await self._until_answered(kind)
                on_answer()

    async def run(self, seconds: float, on_time: Callable[[float], None]) -> None:
        """Send for `seconds` at the changing rate, then wait for the replies. on_time gets the seconds so far."""
        rates = self._family.rates
        phase = seconds / len(rates)
        steps = tuple((at * phase, rate) for number, rate in enumerate(rates) for at in (number, number + 1))
        total = sum(kind.weight for kind in self._kinds)
        # The generator of arrivals takes each kind of query as an app of a scenario.
        names, shares = tuple(kind.name for kind in self._kinds), tuple(kind.weight / total for kind in self._kinds)
        times, picks = at_once(WorkloadSpec(apps=names, shares=shares, rate=steps), seconds, self._rng)
        start = time.monotonic()
        async with asyncio.TaskGroup() as group:
            for due, pick in zip(times.tolist(), picks.tolist(), strict=True):
                ahead = start + due - time.monotonic()
                if ahead > 0:
                    await asyncio.sleep(ahead)
                group.create_task(self._one(pick, start + due))
                on_time(due)
        on_time(seconds)

    async def _one(self, pick: int, intended: float) -> None:
        kind, counts = self._kinds[pick], self.counts[pick]
        items = 1 if self._rng.random() < ALONE else int(self._rng.integers(2, self._family.max_items + 1))
        pictures = self._sources[pick].draw(items)
        label = f"demo-{self.sent}"
        self.sent += 1
        counts.sent += 1
        try:
            needs: Needs = {**kind.needs, "id": label}
            reply = await self._client.query(self._family.app, self._pictures.x[pictures], raise_refused=False, **needs)
            took_ms = 1000 * (time.monotonic() - intended)
            problem = (
                wrong_refusal(kind, reply)
                if isinstance(reply, Refused)
                else wrong_answer(kind, items, label, reply, self._variants, self._family.classes)
            )
        except InfaasError as error:
            counts.failed(f"neither answered nor refused: {error}")
            return
        if problem:
            counts.failed(problem)
        elif isinstance(reply, Refused):
            counts.refused(reply)
        else:
            counts.answered(reply, self._pictures.y[pictures], pictures, took_ms)

    async def _until_answered(self, kind: QueryKind) -> float:
        """Milliseconds from the first try to the first answer; raises InfaasError after FIRST_ANSWER_S."""
        began = time.monotonic()
        while True:
            self.sent += 1
            reply = await self._client.query(self._family.app, self._pictures.x[:1], raise_refused=False, **kind.needs)
            waited = time.monotonic() - began
            if not isinstance(reply, Refused):
                return 1000 * waited
            if wrong_refusal(kind, reply) or waited > FIRST_ANSWER_S:
                raise InfaasError(f"“{kind.name}” was not answered within {waited:.1f} s: {reply}")
            await asyncio.sleep(min(1.0, max((reply.retry_after_ms or 0.0) / 1000, RETRY_S)))


async def run(
    family: ModelFamily, *, keep: bool, seconds: float, progress: Progress
) -> tuple[dict[str, Any], DemoSystem]:
    """Run the demo. Returns its result (`problems` is empty if all went well) and the system, which is stopped unless kept.

    Raises InfaasError if the demo could not be carried out; then the system is stopped even with `keep`.
    """
    began = time.monotonic()
    async with temporary(family.settings, keep=keep, progress=progress) as (system, ready_s):
        async with infaas.connect(data_dir=system.data_dir) as client:
            validation = family.save_validation(system.data_dir.parent / "validation.npz")
            registered = await register(client, family, validation, progress)
            load = await send(client, family, seconds, progress)
        progress("reading the records", 0.0)
        problems = [problem for counts in load.counts for problem in counts.problems_found()]
        problems += await recorded(system, family.app, load.sent)
        found = {
            "app": family.app,
            "things": family.things,
            "registered": registered,
            "asks": [counts.summary() for counts in load.counts],
            "first_answer_ms": load.first_ms,
            "queries": load.sent,
            "sql": {
                "infaas sql: outcomes by variant": await system.sql(OUTCOMES.format(app=family.app)),
                "infaas sql: states of instances": await system.sql(STATES.format(app=family.app)),
                "infaas sql: cost by app": await system.sql(COST),
            },
            "problems": problems,
            "ready_s": ready_s,
            "seconds": time.monotonic() - began,
        }
    return found, system


async def register(client: Client, family: ModelFamily, validation: Path, progress: Progress) -> list[dict[str, Any]]:
    """Register every model of the family, one after the other. Returns the measured figures of each one's variants."""
    files = family.models
    failures: dict[str, dict[str, str]] = {}
    for number, (model, path) in enumerate(files.items()):
        title = f"registering {model} ({number + 1} of {len(files)})"
        progress(title, 0.0)

        def on_progress(status: RegistrationStatus, title: str = title) -> None:
            progress(title, status.progress)

        status = await client.register(
            path, app=family.app, model=model, validation=validation, on_progress=on_progress
        )
        failures[model] = {failure.variant: failure.reason for failure in status.failures}
    by_model: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in await client.variants(app=family.app):
        by_model[row["model"]].append(row)
    missing = files.keys() - by_model.keys()
    if missing:
        raise InfaasError(f"registered, but not listed: {', '.join(sorted(missing))}")
    return [{**summary(model, by_model[model]), "failures": failures[model]} for model in files]


def summary(model: str, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The smallest and the largest of each figure of one model's variants."""
    ranges: dict[str, list[float]] = {}
    for name in ("accuracy", "latency_ms", "cost_per_1000", "memory_mb"):
        values = [float(row[name]) for row in rows if row[name] is not None]
        ranges[name] = [min(values), max(values)] if values else [0.0, 0.0]
    return {"model": model, "variants": len(rows), **ranges}


async def send(client: Client, family: ModelFamily, seconds: float, progress: Progress) -> DemoLoad:
    """Send each kind of query until it is answered once, then send the load."""
    variants = {row["variant"]: row for row in await client.variants(app=family.app)}
    kinds = family.query_kinds(variants.values())
    load = DemoLoad(client, family, kinds, variants)
    possible = sum(kind.possible for kind in kinds)
    await load.load_variants(lambda: progress("first queries: loading what they need", len(load.first_ms) / possible))
    await load.run(seconds, lambda due: progress("sending queries", due / seconds))
    return load


async def recorded(system: DemoSystem, app: str, sent: int) -> list[str]:
    """Wait until the database holds one outcome for each query. Returns what is wrong if it does not."""
    give_up = time.monotonic() + RECORDED_S
    while True:
        (row,) = await system.sql(COUNT.format(app=app))
        if row["n"] == row["uids"] == sent:
            return []
        if row["n"] > sent or time.monotonic() > give_up:
            return [f"{sent} queries were sent, but SQL holds {row['n']} outcomes ({row['uids']} different)"]
        await asyncio.sleep(0.5)

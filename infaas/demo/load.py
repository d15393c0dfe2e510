"""The demo's load: open loop, real pictures with random requirements, a rate that changes."""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from infaas.client import Client
from infaas.demo.asks import Ask
from infaas.demo.family import Family, Labelled
from infaas.demo.judge import wrong_answer, wrong_refusal
from infaas.demo.tally import Tally
from infaas.errors import InfaasError, Refused
from infaas.queries import Needs
from services.simulation.scenario.model import WorkloadSpec
from services.simulation.workload import at_once

ALONE = 0.8  # share of queries with a single picture
PATIENCE = 20.0  # s until what is possible must be answered once, variants being loaded
PAUSE = 0.2  # s between tries where the system does not say when


class Picturesource:
    """Hands out pictures in random order, every one before any comes again."""

    def __init__(self, pictures: Labelled, rng: np.random.Generator) -> None:
        self.pictures = pictures
        self._rng = rng
        self._left: NDArray[np.int64] = np.empty(0, np.int64)

    def draw(self, items: int) -> NDArray[np.int64]:
        """Numbers of so many pictures."""
        if len(self._left) < items:
            self._left = np.concatenate([self._left, self._rng.permutation(len(self.pictures))])
        drawn, self._left = self._left[:items], self._left[items:]
        return drawn


class Load:
    """Sends queries and keeps a tally for each set of requirements."""

    def __init__(
        self,
        client: Client,
        family: Family,
        asks: Sequence[Ask],
        variants: Mapping[str, Mapping[str, Any]],
        seed: int = 0,
    ) -> None:
        self._client = client
        self._family = family
        self._asks = asks
        self._pictures = family.unseen
        self._variants = variants
        self._rng = np.random.default_rng(seed)
        self._sources = [Picturesource(family.unseen, self._rng) for _ in asks]
        self.tallies = [Tally(ask, validated=family.validated, views=family.views) for ask in asks]
        self.sent = 0
        self.first_ms: dict[str, float] = {}

    async def wake(self, told: Callable[[], None]) -> None:
        """Ask each possible thing until it is answered, so that what it needs is loaded; how long this took is kept."""
        for ask in self._asks:
            if ask.possible:
                self.first_ms[ask.name] = await self._until_answered(ask)
                told()

    async def run(self, seconds: float, told: Callable[[float], None]) -> None:
        """Send for so many seconds at the changing rate, then wait for all that is still under way."""
        rates = self._family.rates
        phase = seconds / len(rates)
        steps = tuple((at * phase, rate) for number, rate in enumerate(rates) for at in (number, number + 1))
        total = sum(ask.weight for ask in self._asks)
        # To the generator of arrivals, each set of requirements is what an app is in a scenario.
        names, shares = tuple(ask.name for ask in self._asks), tuple(ask.weight / total for ask in self._asks)
        times, picks = at_once(WorkloadSpec(apps=names, shares=shares, rate=steps), seconds, self._rng)
        start = time.monotonic()
        async with asyncio.TaskGroup() as group:
            for due, pick in zip(times.tolist(), picks.tolist(), strict=True):
                ahead = start + due - time.monotonic()
                if ahead > 0:
                    await asyncio.sleep(ahead)
                group.create_task(self._one(pick, start + due))
                told(due)
        told(seconds)

    async def _one(self, pick: int, intended: float) -> None:
        ask, tally = self._asks[pick], self.tallies[pick]
        items = 1 if self._rng.random() < ALONE else int(self._rng.integers(2, self._family.most_items + 1))
        pictures = self._sources[pick].draw(items)
        label = f"demo-{self.sent}"
        self.sent += 1
        tally.sent += 1
        try:
            needs: Needs = {**ask.needs, "id": label}
            reply = await self._client.query(self._family.app, self._pictures.x[pictures], raise_refused=False, **needs)
            took_ms = 1000 * (time.monotonic() - intended)
            problem = (
                wrong_refusal(ask, reply)
                if isinstance(reply, Refused)
                else wrong_answer(ask, items, label, reply, self._variants, self._family.classes)
            )
        except InfaasError as error:
            tally.failed(f"neither answered nor refused: {error}")
            return
        if problem:
            tally.failed(problem)
        elif isinstance(reply, Refused):
            tally.refused(reply)
        else:
            tally.answered(reply, self._pictures.y[pictures], pictures, took_ms)

    async def _until_answered(self, ask: Ask) -> float:
        """Milliseconds from the first try to the first answer; raises InfaasError after PATIENCE."""
        began = time.monotonic()
        while True:
            self.sent += 1
            reply = await self._client.query(self._family.app, self._pictures.x[:1], raise_refused=False, **ask.needs)
            waited = time.monotonic() - began
            if not isinstance(reply, Refused):
                return 1000 * waited
            if wrong_refusal(ask, reply) or waited > PATIENCE:
                raise InfaasError(f"“{ask.name}” was not answered within {waited:.1f} s: {reply}")
            await asyncio.sleep(min(1.0, max((reply.retry_after_ms or 0.0) / 1000, PAUSE)))

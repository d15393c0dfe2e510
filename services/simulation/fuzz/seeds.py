"""Trials of seeds: one, or many on all cores."""

import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from time import perf_counter

from msgspec import Struct

from services.simulation.fuzz.draw import document_of
from services.simulation.fuzz.trial import FaultTrial, Verdict, first_of
from services.simulation.fuzz.violations import Violation
from services.simulation.run import seldom_collected
from services.simulation.scenario.model import Scenario
from services.simulation.scenario.read import derive


class SeedResult(Struct, frozen=True, kw_only=True):
    """seconds: simulated. took: on the wall's clock. broken: the first violation of each invariant."""

    seed: int
    seconds: float
    took: float
    queries: int
    faults: int
    broken: dict[str, Violation]


def scenario_of(seed: int) -> Scenario:
    """The scenario of a seed."""
    return derive(document_of(seed), Path(f"faults-{seed}.toml"))


def tried(scenario: Scenario) -> Verdict:
    """A whole checked run."""
    with seldom_collected():
        return FaultTrial(scenario).verdict()


def result_of(seed: int) -> SeedResult:
    """The trial of a seed."""
    began = perf_counter()
    found = tried(scenario_of(seed))
    return SeedResult(
        seed=seed, seconds=found.seconds, took=perf_counter() - began, queries=found.queries, faults=found.faults,
        broken=dict(first_of(found.violations)),
    )  # fmt: skip


def results_of(seeds: Iterable[int], processes: int | None = None) -> Iterator[SeedResult]:
    """The trials of many seeds, in their order. processes: None: one a core."""
    count = processes or len(os.sched_getaffinity(0))
    with ProcessPoolExecutor(count, mp_context=get_context("spawn"), initializer=_to_stderr) as pool:
        yield from pool.map(result_of, seeds)


def _to_stderr() -> None:
    """What a solver prints is no result."""
    os.dup2(2, 1)

"""Processes of a whole system are stopped for a while and killed under load: each query has one meaning, and its row says what its client got first."""

import asyncio
import os
import signal
from contextlib import suppress

import pytest

import infaas
from tests.support.clients.as_told import Told, astray, compared, rows_of
from tests.support.clients.constant_load import APP, LibraryLoad, StockLoad, wrong
from tests.support.clients.responders import until
from tests.support.models import tiny_models
from tests.support.servers.nats import run
from tests.support.servers.processes import eventually
from tests.support.servers.system import Whole

RATE = 20.0  # queries/s of each of two clients
TIGHT = 300.0  # ms
STOPS = (0.3, 1.2)  # s: the length of a fault, and not what anybody waits for
LONG = 240.0  # s; only ends a failing test


@pytest.fixture(scope="module")
def system(doubled: Whole) -> Whole:
    doubled.register(APP, tiny_models.exact(tiny_models.mlp()))
    return doubled


def victims(system: Whole, service: str, load: LibraryLoad) -> list[int]:
    """The process of this service; of the worker that answered last."""
    worker = list(load.answers.values())[-1].worker if service in ("executor", "monitor") else ""
    return system.pids(service, worker)[:1]


def sent(pids: list[int], signum: signal.Signals) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):  # the supervisor has replaced it
            os.kill(pid, signum)


async def suffer(system: Whole, service: str) -> tuple[StockLoad, LibraryLoad]:
    """Stops and a kill of this service under load; both clients have had their last replies. Half of the library's queries have time, on any machine."""
    stock = StockLoad(system.nats, f"told-stock-{service}", RATE, latency_ms=TIGHT)
    library = LibraryLoad(system.nats, f"told-library-{service}", RATE, latency_ms=TIGHT, every=2)
    async with stock, library:
        await until(lambda: stock.replies and library.answers, LONG)
        for length in STOPS:
            pids = victims(system, service, library)
            sent(pids, signal.SIGSTOP)
            await asyncio.sleep(length)
            sent(pids, signal.SIGCONT)
            count = len(stock.replies)
            await until(lambda: len(stock.replies) > count + RATE, LONG)  # noqa: B023  awaited here
        sent(victims(system, service, library), signal.SIGKILL)
        count = len(stock.replies)
        await until(lambda: len(stock.replies) > count + 2 * RATE, LONG)
    return stock, library


def told(system: Whole, load: StockLoad) -> Told:
    """What is so once each query with a reply has a row."""
    eventually(lambda: not compared(load, rows_of(system.sql, load.tag)).unrecorded, LONG)
    return compared(load, rows_of(system.sql, load.tag))


@pytest.mark.parametrize("service", ["executor", "dispatcher", "monitor", "registrar"])
def test_what_is_recorded_is_what_was_said(system: Whole, service: str) -> None:
    stock, library = run(suffer(system, service))
    found = told(system, stock)
    # An executor that is stopped just before its reply leaves it says it when it goes on, after its dispatcher's refusal (ADR 12).
    crossed = set() if service != "executor" else found.refused["deadline"]
    assert {name: stock.replies[name] for name in found.other - crossed} == {}
    assert (found.unrecorded, found.differs, found.charged) == (set(), set(), set())
    assert wrong(stock) == {}
    if service != "dispatcher":  # only what a dispatcher died with unread has no reply
        assert (found.silent, found.unserved) == (set(), set())

    # Who sends again gets a reply to everything, and of each query there is one row that says it.
    assert wrong(library) == {}
    assert {name: end for name, end in library.others.items() if not isinstance(end, infaas.Refused)} == {}
    eventually(lambda: not astray(library, rows_of(system.sql, library.tag)), LONG)
    assert astray(library, rows_of(system.sql, library.tag)) == {}

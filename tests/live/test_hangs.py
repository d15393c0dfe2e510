"""Processes of a whole system are stopped for good: each is replaced, and until then every door says so."""

import json
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

import pytest

from tests.support.servers.processes import eventually, fetched
from tests.support.servers.system import Whole, running

LONG = 240.0  # s; only ends a failing test


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Whole]:
    with running(tmp_path_factory.mktemp("hangs") / "data", "--no-dashboard") as whole:
        yield whole


def stop(pids: list[int]) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP)


def whole_again(system: Whole) -> bool:
    return fetched(system.metrics.replace("/metrics", "/readyz"))[0] == 200


@pytest.mark.parametrize("service", ["executor", "dispatcher", "monitor"])
def test_a_process_that_is_stopped_for_good_is_replaced_and_all_doors_tell_it(system: Whole, service: str) -> None:
    assert eventually(lambda: whole_again(system), LONG)
    page, door = system.metrics.replace("/metrics", "/readyz"), f"{system.gateway}/v2/health/ready"
    first = system.pids(service)

    def told(url: str, part: str) -> Callable[[], bool]:
        def asked() -> bool:
            stop(system.pids(service))  # the one that took its place, too, until somebody has looked
            status, body = fetched(url)
            return status == 503 and part in body

        return asked

    assert eventually(told(page, f"{service}-"), LONG)
    if service == "monitor":  # it says to all others which executors live: what they lack then hides no cause
        assert eventually(told(page, "a living executor"), LONG)
    assert eventually(told(door, f"{service}-"), LONG)
    assert eventually(lambda: whole_again(system), LONG), fetched(page)
    assert eventually(lambda: fetched(door) == (200, '{"ready":true}'), LONG), fetched(door)
    assert eventually(lambda: not set(first) & set(system.pids(service)), LONG), "the old one goes once it is replaced"

    said = system.done("logs", "up")
    assert f"{service}-" in said
    assert "did not turn for 2 s (stopped by a signal): ended and started again" in said

    def counted() -> bool:
        lines = fetched(system.metrics)[1].splitlines()
        hangs = [line for line in lines if line.startswith("infaas_part_hangs_total{") and f'"{service}-' in line]
        return sum(float(line.rpartition(" ")[2]) for line in hangs) >= 1 and 'infaas_ready{process="up"} 1.0' in lines

    assert eventually(counted, LONG), fetched(system.metrics)


def test_the_history_says_why_an_executor_ended(system: Whole) -> None:
    """One that is stopped once goes on until its successor is ready; one that is stopped again is ended, or goes on and leaves if that is ready."""
    assert eventually(lambda: whole_again(system), LONG)
    first, began = system.pids("executor"), datetime.now(UTC)

    def gone() -> bool:
        stop(first)
        return not set(first) & set(system.pids("executor"))

    def told() -> bool:
        found = system.rows("SELECT reason FROM infaas.worker_events WHERE time > %s", began)
        return any("it did not turn for 2 s (stopped by a signal) and was ended" in reason for (reason,) in found)

    assert eventually(gone, LONG)
    assert eventually(told, LONG)
    assert eventually(lambda: whole_again(system), LONG)


def test_a_database_that_is_stopped_is_told_by_all_and_stops_no_query(system: Whole) -> None:
    """Each look may come too late, on a slow machine: then the server has been replaced, and is stopped once more."""
    place = system.directory / "postgres" / "postmaster.pid"

    def stopped(look: Callable[[], bool]) -> Callable[[], bool]:
        def asked() -> bool:
            with suppress(OSError, ValueError):
                stop([int(place.read_text().split("\n")[0])])
            return look()

        return asked

    def status() -> bool:
        found = json.loads(system.command("status", "--json").stdout or "{}")
        return not found.get("ready", True) and any(word.startswith("postgres:") for word in found["missing"])

    def doctor() -> bool:
        checks = {check["check"]: check for check in json.loads(system.command("doctor", "--json").stdout)["checks"]}
        return checks["parts"]["state"] == "failed" and "postgres:" in checks["parts"]["detail"]

    def door() -> bool:
        code, body = fetched(f"{system.gateway}/v2/health/ready")
        return code == 200 and "postgres: silent" in body

    try:
        for look in (door, status, doctor):
            assert eventually(stopped(look), LONG)
    finally:
        with suppress(OSError, ValueError):
            os.kill(int(Path(place).read_text().split("\n")[0]), signal.SIGCONT)
    assert eventually(lambda: whole_again(system), LONG), fetched(system.metrics.replace("/metrics", "/readyz"))

"""Fixtures that every test may ask for, how tests are spread over processes, and two options with which `.ci/run` runs nothing twice."""

import gc
import inspect
import json
import os
import signal
import sys
from collections import defaultdict
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from pathlib import Path
from typing import Any

# Once a test has used gRPC, it would start threads in every process that is forked; one with several threads cannot enter
# the user namespace in which root's PostgreSQL runs. Read when gRPC is imported.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

import pytest
from hypothesis import HealthCheck, settings

from tests.support.servers.nats import nats_server, nats_url, prefix, run
from tests.support.servers.postgres import database_dsn, empty_database, empty_dsn, postgres, reader_dsn, superuser_dsn
from tests.support.servers.system import system

__all__ = [
    "database_dsn",
    "empty_database",
    "empty_dsn",
    "nats_server",
    "nats_url",
    "postgres",
    "prefix",
    "reader_dsn",
    "superuser_dsn",
    "system",
]

# What the caller's shell says of a system of theirs is not about the systems of tests. INFAAS_GPU_REPORT: of `make test-gpu`.
for _name in [name for name in os.environ if name.startswith("INFAAS") and name != "INFAAS_GPU_REPORT"]:
    del os.environ[_name]

# Nor is how wide the caller's terminal is, for which tables leave columns out.
for _name in ("COLUMNS", "LINES"):
    os.environ.pop(_name, None)

# Servers of tests are on this machine, wherever the caller's proxy is.
for _name in ("no_proxy", "NO_PROXY"):
    os.environ[_name] = ",".join(filter(None, [os.environ.get(_name), "127.0.0.1", "127.0.0.2", "localhost", "::1"]))

# What the processes of tests import is compiled once, and not once each, wherever the caller has no use for that.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# Processes that a shell without job control starts in the background ignore Ctrl-C, and so would theirs.
signal.signal(signal.SIGINT, signal.default_int_handler)

# The same examples every time, so that a red test means a changed system; HYPOTHESIS_PROFILE=explore looks for new ones.
# Their number never changes, so how long it takes to make them says something about the machine only. `.ci/run` takes `thorough`.
ALWAYS = settings(derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("repeatable", ALWAYS, max_examples=25)
settings.register_profile("thorough", ALWAYS)
settings.register_profile("explore", deadline=None, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))

DURATIONS = Path(__file__).with_name("durations.json")


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("what an environment lacks")
    group.addoption("--skipped-to", metavar="FILE", help="write the ids of the tests and modules that skipped")
    group.addoption("--only-skipped", metavar="FILE", help="run the tests of such a file, and no others")
    parser.addoption("--keep-durations", action="store_true", help=f"write what each file took into {DURATIONS.name}")


def pytest_configure(config: pytest.Config) -> None:
    file = config.getoption("--skipped-to")
    if file and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Skipped(Path(file)))
    if config.getoption("--keep-durations") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Durations(target(config)))


class Skipped:
    """Ids of what skipped, in a file at the end; workers' reports come to their controller."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._ids: set[str] = set()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.skipped and not hasattr(report, "wasxfail"):
            self._ids.add(report.nodeid)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.skipped:
            self._ids.add(report.nodeid)

    def pytest_sessionfinish(self) -> None:
        self._file.write_text("".join(f"{one}\n" for one in sorted(self._ids)))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    file = config.getoption("--only-skipped")
    if not file:
        return
    skipped = set(Path(file).read_text().splitlines())
    wanted = [item for item in items if {item.nodeid, item.nodeid.partition("::")[0]} & skipped]
    config.hook.pytest_deselected(items=[item for item in items if item not in wanted])
    items[:] = wanted


def pytest_collection_finish() -> None:
    """What has been imported and collected stays until the end: no collection of garbage looks through it again."""
    gc.collect()
    gc.freeze()


def target(config: pytest.Config) -> str:
    return "make test" if "not slow" in config.option.markexpr else "make test-all"


class Durations:
    """Seconds of each file, what its fixtures took included, in DURATIONS at the end."""

    def __init__(self, target: str) -> None:
        self._target = target
        self._seconds: dict[str, float] = defaultdict(float)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._seconds[report.nodeid.partition("::")[0]] += report.duration

    def pytest_sessionfinish(self) -> None:
        found = {file: round(seconds, 1) for file, seconds in sorted(self._seconds.items())}
        DURATIONS.write_text(json.dumps({**json.loads(DURATIONS.read_text()), self._target: found}, indent=0) + "\n")


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """A test that is a coroutine runs on the loop that production uses. What a fixture gives as an asynchronous context is entered there."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    given = {name: pyfuncitem.funcargs[name] for name in inspect.signature(pyfuncitem.obj).parameters}

    async def whole() -> None:
        async with AsyncExitStack() as stack:
            for name, value in given.items():
                if isinstance(value, AbstractAsyncContextManager):
                    given[name] = await stack.enter_async_context(value)
            await pyfuncitem.obj(**given)

    run(whole())
    return True


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Of `--dist loadfile`: the tests of a file stay together, and what took longest comes first.

    In `make test` the live ones stay together, too: one whole system serves the run.
    """
    if config.getvalue("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    together = "tests/live/" if target(config) == "make test" else "no such file"

    class LongestFirst(LoadFileScheduling):
        def __init__(self) -> None:
            super().__init__(config, log)
            self._kept: dict[str, float] = defaultdict(float)
            for file, seconds in json.loads(DURATIONS.read_text())[target(config)].items():
                self._kept[self._split_scope(file)] += seconds

        def _split_scope(self, nodeid: str) -> str:
            return together if nodeid.startswith(together) else super()._split_scope(nodeid)

        def _assign_work_unit(self, node: Any) -> None:
            first = max(self.workqueue, key=lambda scope: self._kept.get(scope, len(self.workqueue[scope])))
            self.workqueue.move_to_end(first, last=False)
            super()._assign_work_unit(node)

    return LongestFirst()

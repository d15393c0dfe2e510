"""One whole system for a test session: `infaas up` with two small models of the demo registered."""

import json
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import psycopg
import pytest

import infaas
from infaas.demo import digits
from tests.support.servers.nats import run, skip_without_nats
from tests.support.servers.processes import infaas as command
from tests.support.servers.processes import pids_of, program, read_line

APP = "digits"
MODELS = ("logreg", "mlp-s")
QUICK = "[registrar]\nthreads = [1]\nmax_batches = [8]\n"


class Whole(NamedTuple):
    """nats, sql, gateway: URLs as a user sees them; gateway_grpc: as host:port. x, y: unseen digits and their labels, FP32 [n, 784] and int64 [n]."""

    directory: Path
    nats: str
    sql: str
    dashboard: str
    x: np.ndarray
    y: np.ndarray
    gateway: str = ""
    gateway_grpc: str = ""

    @property
    def where(self) -> tuple[str, str]:
        """The option that names it to a command."""
        return "--data-dir", str(self.directory)

    @property
    def metrics(self) -> str:
        """The URL of its page of metrics, as `infaas up` wrote it down."""
        return str(json.loads((self.directory / "endpoints.json").read_text())["metrics"])

    def rows(self, query: str, *values: Any) -> list[tuple[Any, ...]]:
        """What SQL says."""
        with psycopg.connect(self.sql) as connection:
            return connection.execute(query.encode(), values).fetchall()

    def command(self, *arguments: str, **more: Any) -> "subprocess.CompletedProcess[str]":
        return command(*arguments, *self.where, **more)

    def done(self, *arguments: str, **more: Any) -> str:
        """What a command prints that succeeds."""
        done = self.command(*arguments, **more)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def told(self, *arguments: str, **more: Any) -> Any:
        """The document that such a command prints; of a list, the items."""
        document = json.loads(self.done(*arguments, "--json", **more))
        return document.get("items", document)

    def pids(self, service: str, worker: str = "") -> list[int]:
        return pids_of(self.directory, service, worker)

    def register(
        self, app: str, model: bytes, x: np.ndarray | None = None, y: np.ndarray | None = None, *how: str
    ) -> Any:
        """As app and model of this name; without x and y with those of `tiny_models.mlp`. What the command says."""
        from tests.support.models import tiny_models

        file, validation = (self.directory.parent / f"{app}.{ending}" for ending in ("onnx", "npz"))
        file.write_bytes(model)
        if x is None or y is None:
            x, y = tiny_models.digits()
        validation.write_bytes(tiny_models.npz(x=x, y=y))
        return self.told("register", str(file), "--app", app, "--model", app, "--validation", str(validation), *how)


def talk(system: Whole, work: Callable[[Any], Any]) -> Any:
    """Do it with a client of its own."""

    async def main() -> Any:
        async with infaas.connect(system.nats) as client:
            return await work(client)

    return run(main())


@contextmanager
def running(directory: Path, *options: str, **more: str) -> Iterator[Whole]:
    """`infaas up` with this data directory, these options and variables, and no models; it ends with the block."""
    skip_without_nats()
    errors = directory.parent / "up.err"
    command = ("infaas.cli", "up", "--json", "--data-dir", str(directory), *options)
    with program(*command, errors=errors, patience=180.0, **more) as process:
        urls = json.loads(read_line(process))
        assert read_line(process).startswith("ready"), errors.read_text()
        unseen = digits.load(digits.UNSEEN)
        places = [urls.get(name) or "" for name in ("nats", "sql", "dashboard")]
        doors = [urls.get(name) or "" for name in ("gateway", "gateway_grpc")]
        yield Whole(directory, *places, unseen.x, unseen.y, *doors)


@contextmanager
def with_digits(directory: Path, *options: str, models: Sequence[str] = MODELS, **more: str) -> Iterator[Whole]:
    """As `running`, with the app `digits` served by these models."""
    with running(directory, *options, **more) as whole:
        validation = digits.save_validation(directory.parent / "validation.npz")
        for model in models:
            about = ("--app", APP, "--model", model, "--validation", str(validation))
            whole.done("register", str(digits.models()[model]), *about)
        yield whole


@pytest.fixture(scope="session")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Whole]:
    """The one of most tests, which leave the app `digits` as they found it."""
    with with_digits(tmp_path_factory.mktemp("whole") / "data") as whole:
        yield whole


@pytest.fixture(scope="session")
def doubled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Whole]:
    """A running system of two dispatchers and two workers whose registrations are quick, without a dashboard; tests bring their models."""
    directory = tmp_path_factory.mktemp("doubled") / "data"
    config = directory.parent / "infaas.toml"
    config.write_text(QUICK)
    options = ("--no-dashboard", "--dispatchers", "2", "--workers", "2", "--config", str(config))
    with running(directory, *options) as whole:
        yield whole

"""One whole system for a test session: `infaas up` with two small models of the demo registered."""

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from infaas.demo import digits
from services.shell.host.nats import find_nats_server
from services.shell.host.process import ServerError
from tests.support.servers.processes import environ, infaas, read_line

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


@contextmanager
def running(directory: Path, *options: str) -> Iterator[Whole]:
    """`infaas up` with this data directory and these options, and no models; it ends with the block."""
    try:
        find_nats_server()
    except ServerError as error:
        pytest.skip(str(error))
    command = (sys.executable, "-P", "-m", "infaas.cli", "up", "--json", "--data-dir", str(directory), *options)
    with (
        (directory.parent / "up.err").open("w") as errors,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environ()) as process,
    ):
        try:
            urls = json.loads(read_line(process))
            assert read_line(process).startswith("ready"), (directory.parent / "up.err").read_text()
            unseen = digits.load(digits.UNSEEN)
            yield Whole(
                directory,
                urls["nats"],
                urls["sql"],
                urls.get("dashboard", ""),
                unseen.x,
                unseen.y,
                urls.get("gateway", ""),
                urls.get("gateway_grpc", ""),
            )
        finally:
            process.terminate()
            try:
                process.wait(180)
            except subprocess.TimeoutExpired:
                process.kill()


@contextmanager
def with_digits(directory: Path) -> Iterator[Whole]:
    """As `running`, with the app `digits` served by the models of MODELS."""
    with running(directory) as whole:
        validation = digits.save_validation(directory.parent / "validation.npz")
        for model in MODELS:
            done = infaas(
                *("register", str(digits.models()[model]), "--app", APP, "--model", model),
                *("--validation", str(validation), "--data-dir", str(directory)),
            )
            assert done.returncode == 0, done.stderr
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

"""One whole system for a test session: `infaas up` with two small models of the demo registered."""

import json
import subprocess
import sys
from collections.abc import Iterator
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


@pytest.fixture(scope="session")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Whole]:
    """A running system with the app `digits` served by the models of MODELS."""
    try:
        find_nats_server()
    except ServerError as error:
        pytest.skip(str(error))
    directory = tmp_path_factory.mktemp("whole") / "data"
    command = (sys.executable, "-P", "-m", "infaas.cli", "up", "--json")
    with (directory.parent / "up.err").open("w") as errors:
        process = subprocess.Popen(
            [*command, "--data-dir", str(directory)], stdout=subprocess.PIPE, stderr=errors, text=True, env=environ()
        )
    with process:
        try:
            urls = json.loads(read_line(process))
            assert read_line(process).startswith("ready"), (directory.parent / "up.err").read_text()
            validation = digits.save_validation(directory.parent / "validation.npz")
            for model in MODELS:
                done = infaas(
                    *("register", str(digits.models()[model]), "--app", APP, "--model", model),
                    *("--validation", str(validation), "--data-dir", str(directory)),
                )
                assert done.returncode == 0, done.stderr
            unseen = digits.load(digits.UNSEEN)
            yield Whole(
                directory,
                urls["nats"],
                urls["sql"],
                urls["dashboard"],
                unseen.x,
                unseen.y,
                urls["gateway"],
                urls["gateway_grpc"],
            )
        finally:
            process.terminate()
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()

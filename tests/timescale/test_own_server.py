"""TEST_TIMESCALE_DSN: the tests make databases of their own on a server that is named, and take them away again."""

import os
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import psycopg
import pytest

from tests.support.servers.processes import ROOT, environ
from tests.timescale.wasm import WasmTimescale, missing

pytestmark = [pytest.mark.timescale, pytest.mark.timeout(900)]


@pytest.mark.skipif("TEST_TIMESCALE_DSN" in os.environ, reason="it is in use")
def test_a_server_of_ones_own_can_be_named(tmp_path: Path) -> None:
    if reason := missing():
        pytest.skip(reason)
    databases = "SELECT datname FROM pg_database ORDER BY 1"
    with WasmTimescale(tmp_path / "data") as server:
        with closing(psycopg.connect(server.dsn, autocommit=True)) as connection:
            before = connection.execute(databases).fetchall()
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "timescale"]
        command += ["tests/timescale/test_levels.py", "-k", "an_outcome_is_recorded_once"]
        done = subprocess.run(
            command,
            cwd=ROOT,
            env=environ(TEST_TIMESCALE_DSN=server.dsn),
            capture_output=True,
            text=True,
            timeout=800,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert "1 passed" in done.stdout
        with closing(psycopg.connect(server.dsn, autocommit=True)) as connection:
            assert connection.execute(databases).fetchall() == before

"""What `tests/conftest.py` does: no variable of the caller's systems, coroutines are run, and what skipped can be run alone."""

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.conftest import pytest_pyfunc_call
from tests.support.servers.processes import ROOT, environ


def test_a_test_that_is_a_coroutine_fails_like_any_other_and_what_its_fixtures_opened_is_closed() -> None:
    seen: list[str] = []

    @asynccontextmanager
    async def opened() -> AsyncIterator[str]:
        yield "open"
        seen.append("closed")

    async def fine(place: str, number: int) -> None:
        seen.append(f"{place} {number}")

    async def fails(place: str) -> None:
        raise AssertionError(place)

    def ran(obj: Any, **given: Any) -> bool | None:
        item: Any = SimpleNamespace(obj=obj, funcargs={"place": opened(), **given, "another fixture's": 1})
        return pytest_pyfunc_call(item)

    assert ran(fine, number=3) is True
    assert seen == ["open 3", "closed"]
    with pytest.raises(AssertionError, match="open"):
        ran(fails)
    assert ran(lambda: None) is None, "pytest itself calls a function"


TESTS = """
import os
import pytest

def test_environment():
    assert [name for name in os.environ if name.startswith(("INFAAS", "PYTHONDONT"))] == []

@pytest.mark.parametrize("text", ["a b::c", ""])
def test_skips_once(text):
    pytest.importorskip("nobodys_package")

def test_passes():
    pass
"""


@pytest.mark.xfail(raises=ZeroDivisionError, strict=True)
async def test_a_coroutine_runs_to_its_end_with_what_it_asks_for(tmp_path: Path) -> None:
    await asyncio.sleep(0)
    assert tmp_path.name
    raise ZeroDivisionError


@pytest.mark.slow
def test_what_skipped_runs_alone(tmp_path: Path) -> None:
    def run(*options: str, **more: str) -> str:
        command = [sys.executable, "-m", "pytest", "-p", "tests.conftest", "-n", "2", *options]
        command += ["-c", "pyproject.toml", f"--rootdir={tmp_path}", str(tmp_path)]
        done = subprocess.run(
            command, cwd=ROOT, env=environ(**more), capture_output=True, text=True, check=False, timeout=240
        )
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        return done.stdout.splitlines()[-1]

    (tmp_path / "test_some.py").write_text(TESTS)
    (tmp_path / "test_whole.py").write_text("import pytest\npytest.importorskip('nobodys_package')\n" + TESTS)
    skipped = tmp_path / "skipped"
    said = run(f"--skipped-to={skipped}", INFAAS="1", INFAAS_DATA_DIR="/nowhere", PYTHONDONTWRITEBYTECODE="1")
    assert "2 passed, 3 skipped" in said
    assert skipped.read_text().splitlines() == [
        "test_some.py::test_skips_once[]",
        "test_some.py::test_skips_once[a b::c]",
        "test_whole.py",
    ]
    (tmp_path / "nobodys_package.py").touch()  # the extra
    assert "6 passed in" in run(f"--only-skipped={skipped}", PYTHONPATH=f"{ROOT}:{tmp_path}")

"""Every program of benches/ still imports what it measures, and says how it is used."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.servers.processes import ROOT, environ

# options: of its own, of the figures', of the generators'
READS = re.compile(r"ArgumentParser|compare\.main\(|from closed_loop")
PROGRAMS = sorted(
    path for path in (ROOT / "benches").rglob("*.py") if "__main__" in (text := path.read_text()) and READS.search(text)
)
NEEDED = {"gateway_fuzz": "schemathesis", "mlperf": "mlperf_loadgen"}  # what only an extra brings, or nothing


@pytest.mark.slow
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda path: path.stem)
def test_a_program_says_how_it_is_used(program: Path) -> None:
    library = NEEDED.get(program.stem)
    if library is not None and importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed")
    done = subprocess.run(
        [sys.executable, str(program), "--help"], env=environ(), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"usage: {program.name}")


def test_the_shipped_day_is_what_the_program_writes_for_its_seed() -> None:
    sys.path.insert(0, str(ROOT / "benches"))
    from paper.lookalike import OUT, text

    assert OUT.read_text() == text(1, 10)
    assert OUT.stat().st_size < 100_000

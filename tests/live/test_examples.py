"""Each program of examples/ does what it says, beside a running system; where the library that it needs is installed."""

import importlib.util
import re
import runpy
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.servers.processes import ROOT, environ
from tests.support.servers.system import Whole

EXAMPLES = ROOT / "examples"
PROGRAMS = sorted(path for path in EXAMPLES.glob("*.py") if path.name != "__init__.py")
NOTEBOOKS = sorted(EXAMPLES.glob("*.ipynb"))
# What each prints when it is right.
PRINTED = {
    "scikit_learn": r"(2[4-9]|30) of 30 right, by \S+-v\d+-\S+",
    "torch_module": r"([7-9]|10) of 10 right, by \S+-v\d+-\S+",
    "two_inputs": r"50 m2 in Delft: (9[5-9]\d|10[0-5]\d)\n100 m2 in Lille: 1[12]\d\d\n",
    "text": r"cheese!: food\n.*wind: weather\n.*hotel\): travel\n",
    "pictures": r"(1[5-9]|20) of 20 right, the first is (one|two|three|four|five|six|seven|eight|nine|zero), by ",
    "detector": r"(4[5-9]|5\d) of 59 digits right, 0 to 6 a form",
    "ensemble": r"(8\d|9\d|100) of 100 right together\n(\S+: weight 0\.\d\d after 100 feedbacks\n){3}",
}
EXECUTE = """
import sys, nbclient, nbformat
notebook = nbformat.read(sys.argv[1], as_version=4)
nbclient.NotebookClient(notebook, timeout=600, kernel_name="python3").execute()
print(*(output.get("text", "") for cell in notebook.cells for output in cell.get("outputs", [])))
"""


def test_every_program_is_short_and_in_the_table() -> None:
    table = (EXAMPLES / "README.md").read_text()
    for path in (*PROGRAMS, *NOTEBOOKS):
        assert f"[{path.name}]({path.name})" in table
    assert {path.stem for path in PROGRAMS} == set(PRINTED)
    assert [path.name for path in PROGRAMS if len(path.read_text().splitlines()) > 60] == []


def _run(system: Whole, directory: Path, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=directory,
        env=environ(INFAAS_DATA_DIR=str(system.directory)),
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-3000:]}"
    return done.stdout


@pytest.mark.timeout(900)
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda path: path.stem)
def test_a_program(system: Whole, tmp_path: Path, program: Path) -> None:
    for library in set(re.findall(r"^ *(?:from|import) (sklearn|torch)\b", program.read_text(), re.MULTILINE)):
        if importlib.util.find_spec(library) is None:
            pytest.skip(f"{library} is not installed")
    printed = _run(system, tmp_path, str(program))
    assert re.search(PRINTED[program.stem], printed), printed
    if program.stem == "pictures":
        _by_other_doors(system, tmp_path / "seven.jpg", runpy.run_path(str(program), run_name="read"))


def _by_other_doors(system: Whole, file: Path, example: dict[str, Any]) -> None:
    """Its app answers a file's bytes from the shell and as the body of a request, and refuses what is no picture as the client's mistake."""
    file.write_bytes(example["jpeg"](np.eye(8) * 16))
    said = system.told("query", "jpegs", "--input", str(file))
    assert said["labels"][0] in example["NAMES"]
    head = {"Inference-Header-Content-Length": "0", "Content-Type": "application/octet-stream"}

    def post(body: bytes) -> bytes:
        request = urllib.request.Request(f"{system.gateway}/v2/models/jpegs/infer", body, head)
        with urllib.request.urlopen(request, timeout=60) as reply:
            return bytes(reply.read())

    assert str(said["labels"][0]).encode() in post(file.read_bytes()), "outputs come as binary data, too"
    with pytest.raises(urllib.error.HTTPError) as refused:
        post(b"no picture")
    assert (refused.value.code, "this is no picture" in refused.value.read().decode()) == (400, True)
    listed = system.told("variants", "--app", "jpegs")
    named = {one["functions"].rpartition(" (")[0] for one in listed}  # the rest is the time that they take
    assert named == {"before pictures.py:decode and after pictures.py:name"}


@pytest.mark.timeout(900)
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook(system: Whole, tmp_path: Path, notebook: Path) -> None:
    for library in ("sklearn", "nbclient", "ipykernel"):
        if importlib.util.find_spec(library) is None:
            pytest.skip(f"{library} is not installed")
    assert "accuracy 0.9" in _run(system, tmp_path, "-c", EXECUTE, str(notebook))

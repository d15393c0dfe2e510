"""`infaas apply` and `infaas export` on a running system."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from tests.support.models.tiny_models import digits, exact, made, mlp, npz
from tests.support.servers.ensembles import Ensembles
from tests.support.servers.processes import infaas

FILE = """
[[app]]
name = "applied"
latency_ms = 5000
slo_target = 0.9
quality_act = "refuse"
payloads = 0.25
selection = { policy = "majority", members = ["first"], cache_mb = 1 }
[[app]]
name = "applied-too"
models = { first = "7" }
[[app]]
name = "applied-pipe"
default_output = [0.5]
[[model]]
name = "first"
version = "7"
app = "applied"
file = "first.onnx"
validation = "validation.npz"
[[model]]
name = "rated"
app = "rated"
file = "first.onnx"
validation = "worded.npz"
metric = "score.py:near"
[[model]]
name = "priced"
app = "priced"
file = "priced.onnx"
validation = "priced.npz"
metric = "mae"
target = "price"
unit = "EUR"
[[pipeline]]
pipeline = { name = "applied-pipe", latency_ms = 9000 }
vertex = [{ name = "only", app = "applied-too", inputs = { x = "$.x" } }]
output = { scores = "only.scores" }
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    x, y = digits()
    (tmp_path / "first.onnx").write_bytes(exact(mlp(seed=77)))
    (tmp_path / "validation.npz").write_bytes(npz(x=x, y=y))
    mean = "(float[n, 16] x) => (float[n, 1] price) {price = ReduceMean<axes=[1], keepdims=1>(x)}"
    (tmp_path / "priced.onnx").write_bytes(made(mean))
    (tmp_path / "priced.npz").write_bytes(npz(x=x, y=x.mean(axis=1)))
    (tmp_path / "worded.npz").write_bytes(npz(x=x, y=np.array([f"class {one}" for one in y])))
    score = "def near(y, outputs):\n    return float((outputs['scores'].argmax(axis=1) == [int(one[6:]) for one in y]).mean())\n"
    (tmp_path / "score.py").write_text(score)
    (tmp_path / "system.toml").write_text(FILE)
    return tmp_path / "system.toml"


def test_a_file_is_applied_once_and_what_is_exported_changes_nothing(
    ensembles: Ensembles, file: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    def applied(path: Path, *options: str) -> list[str]:
        said = infaas("apply", str(path), "--json", *options, *ensembles.where)
        assert said.returncode == 0, said.stderr
        return [" ".join(one.split()[:4]) for one in json.loads(said.stdout)["changes"]]

    plan = applied(file, "--dry-run")
    assert [one.split(":")[0] for one in plan] == [
        "+ app applied", "+ app applied-too", "+ app applied-pipe", "+ model first version", "+ model rated for", "+ model priced for",
        "~ selection of app", "+ model first version", "+ pipeline applied-pipe of",
    ]  # fmt: skip
    assert applied(file) == plan
    assert applied(file) == []
    elsewhere = tmp_path_factory.mktemp("elsewhere") / "system.toml"
    elsewhere.write_text(text := infaas("export", *ensembles.where).stdout)
    assert applied(elsewhere) == []
    assert 'quality_act = "refuse"\npayloads = 0.25\n' in text and 'name = "applied-pipe"\ndefault_output = ' in text
    assert 'metric = "near"' in text and 'target = "price"\nunit = "EUR"' in text
    assert infaas("export", "--files", str(elsewhere.parent), *ensembles.where).returncode == 0
    assert elsewhere.read_text() == text
    whole = elsewhere.parent / "models" / "rated-1.npz"  # with the metric's function: the set is what was sent
    assert applied(elsewhere) == [] and whole.is_file()
    file.write_text(FILE.replace("5000", "6000"))
    assert applied(file) == ["~ app applied: latency_ms"]
    file.write_text(FILE.replace("5000", "6000").replace('"refuse"', '"report"').replace("0.25", "0.5"))
    said = infaas("apply", str(file), "--dry-run", *ensembles.where).stdout
    assert '~ app applied: quality_act "report" (was refuse), payloads 0.5 (was 0.25)' in said
    file.write_text(FILE.replace('"first.onnx"', '"validation.npz"'))
    told = infaas("apply", str(file), *ensembles.where)
    assert (told.returncode, "model[0].version: version 7 of first is another file" in told.stderr) == (2, True)
    file.write_text(FILE.replace('"first.onnx"', '"validation.npz"').replace('"priced.npz"', '"none.npz"'))
    told = infaas("apply", str(file), *ensembles.where).stderr
    assert "model[0].version: version 7 of first" in told and "model[2].validation: there is no file" in told


def test_a_repository_of_triton_is_applied(ensembles: Ensembles, tmp_path: Path) -> None:
    (tmp_path / "fromtriton" / "3").mkdir(parents=True)
    (tmp_path / "fromtriton" / "3" / "model.onnx").write_bytes(exact(mlp(seed=78)))
    (tmp_path / "fromtriton" / "config.pbtxt").write_text('backend: "onnxruntime"\n')
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.pbtxt").write_text('backend: "python"\n')
    (tmp_path / "broken" / "1").mkdir(parents=True)
    (tmp_path / "broken" / "1" / "model.onnx").write_bytes(b"no model")
    said = infaas("apply", str(tmp_path), *ensembles.where)
    assert (said.returncode, "1 of 2 changes were not made" in said.stderr) == (1, True), said.stderr
    assert "left out: other: it is of python" in said.stderr
    shutil.rmtree(tmp_path / "broken")
    assert "nothing to change" in infaas("apply", str(tmp_path), *ensembles.where).stdout


@pytest.mark.parametrize(
    ("mended", "told"),
    [
        ((), ["model[0].nam: there is no such key; did you mean name?", "app[0].latency_ms: must be above 0, not -5"]),
        (("nam =", "name ="), ["app[0].latency_ms: must be above 0, not -5"]),
        (
            ("nam =", "name =", "-5", "5", "9000 }", "9000 }\nfile = 'other.toml'"),
            ["pipeline[0].file: says all of the pipeline"],
        ),
    ],
)
def test_all_that_a_file_says_wrong_is_named_by_its_key(mended: tuple[str, ...], told: list[str], file: Path) -> None:
    text = FILE.replace('name = "first"', 'nam = "first"').replace("5000", "-5")
    for one, other in zip(mended[::2], mended[1::2], strict=True):
        text = text.replace(one, other)
    file.write_text(text)
    said = infaas("apply", str(file), "--data-dir", str(file.parent))
    assert (said.returncode, said.stderr.count("\n")) == (2, len(told)), said.stderr
    assert all(f"infaas: {file}: {one}" in said.stderr for one in told)

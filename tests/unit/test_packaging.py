"""Rules of the repository that no other test would notice."""

import ast
import re
import subprocess
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SHIPPED = ("bus", "services", "infaas", "dashboard")
SOURCES = sorted(path for name in SHIPPED for path in (ROOT / name).rglob("*.py"))
BESIDES = ("examples", "tools")  # part of the repository, not of the wheel
LOADERS = [*SOURCES, *sorted(path for name in BESIDES for path in (ROOT / name).rglob("*.py"))]
EVERYTHING = [*LOADERS, *sorted(path for name in ("tests", "benches") for path in (ROOT / name).rglob("*.py"))]

UNSAFE_MODULES = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "joblib", "shelve", "marshal"}
NAMED = re.compile("|".join([*UNSAFE_MODULES, "torch"]))  # other sources are not worth parsing


# Reads weights of a package on its user's machine. No service imports it.
PREPARATION = ROOT / "examples" / "photos"


def unsafe(source: str, *, weights: bool = False) -> list[str]:
    """What in this source could run code that a file brings along. weights: torch.load may read tensors alone."""
    found: list[str] = []
    for node in ast.walk(ast.parse(source)) if NAMED.search(source) else ():
        match node:
            case ast.Import(names=names):
                found += [alias.name for alias in names if alias.name.split(".")[0] in UNSAFE_MODULES]
            case ast.ImportFrom(module=str(module), names=names):
                if module.split(".")[0] in UNSAFE_MODULES or (
                    module == "torch" and any(alias.name == "load" for alias in names)
                ):
                    found.append(module)
            case ast.Call(func=function, args=arguments, keywords=keywords):
                called = ast.unparse(function)
                tensors_only = weights and any(word.arg == "weights_only" and is_true(word.value) for word in keywords)
                if called == "torch.hub.load" or (called == "torch.load" and not tensors_only):
                    found.append(called)
                if any(word.arg == "allow_pickle" and not is_false(word.value) for word in keywords):
                    found.append("allow_pickle")
                if called in {"__import__", "import_module", "importlib.import_module"} and any(
                    isinstance(argument, ast.Constant) and str(argument.value).split(".")[0] in UNSAFE_MODULES
                    for argument in arguments
                ):
                    found.append(called)
    return found


def is_true(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is True


def is_false(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is False


def test_no_loader_that_runs_what_it_reads() -> None:
    found = {path: unsafe(path.read_text(), weights=PREPARATION in path.parents) for path in LOADERS}
    assert {str(path.relative_to(ROOT)): names for path, names in found.items() if names} == {}


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "import joblib as j",
        "from cloudpickle import loads",
        "import numpy as np\nnp.load('x', allow_pickle=True)",
        "import numpy as np\nflag = 1\nnp.load('x', allow_pickle=flag)",
        "import torch\ntorch.load('x')",
        "from torch import load",
        "import torch\ntorch.load('x', weights_only=True)",
        "__import__('pickle')",
        "def f():\n    import pickle",
    ],
)
def test_the_scan_sees(source: str) -> None:
    assert unsafe(source)


@pytest.mark.parametrize("more", ["", ", weights_only=False", ", weights_only=flag", ", **{'weights_only': True}"])
def test_where_weights_are_read_only_tensors_pass(more: str) -> None:
    assert unsafe("import torch\ntorch.load('x', weights_only=True)", weights=True) == []
    assert unsafe(f"import torch\ntorch.load('x'{more})", weights=True) == ["torch.load"]
    assert unsafe("import pickle\nimport torch\ntorch.hub.load('x', weights_only=True)", weights=True)


def test_the_scan_lets_good_code_pass() -> None:
    assert unsafe("import numpy as np\nnp.load('x', allow_pickle=False)\nnp.load('y')") == []


@pytest.mark.parametrize("name", SHIPPED)
def test_nobody_else_ships_our_names(name: str) -> None:
    assert set(packages_distributions().get(name, ())) <= {"infaas"}


def test_files_stay_small() -> None:
    lines = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in EVERYTHING}
    assert {name: count for name, count in lines.items() if count > 500} == {}


def test_import_rules_are_kept() -> None:
    linter = Path(sys.executable).with_name("lint-imports")
    if not linter.exists():
        pytest.skip("import-linter is not installed beside this Python")
    result = subprocess.run([linter, "--no-cache"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-1000:]


def test_wheel_holds_what_is_imported() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    shipped = project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    assert set(SHIPPED) == set(shipped)
    for name in ("tests", "benches", "docs", *BESIDES):
        assert not (ROOT / name / "__init__.py").exists(), f"{name} must not become a package of its own"


# Extras that take the place of another package, on machines with the device only: no environment holds them and the rest.
WITH_A_DEVICE = {"tensorrt"}


def pinned() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return dict(line.split("==") for line in lines if line and not line.startswith("#"))


def test_every_dependency_is_pinned() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    groups = {name: lines for name, lines in project["optional-dependencies"].items() if name not in WITH_A_DEVICE}
    assert len(groups) + len(WITH_A_DEVICE) == len(project["optional-dependencies"])
    wanted = [*project["dependencies"], *(line for lines in groups.values() for line in lines)]
    names = {re.split(r"[\[<>=!~ ]", line, maxsplit=1)[0] for line in wanted}
    assert names - set(pinned()) == {"infaas"}, "extras of ours in others"


def test_constraints_name_versions_only() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    wrong = [
        line for line in lines if not line.startswith("#") and not re.fullmatch(r"[a-z0-9-]+==[0-9][0-9a-z.]*", line)
    ]
    assert wrong == []
    assert pinned()["torch"] == "2.13.0", "no local version tag: plain pip must be able to resolve it"

"""Tests are collected wherever `make test` has made the environment: what only an extra brings, a module asks for by `pytest.importorskip`."""

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from importlib.metadata import packages_distributions, requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.live.conftest import CROSSINGS

ROOT = Path(__file__).parents[2]
OURS = {"bus", "services", "infaas", "dashboard", "tests", "benches", "examples", "tools"}
# benches/ are programs that stand beside each other; their tests put them on the path.
OURS |= {name for path in (ROOT / "benches").rglob("*.py") for name in (path.stem, path.parent.name)}
COLLECTED = sorted(path for pattern in ("test_*.py", "conftest.py") for path in (ROOT / "tests").rglob(pattern))
_distributions = cache(packages_distributions)


def normal(distribution: str) -> str:
    return re.sub(r"[-_.]+", "-", distribution).lower()


@cache
def named() -> frozenset[str]:
    """The distributions that pyproject.toml names, extras of others and `dev` included. What they bring besides may change with them."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    lines = [*project["dependencies"], *extras["dev"]]
    for line in lines:
        lines += [one for extra in Requirement(line).extras if line.startswith("infaas[") for one in extras[extra]]
    found = [Requirement(line) for line in lines]
    found += [
        of
        for one in found
        for extra in one.extras
        for of in map(Requirement, requires(one.name) or ())
        if only_of(extra, of)
    ]
    return frozenset(normal(one.name) for one in found)


def only_of(extra: str, requirement: Requirement) -> bool:
    marker = requirement.marker
    return marker is not None and marker.evaluate({"extra": extra}) and not marker.evaluate({"extra": ""})


@cache
def is_there(package: str) -> bool:
    """Whether Python, this repository or `pip install '.[dev]'` brings this top-level package."""
    if package in sys.stdlib_module_names or package in OURS:
        return True
    return any(normal(name) in named() for name in _distributions().get(package, ()))


def at_import(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements that run when the module is imported, and must not fail."""
    for node in body:
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                pass
            case ast.If(test=ast.Name(id="TYPE_CHECKING")):
                yield from at_import(node.orelse)
            case ast.Try(handlers=handlers) if any("ImportError" in ast.dump(one) for one in handlers):
                yield from at_import(node.orelse)
            case ast.If() | ast.Try() | ast.With() | ast.For() | ast.ClassDef():
                yield node
                for part in ("body", "orelse", "finalbody"):
                    yield from at_import(getattr(node, part, []))
            case _:
                yield node


def imported(node: ast.stmt) -> list[str]:
    """Modules that a statement imports; `from a import b` may mean a.b."""
    match node:
        case ast.Import(names=names):
            return [alias.name for alias in names]
        case ast.ImportFrom(module=str(module), names=names, level=0):
            return [module, *(f"{module}.{alias.name}" for alias in names)]
    return []


def asked_for(node: ast.stmt) -> set[str]:
    """Top-level packages without which this statement skips the module."""
    return {
        call.args[0].value.partition(".")[0]
        for call in ast.walk(node)
        if isinstance(call, ast.Call)
        and ast.unparse(call.func) == "pytest.importorskip"
        and isinstance(call.args[0], ast.Constant)
    }


@cache
def source(module: str) -> str | None:
    """A module of this repository."""
    path = ROOT.joinpath(*module.split("."))
    return next(
        (file.read_text() for file in (path.with_suffix(".py"), path / "__init__.py") if file.is_file()),
        None,
    )


_needed: dict[str, set[str]] = {}


def needed(module: str) -> set[str]:
    """What a module of ours needs that only an extra brings; one that skips itself needs what it asks for."""
    if module not in _needed:
        _needed[module] = set()  # while it is looked at: modules may import each other
        if (text := source(module)) is not None:
            asks = {package for node in at_import(ast.parse(text).body) for package in asked_for(node)}
            _needed[module] = {package for package in asks if not is_there(package)} | set(missing(text))
    return _needed[module]


def missing(text: str) -> dict[str, str]:
    """What importing this source needs that only an extra brings: the package, and the import that leads to it."""
    found: dict[str, str] = {}
    asked: set[str] = set()
    for node in at_import(ast.parse(text).body):
        asked |= asked_for(node)
        for module in imported(node):
            package = module.partition(".")[0]
            needs = needed(module) if package in OURS else set() if is_there(package) else {package}
            found |= dict.fromkeys(needs - asked, module)
    return found


@pytest.mark.slow
def test_modules_ask_for_what_only_an_extra_brings() -> None:
    found = {str(path.relative_to(ROOT)): missing(path.read_text()) for path in COLLECTED}
    assert {name: packages for name, packages in found.items() if packages} == {}, (
        "pytest.importorskip first, or import it where it is used"
    )


def test_make_test_has_a_few_live_tests_that_exist() -> None:
    """The others of tests/live are slow, so that a name that is misspelt would be of no test."""
    named = [(file, name) for file, names in CROSSINGS.items() for name in names]
    assert 20 <= len(named) <= 30
    for file, name in named:
        text = (ROOT / "tests" / "live" / file).read_text()
        assert re.search(rf"^(async )?def {name}\(", text, re.MULTILINE), (file, name)


def test_what_others_bring_along_is_not_named() -> None:
    assert "pillow" in named() and "pyarrow" not in named(), "streamlit needs both"
    assert is_there("PIL") and not is_there("pyarrow")


def test_make_brings_what_tests_use_and_no_extra() -> None:
    assert {"numpy", "pytest", "hypothesis", "sklearn", "PIL"} == {
        name for name in ("numpy", "pytest", "hypothesis", "sklearn", "PIL", "torch", "httpx") if is_there(name)
    }


@pytest.mark.parametrize(
    "text",
    [
        "import httpx",
        "from playwright.sync_api import Page",
        "if True:\n    import torch",
        "import torch\nimport pytest\npytest.importorskip('torch')",
        "class Fake:\n    import torch",
        "from services.simulation import plot",
        "from services.executor.workshop.tasks.torch_files import load",
        "from tests.browser.test_dashboard import open_page",  # it skips itself, and is left half imported
        "import pytest\npytest.importorskip('docker')\nimport torch",
    ],
)
def test_the_scan_sees(text: str) -> None:
    assert missing(text)


@pytest.mark.parametrize(
    "text",
    [
        "import pytest\ntorch = pytest.importorskip('torch')\nimport torch.nn",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch",
        "def test() -> None:\n    import torch",
        "try:\n    import torch\nexcept ImportError:\n    torch = None",
        "import sys, numpy, PIL.Image\nfrom services.core import actor",
        "import pytest\npytest.importorskip('matplotlib')\nfrom services.simulation import plot",
    ],
)
def test_the_scan_lets_pass(text: str) -> None:
    assert missing(text) == {}

"""One composition: every actor has one factory in its own module, and shipped code makes actors nowhere else.

So production and the simulator cannot drift apart: both call the same factory with their settings.
"""

import ast
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SHIPPED = ("bus", "services", "dashboard", "infaas", "benches", "tools")
SIMULATED = {
    "make_dispatcher",
    "make_executor",
    "make_monitor",
    "make_model_autoscaler",
    "make_controller",
    "make_coordinator",
    "make_runner",
}


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def modules() -> list[Path]:
    return [path for name in SHIPPED for path in sorted((ROOT / name).rglob("*.py"))]


def actors(path: Path) -> list[str]:
    """The classes of a module that handle messages."""
    return [
        node.name
        for node in tree(path).body
        if isinstance(node, ast.ClassDef)
        and (
            any(isinstance(one, ast.FunctionDef) and one.name == "handle" for one in node.body)
            or any(isinstance(base, ast.Name) and base.id == "TableActor" for base in node.bases)
        )
    ]


ACTORS = {name: path for path in sorted((ROOT / "services").rglob("actor.py")) if path.parts[-2] != "core" for name in actors(path)}  # fmt: skip


@cache
def made(path: Path) -> list[tuple[str, str]]:
    """(actor, top-level function or class in which it is made) of each call of an actor's constructor."""
    return [
        (name, getattr(top, "name", ""))
        for top in tree(path).body
        for node in ast.walk(top)
        if isinstance(node, ast.Call)
        for name in [getattr(node.func, "attr", None) or getattr(node.func, "id", "")]
        if name in ACTORS
    ]


def test_there_are_actors() -> None:
    assert {"Dispatcher", "Executor", "MonitorActor", "ModelAutoscaler", "Controller", "Coordinator", "Runner"} <= set(
        ACTORS
    )


@pytest.mark.parametrize("actor", sorted(ACTORS))
def test_an_actor_is_only_made_by_its_factory(actor: str) -> None:
    makers = {
        (path, maker) for path in modules() if actor in path.read_text() for name, maker in made(path) if name == actor
    }
    assert len(makers) == 1, makers
    [(path, maker)] = makers
    assert path == ACTORS[actor]
    assert maker.startswith("make_")


def test_the_simulator_calls_the_factories() -> None:
    system = tree(ROOT / "services" / "simulation" / "system.py")
    called = {
        node.func.id for node in ast.walk(system) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    }
    assert called >= SIMULATED

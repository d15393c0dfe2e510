"""There is one way to write an actor: a table from message type to method, each of which returns its effects."""

import ast
from pathlib import Path

import pytest

SERVICES = Path(__file__).parents[2] / "services"
PROTOCOL = SERVICES / "core" / "actor.py"
CALL = "self._on[type(envelope.message)](envelope)"
ACTORS = {
    str(path.relative_to(SERVICES)): ast.parse(path.read_text())
    for path in sorted(SERVICES.rglob("*.py"))
    if path != PROTOCOL and "self._on: dict[type, Handler]" in path.read_text()
}


def test_actors_are_found() -> None:
    assert len(ACTORS) >= 11


@pytest.mark.parametrize("tree", ACTORS.values(), ids=ACTORS)
def test_handle_looks_the_method_up(tree: ast.Module) -> None:
    """First of all. What it does with the effects then is its own concern."""
    members = [one for node in tree.body if isinstance(node, ast.ClassDef) for one in node.body]
    functions = [one for one in members if isinstance(one, ast.FunctionDef) and one.name == "handle"]
    assert functions or "TableActor" in ast.unparse(tree)
    for handle in functions:
        body = [
            node for node in handle.body if not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))
        ]
        assert isinstance(body[0], ast.Return | ast.Assign)
        assert body[0].value is not None
        assert ast.unparse(body[0].value) == CALL


@pytest.mark.parametrize("tree", ACTORS.values(), ids=ACTORS)
def test_effects_are_returned_not_yielded(tree: ast.Module) -> None:
    assert [node.lineno for node in ast.walk(tree) if isinstance(node, ast.Yield | ast.YieldFrom)] == []

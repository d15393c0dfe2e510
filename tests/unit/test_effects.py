"""Nothing is accepted without effect: for each name that a user can set, a test shows what it does (tests/support/data/effects.toml)."""

import ast
import tomllib
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from bus.messages.public import Requirements
from bus.messages.verbs import ADMIN_VERBS, body_of
from infaas.cli import COMMANDS, build
from services.core.settings import Settings, described

TESTS = Path(__file__).parents[1]
TABLE = tomllib.loads((TESTS / "support" / "data" / "effects.toml").read_text())
UNPROVEN = TABLE.pop("unproven")
MOST_UNPROVEN = 0  # it may only shrink


def options() -> list[str]:
    """`command --option` of all commands. Those of operators' verbs are their fields."""
    app = build()
    verbs = {"app", "model", "worker", "job", "release", "payloads", "admin"}
    arguments = (
        (one, each) for one in COMMANDS if one not in verbs for each in app[one].assemble_argument_collection()
    )
    named = ((command, [name for name in one.names if name.startswith("--")]) for command, one in arguments)
    return [f"{command} {names[0]}" for command, names in named if names]


NAMES: dict[str, Callable[[], list[str]]] = {
    "settings": lambda: [setting.key for setting in described(Settings)],
    "needs": lambda: list(Requirements.__struct_fields__),
    "verbs": lambda: list(dict.fromkeys(name for verb in ADMIN_VERBS.values() for name in body_of(verb))),
    "options": options,
}


WAITS = ("raises", "until", "wait_until")  # beside assertions


@cache
def functions(path: Path) -> frozenset[str]:
    """Names of the tests of a file that assert something, or have something raised."""
    tree = ast.parse(path.read_text())
    found = (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
    return frozenset(
        one.name
        for one in found
        if one.name.startswith("test")
        and any(
            isinstance(node, ast.Assert) or (getattr(node, "attr", None) or getattr(node, "id", "")) in WAITS
            for node in ast.walk(one)
        )
    )


@pytest.mark.parametrize("kind", NAMES)
def test_each_name_has_a_test_of_its_effect(kind: str) -> None:
    names = NAMES[kind]()
    missing = [name for name in names if name not in TABLE[kind] and name not in UNPROVEN[kind]]
    assert missing == [], "write a test that sets it and asserts on its effect, and name it in effects.toml"
    assert [name for name in (*TABLE[kind], *UNPROVEN[kind]) if name not in names] == [], "these are no more"
    assert [name for name in UNPROVEN[kind] if name in TABLE[kind]] == [], "these have one now: take them off the list"


@pytest.mark.parametrize("kind", NAMES)
def test_each_named_test_is_there_and_speaks_of_its_name(kind: str) -> None:
    for name, test in TABLE[kind].items():
        file, _, function = test.partition("::")
        path = TESTS / file
        assert path.is_file(), f"{name}: there is no {file}"
        assert function in functions(path), f"{name}: {file} has no {function} that asserts"
        words = [name.split()[-1].split(".")[-1], *(["keep_days"] if ".keep_days." in name else [])]
        text = path.read_text().lower()
        assert any(word.lower() in text for word in words), f"{name}: {file} does not speak of it"


def test_the_list_of_what_nobody_has_proven_only_shrinks() -> None:
    assert sum(map(len, UNPROVEN.values())) <= MOST_UNPROVEN

"""What an actor remembers: every text that can be reached from it, with the way there."""

import re
from collections.abc import Iterator, Mapping
from functools import partial
from types import BuiltinFunctionType, BuiltinMethodType, FunctionType, MethodType, ModuleType
from typing import Any

_LEAVES = (type, ModuleType, BuiltinFunctionType, BuiltinMethodType, int, float, complex, type(None))


def _inside(one: Any) -> Iterator[tuple[str, Any]]:
    """What a thing holds, by the words of a way."""
    if isinstance(one, Mapping):
        for key, value in one.items():
            yield "[]", key
            yield "[]", value
    elif isinstance(one, (list, tuple, set, frozenset)) or type(one).__name__ in ("deque", "dict_values"):
        for each in one:
            yield "[]", each
    elif isinstance(one, MethodType):
        yield "()", one.__self__
    elif isinstance(one, FunctionType):
        for name, cell in zip(one.__code__.co_freevars, one.__closure__ or (), strict=True):
            yield f"({name})", cell.cell_contents
        for each in one.__defaults__ or ():
            yield "()", each
    elif isinstance(one, partial):
        yield from (("()", each) for each in (one.func, *one.args, *one.keywords.values()))
    for base in type(one).__mro__:
        slots = base.__dict__.get("__slots__", ())
        for name in (
            (slots,)
            if isinstance(slots, str)
            else slots
            if isinstance(slots, tuple | list)
            else getattr(base, "__struct_fields__", ())
        ):
            if hasattr(one, name):
                yield f".{name}", getattr(one, name)
    for name, value in getattr(one, "__dict__", {}).items():
        yield f".{name}", value


def remembered(root: Any, pattern: str, *but: Any) -> dict[str, int]:
    """How many texts, or bytes, that hold this pattern can be reached, by the way to them."""
    wanted, wanted_bytes = re.compile(pattern), re.compile(pattern.encode())
    found: dict[str, int] = {}
    seen = set(map(id, but))
    keep: list[Any] = []  # what is made on the way must not give its id away
    ahead: list[tuple[str, Any]] = [("", root)]
    for way, one in ahead:
        if isinstance(one, str | bytes | bytearray):
            if (wanted if isinstance(one, str) else wanted_bytes).search(one):  # type: ignore[arg-type]
                found[way] = found.get(way, 0) + 1
        elif not isinstance(one, _LEAVES) and id(one) not in seen:
            seen.add(id(one))
            keep.append(one)
            ahead.extend((way + word, each) for word, each in _inside(one))
    return found

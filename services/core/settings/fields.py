"""Settings as fields (bus/fields.py): their base, how `infaas settings` lists them, and the bounds that several sections share."""

import shlex
from collections.abc import Iterator
from types import UnionType
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin

from msgspec import NODEFAULT, Struct

from bus.fields import Checked, Number, Text, fields_of, hints_of, parts_of
from services.core.emulation import KINDS, MOST

NAME_IN_KEY = "NAME"  # stands for any name of a map in the keys of `described`


class Section(Checked, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of all sections: an unknown key is an error, not a typo that passes."""


class Setting(NamedTuple):
    """One setting as `infaas settings` shows it.

    key: with NAME for any name of a map. kind: of value. default: None where there is none. bounds: "" for whatever its
    kind allows.
    """

    key: str
    kind: str
    default: Any
    bounds: str
    meaning: str


def described(section: type[Struct], key: str = "") -> Iterator[Setting]:
    """Every setting of a section and of those inside it, in the order of their definition."""
    hints = hints_of(section)
    for field in fields_of(section).values():
        where = f"{key}.{field.name}".lstrip(".")
        inner, rule, meaning = parts_of(hints[field.name])
        item: Any = get_args(inner)[1] if get_origin(inner) is dict else None
        if _is_section(inner):
            yield from described(inner, where)
        elif _is_section(item):
            yield from described(item, f"{where}.{NAME_IN_KEY}")
        else:
            if item is not None:
                _, rule, _ = parts_of(item)
            kind = _kind(inner)
            bounds = (kind if " or " in kind else "") if rule is None else rule.words
            yield Setting(where, kind, None if field.default is NODEFAULT else field.default, bounds, meaning)


def _is_section(hint: Any) -> bool:
    return isinstance(hint, type) and issubclass(hint, Struct)


_KINDS = {bool: "true or false", int: "whole number", float: "number", str: "text"}


def _kind(hint: Any) -> str:
    hint, _, _ = parts_of(hint)
    origin, inside = get_origin(hint), get_args(hint)
    if origin is Literal:
        return " or ".join(map(str, inside))
    if origin is tuple:
        return f"list of {_kind(inside[0])}s"
    if origin is dict:
        return f"map of name to {_kind(inside[1])}"
    if origin in (Union, UnionType):  # a text instead of a list is for variables
        return " or ".join(_kind(one) for one in inside if not (one is str and get_origin(inside[0]) is tuple))
    return _KINDS[hint]


# ---- bounds and types that several sections share, and texts that stand for lists

DAY = 86400.0

SECONDS = Number(above=0, most=DAY)
WAIT = Number(most=365 * DAY)
COUNT = Number(1, 1e9)
AMOUNT = Number(most=1e9)
PORT = Number(1, 65535)
MEMORY = Number(most=1e8, zero="what the machine has")
CORES = Number(most=4096, zero="what the machine has")
_DEVICES = Number(most=MOST)

Texts = tuple[str, ...] | str  # a text in a variable: see `listed` and `words`
Simulated = dict[
    Annotated[str, Text("|".join(KINDS), f"a kind that can be simulated ({', '.join(KINDS)})")],
    Annotated[int, _DEVICES],
]
Accelerators = dict[
    Annotated[str, Text("|".join(KINDS), f"a kind of accelerator ({', '.join(KINDS)})")], Annotated[int, _DEVICES]
]


def listed(value: Texts) -> tuple[str, ...]:
    """A setting that may be a list or, in a variable, a text with commas or white space between the items."""
    return tuple(value.replace(",", " ").split()) if isinstance(value, str) else value


def words(command: Texts) -> tuple[str, ...]:
    """A command's words; where it is one text, as in a variable, split as a shell would. Raises ValueError."""
    return tuple(shlex.split(command)) if isinstance(command, str) else command

"""What a setting's annotation says: its bounds and its meaning. One walker checks them, another lists them.

    heartbeat_s: Annotated[float, Number(above=0, most=60), "Seconds between two heartbeats."] = 0.5

`Number` and `Text` bound a value, each item of a list, or the values of a map; in the type of a map's keys they bound its names.
The plain text is the meaning, which `infaas settings` prints.
"""

import re
import shlex
from collections.abc import Iterator
from functools import cache
from math import inf, isfinite
from types import UnionType
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

from msgspec import NODEFAULT, Struct
from msgspec.structs import fields

from bus.subjects import NAME
from services.core.emulation import KINDS, MOST

NAME_IN_KEY = "NAME"  # stands for any name of a map in the keys of `described`


class Fault(NamedTuple):
    """What is wrong with one setting. key: as in a file, section.name. reason: what it must be, and what it is."""

    key: str
    reason: str


class Section(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of all sections: an unknown key is an error, not a typo that passes."""

    def conflicts(self) -> Iterator[Fault]:
        """Values that are right by themselves and wrong beside each other. Called only when each is right by itself."""
        yield from ()


class Number(NamedTuple):
    """A number of at least `least`, or more than `above`, and at most `most`, or less than `below`.

    zero: 0 is right as well, and means this.
    """

    least: float = 0.0
    most: float = inf
    above: float | None = None
    zero: str = ""
    below: float | None = None

    @property
    def words(self) -> str:
        """The bounds, as in "must be ..."."""
        low = f"at least {_short(self.least)}" if self.above is None else f"above {_short(self.above)}"
        high = f" and at most {_short(self.most)}" if self.most < inf else ""
        if self.below is not None:
            high = f" and below {_short(self.below)}"
        if self.zero:
            from_zero = self.least == 0 and self.above is None
            low = f"{low} (0: {self.zero})" if from_zero else f"0 ({self.zero}), or {low}"
        return low + high

    def refuse(self, value: Any) -> str | None:
        """Why this value is wrong, None where it is right."""
        if isinstance(value, bool) or not isinstance(value, int | float):
            return None if isinstance(value, str) else "must be a number"  # a text's type has allowed it: "auto"
        if self.zero and value == 0:
            return None
        value = max(-1e300, min(value, 1e300)) if isinstance(value, int) else value  # larger ones are no float
        enough = value >= self.least if self.above is None else value > self.above
        right = isfinite(value) and enough and value <= self.most and (self.below is None or value < self.below)
        return None if right else f"must be {self.words}, not {_short(value)}"


class Text(NamedTuple):
    """A text that matches the whole pattern. words: how it is written, as in "must be ..."."""

    pattern: str
    words: str

    def refuse(self, value: Any) -> str | None:
        """Why this value is wrong, None where it is right."""
        return None if re.fullmatch(self.pattern, str(value)) else f"must be {self.words}, not {str(value)!r}"


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


def faults(settings: Section) -> Iterator[Fault]:
    """Everything that is wrong with these settings: single ones, or, where each is right, what does not go together."""
    wrong = False
    for fault in _faults(settings, type(settings), ""):
        wrong = True
        yield fault
    if not wrong:
        yield from settings.conflicts()


def _faults(value: Any, hint: Any, key: str) -> Iterator[Fault]:
    inner, rule, _ = _parts(hint)
    if isinstance(value, Struct):
        for name, of in _hints(type(value)).items():
            yield from _faults(getattr(value, name), of, f"{key}.{name}".lstrip("."))
    elif isinstance(value, dict):
        names, items = get_args(inner)
        _, named, _ = _parts(names)
        for name, item in value.items():
            reason = named.refuse(name) if named is not None else None
            if reason is not None:
                yield Fault(f"{key}.{name}", f"the name {reason}")
            yield from _faults(item, items, f"{key}.{name}")
    elif rule is not None:
        for item in value if isinstance(value, tuple) else (value,):
            reason = rule.refuse(item)
            if reason is not None:
                yield Fault(key, reason)


def described(section: type[Struct], key: str = "") -> Iterator[Setting]:
    """Every setting of a section and of those inside it, in the order of their definition."""
    hints = _hints(section)
    for field in fields(section):
        where = f"{key}.{field.name}".lstrip(".")
        inner, rule, meaning = _parts(hints[field.name])
        item: Any = get_args(inner)[1] if get_origin(inner) is dict else None
        if _is_section(inner):
            yield from described(inner, where)
        elif _is_section(item):
            yield from described(item, f"{where}.{NAME_IN_KEY}")
        else:
            default = field.default_factory() if field.default_factory is not NODEFAULT else field.default
            if item is not None:
                _, rule, _ = _parts(item)
            kind = _kind(inner)
            bounds = (kind if " or " in kind else "") if rule is None else rule.words
            yield Setting(where, kind, None if default is NODEFAULT else default, bounds, meaning)


@cache
def _hints(section: type[Struct]) -> dict[str, Any]:
    return get_type_hints(section, include_extras=True)


def _parts(hint: Any) -> tuple[Any, Number | Text | None, str]:
    """An annotation's type, rule and meaning."""
    if get_origin(hint) is not Annotated:
        return hint, None, ""
    inner, *extras = get_args(hint)
    rule = next((extra for extra in extras if isinstance(extra, Number | Text)), None)
    return inner, rule, next((extra for extra in extras if isinstance(extra, str)), "")


def _is_section(hint: Any) -> bool:
    return isinstance(hint, type) and issubclass(hint, Struct)


_KINDS = {bool: "true or false", int: "whole number", float: "number", str: "text"}


def _kind(hint: Any) -> str:
    hint, _, _ = _parts(hint)
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


def _short(value: float) -> str:
    return str(value) if isinstance(value, int) and abs(value) < 10**15 else f"{value:g}"


# ---- bounds and types that several sections share, and texts that stand for lists

DAY = 86400.0

_NAME = NAME.pattern.removesuffix(r"\Z")
TOKEN = Text(_NAME, "1 to 64 letters, digits, - or _, a letter or digit first")
NAME_OR_EMPTY = Text(f"({_NAME})?", "empty, or 1 to 64 letters, digits, - or _, a letter or digit first")
SOME_TEXT = Text(r"(?s).*\S.*", "some text")
SECONDS = Number(above=0, most=DAY)
WAIT = Number(most=365 * DAY)
SHARE = Number(most=1)
PART = Number(above=0, most=1)
TARGET = Number(above=0, below=1)  # share of queries to be answered in time; all of them would cost without limit
COUNT = Number(1, 1e9)
AMOUNT = Number(most=1e9)
PORT = Number(1, 65535)
MEMORY = Number(most=1e8, zero="what the machine has")
CORES = Number(most=4096, zero="what the machine has")
_DEVICES = Number(most=MOST)

Texts = tuple[str, ...] | str  # a text in a variable: see `listed` and `words`
Named = Annotated[str, TOKEN]
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

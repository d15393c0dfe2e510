"""A scenario's TOML file: reading it, checked values, and refusals that name file and key."""

import re
import sys
import tomllib
from collections.abc import Collection, Iterable, Mapping
from difflib import get_close_matches
from math import isfinite
from pathlib import Path
from types import UnionType
from typing import Any, Literal, NamedTuple, NoReturn, TypeVar, Union, get_args, get_origin

from msgspec import NODEFAULT, Struct

from bus.fields import Rule, Text, fields_of, parts_of, stated
from bus.subjects import valid_name

_BARE = re.compile(r"[A-Za-z0-9_-]+\Z")
_LONGEST = 60  # characters of a value that a refusal shows


class ScenarioError(ValueError):
    """An invalid scenario. The text names the file, the key, what is wrong there, and the remedy."""


class Location(NamedTuple):
    """A key in a file, such as load[0].rate[2][1]. Entries of lists count from 0."""

    file: str
    key: str = ""

    def at(self, key: str | int) -> "Location":
        """The location of a key or entry inside."""
        if isinstance(key, int):
            return Location(self.file, f"{self.key}[{key}]")
        written = key if _BARE.match(key) else shown(key)
        return Location(self.file, f"{self.key}.{written}" if self.key else written)

    def refuse(self, reason: str) -> NoReturn:
        """Raises ScenarioError."""
        raise ScenarioError(": ".join(part for part in (self.file, self.key, reason) if part))


def shown(value: Any) -> str:
    """A value as a refusal shows it: short, on one line."""
    try:
        written = repr(value)
    except (ValueError, RecursionError):  # a whole number of thousands of digits
        return "that"
    return written if len(written) <= _LONGEST else f"{written[:_LONGEST]}…"


def meant(name: str, known: Iterable[str]) -> str:
    """The similar name that was probably meant, else all known names if they are few."""
    names = sorted(known)
    near = get_close_matches(name[:100], names, n=1)
    if near:
        return f"; did you mean {near[0]}?"
    return f"; there are {', '.join(names)}" if 0 < len(names) <= 12 else ""


# -- reading the file

_LARGEST = 8 * 2**20  # bytes; larger files take seconds to read


def read_toml(path: Path) -> dict[str, Any]:
    """The file's content. Raises ScenarioError, which names the file, and the line of a syntax error."""
    location = Location(str(path))
    try:
        with path.open("rb") as opened:
            content = opened.read(_LARGEST + 1)  # the file may be a device that never ends
    except (OSError, ValueError) as error:  # ValueError: a path that cannot be one
        location.refuse(f"cannot be read: {getattr(error, 'strerror', None) or error}")
    if len(content) > _LARGEST:
        location.refuse(
            f"is larger than {_LARGEST >> 20} MiB, which no such file needs: long lists of counts or times are their own files"
        )
    try:
        return tomllib.loads(content.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        location.refuse(f"is not valid TOML: byte {error.start} is not UTF-8 text")
    except tomllib.TOMLDecodeError as error:
        location.refuse(f"is not valid TOML: {error}")
    except RecursionError:
        location.refuse("is not valid TOML: it is nested too deeply")
    except ValueError as error:  # a number of too many digits
        location.refuse(f"cannot be read: {error}")


# -- checked values

LARGEST = 1e12  # of any number


def table_at(value: Any, location: Location) -> dict[str, Any]:
    if not isinstance(value, dict):
        location.refuse(f"must be a table, not {shown(value)}")
    return value


def list_at(value: Any, location: Location) -> list[Any]:
    if not isinstance(value, list):
        location.refuse(f"must be a list, not {shown(value)}")
    return value


def number_at(
    value: Any, location: Location, least: float = 0.0, most: float = LARGEST, *, above: bool = False
) -> float:
    """A number from least to most. above: `least` itself is refused."""
    value = _number(value, location)
    if not least <= value <= most or (above and value == least):  # NaN is not between any two numbers
        low = f"above {least:g}" if above else f"at least {least:g}"
        high = f" and at most {most:g}" if value > most else ""
        location.refuse(f"must be {low}{high}, not {shown(value)}")
    return float(value)


def _number(value: Any, location: Location) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        location.refuse(f"must be a number, not {shown(value)}")
    return value


def whole_at(value: Any, location: Location, least: int = 0, most: int = 10**9) -> int:
    """A whole number from least to most."""
    found = _whole(value, location)
    if not least <= found <= most:
        location.refuse(f"must be from {least} to {most}, not {shown(value)}")
    return found


def _whole(value: Any, location: Location) -> int:
    if isinstance(value, float) and isfinite(value) and value == int(value):
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        location.refuse(f"must be a whole number, not {shown(value)}")
    return int(value)


def _flag(value: Any, location: Location) -> bool:
    if not isinstance(value, bool):
        location.refuse(f"must be true or false, not {shown(value)}")
    return value


def text_at(value: Any, location: Location) -> str:
    """Some printable text."""
    if not isinstance(value, str) or not value.strip() or not value.isprintable():
        location.refuse(f"must be some printable text, not {shown(value)}")
    return value


def name_at(value: Any, location: Location) -> str:
    """A name that may stand in a subject."""
    if not valid_name(value):
        location.refuse(f"must be 1 to 64 letters, digits, - or _, a letter or digit first, not {shown(value)}")
    return str(value)


def one_of(value: Any, location: Location, known: Collection[str], what: str) -> str:
    """One of these names. what: its kind in the refusal, such as `app` or `variant`."""
    if not isinstance(value, str):
        location.refuse(f"must be the name of {'an' if what[0] in 'aeiou' else 'a'} {what}, not {shown(value)}")
    if value not in known:
        location.refuse(f"there is no {what} {shown(value)}{meant(value, known)}")
    return value


def value_at(value: Any, location: Location, kind: Any, rule: Rule | None = None) -> Any:
    """A value of this type, as fields of structs have: also lists, maps and structs of such. rule: its bounds, or those of each item."""
    kind, own, _ = parts_of(kind)
    kind, rule = stated(kind), rule or own
    origin, inside = get_origin(kind), get_args(kind)
    if isinstance(kind, type) and issubclass(kind, Struct):
        return struct_at(value, location, kind)
    if origin is list:
        return [value_at(one, location.at(i), inside[0], rule) for i, one in enumerate(list_at(value, location))]
    if origin is dict:
        return {
            name: value_at(one, location.at(name), inside[1], rule) for name, one in table_at(value, location).items()
        }
    if origin in (Union, UnionType):  # one, or a list of several
        return value_at(value, location, inside[isinstance(value, list)], rule)
    if origin is Literal:
        return one_of(value, location, inside, "choice")
    if kind is int:
        value = _whole(value, location)
    elif kind is float:
        value = _number(value, location)
    elif kind is bool:
        value = _flag(value, location)
    elif not isinstance(rule, Text):
        value = text_at(value, location)
    elif not isinstance(value, str):
        location.refuse(f"must be {rule.words}, not {shown(value)}")
    refused = None if rule is None else rule.refuse(value)
    if refused is not None:
        location.refuse(refused)
    if kind is float and abs(value) > sys.float_info.max:  # of a whole number
        location.refuse(f"must be at most {LARGEST:g}, not {shown(value)}")
    return float(value) if kind is float else value


S = TypeVar("S", bound=Struct)


def struct_at(value: Any, location: Location, kind: type[S]) -> S:
    """A table with the fields of a struct as its keys. Those without a default must be there."""
    names = dict(zip(kind.__struct_encode_fields__, kind.__struct_fields__, strict=True))
    table = TomlTable(value, location, names)
    fields = fields_of(kind)
    for key, name in names.items():
        if fields[name].default is NODEFAULT:
            table.get(key)
    return kind(
        **{
            names[key]: value_at(one, location.at(key), fields[names[key]].type, fields[names[key]].rule)
            for key, one in table.content.items()
        }
    )


class TomlTable:
    """A table with checked values. keys: all that it may have. moved: keys that belong elsewhere, with the remedy."""

    def __init__(
        self, value: Any, location: Location, keys: Collection[str], moved: Mapping[str, str] | None = None
    ) -> None:
        self.location = location
        self.content = table_at(value, location)
        for key in self.content:
            if key not in keys:
                remedy = (moved or {}).get(key)
                location.at(key).refuse(remedy or f"there is no such key{meant(key, keys)}")

    def __contains__(self, key: object) -> bool:
        return key in self.content

    def at(self, key: str) -> Location:
        return self.location.at(key)

    def get(self, key: str) -> Any:
        """The unchecked value. A missing key is refused."""
        if key not in self.content:
            self.at(key).refuse("is missing")
        return self.content[key]

    def fields(self, message: type[Struct], *names: str) -> dict[str, Any]:
        """Those of these fields of a message that the table states, with checked values."""
        known = fields_of(message)
        return {
            name: value_at(self.content[name], self.at(name), known[name].type, known[name].rule)
            for name in names
            if name in self
        }

    def number(
        self,
        key: str,
        default: float | None = None,
        least: float = 0.0,
        most: float = LARGEST,
        *,
        above: bool = False,
    ) -> float:
        """A number. Without a default the key is required."""
        if default is not None and key not in self.content:
            return default
        return number_at(self.get(key), self.at(key), least, most, above=above)

    def maybe(self, key: str, least: float = 0.0, most: float = LARGEST, *, above: bool = False) -> float | None:
        """A number; None if the key is missing."""
        return number_at(self.content[key], self.at(key), least, most, above=above) if key in self.content else None

    def whole(self, key: str, default: int | None = None, least: int = 0, most: int = 10**9) -> int:
        if default is not None and key not in self.content:
            return default
        return whole_at(self.get(key), self.at(key), least, most)

    def flag(self, key: str) -> bool:
        """False where nothing is said."""
        return _flag(self.content.get(key, False), self.at(key))

    def text(self, key: str, default: str | None = None) -> str:
        if default is not None and key not in self.content:
            return default
        return text_at(self.get(key), self.at(key))

    def name(self, key: str) -> str:
        return name_at(self.get(key), self.at(key))

    def table(self, key: str) -> dict[str, Any]:
        """Empty where nothing is said."""
        return table_at(self.content.get(key, {}), self.at(key))

    def items(self, key: str) -> list[Any]:
        """Empty where nothing is said."""
        return list_at(self.content.get(key, []), self.at(key))

    def blocks(self, key: str, keys: Collection[str], moved: Mapping[str, str] | None = None) -> "list[TomlTable]":
        """The [[key]] blocks, each with these keys."""
        found = self.content.get(key, [])
        if isinstance(found, dict):
            self.at(key).refuse(f"must be written [[{key}]], one block for each")
        if not isinstance(found, list):
            self.at(key).refuse(f"must be [[{key}]] blocks, not {shown(found)}")
        return [TomlTable(one, self.at(key).at(i), keys, moved) for i, one in enumerate(found)]

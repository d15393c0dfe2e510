"""A scenario's TOML file: reading it into annotated structs, refusals that name file and key, and writing one."""

import re
import sys
import tomllib
from collections.abc import Collection, Iterable, Mapping
from math import isfinite
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, NamedTuple, NoReturn, TypeVar, Union, get_args, get_origin

from msgspec import NODEFAULT, Struct

from bus.fields import Field, Number, Rule, Text, fields_of, hints_of, meant, parts_of, stated

_BARE = re.compile(r"[A-Za-z0-9_-]+\Z")
_LONGEST = 60  # characters of a value that a refusal shows
_MOST_NAMES = 30  # that a refusal lists


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
        written = (
            repr(value)
            if isinstance(value, str)
            else value_text(value)
            if isinstance(value, dict | list | bool)
            else str(value)
        )
    except (ValueError, RecursionError):  # a whole number of thousands of digits
        return "that"
    return written if len(written) <= _LONGEST else f"{written[:_LONGEST]}…"


def meant_or_all(name: str, known: Iterable[str]) -> str:
    """The similar name that was probably meant, else all known names if they are few."""
    names = sorted(known)
    if found := meant(name, names):
        return found
    return f"; there are {', '.join(names)}" if 0 < len(names) <= _MOST_NAMES else ""


# -- reading the file

_TWICE = re.compile(r"Cannot (overwrite a value|declare .* twice|mutate immutable namespace .*?)(?= \(at )")
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
        location.refuse(
            f"is not valid TOML: {_TWICE.sub('this is there twice: keys and [tables] once, [[blocks]] each', str(error))}"
        )
    except RecursionError:
        location.refuse("is not valid TOML: it is nested too deeply")
    except ValueError as error:  # a number of too many digits
        location.refuse(f"cannot be read: {error}")


# -- checked values

LARGEST = 1e12  # of any number
AMOUNT = Number(most=LARGEST)
SECONDS = Number(most=1e9)


def table_at(value: Any, location: Location) -> dict[str, Any]:
    if isinstance(value, list) and value and isinstance(value[0], dict):
        location.refuse(f"must be written [{location.key}], once")
    if not isinstance(value, dict):
        location.refuse(f"must be a table, not {shown(value)}")
    return value


def text_at(value: Any, location: Location) -> str:
    """Some printable text."""
    if not isinstance(value, str) or not value.strip() or not value.isprintable():
        location.refuse(f"must be some printable text, not {shown(value)}")
    return value


def one_of(value: Any, location: Location, known: Collection[str], what: str) -> str:
    """One of these names. what: its kind in the refusal, such as `app` or `variant`."""
    if not isinstance(value, str):
        location.refuse(f"must be the name of {'an' if what[0] in 'aeiou' else 'a'} {what}, not {shown(value)}")
    if value not in known:
        location.refuse(f"there is no {what} {shown(value)}{meant_or_all(value, known)}")
    return value


def within(value: float, location: Location, rule: Number) -> None:
    """Refuse a number beyond bounds that other values set."""
    if (refused := rule.refuse(value)) is not None:
        location.refuse(refused)


def value_at(value: Any, location: Location, hint: Any, rule: Rule | None = None) -> Any:
    """A value as a field's annotation says: also lists, maps and structs of such. rule: its bounds, or those of each item.

    A meaning that is no sentence says what a value must be: one of several kinds of value, a list of a certain length, or a word of several.
    """
    kind, own, meaning = parts_of(hint)
    kind, rule, meaning = stated(kind), rule or own, "" if meaning.endswith(".") else meaning
    if kind is Any:
        return value
    if get_origin(kind) is Annotated:  # of a value that may be left out
        return value_at(value, location, kind, rule)
    if isinstance(kind, type) and issubclass(kind, Struct):
        return struct_at(value, location, kind)
    origin, inside = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        chosen = next((one for one in inside if _is_meant(value, one)), None)
        if chosen is None and meaning:
            location.refuse(f"must be {meaning}, not {shown(value)}")
        return value_at(value, location, inside[0] if chosen is None else chosen, rule)
    if origin in (list, tuple, frozenset):
        return _items_at(value, location, kind, rule, meaning)
    if origin is dict:
        found = {}
        for name, one in table_at(value, location).items():
            key = _name_at(name, location.at(name), inside[0])
            if key in found:
                location.at(name).refuse(f"{key} occurs twice")
            found[key] = value_at(one, location.at(name), inside[1], rule)
        return found
    if origin is Literal:
        return one_of(value, location, inside, meaning or location.key.rpartition(".")[2])
    if kind is int:
        value = _whole(value, location)
    elif kind is float:
        value = _number(value, location)
    elif kind is bool:
        if not isinstance(value, bool):
            location.refuse(f"must be true or false, not {shown(value)}")
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


def _is_meant(value: Any, hint: Any) -> bool:
    """Whether a value is of the kind that this member of a union describes."""
    kind, _, _ = parts_of(hint)
    origin = get_origin(kind)
    if isinstance(value, list | tuple):
        return origin in (list, tuple, frozenset)
    if isinstance(value, dict):
        return origin is dict or (isinstance(kind, type) and issubclass(kind, Struct))
    if isinstance(value, str):
        return kind is str or (origin is Literal and value in get_args(kind))
    return kind in (int, float, bool)


def _items_at(value: Any, location: Location, kind: Any, rule: Rule | None, meaning: str) -> Any:
    """A list: of any number of values of one kind, or of one value of each."""
    origin, inside = get_origin(kind), get_args(kind)
    block = isinstance(inside[0], type) and issubclass(inside[0], Struct)
    if (block or get_origin(inside[0]) is dict) and isinstance(value, dict):
        location.refuse(f"must be written [[{location.key}]], one block for each")
    each = origin is tuple and inside[-1] is not Ellipsis
    if not isinstance(value, list | tuple) or (each and len(value) != len(inside)):
        location.refuse(f"must be {meaning or 'a list'}, not {shown(value)}")
    kinds = inside if each else (inside[0],) * len(value)
    return origin(value_at(one, location.at(i), kinds[i], rule) for i, one in enumerate(value))


def _name_at(name: str, location: Location, hint: Any) -> Any:
    """The name of an entry of a map: a text, or a whole number."""
    kind, rule, _ = parts_of(hint)
    if kind is int:
        return value_at(int(name) if name.isascii() and name.isdecimal() and len(name) < 10 else name, location, hint)
    if rule is not None and (refused := rule.refuse(name)) is not None:
        location.refuse(f"the name {refused}")
    return name


def _number(value: Any, location: Location) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        location.refuse(f"must be a number, not {shown(value)}")
    return value


def _whole(value: Any, location: Location) -> int:
    if isinstance(value, float) and isfinite(value) and value == int(value):
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        location.refuse(f"must be a whole number, not {shown(value)}")
    return int(value)


S = TypeVar("S", bound=Struct)


def struct_at(value: Any, location: Location, kind: type[S]) -> S:
    """A table with the fields of a struct as its keys. Those without a default must be there.

    moved: of the struct, where it has it, keys that belong elsewhere, with the remedy.
    """
    names = dict(zip(kind.__struct_encode_fields__, kind.__struct_fields__, strict=True))
    content, hints, fields = table_at(value, location), hints_of(kind), fields_of(kind)
    for key in content:
        remedy = getattr(kind, "moved", {}).get(key)
        if key not in names or remedy:
            location.at(key).refuse(remedy or f"there is no such key{meant_or_all(key, names)}")
    for key, name in names.items():
        if key not in content and fields[name].default is NODEFAULT:
            location.at(key).refuse(f"is missing{_wanted(fields[name], key)}")
    return kind(
        **{
            names[key]: one
            if _left_out(one, fields[names[key]])
            else value_at(one, location.at(key), hints[names[key]])
            for key, one in content.items()
        }
    )


def _wanted(field: Field, key: str) -> str:
    """What a key that is missing would say."""
    if field.meaning:
        return f": {field.meaning}"
    if isinstance(field.rule, Number | Text):
        return f": it must be {field.rule.words}"
    kinds = get_args(field.type) or (None,)
    return f": write [[{key}]] blocks" if isinstance(kinds[0], type) and issubclass(kinds[0], Struct) else ""


def _left_out(value: Any, field: Field) -> bool:
    """Whether a value says no more than no value, in a tree that is no file's."""
    return (value is None and bool(field.absent)) or (field.rule is None and field.default == "" == value)


# -- writing a file


def toml_of(document: Mapping[str, Any]) -> str:
    """The text of a document of tables, lists, texts, numbers and truth values.

    There is a [table] for each table of the document, [[blocks]] for each list of tables; all deeper tables are inline.
    """
    parts = []
    for key, value in document.items():
        if isinstance(value, Mapping):
            inner = {name: one for name, one in value.items() if isinstance(one, Mapping)}
            plain = {name: one for name, one in value.items() if name not in inner}
            if plain or not inner:
                parts.append(_block(f"[{key}]", plain))
            parts += [_block(f"[{key}.{name}]", one) for name, one in inner.items()]
        else:
            parts += [_block(f"[[{key}]]", one) for one in value]
    return "\n".join(parts)


def _block(head: str, fields: Mapping[str, Any]) -> str:
    return "\n".join([head, *(f"{key_text(name)} = {value_text(value)}" for name, value in fields.items()), ""])


def value_text(value: Any) -> str:
    """A value on one line."""
    if isinstance(value, Mapping):
        inner = ", ".join(f"{key_text(name)} = {value_text(one)}" for name, one in value.items())
        return f"{{ {inner} }}" if value else "{}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(value_text, value))}]"
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value).lower() if isinstance(value, bool) else quoted(str(value))
    return repr(value)


def quoted(text: str) -> str:
    """A text."""
    inner = "".join(c if c.isprintable() and c not in '"\\' else f"\\U{ord(c):08X}" for c in text)
    return f'"{inner}"'


def key_text(text: str) -> str:
    """A key."""
    return text if _BARE.match(text) else quoted(text)

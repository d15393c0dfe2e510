"""The content of TOML files: checked values in annotated structs, refusals that name file and key, and the text of a file."""

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from functools import partial
from math import isfinite
from types import UnionType
from typing import Annotated, Any, Literal, NamedTuple, NoReturn, TypeVar, Union, get_args, get_origin

from msgspec import NODEFAULT, Struct, ValidationError, convert

from bus.fields import Field, Number, Rule, Text, faults, fields_of, hints_of, meant, parts_of, stated

_BARE = re.compile(r"[A-Za-z0-9_-]+\Z")
_LONGEST = 60  # characters of a value that a refusal shows
_MOST_NAMES = 30  # that a refusal lists


class TomlError(ValueError):
    """A file says what is wrong. Each line of the text names the file, the key, what is wrong there, and the remedy; wrong: the same in parts."""

    def __init__(self, *wrong: "tuple[Location, str]") -> None:
        self.wrong = wrong
        super().__init__("\n".join(": ".join(filter(None, (at.file, at.key, reason))) for at, reason in wrong))


class Location(NamedTuple):
    """A key in a file, such as load[0].rate[2][1]. Entries of lists count from 0. lax: a text may stand for the value that it writes, and be any."""

    file: str
    key: str = ""
    lax: bool = False

    def at(self, key: str | int) -> "Location":
        """The location of a key or entry inside."""
        if isinstance(key, int):
            return self._replace(key=f"{self.key}[{key}]")
        written = key if _BARE.match(key) else shown(key)
        return self._replace(key=f"{self.key}.{written}" if self.key else written)

    def refuse(self, reason: str) -> NoReturn:
        """Raises TomlError."""
        raise TomlError((self, reason))


T = TypeVar("T")


def all_of(found: Iterable[Callable[[], T]]) -> list[T]:
    """What these give, all of them. Raises TomlError with all that they refuse."""
    right: list[T] = []
    wrong: list[tuple[Location, str]] = []
    for one in found:
        try:
            right.append(one())
        except TomlError as error:
            wrong += error.wrong
    if wrong:
        raise TomlError(*wrong)
    return right


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
    if location.lax and isinstance(value, str):
        with suppress(ValidationError):
            value = convert(value, kind, strict=False)
    origin, inside = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        chosen = next((one for one in inside if _is_meant(value, one)), None)
        if chosen is None and (meaning := meaning or _either(inside)):
            location.refuse(f"must be {meaning}, not {shown(value)}")
        return value_at(value, location, inside[0] if chosen is None else chosen, rule)
    if origin in (list, tuple, frozenset):
        return _items_at(value, location, kind, rule, meaning)
    if origin is dict:
        found: dict[Any, Any] = {}

        def entry(name: str, one: Any) -> None:
            key = _name_at(name, location.at(name), inside[0])
            if key in found:
                location.at(name).refuse(f"{key} occurs twice")
            found[key] = value_at(one, location.at(name), inside[1], rule)

        all_of(partial(entry, *one) for one in table_at(value, location).items())
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
        value = value if location.lax and isinstance(value, str) else text_at(value, location)
    elif not isinstance(value, str):
        location.refuse(f"must be {rule.words}, not {shown(value)}")
    refused = None if rule is None else rule.refuse(value)
    if refused is not None:
        location.refuse(refused)
    if kind is float and abs(value) >= 2**1024:  # a whole number that is no float
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


_KINDS = {int: "a whole number", float: "a number", bool: "true or false"}


def _either(members: Iterable[Any]) -> str:
    """What a value of several kinds may be; empty: one of them says it better."""
    kinds = [parts_of(one)[0] for one in members]
    words = [
        _KINDS.get(one) or " or ".join(map(str, get_args(one) if get_origin(one) is Literal else ())) for one in kinds
    ]
    return " or ".join(words) if len(words) > 1 and all(words) else ""


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
    return origin(all_of(partial(value_at, one, location.at(i), kinds[i], rule) for i, one in enumerate(value)))


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

    def read(key: str) -> tuple[str, Any]:
        name, at = names.get(key), location.at(key)
        remedy = getattr(kind, "moved", {}).get(key)
        if name is None or remedy:
            at.refuse(remedy or f"there is no such key{meant_or_all(key, names)}")
        if key not in content:
            at.refuse(f"is missing{_wanted(fields[name], key)}")
        one = content[key]
        return name, one if _left_out(one, fields[name]) else value_at(one, at, hints[name])

    strange = content.keys() - names.keys()
    missing = [key for key, name in names.items() if key not in content and fields[name].default is NODEFAULT]
    missing = [key for key in missing if not meant(key, strange)]  # it is there, misspelt
    return kind(**dict(all_of(partial(read, key) for key in [*content, *missing])))


def checked_at(value: Any, location: Location, kind: type[S]) -> S:
    """The same, whose values also go together."""
    found = struct_at(value, location, kind)
    if wrong := list(faults(found, location.key)):
        raise TomlError(*((location._replace(key=one.key), one.reason) for one in wrong))
    return found


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

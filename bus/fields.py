"""What a field's annotation says: its bounds, its unit and its meaning. Every door reads a field from here.

    latency_ms: Annotated[float | None, Number(above=0, unit="milliseconds"), "Latency objective of a query."] = None

`Number`, `Text` and `Length` bound a value that is there, each item of a list, or the values of a map; in the type of a map's keys
they bound its names. The plain text is the meaning. None and UNSET are always right.

`faults` finds all that is wrong, with keys of nested fields. `check_of` compiles the same for a message without nested ones: it
finds the first fault, as fast as comparisons written by hand. `fields_of` lists the fields, for options, schemas and tables.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from itertools import islice
from math import inf, isfinite
from types import NoneType, UnionType
from typing import Annotated, Any, NamedTuple, TypeVar, Union, get_args, get_origin, get_type_hints

from msgspec import NODEFAULT, UNSET, Struct, UnsetType
from msgspec.structs import FieldInfo, fields

from bus.subjects import NAME, WITHOUT_APP

SHOWN = 80  # characters of a wrong text that its refusal repeats


class Fault(NamedTuple):
    """What is wrong with one field. key: as in a file, section.name. reason: what it must be, and what it is."""

    key: str
    reason: str

    def __str__(self) -> str:
        return f"{self.key} {self.reason}"


class Checked(Struct, frozen=True):
    """Base of messages and settings of which some values do not go together."""

    def conflicts(self) -> Iterator[Fault]:
        """Values that are right by themselves and wrong beside each other. Called only when each is right by itself."""
        yield from ()


class Number(NamedTuple):
    """A number of at least `least`, or more than `above`, and at most `most`, or less than `below`.

    zero: 0 is right as well, and means this. unit: of the value, where its name does not say it.
    """

    least: float = 0
    most: float = inf
    above: float | None = None
    zero: str = ""
    below: float | None = None
    unit: str = ""

    @property
    def words(self) -> str:
        """The bounds, as in "must be ..."."""
        low = f"at least {short(self.least)}" if self.above is None else f"above {short(self.above)}"
        high = f" and at most {short(self.most)}" if self.most < inf else ""
        if self.below is not None:
            high = f" and below {short(self.below)}"
        if self.zero:
            from_zero = self.least == 0 and self.above is None
            low = f"{low} (0: {self.zero})" if from_zero else f"0 ({self.zero}), or {low}"
        return f"{self.unit}, {low}{high}" if self.unit else low + high

    def refuse(self, value: Any) -> str | None:
        """Why this value is wrong, None where it is right."""
        if isinstance(value, bool) or not isinstance(value, int | float):
            return None if isinstance(value, str) else "must be a number"  # a text's type has allowed it: "auto"
        if self.zero and value == 0:
            return None
        value = max(-1e300, min(value, 1e300)) if isinstance(value, int) else value  # larger ones are no float
        enough = value >= self.least if self.above is None else value > self.above
        right = isfinite(value) and enough and value <= self.most and (self.below is None or value < self.below)
        if right:
            return None
        exact = repr(value) if isinstance(value, float) and float(short(value)) != value else short(value)
        return f"must be {self.words}, not {exact}"

    @property
    def test(self) -> str:
        """An expression of `value` that holds where it is right; where it does not, `refuse` decides."""
        low = f"{self.least!r} <= value" if self.above is None else f"{self.above!r} < value"
        high = f" < {self.below!r}" if self.below is not None else f" <= {self.most!r}" if self.most < inf else " < inf"
        return low + high

    @property
    def schema(self) -> dict[str, Any]:
        """The bounds in JSON Schema."""
        found: dict[str, Any] = {}
        found |= {"exclusiveMinimum": self.above} if self.above is not None and not self.zero else {}
        found |= {"minimum": 0 if self.zero else self.least} if self.above is None or self.zero else {}
        found |= {"exclusiveMaximum": self.below} if self.below is not None else {}
        return found | ({"maximum": self.most} if self.below is None and self.most < inf else {})


class Text(NamedTuple):
    """A text that matches the whole pattern. words: how it is written, as in "must be ..."."""

    pattern: str
    words: str

    def refuse(self, value: Any) -> str | None:
        """Why this value is wrong, None where it is right."""
        return None if re.fullmatch(self.pattern, str(value)) else f"must be {self.words}, not {str(value)[:SHOWN]!r}"

    @property
    def schema(self) -> dict[str, Any]:
        return {"pattern": f"^({self.pattern})$"}


class Length(NamedTuple):
    """A text, or bytes, of `least` to `most` characters."""

    most: int
    least: int = 0

    @property
    def words(self) -> str:
        return f"{self.least} to {self.most} characters long" if self.least else f"at most {self.most} characters long"

    def refuse(self, value: Any) -> str | None:
        """Why this value is wrong, None where it is right."""
        return None if self.least <= len(value) <= self.most else f"must be {self.words}, not {len(value)}"

    @property
    def test(self) -> str:
        return f"{self.least} <= len(value) <= {self.most}"

    @property
    def schema(self) -> dict[str, Any]:
        return {"minLength": self.least, "maxLength": self.most} if self.least else {"maxLength": self.most}


Rule = Number | Text | Length


def choice(*known: str) -> Text:
    """One of these texts."""
    return Text("|".join(map(re.escape, known)), f"one of {', '.join(known)}")


class Field(NamedTuple):
    """One field of a message. type: of a value that is there. absent: what it is else, "None" or "UNSET". default: NODEFAULT if it has none."""

    name: str
    type: Any
    absent: tuple[str, ...]
    rule: Rule | None
    meaning: str
    default: Any


@cache
def fields_of(message: type[Struct]) -> Mapping[str, Field]:
    """The fields of a message by name, in the order of their definition."""
    hints = hints_of(message)
    return {info.name: _field(info, hints[info.name]) for info in fields(message)}


def _field(info: FieldInfo, hint: Any) -> Field:
    inner, rule, meaning = parts_of(hint)
    default = info.default_factory() if info.default_factory is not NODEFAULT else info.default
    absent = tuple(_ABSENT[one] for one in get_args(inner) if one in _ABSENT) if _is_union(inner) else ()
    return Field(info.name, stated(inner), absent, rule, meaning, default)


_ABSENT = {NoneType: "None", UnsetType: "UNSET"}


def _is_union(hint: Any) -> bool:
    return get_origin(hint) in (Union, UnionType)


def stated(hint: Any) -> Any:
    """A type without None and UNSET: that of a value that is there."""
    left = tuple(one for one in get_args(hint) if one not in _ABSENT) if _is_union(hint) else ()
    return Union[left] if left else hint  # noqa: UP007  (of types that are known here only)


@cache
def hints_of(message: type[Struct]) -> dict[str, Any]:
    """The annotations of a message's fields, with their rules and meanings."""
    return get_type_hints(message, include_extras=True)


def parts_of(hint: Any) -> tuple[Any, Rule | None, str]:
    """An annotation's type, rule and meaning."""
    if get_origin(hint) is not Annotated:
        return hint, None, ""
    inner, *extras = get_args(hint)
    rule = next((extra for extra in extras if isinstance(extra, Rule)), None)
    return inner, rule, next((extra for extra in extras if isinstance(extra, str)), "")


def faults(message: Struct, key: str = "") -> Iterator[Fault]:
    """All that is wrong with a message: single fields, also of messages inside it, or, where each is right, what does not go together.

    key: before the names of its fields.
    """
    wrong = False
    for fault in _faults(message, type(message), key):
        wrong = True
        yield fault
    if not wrong and isinstance(message, Checked):
        yield from message.conflicts()


def _faults(value: Any, hint: Any, key: str) -> Iterator[Fault]:
    if value is None or value is UNSET:
        return
    inner, rule, _ = parts_of(hint)
    inner = stated(inner)
    if isinstance(value, Struct):
        for name, of in hints_of(type(value)).items():
            yield from _faults(getattr(value, name), of, f"{key}.{name}".lstrip("."))
    elif isinstance(value, dict) and get_origin(inner) is dict:
        names, items = get_args(inner)
        _, named, _ = parts_of(names)
        for name, item in value.items():
            reason = named.refuse(name) if named is not None else None
            if reason is not None:
                yield Fault(f"{key}.{name}", f"the name {reason}")
            yield from _faults(item, items, f"{key}.{name}")
    elif rule is not None:
        for item in value if isinstance(value, tuple | list) else (value,):
            reason = rule.refuse(item)
            if reason is not None:
                yield Fault(key, reason)
    elif isinstance(value, tuple | list) and value and isinstance(value[0], Struct):
        for i, item in enumerate(value):
            yield from _faults(item, type(item), f"{key}[{i}]")


def unread_keys(value: Any, hint: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """The keys inside of a decoded object that no field reads, each with the name that was meant (empty: none is near).

    hint: the message's type. key: of the object. Keys of the object itself are its caller's.
    """
    inner, _, _ = parts_of(hint)
    inner = stated(inner)
    if isinstance(inner, type) and issubclass(inner, Struct) and isinstance(value, dict):
        names = dict(zip(inner.__struct_encode_fields__, inner.__struct_fields__, strict=True))
        if key:
            for name in value.keys() - names.keys():
                yield f"{key}.{str(name)[:SHOWN]}", near(str(name), names)
        for name in value.keys() & names.keys():
            yield from unread_keys(value[name], hints_of(inner)[names[name]], f"{key}.{name}".lstrip("."))
    elif get_origin(inner) is list and isinstance(value, list) and isinstance(get_args(inner)[0], type):
        for i, item in enumerate(value if issubclass(get_args(inner)[0], Struct) else ()):
            yield from unread_keys(item, get_args(inner)[0], f"{key}[{i}]")


@cache
def check_of(message: type[Struct]) -> Callable[[Any], Fault | None]:
    """A function that finds the first field of such a message whose value is wrong by itself. It does not look into nested messages.

    It is compiled, as a dataclass's methods are: it runs for every query.
    """
    scope: dict[str, Any] = {"inf": inf, "UNSET": UNSET, "Fault": Fault}
    lines = ["def check(message):"]
    for name, field in fields_of(message).items():
        if field.rule is None:
            continue
        scope[f"refuse_{name}"] = field.rule.refuse
        if isinstance(field.rule, Text):
            scope[f"matches_{name}"] = re.compile(field.rule.pattern).fullmatch
            test = f"matches_{name}(value)"
        else:
            test = field.rule.test
        absent = "".join(f"value is not {one} and " for one in field.absent)
        lines += [
            f"    value = message.{name}",
            f"    if {absent}not ({test}) and (why := refuse_{name}(value)) is not None:",
            f"        return Fault({name!r}, why)",
        ]
    exec("\n".join([*lines, "    return None"]), scope)  # noqa: S102  (made of our own annotations)
    check: Callable[[Any], Fault | None] = scope["check"]
    return check


def short(value: float) -> str:
    """A number as people write it."""
    return str(value) if isinstance(value, int) and abs(value) < 10**15 else f"{value:g}"


TYPO = 1.0


def near(name: str, known: Iterable[str]) -> str:
    """The known name that is a typo away from an unknown one, or differs in case or hyphens; empty: none is.

    It looks at 1,000 names at most: strangers may ask for any number of names that are not there.
    """
    return next((one for one in islice(known, 1000) if _one_typo(_plain(name), _plain(one))), "")


def similar(name: str, known: Iterable[str], least: float = 0.6) -> str:
    """The known name that is most alike an unknown one; empty: none is so much alike, 0 to 1. `TYPO`: as `near`, which costs strangers' asking less."""
    if least == TYPO:
        return near(name, known)
    from difflib import get_close_matches  # noqa: PLC0415  (few need it)

    return next(iter(get_close_matches(name[:100], list(known), 1, least)), "")


def meant(name: str, known: Iterable[str], least: float = 0.6) -> str:
    """The end of a sentence about an unknown name: which one was meant (`similar`); empty: none is, or it is known."""
    found = "" if name in (known := list(known)) else similar(name, known, least)
    return f"; did you mean {found}?" if found else ""


def _plain(name: str) -> str:
    return name.lower().replace("-", "_")


def _one_typo(name: str, other: str) -> bool:
    """Whether they are equal but for a letter more, less, other or swapped."""
    if abs(len(name) - len(other)) > 1:
        return False
    at = next((i for i, (a, b) in enumerate(zip(name, other, strict=False)) if a != b), min(len(name), len(other)))
    a, b = name[at:], other[at:]
    return a[1:] == b[1:] or a[1:] == b or a == b[1:] or (a[:2] == b[1::-1] and a[2:] == b[2:])


# ---- bounds that several messages and settings share

_NAME = NAME.pattern.removesuffix(r"\Z")
NAMED = "1 to 64 letters, digits, - or _, a letter or digit first"
TOKEN = Text(_NAME, NAMED)
TOKEN_OR_NONE = Text(f"{WITHOUT_APP}|{_NAME}", f"{NAMED}, or {WITHOUT_APP} for a model without an app")
NAME_OR_EMPTY = Text(f"({_NAME})?", f"empty, or {NAMED}")
# Of a device: that of a user's own process has its model and version.
KIND = Text(rf"{_NAME}(\.{_NAME})*", "names joined by dots")
SOME_TEXT = Text(r"(?s).*\S.*", "some text")
SHARE = Number(most=1)
PART = Number(above=0, most=1)
TARGET = Number(above=0, below=1)  # share of queries to be answered in time; all of them would cost without limit

Named = Annotated[str, TOKEN]


_Message = TypeVar("_Message", bound=Struct)


def filled(kind: type[_Message], /, *sources: Any, **given: Any) -> _Message:
    """A message of this kind: with what is given, and each other field from the first source that has one of its name."""
    for name in kind.__struct_fields__:
        if name not in given:
            for source in sources:
                if (value := getattr(source, name, NODEFAULT)) is not NODEFAULT:
                    given[name] = value
                    break
    return kind(**given)

"""A table of a scenario file, read with care: every value is what it should be, or refused by its key."""

from collections.abc import Collection, Mapping
from math import isfinite
from typing import Any

from bus.subjects import valid_name
from services.simulation.scenario.place import Place, meant, shown

LARGEST = 1e12  # of any number


def table_at(value: Any, place: Place) -> dict[str, Any]:
    if not isinstance(value, dict):
        place.refuse(f"must be a table, not {shown(value)}")
    return value


def list_at(value: Any, place: Place) -> list[Any]:
    if not isinstance(value, list):
        place.refuse(f"must be a list, not {shown(value)}")
    return value


def number_at(value: Any, place: Place, least: float = 0.0, most: float = LARGEST, *, above: bool = False) -> float:
    """A number from least to most; above: `least` itself is too little."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        place.refuse(f"must be a number, not {shown(value)}")
    if not least <= value <= most or (above and value == least):  # what is no number is not between any two
        low = f"above {least:g}" if above else f"at least {least:g}"
        high = f" and at most {most:g}" if value > most else ""
        place.refuse(f"must be {low}{high}, not {shown(value)}")
    return float(value)


def whole_at(value: Any, place: Place, least: int = 0, most: int = 10**9) -> int:
    """A whole number from least to most."""
    if isinstance(value, float) and isfinite(value) and value == int(value):
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        place.refuse(f"must be a whole number, not {shown(value)}")
    if not least <= value <= most:
        place.refuse(f"must be from {least} to {most}, not {shown(value)}")
    return value


def text_at(value: Any, place: Place) -> str:
    """Some printable text."""
    if not isinstance(value, str) or not value.strip() or not value.isprintable():
        place.refuse(f"must be some printable text, not {shown(value)}")
    return value


def name_at(value: Any, place: Place) -> str:
    """A name that may stand in a subject."""
    if not valid_name(value):
        place.refuse(f"must be 1 to 64 letters, digits, - or _, a letter or digit first, not {shown(value)}")
    return str(value)


def one_of(value: Any, place: Place, known: Collection[str], what: str) -> str:
    """One of these names. what: `app`, `variant`, as the refusal says it."""
    if not isinstance(value, str):
        place.refuse(f"must be the name of {'an' if what[0] in 'aeiou' else 'a'} {what}, not {shown(value)}")
    if value not in known:
        place.refuse(f"there is no {what} {shown(value)}{meant(value, known)}")
    return value


class Table:
    """keys: all that it may have. moved: keys that stand elsewhere, and what to write instead."""

    def __init__(self, value: Any, place: Place, keys: Collection[str], moved: Mapping[str, str] | None = None) -> None:
        self.place = place
        self.content = table_at(value, place)
        for key in self.content:
            if key not in keys:
                remedy = (moved or {}).get(key)
                place.at(key).refuse(remedy or f"there is no such key{meant(key, keys)}")

    def __contains__(self, key: object) -> bool:
        return key in self.content

    def at(self, key: str) -> Place:
        return self.place.at(key)

    def get(self, key: str) -> Any:
        """The value as it stands; refused when there is none."""
        if key not in self.content:
            self.at(key).refuse("is missing")
        return self.content[key]

    def number(
        self,
        key: str,
        default: float | None = None,
        least: float = 0.0,
        most: float = LARGEST,
        *,
        above: bool = False,
    ) -> float:
        """A number; without a default it must be there."""
        if default is not None and key not in self.content:
            return default
        return number_at(self.get(key), self.at(key), least, most, above=above)

    def maybe(self, key: str, least: float = 0.0, most: float = LARGEST, *, above: bool = False) -> float | None:
        """A number, None where nothing is said."""
        return number_at(self.content[key], self.at(key), least, most, above=above) if key in self.content else None

    def whole(self, key: str, default: int | None = None, least: int = 0, most: int = 10**9) -> int:
        if default is not None and key not in self.content:
            return default
        return whole_at(self.get(key), self.at(key), least, most)

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

    def blocks(self, key: str, keys: Collection[str], moved: Mapping[str, str] | None = None) -> "list[Table]":
        """The [[key]] blocks, each with these keys."""
        found = self.content.get(key, [])
        if isinstance(found, dict):
            self.at(key).refuse(f"must be written [[{key}]], one block for each")
        if not isinstance(found, list):
            self.at(key).refuse(f"must be [[{key}]] blocks, not {shown(found)}")
        return [Table(one, self.at(key).at(i), keys, moved) for i, one in enumerate(found)]

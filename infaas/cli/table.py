"""Plain tables for terminals and logs: aligned columns, numbers to the right, nothing cut off."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple


class Column(NamedTuple):
    """title: as shown, with the unit. value: the item's field, or a function of the item."""

    title: str
    value: str | Callable[[Mapping[str, Any]], Any]


def print_table(items: Sequence[Mapping[str, Any]], columns: Sequence[Column], empty: str) -> None:
    """One line an item; `empty` when there is none."""
    if not items:
        print(empty)
        return
    cells = [[_value(item, column) for column in columns] for item in items]
    texts = [[text(value) for value in row] for row in cells]
    widths = [max(len(column.title), *(len(row[i]) for row in texts)) for i, column in enumerate(columns)]
    right = [all(row[i] is None or isinstance(row[i], (int, float)) for row in cells) for i in range(len(columns))]
    for row in [[column.title for column in columns], *texts]:
        aligned = [cell.rjust(w) if r else cell.ljust(w) for cell, w, r in zip(row, widths, right, strict=True)]
        print("  ".join(aligned).rstrip())


def text(value: Any) -> str:
    """A value for people: numbers to three or four digits, nothing as a dash."""
    if value is None or value == "":
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return number(value)
    if isinstance(value, (list, tuple)):
        return ", ".join(map(str, value)) or "-"
    return str(value)


def number(value: float) -> str:
    """A measured number without digits that mean nothing."""
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    if value == 0 or abs(value) >= 0.001:
        return f"{value:.4g}"
    return f"{value:.3g}"


def _value(item: Mapping[str, Any], column: Column) -> Any:
    return column.value(item) if callable(column.value) else item.get(column.value)

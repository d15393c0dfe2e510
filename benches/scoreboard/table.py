"""Rows of benches/decisions.py as tables: of each run, or of each scenario."""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

Row = Mapping[str, Any]


class Column(NamedTuple):
    title: str
    key: str
    form: str


COLUMNS = (
    Column("violations", "violations", ".3%"),
    Column("worst app", "worst_violations", ".2%"),
    Column("apps on target", "met", ".0%"),
    Column("accuracy", "accuracy", ".4f"),
    Column("of best", "accuracy_of_best", ".2%"),
    Column("US$", "cost", ".4f"),
    Column("US$/1000 in time", "cost_per_1000_in_time", ".5f"),
    Column("static / US$", "cheaper", ".2f"),
    Column("to oracle", "to_oracle", ".2f"),
    Column("actions/h", "actions_per_hour", ".0f"),
    Column("used", "utilisation", ".1%"),
    Column("wall s", "wall_s", ".0f"),
)


def text(row: Row, column: Column) -> str:
    value = row.get(column.key)
    if value is None:
        return "-"
    if column.key == "to_oracle":
        return f"{value:+.4f}" if row["goal"] == "accuracy" else f"{value:.2f} x"
    return f"{value:{column.form}}"


def cells(row: Row, before: Row | None = None) -> list[str]:
    """A row's cells; before: of another time, shown where it differs."""
    found = [row["scenario"], row["policy"]]
    for column in COLUMNS:
        now = text(row, column)
        then = now if before is None or column.key == "wall_s" else text(before, column)
        found.append(now if now == then else f"{then} -> {now}")
    return found


def table(rows: Iterable[Row], against: Mapping[tuple[str, str], Row] | None = None) -> str:
    """As Markdown, aligned."""
    against = against or {}
    lines = [["scenario", "policy", *(column.title for column in COLUMNS)]]
    lines += [cells(row, against.get((row["scenario"], row["policy"]))) for row in rows]
    return aligned(lines)


def detail(row: Row) -> str:
    """What the table leaves out."""
    if "apps" not in row:
        return f"{row['scenario']} {row['policy']}: at most {row['in_time']:.2%} in time"
    apps = " ".join(f"{app} {share:.2%}" for app, share in row["apps"].items() if share)
    kinds = " ".join(f"{kind} {count}" for kind, count in row["scale_actions"].items())
    refused = " ".join(f"{code} {count}" for code, count in row["refusals"].items())
    name = f"{row['scenario']} {row['policy']}"
    return f"{name}: {row['queries']} queries, late {row['late']}, refused {refused or 0}; apps {apps or 0}; actions {kinds or 0}"


def by_scenario(rows: Iterable[Row]) -> str:
    """A line a scenario: what each policy missed, its bill or its accuracy, its actions in an hour."""
    found: dict[str, dict[str, str]] = {}
    for row in rows:
        found.setdefault(row["scenario"], {})[row["policy"]] = _in_short(row)
    policies = list(dict.fromkeys(policy for cells in found.values() for policy in cells))
    return aligned(
        [["scenario", *policies], *([name, *(of.get(p, "-") for p in policies)] for name, of in found.items())]
    )


def _in_short(row: Row) -> str:
    missed = f"{row['violations']:.2%}, " if "violations" in row else ""
    actions = f", {row['actions_per_hour']:.0f}/h" if row.get("actions") else ""
    if row["goal"] == "accuracy":
        return f"{missed}{row['accuracy']:.2%} accurate{actions}" if row["accuracy"] is not None else f"{missed}-"
    return f"{missed}US$ {row['cost']:.3f}{actions}"


def aligned(lines: list[list[str]]) -> str:
    """As Markdown. The first line is the head."""
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    texts = ["| " + " | ".join(f"{c:<{w}}" for c, w in zip(line, widths, strict=True)) + " |" for line in lines]
    texts.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(texts)

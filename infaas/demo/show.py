"""How the demo shows what it found: tables on stdout."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

MOST_VARIANTS = 3  # named in a cell; the others are counted


def variants_table(registered: Sequence[Mapping[str, Any]]) -> Table:
    """The registered models, each with its best and its fastest variant."""
    table = Table("model", "variants", "accuracy", "fastest", "US$ per 1,000", "MB", title="What was registered")
    for name in ("variants", "accuracy", "fastest", "US$ per 1,000", "MB"):
        table.columns[[str(column.header) for column in table.columns].index(name)].justify = "right"
    for row in registered:
        table.add_row(
            row["model"],
            str(row["variants"]) + (f" ({len(row['failures'])} failed)" if row["failures"] else ""),
            _span(row["accuracy"], ".3f"),
            f"{row['latency_ms'][0]:.3g} ms",
            _span(row["cost_per_1000"], ".2g"),
            _span(row["memory_mb"], ".0f"),
        )
    return table


def asks_table(rows: Sequence[Mapping[str, Any]], things: str) -> Table:
    """For each set of requirements: what answered, and how well."""
    table = Table(
        title=f"What was asked, and what became of it ({things} that the system has not seen)", show_lines=True
    )
    table.add_column("asked for", overflow="fold")
    table.add_column("sent", justify="right")
    table.add_column("answered by", overflow="fold", min_width=28)
    table.add_column("refused", overflow="fold")
    for name in ("accuracy", "p50", "p99", "SLO met", "US$/1,000"):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(
            row["asked"],
            str(row["sent"]),
            _answered(row["variants"]),
            "\n".join(f"{count} × {code}" for code, count in row["refused"].items()),
            _accuracy(row),
            _number(row["p50_ms"], "{:.1f} ms"),
            _number(row["p99_ms"], "{:.1f} ms"),
            _number(row["slo_attainment"], "{:.1%}") + "".join(f"\n{n} × {what}" for what, n in row["missed"].items()),
            _number(row["cost_per_1000"], "{:.2g}"),
        )
    return table


def reasons(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Why queries were refused: one example for each kind."""
    return [f"{row['asked']}: {code}: {text}" for row in rows for code, text in row["reasons"].items()]


def sql_table(title: str, rows: Sequence[Mapping[str, Any]]) -> Table:
    """Rows of a query, as they are."""
    table = Table(title=title)
    for name in rows[0] if rows else ():
        table.add_column(name, justify="right" if isinstance(rows[0][name], int | float) else "left")
    for row in rows:
        table.add_row(*(f"{value:.4g}" if isinstance(value, float) else str(value) for value in row.values()))
    return table


def show(found: Mapping[str, Any], console: Console) -> None:
    """Everything that the demo found, for people."""
    console.print(variants_table(found["registered"]))
    console.print(asks_table(found["asks"], found["things"]))
    console.print("Why queries were refused (one example of each kind):")
    for reason in reasons(found["asks"]):
        console.print(f"  {reason}", highlight=False, soft_wrap=True, markup=False)
    for title, rows in found["sql"].items():
        console.print(sql_table(title, rows))
    for problem in found["problems"]:
        console.print(f"[red]wrong:[/] {problem}", highlight=False)
    if not found["problems"]:
        console.print(
            f"[green]All {found['queries']} queries were answered rightly or refused with a reason[/]"
            f" ({found['seconds']:.0f} s in all).",
            highlight=False,
        )


def _answered(variants: Mapping[str, int]) -> str:
    shown = [f"{count} × {name}" for name, count in list(variants.items())[:MOST_VARIANTS]]
    rest = list(variants.values())[MOST_VARIANTS:]
    return "\n".join([*shown, f"{sum(rest)} × {len(rest)} others"] if rest else shown)


def _accuracy(row: Mapping[str, Any]) -> str:
    if row["accuracy"] is None:
        return ""
    return f"{row['accuracy']:.3f}\npromised {row['promised_accuracy']:.3f}"


def _span(ends: Sequence[float], form: str) -> str:
    low, high = (format(end, form) for end in ends)
    return low if low == high else f"{low} .. {high}"


def _number(value: float | None, form: str) -> str:
    return "" if value is None else form.format(value)

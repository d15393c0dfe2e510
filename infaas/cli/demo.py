"""`infaas demo`: a system for a moment, real models, real queries. Exits 0 only if every query ended as it should."""

import asyncio
import signal
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter
from cyclopts.validators import Number
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from infaas.cli.options import Json
from infaas.cli.output import FAILED, print_json, usage

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from infaas.demo.family import ModelFamily
    from infaas.demo.family import Progress as OnProgress

    MakeFamily = Callable[[OnProgress], Awaitable[ModelFamily]]

FAMILIES = {"digits": "infaas.demo.digits:family", "photos": "examples.photos:family"}
MAX_VARIANTS = 3  # named in a cell of a table; the others are counted


def demo(
    *,
    family: str = "digits",
    keep: Annotated[bool, Parameter(negative="")] = False,
    seconds: Annotated[float, Parameter(validator=Number(gte=1, lte=600))] = 15.0,
    json: Json = False,
) -> int:
    """Start a system in a temporary directory, register real models, send real queries, and show what became of them.

    The default family is seven digit classifiers, from logistic regression to a convolutional network. Each is registered with its
    validation data. Then pictures that the system has not seen are sent with several requirements at a changing rate. Exits 0 only
    if every query was answered rightly or refused with a reason.

    Example: infaas demo --keep

    Parameters
    ----------
    family
        digits: part of this package. photos: EfficientNet-Lite 0, 1 and 2 on photographs; needs a checkout of the repository with
        the extra `photos` (examples/photos/README.md). MODULE:FUNCTION: a family of your own, made like these two.
    keep
        Leave the system running at the end, and print where it is.
    seconds
        Seconds in which queries are sent.
    json
        Print one JSON document and nothing else.

    """
    make = _maker(family)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # an ordered end, as with Ctrl-C
    return asyncio.run(_demo(make, keep, seconds, json))


def _maker(family: str) -> "MakeFamily":
    module, _, function = FAMILIES.get(family, family).partition(":")
    if not (module and function):
        usage(f"--family {family}: is neither {' nor '.join(FAMILIES)} nor MODULE:FUNCTION")
    try:
        make: MakeFamily = getattr(import_module(module), function)
    except ModuleNotFoundError as error:
        if family == "photos" and error.name in ("examples", module):
            usage(
                "--family photos: is in examples/photos of the repository: install a checkout with pip install -e '.[photos]'"
            )
        usage(f"--family {family}: {error}")
    except AttributeError:
        usage(f"--family {family}: {module} has no {function}")
    return make


async def _demo(make: "MakeFamily", keep: bool, seconds: float, as_json: bool) -> int:
    from infaas.demo.scenario import run  # noqa: PLC0415  (after the arguments have been understood)

    bars = Progress(
        TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), console=Console(stderr=True), transient=True
    )
    with bars:
        bar = bars.add_task("", total=1.0)
        last = ""

        def progress(text: str, share: float) -> None:
            nonlocal last
            bars.update(bar, description=text, completed=min(share, 0.999))  # at 1 the clock beside it would stop
            if text != last and not bars.console.is_terminal:
                bars.console.print(text, highlight=False)  # a log gets one line a step instead of a bar
            last = text

        result, system = await run(await make(progress), keep=keep, seconds=seconds, progress=progress)
    if as_json:
        running = {"system": {"data_dir": str(system.data_dir), "pid": system.pid, **system.urls}} if keep else {}
        print_json(result | running)
    else:
        console = Console(width=None if Console().is_terminal else 160)
        print_result(result, console)
        if keep:
            console.print(
                f"The system is still running: infaas status --data-dir {system.data_dir}; stop it with: kill {system.pid}",
                highlight=False,
                soft_wrap=True,
            )
    return FAILED if result["problems"] else 0


def variants_table(registered: Sequence[Mapping[str, Any]]) -> Table:
    """The registered models and the range of each figure of their variants."""
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


def kinds_table(rows: Sequence[Mapping[str, Any]], things: str) -> Table:
    """For each kind of query: which variants answered, and how well."""
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
    """Why queries were refused: one example for each code."""
    return [f"{row['asked']}: {code}: {text}" for row in rows for code, text in row["reasons"].items()]


def sql_table(title: str, rows: Sequence[Mapping[str, Any]]) -> Table:
    """The rows of an SQL query, unchanged."""
    table = Table(title=title)
    for name in rows[0] if rows else ():
        table.add_column(name, justify="right" if isinstance(rows[0][name], int | float) else "left")
    for row in rows:
        table.add_row(*(f"{value:.4g}" if isinstance(value, float) else str(value) for value in row.values()))
    return table


def print_result(result: Mapping[str, Any], console: Console) -> None:
    """Print the result of the demo as tables."""
    console.print(variants_table(result["registered"]))
    console.print(kinds_table(result["asks"], result["things"]))
    console.print("Why queries were refused (one example of each kind):")
    for reason in reasons(result["asks"]):
        console.print(f"  {reason}", highlight=False, soft_wrap=True, markup=False)
    for title, rows in result["sql"].items():
        console.print(sql_table(title, rows))
    for problem in result["problems"]:
        console.print(f"[red]wrong:[/] {problem}", highlight=False)
    if not result["problems"]:
        console.print(
            f"[green]All {result['queries']} queries were answered rightly or refused with a reason[/]"
            f" ({result['seconds']:.0f} s in all).",
            highlight=False,
        )


def _answered(variants: Mapping[str, int]) -> str:
    shown = [f"{count} × {name}" for name, count in list(variants.items())[:MAX_VARIANTS]]
    rest = list(variants.values())[MAX_VARIANTS:]
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

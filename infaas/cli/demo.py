"""`infaas demo`: a system for a moment, real models, real queries. Exits 0 only if every query ended as it should."""

import asyncio
import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from tempfile import mkdtemp
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter
from cyclopts.validators import Number
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from infaas.cli.demo_pipeline import print_pipeline
from infaas.cli.options import Json
from infaas.cli.output import FAILED, per_million, print_json, usage
from infaas.cli.simulate import check_outputs

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from infaas.demo.family import ModelFamily
    from infaas.demo.family import Progress as OnProgress
    from infaas.demo.system import DemoSystem

    MakeFamily = Callable[[OnProgress], Awaitable[ModelFamily]]

FAMILIES = {"digits": "infaas.demo.digits:family", "photos": "examples.photos:family"}
MAX_VARIANTS = 3  # named in a cell of a table; the others are counted


def demo(
    *,
    family: str = "digits",
    keep: Annotated[bool, Parameter(negative="")] = False,
    seconds: Annotated[float | None, Parameter(validator=Number(gte=1, lte=600))] = None,
    ensemble: Annotated[bool, Parameter(negative="")] = False,
    pipeline: Annotated[bool, Parameter(negative="")] = False,
    plot: Path | None = None,
    json: Json = False,
) -> int:
    """Start a system in a temporary directory, register real models, send real queries, and show what became of them.

    The default family is seven digit classifiers, from logistic regression to a convolutional network. Each is registered with its
    validation data. Then pictures that the system has not seen are sent with several requirements at a changing rate. Exits 0 only
    if every query was answered rightly or refused with a reason.

    With --ensemble all seven models answer each query together, and learn from feedback. After a third of the time the best one gets a
    version that is wrong, and after two thirds its sound version again. Shown are weights and errors, as a table and as a picture.

    With --pipeline a cheap model reads each digit, an accurate one those that the cheap one is unsure of, and a check compares the result
    with known pictures. The pipeline is planned, deployed and tuned while its load triples and falls again.

    Example: infaas demo --keep

    Parameters
    ----------
    family
        digits: part of this package. photos: EfficientNet-Lite 0, 1 and 2 on photographs; needs a checkout of the repository with
        the extra `photos` (examples/photos/README.md). MODULE:FUNCTION: a family of your own, made like these two.
    keep
        Leave the system running at the end, and print where it is.
    seconds
        Seconds in which queries are sent. Left out: 15, with --ensemble 60, with --pipeline 50.
    ensemble
        Several models answer together (docs/ensembles.md). For the family digits.
    pipeline
        Several apps answer one after the other (docs/pipelines.md). For the family digits.
    plot
        Where --ensemble and --pipeline draw their picture: .svg, .png or .pdf. Left out: --ensemble draws into a temporary file. Needs
        the extra `plot`.
    json
        Print one JSON document and nothing else.

    """
    if ensemble and pipeline:
        usage("--pipeline: is another demo than --ensemble: leave one of them out")
    which = "--ensemble" if ensemble else "--pipeline" if pipeline else ""
    if plot is not None and not which:
        usage("--plot: is what --ensemble and --pipeline draw; give one of them too, or leave --plot out")
    if which and family != "digits":
        usage(f"{which}: shows the family digits, not {family}: leave --family out")
    if which:
        check_outputs(plot, None)
    make = _maker(family)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # an ordered end, as with Ctrl-C
    if ensemble:
        return asyncio.run(_ensemble(keep, 60.0 if seconds is None else seconds, plot, json))
    if pipeline:
        return asyncio.run(_pipeline(keep, 50.0 if seconds is None else seconds, plot, json))
    return asyncio.run(_demo(make, keep, 15.0 if seconds is None else seconds, json))


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


@contextmanager
def _progress() -> Iterator["OnProgress"]:
    """Shows progress on stderr: a bar on a terminal, else a line a step."""
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

        yield progress


async def _demo(make: "MakeFamily", keep: bool, seconds: float, as_json: bool) -> int:
    from infaas.demo.scenario import run  # noqa: PLC0415  (after the arguments have been understood)

    with _progress() as progress:
        result, system = await run(await make(progress), keep=keep, seconds=seconds, progress=progress)
    return _shown(result, system, keep, as_json, print_result)


async def _ensemble(keep: bool, seconds: float, plot: Path | None, as_json: bool) -> int:
    from infaas.demo.ensemble import run  # noqa: PLC0415  (after the arguments have been understood)

    if plot is None and find_spec("matplotlib") is not None:
        plot = Path(mkdtemp(prefix="infaas-ensemble-")) / "ensemble.svg"
    with _progress() as progress:
        result, system = await run(keep=keep, seconds=seconds, picture=plot, progress=progress)
    return _shown(result, system, keep, as_json, print_ensemble)


async def _pipeline(keep: bool, seconds: float, plot: Path | None, as_json: bool) -> int:
    from infaas.demo.pipeline import run  # noqa: PLC0415  (after the arguments have been understood)

    with _progress() as progress:
        result, system = await run(keep=keep, seconds=seconds, picture=plot, progress=progress)
    return _shown(result, system, keep, as_json, print_pipeline)


def _shown(
    result: dict[str, Any],
    system: "DemoSystem",
    keep: bool,
    as_json: bool,
    print_found: "Callable[[Mapping[str, Any], Console], None]",
) -> int:
    """Print a demo's result. Returns the exit code."""
    if as_json:
        running = {"system": {"data_dir": str(system.data_dir), "pid": system.pid, **system.urls}} if keep else {}
        print_json(result | running)
    else:
        console = Console(width=None if Console().is_terminal else 160)
        print_found(result, console)
        if keep:
            console.print(
                f"The system is still running: infaas status --data-dir {system.data_dir}; stop it with: kill {system.pid}",
                highlight=False,
                soft_wrap=True,
            )
    return FAILED if result["problems"] else 0


COST = "computed\nUS$/million"


def variants_table(registered: Sequence[Mapping[str, Any]]) -> Table:
    """The registered models and the range of each figure of their variants."""
    table = Table("model", "variants", "accuracy", "fastest", COST, "MB", title="What was registered")
    for name in ("variants", "accuracy", "fastest", COST, "MB"):
        table.columns[[str(column.header) for column in table.columns].index(name)].justify = "right"
    for row in registered:
        table.add_row(
            row["model"],
            str(row["variants"]) + (f" ({len(row['failures'])} failed)" if row["failures"] else ""),
            _span(row["accuracy"], ".3f"),
            f"{row['latency_ms'][0]:.3g} ms",
            _span([1000 * one for one in row["cost_per_1000"]], ".2g"),
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
    for name in ("accuracy", "p50", "p99", "in time", "charged\nUS$/million"):
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
            _number(per_million(row["cost_per_1000"]), "{:.2g}"),
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


def ensemble_table(result: Mapping[str, Any]) -> Table:
    """Weights and errors of the members in each phase, and of all of them together."""
    phases = result["phases"]
    table = Table(
        title=f"{result['app']} under {result['policy']}, eta {result['eta']:g}: share of wrong answers, and weight at the end of each third"
    )
    table.add_column("model")
    for phase in phases:
        table.add_column(f"{phase['name']}\n({phase['answers']} answers, {phase['seconds']:.0f} s)", justify="right")
    for model in sorted({model for phase in phases for model in phase["members"]}):
        there = [phase["members"].get(model) for phase in phases]
        cells = ["" if one is None else f"{one['error']:.1%}, weight {one['weight']:.3f}" for one in there]
        table.add_row(f"[bold]{model}[/]" if model == result["switched"] else model, *cells)
    table.add_section()
    best = [phase["best"] and f"{phase['best']['model']} {phase['best']['error']:.1%}" for phase in phases]
    table.add_row("the best model, in hindsight", *(one or "" for one in best))
    table.add_row("the models together", *(_number(phase["error"], "{:.1%}") for phase in phases), style="bold")
    table.add_row("confidence", *(_number(phase["confidence"], "{:.3f}") for phase in phases))
    table.add_row("members missing in an answer", *(_number(phase["missing"], "{:.3f}") for phase in phases))
    return table


def print_ensemble(result: Mapping[str, Any], console: Console) -> None:
    """Print the result of the demo of several models."""
    console.print(ensemble_table(result))
    if result["best"] is not None:
        best = result["best"]
        console.print(
            f"In all: the models together {result['error']:.1%} wrong; the best single one in hindsight, {best['model']}, {best['error']:.1%}."
            f" Pictures: the {result['pictures']} unseen ones of which the models disagree.",
            highlight=False,
            soft_wrap=True,
        )
    refused = ", ".join(f"{count} × {code}" for code, count in result["refused"].items()) or "none"
    console.print(
        f"{result['queries']} queries, {result['feedbacks']} feedbacks, refused: {refused} ({result['seconds']:.0f} s in all).",
        highlight=False,
        soft_wrap=True,
    )
    drawn = "no picture: it needs the extra `plot` (pip install 'infaas\\[plot]')"
    console.print(
        drawn if result["picture"] is None else f"picture: {result['picture']}", highlight=False, soft_wrap=True
    )
    for problem in result["problems"]:
        console.print(f"[red]wrong:[/] {problem}", highlight=False)
    if not result["problems"]:
        console.print(
            "[green]Each query was answered or refused once, and each feedback taught once.[/]", highlight=False
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

"""`infaas demo`: a system for a moment, real models, real queries. Exits 0 only if every query ended as it should."""

import asyncio
import signal
from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from tempfile import mkdtemp
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter
from cyclopts.validators import Number
from rich.console import Console
from rich.table import Table

from infaas.cli.options import Json, imported
from infaas.cli.output import FAILED, print_json, progress_bars, usage
from infaas.cli.simulate import check_outputs

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from infaas.demo.load import ModelFamily
    from infaas.demo.load import Progress as OnProgress
    from infaas.demo.program import Demo, DemoSystem, DemoTable

    MakeFamily = Callable[[OnProgress], Awaitable[ModelFamily]]

FAMILIES = {"digits": "infaas.demo.digits:family", "photos": "examples.photos:family"}
SECONDS = {"": 15.0, "--ensemble": 60.0, "--pipeline": 50.0}  # of queries, if not said


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
    return asyncio.run(_run(which, make, keep, SECONDS[which] if seconds is None else seconds, plot, json))


def _maker(family: str) -> "MakeFamily":
    named = FAMILIES.get(family, family)
    if ":" not in named:
        usage(f"--family {family}: is neither {' nor '.join(FAMILIES)} nor MODULE:FUNCTION")
    if family == "photos" and find_spec("examples") is None:
        usage(
            "--family photos: is in examples/photos of the repository: install a checkout with pip install -e '.[photos]'"
        )
    make: MakeFamily = imported(named)
    return make


async def _run(which: str, make: "MakeFamily", keep: bool, seconds: float, plot: Path | None, as_json: bool) -> int:
    from infaas.demo.program import run  # noqa: PLC0415  (after the arguments have been understood)

    if which == "--ensemble" and plot is None and find_spec("matplotlib") is not None:
        plot = Path(mkdtemp(prefix="infaas-ensemble-")) / "ensemble.svg"
    with progress_bars() as progress:
        demo = await _demo(which, make, progress)
        result, system = await run(demo, keep=keep, seconds=seconds, picture=plot, progress=progress)
    if as_json:
        running = {"system": {"data_dir": str(system.data_dir), "pid": system.pid, **system.urls}} if keep else {}
        print_json(result | running)
    else:
        print_result(demo, result, Console(width=None if Console().is_terminal else 160), system if keep else None)
    return FAILED if result["problems"] else 0


async def _demo(which: str, make: "MakeFamily", progress: "OnProgress") -> "Demo":
    if which:
        found: Demo = import_module(f"infaas.demo.{which.lstrip('-')}").DEMO
        return found
    from infaas.demo.choices import choices  # noqa: PLC0415

    return choices(await make(progress))


def print_result(demo: "Demo", result: Mapping[str, Any], console: Console, kept: "DemoSystem | None" = None) -> None:
    """Print the result of a demo. kept: the system, if it still runs."""

    def say(text: str, *, markup: bool = False) -> None:
        console.print(text, highlight=False, soft_wrap=True, markup=markup)

    for block in demo.shown(result):
        if isinstance(block, str):
            say(block)
        else:
            console.print(_table(block))
    if result["picture"] is not None:
        say(f"picture: {result['picture']}")
    for problem in result["problems"]:
        console.print("[red]wrong:[/]", end=" ")
        say(problem)
    if not result["problems"]:
        done = f"[green]All {result['queries']} queries were answered rightly or refused with a reason, once[/]"
        say(f"{done} ({result['seconds']:.0f} s in all). Nothing is simulated.", markup=True)
    if kept is not None:
        where = f"infaas status --data-dir {kept.data_dir}; stop it with: kill {kept.pid}"
        say(f"The system is still running: {where}")


def _table(block: "DemoTable") -> Table:
    tall = any("\n" in cell for row in block.rows for cell in row.values())
    table = Table(title=block.title, show_lines=tall)
    for name in block.rows[0] if block.rows else ():
        words = not table.columns or name in block.left
        table.add_column(name, justify="left" if words else "right", overflow="fold" if words else "ellipsis")
    for row in block.rows:
        table.add_row(*row.values())
    return table

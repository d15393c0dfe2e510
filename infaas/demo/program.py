"""The one program of all demos: start a system, register models, send queries, check the records, and say what became of them."""

import asyncio
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import infaas
from bus.messages.public import RegistrationStatus
from infaas.client import Client
from infaas.demo.family import Progress
from infaas.demo.load import DemoLoad
from infaas.demo.system import DemoSystem, temporary

RECORDED_S = 10.0  # until every outcome must be in SQL. The contract says 5 s; a loaded machine may take longer.
COUNT = """
SELECT count(*) AS outcomes, count(DISTINCT uid) AS "different ones" FROM infaas.query_outcomes WHERE app = '{app}' AND parent IS NULL
"""


class DemoTable(NamedTuple):
    """A table to print. rows: cells by the titles of their columns. left: the columns of words, beside the first; others are flush right."""

    title: str
    rows: Sequence[Mapping[str, str]]
    left: Sequence[str] = ()


class Demo(Protocol):
    """What one demo is about. settings: TOML for its system."""

    app: str
    settings: str = ""

    async def play(self, client: Client, directory: Path, seconds: float, progress: Progress) -> DemoLoad:
        """Register the models and send queries for so many seconds. Raises InfaasError."""

    async def figures(self, system: DemoSystem, load: DemoLoad) -> dict[str, Any]:
        """What became of the queries; a part of the printed JSON. `problems`: what is wrong with them, where something is."""

    def shown(self, result: Mapping[str, Any]) -> Iterator[str | DemoTable]:
        """The result, to print."""

    def draw(self, result: Mapping[str, Any], path: Path) -> None:
        """A picture of the result, where the demo has one. The path's suffix decides its format. Needs matplotlib."""
        del result, path


async def run(
    demo: Demo, *, keep: bool, seconds: float, picture: Path | None, progress: Progress
) -> tuple[dict[str, Any], DemoSystem]:
    """Run a demo. Returns its result (`problems` is empty if all went well) and the system, which is stopped unless kept.

    picture: file to draw into; None: none is drawn. Raises InfaasError if the demo could not be carried out; then the system is stopped
    even with `keep`.
    """
    began = time.monotonic()
    async with temporary(demo.settings, keep=keep, progress=progress) as (system, ready_s):
        async with infaas.connect(data_dir=system.data_dir) as client:
            load = await demo.play(client, system.data_dir.parent, seconds, progress)
        progress("reading the records", 0.0)
        unrecorded = await in_sql(system, COUNT.format(app=demo.app), load.queries, "queries were sent")
        figures = await demo.figures(system, load)
        found = {
            "app": demo.app,
            "queries": load.queries,
            **figures,
            "picture": None if picture is None else str(picture),
            "problems": [*load.problems(), *figures.get("problems", ()), *unrecorded],
            "ready_s": ready_s,
            "seconds": time.monotonic() - began,
        }
    if picture is not None:
        demo.draw(found, picture)
    return found, system


async def register(
    client: Client, files: Iterable[tuple[str, str, Path, Path]], progress: Progress
) -> dict[str, dict[str, str]]:
    """Register models, one after the other. files: app, model, file and validation set. Returns failed variants with reasons, by model."""
    failures = {}
    listed = list(files)
    for number, (app, model, path, validation) in enumerate(listed, 1):
        title = f"registering {model} for {app} ({number} of {len(listed)})"
        progress(title, 0.0)

        def on_progress(status: RegistrationStatus, title: str = title) -> None:
            progress(title, status.progress)

        status = await client.register(path, app=app, model=model, validation=validation, on_progress=on_progress)
        failures[model] = {failure.variant: failure.reason for failure in status.failures}
    return failures


async def in_sql(system: DemoSystem, query: str, expected: int, what: str) -> list[str]:
    """Wait until each figure of the query's row is `expected`. Returns what is wrong if it does not become so."""
    give_up = time.monotonic() + RECORDED_S
    while True:
        (row,) = await system.sql(query)
        if set(row.values()) == {expected}:
            return []
        if time.monotonic() > give_up or max(row.values()) > expected:
            held = ", ".join(f"{count} {name}" for name, count in row.items())
            return [f"{expected} {what}, but SQL holds {held}"]
        await asyncio.sleep(0.5)


def text(value: float | None, form: str) -> str:
    """The number in this form; empty without one."""
    return "" if value is None else form.format(value)


def counted(counts: Mapping[str, int], between: str = ", ") -> str:
    """Counts in words: "3 × deadline, 1 × overloaded"."""
    return between.join(f"{count} × {what}" for what, count in counts.items())


def save_picture(figure: Any, panels: Sequence[Any], title: str, seconds: float, path: Path) -> None:
    """Finish a figure of matplotlib and write it. panels: one above the other, over so many seconds."""
    panels[-1].set_xlabel("time, s")
    panels[-1].set_xlim(0.0, seconds)
    for panel in panels:
        panel.set_ylim(bottom=0.0)
        panel.grid(alpha=0.25)
        panel.legend(loc="upper left", bbox_to_anchor=(1.01, 1.02), fontsize=8, frameon=False)
    figure.suptitle(title, fontsize=11)
    figure.savefig(path)

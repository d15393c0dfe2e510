"""`infaas explain`: the decision that a query would get now."""

import asyncio
from pathlib import Path
from typing import Any

from infaas.cli.needs import NO_NEEDS, NeedOptions, told
from infaas.cli.options import DataDir, Json
from infaas.cli.output import show
from infaas.cli.table import Column, print_table
from infaas.connecting import connect
from infaas.errors import Refused
from infaas.explained import why_chosen

_COLUMNS = (
    Column("", lambda item: " " if item.get("why_not") else "->"),
    Column("variant", "variant"),
    Column("state", "state"),
    Column(
        "on", lambda item: f"{item.get('worker') or item.get('hardware')}{' (simulated)' * bool(item.get('simulated'))}"
    ),
    Column("accuracy", "accuracy"),
    Column("latency ms", "latency_ms"),
    Column("load ms", "load_ms"),
    Column("US$/1000", "cost_per_1000"),
    Column("why, or why not", lambda item: item.get("why_not") or f"chosen: {item.get('why') or 'meets all needs'}"),
)


def explain(*, app: str, needs: NeedOptions = NO_NEEDS, data_dir: DataDir = None, json: Json = False) -> int:
    """Show the decision that a query with these requirements would get now, and why each other variant is passed over.

    Sends no query and changes nothing.

    Parameters
    ----------
    app
        The application that would ask.

    """
    show(asyncio.run(_explain(data_dir, app, needs)), json, _render)
    return 0


async def _explain(data_dir: Path | None, app: str, needs: NeedOptions) -> dict[str, Any]:
    async with connect(data_dir=data_dir) as client:
        return await client.explain(app, **needs.to_needs())


def _render(explanation: dict[str, Any]) -> None:
    why = why_chosen(explanation)
    rows = [{**each, "why": why} for each in explanation.get("candidates") or []]
    print_table(rows, _COLUMNS, "this app has no variants")
    if explanation.get("chosen") is None:
        refusal = explanation.get("refusal")
        print(f"no variant: {told(Refused.from_map({'error': refusal}))}" if refusal else "no variant would answer now")

"""The tables of a comparison, as Markdown that also reads well on a terminal. Pure."""

from collections import Counter
from collections.abc import Mapping
from statistics import median
from typing import Any

from benches.scoreboard.table import aligned
from peers.systems import PEERS

BEGIN, END = "<!-- figures: benches/comparison.py --write -->", "<!-- end of figures -->"
COLUMNS = ("answers/s", "CPU, ms", "p50, ms", "p99, ms", "memory, MB", "… under load", "start, s")


def tables(found: Mapping[str, Any]) -> str:
    """All of it. found: what benches/comparison.py keeps with --json."""
    rounds = max(Counter((run["system"], run["model"]) for run in found["runs"]).values(), default=0)
    parts = [f"{found['when']} " + (f"Medians of {rounds} rounds." if rounds > 1 else "One round.")]
    for model, about in found["models"].items():
        parts += [f"**{model}**: {about['what']}. Latency at {about['rate']:g} requests/s.", figures(found, model)]
    return "\n\n".join([*parts, "What each was given:", given(found), disturbed(found)])


def figures(found: Mapping[str, Any], model: str) -> str:
    """One row a system, the fastest first; a system without figures says why."""
    runs: dict[str, list[Mapping[str, Any]]] = {name: [] for name in found["systems"]}
    for run in found["runs"]:
        if run["model"] == model:
            runs[run["system"]].append(run)
    rows, without = [], []
    for name, all_runs in runs.items():
        good = [run for run in all_runs if "failed" not in run]
        if not good:
            reason = found["systems"][name]["reason"] or next((run["failed"] for run in all_runs), "it was not run")
            without.append([PEERS[name].title, _cell(reason), *[""] * (len(COLUMNS) - 1)])
            continue
        of = {key: median(run[key] for run in good) for key in good[0] if key not in {"model", "system"}}
        shown = [
            f"{of['rate']:,.0f}",
            f"{of['cpu_ms']:.3f}" if of["cpu_ms"] < 1 else f"{of['cpu_ms']:.1f}",
            f"{of['p50_ms']:.1f}",
            f"{of['p99_ms']:.1f}",
            f"{of['idle_mb']:,.0f}",
            f"{of['loaded_mb']:,.0f}",
            f"{of['start_s']:.1f}",
        ]
        failed = len(all_runs) - len(good)
        some = f" ({failed} of {len(all_runs)} rounds failed)" if failed else ""
        rows.append((of["rate"], [PEERS[name].title + some, *shown]))
    lines = [row for _, row in sorted(rows, key=lambda each: -each[0])]
    alone = [each for each in found["alone"] if each["model"] == model]
    if alone:
        rate, cpu = (median(each[key] for each in alone) for key in ("rate", "cpu_ms"))
        lines.append(
            ["*the model alone, no server*", f"{rate:,.0f}", f"{cpu:.3f}" if cpu < 1 else f"{cpu:.1f}", *["–"] * 5]
        )
    return aligned([["", *COLUMNS], *lines, *without])


def given(found: Mapping[str, Any]) -> str:
    """Version, size and configuration of each system."""
    rows = []
    for name, of in found["systems"].items():
        peer = PEERS[name]
        size = _cell(of["reason"]) if of["reason"] else f"{of['mb']:,.0f}"
        rows.append([peer.title, peer.version, size, peer.given])
    return aligned([["", "version", "installed, MB", "given"], *rows])


def disturbed(found: Mapping[str, Any]) -> str:
    """How much the machine was used by others meanwhile, whether the generator kept its own times, and what was done before."""
    good = [run for run in found["runs"] if "failed" not in run]
    if not good:
        return ""
    others, late = median(run["others"] for run in good), median(run["late_ms"] for run in good)
    registered = (
        f" INFaaS registered the models beforehand in {found['registered_s']:.0f} s." if "registered_s" in found else ""
    )
    return (
        f"Other programs took {others:.1f} cores meanwhile (median of the runs; at most {max(run['others'] for run in good):.1f}). "
        f"The generator itself was late by {late:.1f} ms (median of the runs' 99th percentiles), which is part of the latencies.{registered}"
    )


def written(page: str, tables: str) -> str:
    """The page with these tables between its marks. Raises ValueError if it has none."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the page needs the lines {BEGIN!r} and {END!r}: the tables go between them")
    return f"{before}{BEGIN}\n\n{tables}\n\n{END}{after}"


def _cell(text: str) -> str:
    """One line that breaks no table."""
    return " ".join(text.replace("|", "/").split())

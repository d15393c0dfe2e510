"""What `infaas demo --pipeline` prints: a table of the stages, figures of the whole, and the load over time in blocks."""

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from rich.console import Console
from rich.table import Table

BLOCKS = " ▁▂▃▄▅▆▇█"


def print_pipeline(result: Mapping[str, Any], console: Console) -> None:
    """Print the result of the demo of a pipeline."""

    def say(text: str) -> None:
        console.print(text, highlight=False, soft_wrap=True)

    console.print(stages_table(result))
    console.print(phases_table(result))
    for line in (*figures(result), *chart(result["series"], result["phases"])):
        console.print(line, highlight=False, soft_wrap=True, markup=False)
    if result["picture"] is not None:
        say(f"picture: {result['picture']}")
    if result["pipeline_file"] is not None:
        say(f"the pipeline: {result['pipeline_file']}")
    for problem in result["problems"]:
        console.print(f"[red]wrong:[/] {problem}", highlight=False)
    if not result["problems"]:
        say(
            f"[green]All {result['queries']} queries were answered rightly or refused with a reason, once[/]"
            f" ({result['seconds']:.0f} s in all). Nothing is simulated."
        )


def stages_table(result: Mapping[str, Any]) -> Table:
    """How each vertex was planned, visited and served."""
    plan = result["plan"]
    table = Table(
        title=f"{result['app']} as planned by {plan['policy']} for {plan['rate']:.3g} queries/s ({plan['status']},"
        f" US$ {3600 * plan['cost_per_s']:.3g} an hour, estimated p99 {plan['p99_ms']:.3g} ms), and as it was served"
    )
    table.add_column("stage")
    table.add_column("variant", overflow="fold")
    for name in ("accuracy", "visits", "a query", "replicas", "over time", "instances", "batch", "p50", "p99"):
        table.add_column(name, justify="right")
    for row in result["vertices"]:
        planned = row["planned"]
        wanted = result["series"]["wanted"][row["vertex"]]
        table.add_row(
            row["vertex"],
            row["variant"],
            number(planned["accuracy"], "{:.3f}"),
            str(row["visits"]),
            f"{row['visits'] / max(1, result['answered']):.2f}, planned {planned['scale']:.2f}",
            f"planned {planned['replicas']}",
            " → ".join(str(n) for n in changes(wanted)),
            "{} .. {}".format(*row["instances"]),
            number(row["batch"], "{:.1f}") + f" of {planned['batch']}",
            number(row["p50_ms"], "{:.1f} ms"),
            number(row["p99_ms"], "{:.1f} ms"),
        )
    return table


def phases_table(result: Mapping[str, Any]) -> Table:
    """Latency and attainment of the pipeline in each phase of the load, and in all."""
    table = Table(title=f"its queries, objective {result['objective_ms']:g} ms (as the client saw them)")
    table.add_column("load")
    for name in ("queries", "queries/s", "refused", "p50", "p99", "in time"):
        table.add_column(name, justify="right")
    whole = {
        "name": "in all",
        "queries": result["load"],
        "qps": result["load"] / sum(phase["seconds"] for phase in result["phases"]),
        "refused": sum(result["refused"].values()),
        **{key: result[key] for key in ("p50_ms", "p99_ms", "attainment")},
    }
    for row in (*result["phases"], whole):
        table.add_row(
            row["name"],
            str(row["queries"]),
            f"{row['qps']:.1f}",
            str(row["refused"]),
            number(row["p50_ms"], "{:.1f} ms"),
            number(row["p99_ms"], "{:.1f} ms"),
            number(row["attainment"], "{:.1%}"),
            style="bold" if row is whole else None,
        )
    return table


def figures(result: Mapping[str, Any]) -> list[str]:
    """Accuracy, cost, and what the check found, in words."""
    rates = ", then ".join(f"{rate:.3g}" for rate in result["rates"])
    found = [f"Load: the machine carried {result['capacity_qps']:.0f} queries/s of this pipeline; sent were {rates}."]
    accuracy, cost, check = result["accuracy"], result["cost"], result["check"]
    if accuracy is not None:
        found.append(
            f"Accuracy: {accuracy['answers']:.2%} measured. For the same pictures, computed here: {accuracy['quick']} alone"
            f" {accuracy['computed_quick']:.2%}, {accuracy['exact']} alone {accuracy['computed_exact']:.2%}."
        )
    if cost["per_1000"] is not None:
        by_stage = ", ".join(
            f"{row['vertex']} {1e6 * row['cost'] * row['visits'] / result['answered']:.3g}"
            for row in result["vertices"]
            if row["cost"] is not None
        )
        found.append(f"Cost: US$ {1000 * cost['per_1000']:.3g} per million answers, charged ({by_stage}).")
        if cost["computed_exact_and_check_per_1000"] is not None:
            found.append(
                f"The accurate model for each query, computed from what its visits here were charged:"
                f" {1000 * cost['computed_exact_per_1000']:.3g}; with the check: {1000 * cost['computed_exact_and_check_per_1000']:.3g}."
            )
    if check["right"] + check["wrong"]:
        found.append(
            f"Check: it doubts {check['wrong_doubted']} of {check['wrong']} wrong answers, and {check['right_doubted']} of {check['right']}"
            " right ones."
        )
    found += decisions(result["events"])
    refused = ", ".join(f"{count} × {code}" for code, count in result["refused"].items())
    return [*found, f"Refused: {refused}."] if refused else found


def decisions(events: Sequence[Mapping[str, Any]]) -> list[str]:
    """A line for each decision of the tuner, which is about all stages. events: in order, with `at_s` seconds since the load began."""
    found = []
    for (at, action), rows in groupby(events, key=lambda row: (row["at_s"], row["action"])):
        changed = list(rows)
        what = ", ".join(f"{row['vertex']} {row['from_replicas']} → {row['to_replicas']}" for row in changed)
        reason = max((row["reason"] for row in changed), key=len)  # the longest also says what found no room
        found.append(f"Tuner at {at:.1f} s: {action}: {what}: {reason}")
    return found


def chart(series: Mapping[str, Any], phases: Sequence[Mapping[str, Any]]) -> list[str]:
    """Rate, replicas and attainment over time, a block for each interval; the last line says how the load's rate changes."""
    wanted = series["wanted"]
    rows: list[tuple[str, Sequence[float | None], float, str]] = [
        ("queries/s", series["qps"], max(series["qps"], default=0.0), "{:.0f}"),
        *((f"{vertex} replicas", values, float(max(*values, 1)), "{:.0f}") for vertex, values in wanted.items()),
        ("in time", series["attainment"], 1.0, "{:.0%}"),
    ]
    wide = max(len(name) for name, *_ in rows)
    lines = [f"{name:>{wide}} {blocks(values, top)} to {form.format(top)}" for name, values, top, form in rows]
    total = sum(phase["seconds"] for phase in phases)
    points = len(series["time"])
    axis, done = "", 0.0
    for phase in phases:
        done += phase["seconds"]
        length = round(points * done / total) - len(axis)
        axis += f"|×{phase['times']:g}"[:length].ljust(length)
    return [*lines, f"{'':>{wide}} {axis} {total:.0f} s"]


def blocks(values: Sequence[float | None], top: float) -> str:
    """One character for each value, 0 .. top: a space for None and 0, at least the lowest block for what is above 0."""
    found = []
    for value in values:
        share = 0.0 if value is None or top <= 0 else min(1.0, max(0.0, value / top))
        found.append(BLOCKS[max(1, round(share * 8))] if share > 0 else " ")
    return "".join(found)


def changes(values: Sequence[int]) -> list[int]:
    """The values without those that equal the one before."""
    return [value for i, value in enumerate(values) if not i or value != values[i - 1]]


def number(value: float | None, form: str) -> str:
    return "" if value is None else form.format(value)

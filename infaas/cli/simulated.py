"""The table of `infaas simulate`: a line for each policy, the best of each figure marked."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from infaas.cli.table import Column, number, print_table

_MARK, _NONE = "*", " "


class _Figure(NamedTuple):
    """key: of the result. best: min or max where one is better than another. shown: for people."""

    title: str
    key: str
    best: Callable[[Sequence[float]], float] | None
    shown: Callable[[float], str]


def _percent(value: float) -> str:
    return f"{100 * value:.2f} %"


_FIGURES = (
    _Figure("queries", "queries", None, lambda v: f"{v:,.0f}"),
    _Figure("answered", "answered", None, lambda v: f"{v:,.0f}"),
    _Figure("late", "late", None, lambda v: f"{v:,.0f}"),
    _Figure("refused", "refused", None, lambda v: f"{v:,.0f}"),
    _Figure("failed", "failed", None, lambda v: f"{v:,.0f}"),
    _Figure("violations", "slo_violation_ratio", min, _percent),
    _Figure("accuracy", "effective_accuracy", max, lambda v: f"{v:.4f}"),
    _Figure("worst drop", "max_accuracy_drop", min, lambda v: f"{v:.4f}"),
    _Figure("answers/s", "throughput_qps", max, number),
    _Figure("p50 ms", "p50_ms", min, number),
    _Figure("p99 ms", "p99_ms", min, number),
    _Figure("US$", "cost", min, lambda v: f"{v:.4g}"),
    _Figure("US$ per 1,000", "cost_per_1000", min, lambda v: f"{v:.4g}"),
    _Figure("utilisation", "mean_utilisation", None, lambda v: f"{100 * v:.1f} %"),
)


def print_runs(document: Mapping[str, Any]) -> None:
    """The document of `infaas simulate --json` for people."""
    runs: Sequence[Mapping[str, Any]] = document["policies"]
    print(f"{document['scenario']}, seed {document['seed']}, {number(runs[0]['duration_s'])} s, simulated")
    print_figures(runs)
    print()
    print_details(runs)
    if len(runs) > 1:
        print(f"{_MARK} the best of these policies")


def print_figures(runs: Sequence[Mapping[str, Any]]) -> None:
    """A line for each run."""
    columns = [Column("policy", "policy")]
    rows: list[dict[str, Any]] = [{"policy": run["policy"]} for run in runs]
    for figure in _FIGURES:
        cells = [figure.title + _NONE, *_cells(figure, [run[figure.key] for run in runs])]
        wide = max(map(len, cells))
        title, *aligned = (cell.rjust(wide) for cell in cells)
        columns.append(Column(title, figure.key))
        for row, cell in zip(rows, aligned, strict=True):
            row[figure.key] = cell
    print_table(rows, columns, "")


def print_details(runs: Sequence[Mapping[str, Any]]) -> None:
    """What was scaled, refused and decided in each simulated run."""
    for run in runs:
        _details(run, max(len(one["policy"]) for one in runs))


def _cells(figure: _Figure, values: Sequence[float | None]) -> list[str]:
    """Each value, marked where it is the best; not where all are the same."""
    shown = ["-" if value is None else figure.shown(value) for value in values]
    known = [value for value in values if value is not None]
    best = figure.shown(figure.best(known)) if figure.best is not None and known else None
    marked = best if len(set(shown) - {"-"}) > 1 else None
    return [cell + (_MARK if cell == marked else _NONE) for cell in shown]


def _details(run: Mapping[str, Any], wide: int) -> None:
    """What was scaled and refused, what became of offline jobs, and how fast all that was computed."""
    actions = ", ".join(f"{name} {count:,}" for name, count in run["scale_actions"].items()) or "no scaling"
    refusals = ", ".join(f"{name} {count:,}" for name, count in run["refusals"].items())
    jobs = run.get("jobs") or ()
    finished = sum(job["finished_s"] is not None for job in jobs)
    done, inputs = sum(job["done"] for job in jobs), sum(job["inputs"] for job in jobs)
    decided = run["decisions"]["p99_us"]
    parts = [
        actions,
        f"refused: {refusals}" if refusals else "",
        f"offline: {finished} of {len(jobs)} jobs, {done:,} of {inputs:,} items" if jobs else "",
        f"decided in {number(decided)} us (p99)" if decided is not None else "",
        f"{number(run['events_per_s'])} events/s" if run["events_per_s"] is not None else "",
    ]
    print(f"{run['policy'].ljust(wide)}  {'; '.join(part for part in parts if part)}")

"""One picture of a simulation: a column for each policy, rows for load, instances, workers and cost. Needs matplotlib (extra `plot`)."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

Row = NDArray[np.float64]
Run = Mapping[str, Any]
Panel = tuple[str, float, Callable[[Axes, Run, Row], None]]

SHOWN = 12  # variants with a colour of their own; the rest is one
POINTS = 300  # in a line; more are averaged
LABEL = 30  # characters
SHADES = {"cpu": "Blues", "gpu": "Purples", "inferentia": "Oranges"}
MORE_SHADES = ("Greens", "YlOrBr", "RdPu", "GnBu")  # of kinds that SHADES does not know
REST = "#B0B0B0"
OFFERED, ANSWERED, VIOLATED, COST, OFFLINE = "#000000", "#009E73", "#D55E00", "#0072B2", "#CC79A7"
OTHERS = "#C4C4C4"
SECONDS = ((900.0, 1.0, "s"), (3 * 3600.0, 60.0, "min"), (np.inf, 3600.0, "h"))  # longest duration, unit, its name


def draw(document: Mapping[str, Any], path: Path) -> None:
    """The document of `infaas simulate --json` as a picture; the path's suffix decides its format."""
    picture(document).savefig(path)


def picture(document: Mapping[str, Any]) -> Figure:
    """The same, not yet in a file; belongs to no window."""
    runs: Sequence[Run] = document["policies"]
    duration = max(run["duration_s"] for run in runs)
    unit, unit_name = next((size, name) for most, size, name in SECONDS if duration <= most)
    rows = _rows(runs, unit)
    heights = [height for _, height, _ in rows]
    wide = 4.0 if len(runs) <= 4 else 3.0
    figure = Figure(figsize=(4.4 + wide * len(runs), 1.4 + sum(heights)), dpi=110, layout="constrained")
    panels = figure.subplots(len(rows), len(runs), sharex=True, sharey="row", squeeze=False, height_ratios=heights)
    for column, run in enumerate(runs):
        times = _edges(run) / unit
        for (_, _, paint), panel in zip(rows, panels[:, column], strict=True):
            paint(panel, run, times)
        panels[0][column].set_title(_title(run), fontsize=10)
        panels[-1][column].set_xlabel(f"time, {unit_name}")
    for (label, _, _), line in zip(rows, panels, strict=True):
        line[0].set_ylabel(label)
        for panel in line:
            panel.grid(alpha=0.25)
            panel.set_axisbelow(True)
            panel.set_xlim(0, duration / unit)
            if label != "accuracy":
                panel.set_ylim(bottom=0)
        _legend(line)
    figure.align_ylabels(panels[:, 0])
    figure.suptitle(
        document.get("title") or f"{document['scenario']} (simulated, seed {document['seed']})", fontsize=13
    )
    return figure


def _rows(runs: Sequence[Run], unit: float) -> list[Panel]:
    """Label, inches, and what paints it."""
    totals = [_spent(run) for run in runs]

    def spent(panel: Axes, run: Run, _times: Row) -> None:
        for other, (at, total) in zip(runs, totals, strict=True):
            mine = other is run
            panel.plot(
                at / unit,
                total,
                color=COST if mine else OTHERS,
                lw=1.8 if mine else 1.0,
                zorder=3 if mine else 2,
                label="spent so far" if mine else "other policies",
            )

    rows: list[Panel] = [
        ("queries/s", 2.3, _load),
        ("instances", 2.6, partial(_stack, "instances", _palette(runs, "instances"))),
        ("workers", 1.3, partial(_stack, "workers", _palette(runs, "workers"))),
        ("US$ per hour", 1.2, _rate),
        ("US$", 1.2, spent),
    ]
    if any("offline_done" in run["series"] for run in runs):
        rows.insert(1, ("offline items/s", 1.2, _offline))
    known = [value for run in runs for value in run["series"]["effective_accuracy"] if value is not None]
    if known and max(known) - min(known) > 1e-6:
        rows.insert(1, ("accuracy", 1.2, _accuracy))
    return rows


def _title(run: Run) -> str:
    figures = [f"{run['slo_violation_ratio']:.2%} violations"]
    if run["effective_accuracy"] is not None:
        figures.append(f"accuracy {run['effective_accuracy']:.4g}")
    figures.append(f"US$ {run['cost']:.4g}")
    return f"{run['policy']}\n{', '.join(figures)}"


def _load(panel: Axes, run: Run, times: Row) -> None:
    series = run["series"]
    missed = np.array(series["violations"], float) / _spans(run)
    panel.fill_between(times, _steps(missed), step="post", color=VIOLATED, alpha=0.75, lw=0, label="late or refused")
    panel.step(times, _steps(series["offered_qps"]), where="post", color=OFFERED, lw=0.9, label="offered")
    panel.step(times, _steps(series["answered_qps"]), where="post", color=ANSWERED, lw=1.3, label="answered")


def _accuracy(panel: Axes, run: Run, times: Row) -> None:
    values = np.array([np.nan if value is None else value for value in run["series"]["effective_accuracy"]])
    panel.step(times, _steps(values), where="post", color=ANSWERED, lw=1.3, label="mean of answers in time")


def _offline(panel: Axes, run: Run, times: Row) -> None:
    done = run["series"].get("offline_done") or np.zeros(len(run["series"]["time"]))
    panel.step(times, _steps(done), where="post", color=OFFLINE, lw=1.3, label="outputs of jobs")


def _rate(panel: Axes, run: Run, times: Row) -> None:
    hourly = 3600.0 * np.array(run["series"]["cost_rate"])
    panel.step(times, _steps(hourly), where="post", color=COST, lw=1.5, label="cost rate")


def _stack(of: str, palette: Mapping[str, tuple[str, Any]], panel: Axes, run: Run, times: Row) -> None:
    """Layers in the palette's order, those that share a label as one."""
    counts = run["series"][of]
    layers: dict[str, tuple[Any, Row]] = {}
    for name, (label, colour) in palette.items():
        if name in counts:
            known = layers.get(label, (colour, np.zeros(len(times))))[1]
            layers[label] = (colour, known + _steps(counts[name]))
    below = np.zeros(len(times))
    for label, (colour, layer) in layers.items():
        panel.fill_between(
            times, below, below + layer, step="post", facecolor=colour, edgecolor="white", lw=0.2, label=label
        )
        below = below + layer
    panel.yaxis.set_major_locator(MaxNLocator(integer=True, nbins=5))


def _palette(runs: Sequence[Run], of: str) -> dict[str, tuple[str, Any]]:
    """Name to label and colour, in the order of layers: by hardware, and within it by use, which decides who has a colour."""
    use: dict[str, int] = {}
    hardware: dict[str, str] = {}
    for run in runs:
        hardware |= run["hardware"]
        for name, row in run["series"][of].items():
            use[name] = use.get(name, 0) + sum(row)
    ranked = sorted(use, key=lambda name: (-use[name], name))
    shown = ranked if len(ranked) <= SHOWN else ranked[: SHOWN - 1]
    kind_of = {name: hardware.get(name, name if of == "workers" else "") for name in ranked}
    kinds = sorted({kind_of[name] for name in shown})
    unknown = [kind for kind in kinds if kind not in SHADES]
    shades = SHADES | {kind: MORE_SHADES[i % len(MORE_SHADES)] for i, kind in enumerate(unknown)}
    found: dict[str, tuple[str, Any]] = {}
    for kind in kinds:
        same = [name for name in shown if kind_of[name] == kind]
        for i, name in enumerate(same):
            strength = 0.9 - 0.6 * i / max(1, len(same) - 1) if len(same) > 1 else 0.7
            found[name] = (_label(name), mpl.colormaps[shades[kind]](strength))
    rest = ranked[len(shown) :]
    return found | {name: (f"{len(rest)} others", REST) for name in rest}


def _label(name: str) -> str:
    return name if len(name) <= LABEL else f"{name[: LABEL // 2 - 1]}…{name[-LABEL // 2 :]}"


def _legend(line: Sequence[Axes]) -> None:
    """What is in any panel of the row, to the right of the last one; the topmost layer first where layers are stacked."""
    handles: dict[str, Any] = {}
    for panel in line:
        for handle, label in zip(*panel.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    line[-1].legend(
        handles.values(), handles.keys(), loc="upper left", bbox_to_anchor=(1.01, 1.02), fontsize=8, frameon=False,
        borderaxespad=0.0, labelspacing=0.35,
    )  # fmt: skip


def _bounds(run: Run) -> Row:
    """Where intervals begin, and where the last one ends; seconds."""
    times = np.array(run["series"]["time"], float)
    last = times[-1] - times[-2] if len(times) > 1 else run["duration_s"]
    return np.append(times, times[-1] + last)


def _spans(run: Run) -> Row:
    """Seconds of each interval."""
    return np.diff(_bounds(run))


def _spent(run: Run) -> tuple[Row, Row]:
    """Seconds, and US$ until then: by the rates, scaled to the run's cost."""
    total = np.append(0.0, np.cumsum(np.array(run["series"]["cost_rate"]) * _spans(run)))
    return _bounds(run), total * (run["cost"] / total[-1] if total[-1] > 0 else 0.0)


def _edges(run: Run) -> Row:
    """Where the steps of _steps begin, and where the last one ends; seconds."""
    bounds = _bounds(run)
    return np.append(bounds[: -1 : _each(len(bounds) - 1)], bounds[-1])


def _steps(values: Sequence[float] | Row) -> Row:
    """Means of neighbours, so many that a line has at most POINTS; the last one twice, for the step's end."""
    row = np.array(values, float)
    each = _each(len(row))
    groups = np.ma.masked_invalid(np.pad(row, (0, -len(row) % each), mode="edge").reshape(-1, each))
    means = groups.mean(axis=1).filled(np.nan)
    return np.append(means, means[-1])


def _each(count: int) -> int:
    return -(-count // POINTS)

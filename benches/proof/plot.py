"""One picture of a report: a row for load, instances and cost each, a column for each policy. Needs matplotlib."""

from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np

from proof.table import short

mpl.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.ticker import MaxNLocator

# Okabe and Ito's colours, which colour-blind readers can tell apart; light to dark within a kind of hardware.
COLOURS = {
    "cpu": ("#56B4E9", "#0072B2"),
    "simulated inferentia": ("#E69F00", "#D55E00"),
    "simulated gpu": ("#CC79A7", "#882255"),
}
OTHER = "#999999"
LINES = {"offered": "#000000", "in_time": "#009E73", "missed": "#D55E00", "cost": "#0072B2"}
WIDTH, HEIGHT, DPI = 12.8, 8.0, 100  # inches, and pixels an inch


def picture(report: Any, path: Path) -> None:
    """Draw a Report of benches/fluctuating.py."""
    runs = report.runs
    colours = _colours(sorted({v for run in runs for v in run.line.instances}), report.hardware)
    figure, panels = plt.subplots(
        3, len(runs), figsize=(WIDTH, HEIGHT), dpi=DPI, sharex=True, sharey="row", squeeze=False, layout="constrained"
    )
    for column, run in enumerate(runs):
        times = np.array(run.line.times)
        _load(panels[0][column], run, times)
        _instances(panels[1][column], run, times, colours, report.hardware)
        _cost(panels[2][column], run, times)
        missed, cost = run.figures.violation_ratio, 1e3 * run.figures.cost
        panels[0][column].set_title(f"{run.policy}\n{missed:.1%} violations, {cost:.2f} mUS$", fontsize=10)
        panels[2][column].set_xlabel("time, s")
    for row, label in enumerate(("queries/s", "instances", "US$ per hour")):
        panels[row][0].set_ylabel(label)
        for panel in panels[row]:
            panel.grid(alpha=0.3)
            panel.set_xlim(0, report.seconds)
            panel.set_ylim(bottom=0)
            if row == 1:
                panel.yaxis.set_major_locator(MaxNLocator(integer=True))
    handles = {}
    for row in panels:
        for panel in row:
            handles |= {label: handle for handle, label in zip(*panel.get_legend_handles_labels(), strict=True)}
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=4, fontsize=9)
    figure.suptitle(
        f"Fluctuating load, 4 to 80 queries/s, within {report.latency_ms:g} ms and accuracy ≥ {report.accuracy:g};"
        " real CPU, simulated GPU and Inferentia",
        fontsize=12,
    )
    figure.savefig(path)
    plt.close(figure)


def _colours(variants: list[str], hardware: dict[str, str]) -> dict[str, str]:
    used: dict[str, int] = {}
    found = {}
    for variant in variants:
        shades = COLOURS.get(hardware.get(variant, ""), (OTHER,))
        number = used.get(hardware.get(variant, ""), 0)
        used[hardware.get(variant, "")] = number + 1
        found[variant] = shades[number % len(shades)]
    return found


def _load(panel: Any, run: Any, times: Any) -> None:
    missed = np.array(run.line.late) + np.array(run.line.refused)
    panel.step(times, run.line.offered, where="mid", color=LINES["offered"], lw=1, label="offered")
    panel.step(times, run.line.in_time, where="mid", color=LINES["in_time"], lw=1.6, label="answered in time")
    panel.fill_between(times, missed, step="mid", color=LINES["missed"], alpha=0.7, lw=0, label="late or refused")


def _instances(panel: Any, run: Any, times: Any, colours: dict[str, str], hardware: dict[str, str]) -> None:
    below = np.zeros(len(times))
    for variant, states in sorted(run.line.instances.items()):
        serving = sum(
            (np.array(row) for state, row in states.items() if state not in ("Loading", "Unloading")), below * 0
        )
        loading = np.array(states.get("Loading", below * 0))
        name = short(variant, hardware.get(variant, ""))
        panel.fill_between(times, below, below + serving, step="mid", color=colours[variant], lw=0, label=name)
        below = below + serving
        if loading.any():
            panel.fill_between(
                times, below, below + loading, step="mid", facecolor="white", edgecolor=colours[variant], hatch="////", lw=0,
                label=f"{name}, loading",
            )  # fmt: skip
        below = below + loading


def _cost(panel: Any, run: Any, times: Any) -> None:
    panel.step(times, run.line.cost_rate, where="mid", color=LINES["cost"], lw=1.6, label="cost of the instances")

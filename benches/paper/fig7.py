"""INFaaS (Romero et al., USENIX ATC 2021), figure 7: a popular large and a small model share GPUs, beside a GPU for each.

`python benches/paper/fig7.py [--short] [--seeds N ...] [--json] [--out DIR]`; scenario: fig7.toml.
"""

from collections.abc import Sequence
from pathlib import Path

import compare
from apps import AppReport
from compare import Document, Figure, Result, at_least, at_most, each, holds, ratios, told

APPS = {"large": "Inception-ResNetV2, 80 %", "small": "MobileNetV1, 20 %"}
PROFILED = {"large": 3.5, "small": 1.5}  # ms
ALONE, SHARED, PEAK, CALM = (
    0,
    1,
    4,
    7,
)  # windows of 30 s: before the load has grown, when it has, its top, long after it


def build(seeds: Sequence[int], short: bool) -> Figure:
    """short: nothing is left out: a new GPU takes its time."""
    del short
    runs = compare.runs("fig7.toml", seeds, report=AppReport)
    rows = [
        holds("one GPU at first, a second is added", "yes", [_machines(one) == (1, 2) for one in _of(runs, "infaas")]),
        told("the second one is ordered at", [_added(one) for one in _of(runs, "infaas")], " s", paper="30 s to 50 s"),
        holds("instances are marked Interfered", "at 30 s and 50 s", [bool(one["interfered"]) for one in _of(runs, "infaas")]),
        at_least("INFaaS costs less than two dedicated GPUs by", 0.10, [1 - part for part in cost(runs)], form=".1%", tolerance=0.0),
        told("queries not answered in time, INFaaS", each(runs, "infaas", "slo_violation_ratio"), form=".1%"),
        told("… Clipper+", each(runs, "clipper+", "slo_violation_ratio"), form=".1%"),
        holds("INFaaS misses fewer", "yes", [a < b for a, b in zip(each(runs, "infaas", "slo_violation_ratio"), each(runs, "clipper+", "slo_violation_ratio"), strict=True)]),
        at_least("peak: the large model's throughput, INFaaS / Clipper+", 1.0, ratios(at(runs, "infaas", "large", "qps", PEAK), at(runs, "clipper+", "large", "qps", PEAK)), tolerance=0.0),
        at_least("peak: the small model's throughput, INFaaS / Clipper+", 1.0, ratios(at(runs, "infaas", "small", "qps", PEAK), at(runs, "clipper+", "small", "qps", PEAK))),
        holds("shared: P99 of the small model grows more than the large one's", "yes", [_inflated(one, "small", SHARED) > _inflated(one, "large", SHARED) for one in _of(runs, "infaas")]),
        told("shared: P99 of the small model / its profile", [_inflated(one, "small", SHARED) for one in _of(runs, "infaas")]),
        told("shared: P99 of the large model / its profile", [_inflated(one, "large", SHARED) for one in _of(runs, "infaas")]),
        at_most("after the peak: P99 of the large model, INFaaS / Clipper+", 1.0, ratios(at(runs, "infaas", "large", "p99_ms", CALM), at(runs, "clipper+", "large", "p99_ms", CALM)), tolerance=0.15),
        at_most("after the peak: P99 of the small model, INFaaS / Clipper+", 1.0, ratios(at(runs, "infaas", "small", "p99_ms", CALM), at(runs, "clipper+", "small", "p99_ms", CALM)), tolerance=0.15),
    ]  # fmt: skip
    return Figure("fig7", "Figure 7: sharing GPUs", rows, {"fig7": runs}, draw)


def cost(documents: Sequence[Document]) -> list[float]:
    """INFaaS / Clipper+, by seed."""
    return ratios(each(documents, "infaas", "cost"), each(documents, "clipper+", "cost"))


def at(documents: Sequence[Document], policy: str, app: str, what: str, window: int) -> list[float]:
    """A number of an app in one window, by seed."""
    return [one["windows"][app][what][window] for one in _of(documents, policy)]


def _of(documents: Sequence[Document], policy: str) -> list[Result]:
    return [compare.of(one, policy) for one in documents]


def _machines(result: Result) -> tuple[int, int]:
    """At the start, and at most."""
    counts = result["series"]["workers"]["gpu"]
    return counts[0], max(counts)


def _added(result: Result) -> float:
    return next(one["time"] for one in result["scaling"]["decisions"] if one["action"] == "add_worker")


def _inflated(result: Result, app: str, window: int) -> float:
    return result["windows"][app]["p99_ms"][window] / PROFILED[app]


def draw(figure: Figure, out: Path) -> None:
    """P99 and throughput of both models over time, and GPUs; the first seed."""
    from matplotlib.figure import Figure as Picture

    document = figure.documents["fig7"][0]
    picture = Picture(figsize=(9.0, 6.6), dpi=110, layout="constrained")
    panels = picture.subplots(3, 2, sharex=True, height_ratios=(2.0, 2.0, 1.0))
    styles = {"infaas": ("#009E73", "-"), "clipper+": ("#D55E00", "--")}
    for column, app in enumerate(APPS):
        for policy, (colour, line) in styles.items():
            result = compare.of(document, policy)
            windows = result["windows"][app]
            middle = [time + 15.0 for time in windows["time"]]
            panels[0][column].plot(middle, windows["p99_ms"], line, color=colour, marker=".", label=policy)
            panels[1][column].plot(middle, windows["qps"], line, color=colour, marker=".", label=policy)
            series = result["series"]
            panels[2][column].step(
                series["time"], series["workers"]["gpu"], line, color=colour, where="post", label=policy
            )
        panels[0][column].set_title(APPS[app], fontsize=10)
        panels[0][column].axhline(PROFILED[app], color="#808080", lw=0.8, label="profiled, one batch")
        panels[0][column].set_yscale("log")
        panels[2][column].set_xlabel("time, s")
    for row, label in zip(panels, ("P99 latency, ms", "answers/s", "GPUs"), strict=True):
        row[0].set_ylabel(label)
        for panel in row:
            panel.grid(alpha=0.25)
            if label != "P99 latency, ms":
                panel.set_ylim(bottom=0)
    panels[0][0].legend(fontsize=8, frameon=False)
    picture.suptitle(f"figure 7 (simulated, seed {document['seed']})", fontsize=11)
    picture.savefig(out / "fig7.png")


if __name__ == "__main__":
    compare.main(build, __doc__)

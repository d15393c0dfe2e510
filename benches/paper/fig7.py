"""INFaaS (Romero et al., USENIX ATC 2021), figure 7: a popular large and a small model share GPUs, beside a GPU for each.

`python benches/paper/fig7.py [--short] [--seeds N ...] [--json] [--out DIR]`; scenario: fig7.toml.
"""

from collections.abc import Sequence
from pathlib import Path

import compare
from apps import AppReport
from compare import Document, Figure, Result, at_least, each, holds, ratios, stated

APPS = {"large": "Inception-ResNetV2, 80 %", "small": "MobileNetV1, 20 %"}
PROFILED = {"large": 3.5, "small": 1.5}  # ms
SHARED, PEAK, CALM = 1, 4, 7  # windows of 30 s: the load has grown, on one GPU still; its top; long after it


def build(seeds: Sequence[int], short: bool) -> Figure:
    """short: the first 120 s, until the second GPU has served for a while."""
    runs = compare.runs("fig7.toml", seeds, duration_s=120.0 if short else None, report=AppReport)
    peak = PEAK - 1 if short else PEAK
    rows = [
        holds("one GPU at first, a second is added", "yes", [_machines(one) == (1, 2) for one in _of(runs, "infaas")]),
        stated("the second one is ordered at", [_added(one) for one in _of(runs, "infaas")], " s", paper="30 s to 50 s"),
        holds("instances are marked Interfered", "yes", [bool(one["interfered"]) for one in _of(runs, "infaas")]),
        stated("the first time, at", [_marked(one)[0] for one in _of(runs, "infaas")], " s", paper="30 s"),
        stated("the second time, at", [_marked(one)[1] for one in _of(runs, "infaas")], " s", paper="50 s"),
        at_least("INFaaS costs less than two dedicated GPUs by", 0.10, [1 - part for part in cost(runs)], form=".1%", tolerance=0.0),
        stated("queries not answered in time, INFaaS", each(runs, "infaas", "slo_violation_ratio"), form=".1%"),
        stated("… Clipper+", each(runs, "clipper+", "slo_violation_ratio"), form=".1%"),
        holds("INFaaS misses fewer", "yes", [a < b for a, b in zip(each(runs, "infaas", "slo_violation_ratio"), each(runs, "clipper+", "slo_violation_ratio"), strict=True)]),
        at_least("peak: the large model's throughput, INFaaS / Clipper+", 1.0, ratios(at(runs, "infaas", "large", "qps", peak), at(runs, "clipper+", "large", "qps", peak)), tolerance=0.0),
        at_least("peak: the small model's throughput, INFaaS / Clipper+", 1.0, ratios(at(runs, "infaas", "small", "qps", peak), at(runs, "clipper+", "small", "qps", peak))),
        holds("shared GPU: the small model's P99 suffers more, against a GPU of its own", "yes", [s > g for s, g in zip(_against(runs, "small", SHARED), _against(runs, "large", SHARED), strict=True)]),
        stated("shared GPU: the small model's P99, INFaaS / Clipper+", _against(runs, "small", SHARED)),
        stated("shared GPU: the large model's P99, INFaaS / Clipper+", _against(runs, "large", SHARED)),
    ]  # fmt: skip
    if not short:
        rows += [
            stated(f"after the peak: the {app} model's P99, INFaaS / Clipper+", _against(runs, app, CALM))
            for app in APPS
        ]
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


def _marked(result: Result) -> list[float]:
    """When instances were found Interfered; at the end, if they were not."""
    times = sorted(time for found in result["interfered"].values() for time in found)
    return [*times, result["duration_s"], result["duration_s"]]


def _against(documents: Sequence[Document], app: str, window: int) -> list[float]:
    """P99 on shared GPUs / P99 on a GPU of its own, by seed."""
    return ratios(at(documents, "infaas", app, "p99_ms", window), at(documents, "clipper+", app, "p99_ms", window))


def draw(figure: Figure, out: Path) -> None:
    """P99 and throughput of both models over time, and GPUs; the first seed."""
    document = figure.documents["fig7"][0]
    picture, panels = compare.canvas(3, 2, (9.0, 6.6), sharex=True, height_ratios=(2.0, 2.0, 1.0))
    for column, app in zip(panels.T, APPS, strict=True):
        for policy, colour, line in (("infaas", "#009E73", "-"), ("clipper+", "#D55E00", "--")):
            result = compare.of(document, policy)
            windows, series = result["windows"][app], result["series"]
            middle = [time + 15.0 for time in windows["time"]]
            column[0].plot(middle, windows["p99_ms"], line, color=colour, marker=".", label=policy)
            column[1].plot(middle, windows["qps"], line, color=colour, marker=".")
            column[2].step(series["time"], series["workers"]["gpu"], line, color=colour, where="post")
        column[0].set_title(APPS[app], fontsize=10)
        column[0].axhline(PROFILED[app], color="#808080", lw=0.8, label="profiled, one batch")
        column[2].set_xlabel("time, s")
    panels[0][0].legend(fontsize=8, frameon=False)
    title, labels = f"figure 7 (simulated, seed {document['seed']})", ("P99 latency, ms", "answers/s", "GPUs")
    compare.saved(picture, panels, title, out / "fig7.png", labels)


if __name__ == "__main__":
    compare.main(build, __doc__)

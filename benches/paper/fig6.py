"""INFaaS (Romero et al., USENIX ATC 2021), figure 6: one model, one worker, three loads; CPU and GPU baselines beside it.

`python benches/paper/fig6.py [--short] [--seeds N ...] [--json] [--out DIR]`: about four minutes; --short half a minute. Scenarios:
fig6-low.toml, fig6-high.toml, fig6-fluctuating.toml.
"""

import statistics
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

import compare
import numpy as np
from compare import Document, Figure, Result, Row, at_least, at_most, each, holds, near, ratios, stated

SETTLED = 20.0  # s: until then INFaaS, which begins with a CPU instance, has loaded what 650 queries/s take
PEAKS = ((60.0, 91.0), (150.0, 181.0))  # s, of the fluctuating load
COLOURS = {  # of the policies whose throughput is drawn
    "infaas": ("#009E73", "-"),
    "clipper+cpu": ("#0072B2", "--"),
    "clipper+gpu": ("#CC79A7", "--"),
    "sm+gpu": ("#7B3294", ":"),
}
SHADES = {"cpu": "#0072B2", "inferentia": "#D55E00", "gpu": "#7B3294"}
SHORT_S, SHORT_HIGH_S = 60.0, 26.0  # of the steady loads


def build(seeds: Sequence[int], short: bool) -> Figure:
    """All three loads. short: the steady ones for a minute and less."""
    low = compare.runs("fig6-low.toml", seeds, duration_s=SHORT_S if short else None)
    high = compare.runs("fig6-high.toml", seeds, duration_s=SHORT_HIGH_S if short else None)
    fluctuating = compare.runs("fig6-fluctuating.toml", seeds)
    return Figure(
        "fig6",
        "Figure 6: ResNet50 on one worker; throughput and cost of three loads",
        [*_low(low), *_high(high), *_fluctuating(fluctuating)],
        {"fig6-low": low, "fig6-high": high, "fig6-fluctuating": fluctuating},
        draw,
    )


def dearer(documents: Sequence[Document], policy: str, than: str = "infaas") -> list[float]:
    """How many times as much a policy costs, by seed."""
    return ratios(each(documents, policy, "cost"), each(documents, than, "cost"))


def course(result: Result) -> list[str]:
    """What served, one after the other: inferentia while one of its variants is loaded, else the GPU, else cpu."""
    hardware, rows = result["hardware"], result["series"]["instances"]
    found = []
    for i in range(len(result["series"]["time"])):
        kinds = {hardware[name] for name, counts in rows.items() if counts[i]}
        found.append(next((kind for kind in ("inferentia", "gpu") if kind in kinds), "cpu"))
    return [kind for kind, _ in groupby(found)]


def served(result: Result) -> float:
    """Queries/s answered until the load's end: what is answered later does not count."""
    return statistics.fmean(_until_the_end(result, "answered_qps"))


def carried(result: Result, since: float = 0.0) -> float:
    """Answers / queries, from a time on until the load's end."""
    return sum(_until_the_end(result, "answered_qps", since)) / sum(_until_the_end(result, "offered_qps", since))


def _low(runs: Sequence[Document]) -> list[Row]:
    return [
        holds("low: INFaaS serves with CPU instances", "yes", [_kind(one) == "cpu" for one in _of(runs, "infaas")]),
        at_least("low: answers / queries, INFaaS", 1.0, each(runs, "infaas", carried), form=".1%", tolerance=0.02),
        at_least("low: Clipper+ GPU costs … times INFaaS", 21.6, dearer(runs, "clipper+gpu")),
        at_least("low: SM+ GPU costs … times INFaaS", 21.3, dearer(runs, "sm+gpu")),
        stated("low: CPU instances of INFaaS, mean", [_instances(one, "cpu") for one in _of(runs, "infaas")]),
        stated("low: P99, INFaaS", each(runs, "infaas", "p99_ms"), " ms", form=".0f"),
        stated("low: Clipper+ GPU costs … times one CPU instance", dearer(runs, "clipper+gpu", "one cpu instance")),
        stated("low: P99, one CPU instance", each(runs, "one cpu instance", "p99_ms"), " ms", form=".0f"),
    ]


def _high(runs: Sequence[Document]) -> list[Row]:
    ours = each(runs, "infaas", served)
    late = [carried(one, SETTLED) for one in _of(runs, "infaas")]
    return [
        holds("high: INFaaS chooses the batch-8 GPU variant", "yes", [_most(one) == "resnet50-trt-b8" for one in _of(runs, "infaas")]),
        at_least("high: answers / queries, INFaaS", 1.0, each(runs, "infaas", carried), form=".1%", tolerance=0.01),
        at_least("high: answers / queries from 20 s on, INFaaS", 1.0, late, form=".1%", tolerance=0.01),
        at_least("high: answers / queries, Clipper+ GPU", 1.0, each(runs, "clipper+gpu", carried), form=".1%", tolerance=0.01),
        near("high: Clipper+ CPU", 10.0, each(runs, "clipper+cpu", served), " queries/s", tolerance=0.1),
        near("high: SM+ CPU", 10.0, each(runs, "sm+cpu", served), " queries/s", tolerance=0.1),
        stated("high: Clipper+ GPU costs … times INFaaS", dearer(runs, "clipper+gpu"), paper="1 (figure)"),
        at_least("high: SM+ GPU costs … times INFaaS", 1.05, dearer(runs, "sm+gpu"), tolerance=0.0),
        at_most("high: SM+ GPU serves … times INFaaS", 0.85, ratios(each(runs, "sm+gpu", served), ours), tolerance=0.0),
        at_least("high: SM+ on two GPU devices costs … times INFaaS", 1.05, dearer(runs, "sm+gpu, two devices"), tolerance=0.0),
        at_most("high: SM+ on two GPU devices serves … times INFaaS", 0.85, ratios(each(runs, "sm+gpu, two devices", served), ours), tolerance=0.0),
    ]  # fmt: skip


def _fluctuating(runs: Sequence[Document]) -> list[Row]:
    courses = [course(one) for one in _of(runs, "infaas")]
    wanted = ["cpu", "inferentia", "cpu", "inferentia", "cpu"]
    gpu, free = "clipper+gpu", "infaas, no inferentia"
    return [
        holds("fluctuating: CPU, Inferentia, CPU, Inferentia, CPU", "yes", [one == wanted for one in courses]),
        stated("fluctuating: GPU instances of INFaaS, mean", [_instances(one, "gpu") for one in _of(runs, "infaas")], paper="0"),
        at_least("fluctuating: answers / queries, INFaaS", 1.0, each(runs, "infaas", carried), form=".1%", tolerance=0.01),
        stated("fluctuating: P99, INFaaS", each(runs, "infaas", "p99_ms"), " ms", form=".0f"),
        near("fluctuating: Clipper+ CPU in peaks", 10.0, [_in_peaks(one) for one in _of(runs, "clipper+cpu")], " queries/s", tolerance=0.1),
        near("fluctuating: SM+ CPU in peaks", 10.0, [_in_peaks(one) for one in _of(runs, "sm+cpu")], " queries/s", tolerance=0.1),
        at_least("fluctuating: Clipper+ GPU costs … times INFaaS", 3.0, dearer(runs, gpu)),
        at_least("fluctuating: SM+ GPU costs … times INFaaS", 3.0, dearer(runs, "sm+gpu")),
        at_least("fluctuating: Clipper+ GPU costs … times INFaaS without Inferentia", 1.7, dearer(runs, gpu, free)),
        at_least("fluctuating: Clipper+ on Inferentia costs … times INFaaS", 1.9, dearer(runs, "clipper+inferentia")),
        at_least("fluctuating: SM+ on Inferentia costs … times INFaaS", 1.9, dearer(runs, "sm+inferentia")),
    ]  # fmt: skip


def _of(runs: Sequence[Document], policy: str) -> list[Result]:
    return [compare.of(one, policy) for one in runs]


def _most(result: Result) -> str:
    """The variant that gave most answers."""
    return max(result["variants"], key=lambda name: result["variants"][name])


def _kind(result: Result) -> str:
    return result["hardware"][_most(result)]


def _instances(result: Result, kind: str) -> float:
    """Of a kind of device, mean over time."""
    rows = [row for name, row in result["series"]["instances"].items() if result["hardware"][name] == kind]
    return sum(statistics.fmean(row) for row in rows)


def _until_the_end(result: Result, what: str, since: float = 0.0) -> list[float]:
    series = result["series"]
    rows = zip(series["time"], series[what], strict=True)
    return [value for at, value in rows if since <= at < result["duration_s"]]


def _in_peaks(result: Result) -> float:
    """Mean queries/s answered within the peaks, their first 5 s left out."""
    series = result["series"]
    rows = zip(series["time"], series["answered_qps"], strict=True)
    found = [qps for at, qps in rows if any(begin + 5.0 <= at < end - 2.0 for begin, end in PEAKS)]
    return statistics.fmean(found)


def draw(figure: Figure, out: Path) -> None:
    """For each load throughput, what INFaaS has loaded, and cost; the first seed."""
    picture, panels = compare.canvas(3, 3, (12.0, 7.6), 82, height_ratios=(2.0, 1.2, 2.0))
    for column, (label, documents) in zip(panels.T, figure.documents.items(), strict=True):
        flow, loaded, cost = column
        infaas = compare.of(documents[0], "infaas")
        series = infaas["series"]
        times = series["time"]
        flow.step(times, series["offered_qps"], where="post", color="black", lw=0.8, label="offered")
        for name, (colour, line) in COLOURS.items():
            answered = compare.of(documents[0], name)["series"]["answered_qps"]
            flow.step(times[: len(answered)], answered[: len(times)], line, where="post", color=colour, label=name)
        for kind, colour in SHADES.items():
            rows = [row for name, row in series["instances"].items() if infaas["hardware"][name] == kind]
            loaded.step(times, np.sum([[0] * len(times), *rows], axis=0), where="post", color=colour, label=kind)
        costs = {one["policy"]: one["cost"] for one in documents[0]["policies"]}
        bars = cost.barh(list(costs), list(costs.values()), color="#7F7F7F")
        bars[list(costs).index("infaas")].set_color(COLOURS["infaas"][0])
        cost.bar_label(bars, fmt="%.3g", fontsize=8, padding=2)
        cost.invert_yaxis()
        cost.margins(x=0.15)
        cost.set_xlabel("cost, US$ (normalised)")
        flow.set_title(label.removeprefix("fig6-"), fontsize=11)
        loaded.set_xlabel("time, s")
        for panel in (flow, loaded):
            panel.set_xlim(0, infaas["duration_s"])
    panels[0][1].legend(fontsize=7, frameon=False, loc="lower right", bbox_to_anchor=(1.0, 0.06), ncol=2)
    panels[1][1].legend(fontsize=7, frameon=False, loc="upper right")
    title = f"figure 6 (simulated, seed {documents[0]['seed']})"
    compare.saved(picture, panels[:2], title, out / "fig6.png", ("queries/s answered", "INFaaS's instances"))


if __name__ == "__main__":
    compare.main(build, __doc__)

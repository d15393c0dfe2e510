"""INFaaS (Romero et al., USENIX ATC 2021), figure 1: what a large and a small model on one GPU do to each other as the load grows.

`python benches/paper/fig1.py [--short] [--seeds N ...] [--json] [--out DIR]`; scenario: fig1.toml.
"""

from collections.abc import Sequence
from pathlib import Path

import compare
from apps import AppReport
from compare import Document, Figure, holds, near, ratios

LOW, SHORT, MIDDLE, HIGH = 0, 2, 5, 8  # steps of the load: 40, 120, 240 and 360 queries/s, half of them for each model
TOP = 9  # 400 queries/s: more than the GPU can do
APPS = {"large": "Inception-ResNetV2", "small": "MobileNetV1"}


def build(seeds: Sequence[int], short: bool) -> Figure:
    """short: the first three steps."""
    runs = compare.runs("fig1.toml", seeds, duration_s=90.0 if short else None, report=AppReport)
    last = SHORT if short else HIGH
    rows = [
        near("low load: the small model's mean latency, together / alone", 1.0, slower(runs, "small", LOW), tolerance=0.15),
        near("low load: the large model's", 1.0, slower(runs, "large", LOW), tolerance=0.15),
        holds("high load: the small model suffers more than the large one", "yes", [s > g for s, g in zip(slower(runs, "small", last), slower(runs, "large", last), strict=True)]),
    ]  # fmt: skip
    for step in () if short else (MIDDLE, HIGH):
        at = f"{40 * (step + 1)} queries/s:"
        rows += [
            holds(f"{at} the small model is at least 1.5 times as slow as alone", '"heavily"', [one >= 1.5 for one in slower(runs, "small", step)]),
            compare.stated(f"{at} the small model's mean latency, together / alone", slower(runs, "small", step), paper='"heavily"'),
            compare.stated(f"{at} its P99", slower(runs, "small", step, "p99_ms"), paper='"heavily"'),
            near(f"{at} the large model's mean latency", 1.0, slower(runs, "large", step), tolerance=0.25),
        ]  # fmt: skip
    if not short:
        rows.append(compare.stated("400 queries/s: the small model's throughput, together / alone", slower(runs, "small", TOP, "qps"), paper="collapses"))  # fmt: skip
        rows.append(near("400 queries/s: the large model's", 1.0, slower(runs, "large", TOP, "qps")))
    return Figure("fig1", "Figure 1: two models on one GPU", rows, {"fig1": runs}, draw)


def slower(documents: Sequence[Document], app: str, step: int, what: str = "mean_ms") -> list[float]:
    """Together / alone at a step of the load, by seed."""
    values = [
        [compare.of(one, policy)["windows"][app][what][step] for one in documents] for policy in ("together", "apart")
    ]
    return ratios(*values)


def draw(figure: Figure, out: Path) -> None:
    """Mean latency and throughput of both models over the load, together and alone; the first seed."""
    document = figure.documents["fig1"][0]
    picture, panels = compare.canvas(1, 2, (9.0, 3.4))
    latency, flow = panels[0]
    for app, colour in (("small", "#D55E00"), ("large", "#0072B2")):
        for policy, line in (("together", "-"), ("apart", "--")):
            windows = compare.of(document, policy)["windows"][app]
            rates = [40 * (i + 1) for i in range(len(windows["time"]))]
            label = f"{APPS[app]}, {'on one GPU with the other' if policy == 'together' else 'alone'}"
            latency.plot(rates, windows["p99_ms"], line, color=colour, label=label, marker=".")
            flow.plot(rates, windows["qps"], line, color=colour, label=label, marker=".")
    latency.set(yscale="log", ylabel="P99 latency, ms", xlabel="queries/s, half of them for each model")
    flow.set(ylabel="answers/s of each model", xlabel="queries/s, half of them for each model")
    latency.legend(fontsize=8, frameon=False)
    compare.saved(picture, panels, f"figure 1 (simulated, seed {document['seed']})", out / "fig1.png")


if __name__ == "__main__":
    compare.main(build, __doc__)

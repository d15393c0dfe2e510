"""INFaaS (Romero et al., USENIX ATC 2021), figure 6: one model, one worker, three loads; CPU and GPU baselines beside it.

`python benches/paper/fig6.py [--short] [--seeds N ...] [--json] [--out DIR]`: about four minutes; --short half a minute. Scenarios:
fig6-low.toml, fig6-high.toml, fig6-fluctuating.toml.
"""

from collections.abc import Sequence
from itertools import groupby

import compare
from compare import Document, Figure, Result, Row, at_least, at_most, each, holds, near, ratios, told

SETTLED = 20.0  # s: until then INFaaS, which begins with a CPU instance, has loaded what 650 queries/s take
PEAKS = ((60.0, 91.0), (150.0, 181.0))  # s, of the fluctuating load
SHORT_S = 40.0  # of the steady loads


def build(seeds: Sequence[int], short: bool) -> Figure:
    """All three loads. short: the steady ones for 40 s."""
    steady = SHORT_S if short else None
    low = compare.runs("fig6-low.toml", seeds, duration_s=steady)
    high = compare.runs("fig6-high.toml", seeds, duration_s=steady)
    fluctuating = compare.runs("fig6-fluctuating.toml", seeds)
    return Figure(
        "fig6",
        "Figure 6: ResNet50 on one worker; throughput and cost of three loads",
        [*_low(low), *_high(high), *_fluctuating(fluctuating)],
        {"fig6-low": low, "fig6-high": high, "fig6-fluctuating": fluctuating},
    )


def dearer(documents: Sequence[Document], policy: str, than: str = "infaas") -> list[float]:
    """How many times as much a policy costs, by seed."""
    return ratios(each(documents, policy, "cost"), each(documents, than, "cost"))


def course(result: Result) -> list[str]:
    """What served, one after the other: an accelerator, while one of its variants has an instance, else cpu."""
    hardware, rows = result["hardware"], result["series"]["instances"]
    times = range(len(result["series"]["time"]))
    there = [sorted({hardware[name] for name, counts in rows.items() if counts[i]} - {"cpu"}) for i in times]
    return [kind for kind, _ in groupby("+".join(kinds) or "cpu" for kinds in there)]


def _low(documents: Sequence[Document]) -> list[Row]:
    carried = _carried(documents, "infaas")
    return [
        holds("low: INFaaS serves with CPU instances", "yes", [_kind(one) == "cpu" for one in _all(documents, "infaas")]),
        at_least("low: queries answered, INFaaS", 1.0, carried, form=".1%", tolerance=0.05),
        at_least("low: Clipper+ GPU costs … times INFaaS", 21.6, dearer(documents, "clipper+gpu")),
        at_least("low: SM+ GPU costs … times INFaaS", 21.3, dearer(documents, "sm+gpu")),
        told("low: Clipper+ GPU costs … times one CPU instance", dearer(documents, "clipper+gpu", "one cpu instance")),
        told("low: … which answers", _carried(documents, "one cpu instance"), form=".1%"),
    ]  # fmt: skip


def _high(documents: Sequence[Document]) -> list[Row]:
    steady = [_after(one, SETTLED) for one in _all(documents, "infaas")]
    less = ratios(each(documents, "sm+gpu", "throughput_qps"), each(documents, "infaas", "throughput_qps"))
    two = ratios(each(documents, "sm+gpu, two devices", "throughput_qps"), each(documents, "infaas", "throughput_qps"))
    return [
        holds("high: INFaaS chooses the batch-8 GPU variant", "yes", [_most(one) == "resnet50-trt-b8" for one in _all(documents, "infaas")]),
        at_least("high: queries answered, INFaaS", 1.0, _carried(documents, "infaas"), form=".1%", tolerance=0.0),
        at_least("high: … after the first 20 s", 1.0, steady, form=".1%", tolerance=0.001),
        at_least("high: queries answered, Clipper+ GPU", 1.0, _carried(documents, "clipper+gpu"), form=".1%", tolerance=0.001),
        near("high: Clipper+ CPU", 10.0, each(documents, "clipper+cpu", "throughput_qps"), " queries/s", tolerance=0.1),
        near("high: SM+ CPU", 10.0, each(documents, "sm+cpu", "throughput_qps"), " queries/s", tolerance=0.1),
        near("high: Clipper+ GPU costs … times INFaaS", 1.0, dearer(documents, "clipper+gpu")),
        at_least("high: SM+ GPU costs … times INFaaS", 1.05, dearer(documents, "sm+gpu"), tolerance=0.0),
        at_most("high: SM+ GPU serves … times INFaaS", 0.85, less, tolerance=0.0),
        at_least("high: SM+ with two GPU devices costs … times INFaaS", 1.05, dearer(documents, "sm+gpu, two devices"), tolerance=0.0),
        at_most("high: SM+ with two GPU devices serves … times INFaaS", 0.85, two, tolerance=0.0),
    ]  # fmt: skip


def _fluctuating(documents: Sequence[Document]) -> list[Row]:
    courses = [course(one) for one in _all(documents, "infaas")]
    wanted = ["cpu", "inferentia", "cpu", "inferentia", "cpu"]
    gpu, free = "clipper+gpu", "infaas, no inferentia"
    return [
        holds("fluctuating: CPU, Inferentia, CPU, Inferentia, CPU", "yes", [one == wanted for one in courses]),
        at_least("fluctuating: queries answered, INFaaS", 1.0, _carried(documents, "infaas"), form=".1%", tolerance=0.0),
        told("fluctuating: … outside the first 10 s of a peak", [_settled(one) for one in _all(documents, "infaas")], form=".1%"),
        near("fluctuating: Clipper+ CPU in peaks", 10.0, [_in_peaks(one) for one in _all(documents, "clipper+cpu")], " queries/s", tolerance=0.1),
        at_least("fluctuating: Clipper+ GPU costs … times INFaaS", 3.0, dearer(documents, gpu), tolerance=0.0),
        at_least("fluctuating: SM+ GPU costs … times INFaaS", 3.0, dearer(documents, "sm+gpu"), tolerance=0.0),
        at_least("fluctuating: Clipper+ GPU … times INFaaS without Inferentia", 1.7, dearer(documents, gpu, free), tolerance=0.0),
        at_least("fluctuating: Clipper+ Inferentia … times INFaaS", 1.9, dearer(documents, "clipper+inferentia"), tolerance=0.0),
        at_least("fluctuating: SM+ Inferentia … times INFaaS", 1.9, dearer(documents, "sm+inferentia"), tolerance=0.0),
    ]  # fmt: skip


def _all(documents: Sequence[Document], policy: str) -> list[Result]:
    return [compare.of(one, policy) for one in documents]


def _carried(documents: Sequence[Document], policy: str) -> list[float]:
    """The part of the queries that was answered in time."""
    return each(documents, policy, lambda one: 1.0 - one["slo_violation_ratio"])


def _most(result: Result) -> str:
    """The variant that gave most answers."""
    return max(result["variants"], key=lambda name: result["variants"][name])


def _kind(result: Result) -> str:
    return result["hardware"][_most(result)]


def _after(result: Result, since: float) -> float:
    """Queries that were not violated, of those of the time after `since`."""
    return _part(result, lambda at: at >= since)


def _settled(result: Result) -> float:
    return _part(result, lambda at: not any(begin <= at < begin + 10.0 for begin, _ in PEAKS))


def _in_peaks(result: Result) -> float:
    """Mean queries/s answered within the peaks, their first 5 s left out."""
    series = result["series"]
    rows = zip(series["time"], series["answered_qps"], strict=True)
    found = [qps for at, qps in rows if any(begin + 5.0 <= at < end - 2.0 for begin, end in PEAKS)]
    return sum(found) / len(found)


def _part(result: Result, counted) -> float:
    series = result["series"]
    every = series["time"][1] - series["time"][0]
    rows = [i for i, at in enumerate(series["time"]) if counted(at)]
    offered = sum(series["offered_qps"][i] * every for i in rows)
    return 1.0 - sum(series["violations"][i] for i in rows) / offered


if __name__ == "__main__":
    compare.main(build, __doc__)

"""INFaaS, Fig. 5: 22 models with 175 variants under four hours of load in 761 s, and under the whole day in 634 s.

python benches/paper/fig5.py                 three seeds
python benches/paper/fig5.py --short         two minutes of one
python benches/paper/fig5.py --trace FILE    a day of one's own, a count for each second a line, instead of the look-alike

The models come from zoo.py. `+ offline` is INFaaS with four jobs of 500 images for a ResNet50 variant on CPUs.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import compare
import zoo
from msgspec.structs import replace

from services.simulation.run import simulate_all
from services.simulation.scenario.model import JobSpec, Scenario, Times
from services.simulation.scenario.read import read_scenario
from services.simulation.workload import read_counts

FILE = "fig5.toml"
OURS, RIVALS = "infaas", ("clipper+", "sm+")
JOBS = tuple(JobSpec(app="resnet50", variant="resnet50-torch-cpu-t4", at_s=0.0, inputs=500) for _ in range(4))
SHORT_S = 120.0
NOISE = 0.02  # by which online work may be worse with offline work beside it
EVERY = 10  # of a trace of one's own the first of so many seconds is kept, as in the look-alike
FEWER = {"clipper+": 1.63, "sm+": 2.54}  # times the SLO violations
MORE = {"clipper+": 1.1, "sm+": 1.3}  # times the throughput


def build(seeds: Sequence[int], short: bool, counts: Times | None = None) -> compare.Figure:
    """All runs. counts: of every tenth second of a day; None: the look-alike's."""
    slow, day, offline = [], [], []
    for number, seed in enumerate(seeds):
        scenario = read_scenario(compare.HERE / FILE, seed=seed)
        if counts is not None:
            scenario = replace(scenario, loads=tuple(replace(one, counts=counts) for one in scenario.loads))
        slow.append(_run(scenario, short))
        ours = replace(scenario, policies=tuple(one for one in scenario.policies if one.name == OURS), jobs=JOBS)
        offline.append(_run(replace(ours, name="fig5, with offline work"), short))
        # of one seed: it is beside the point, since loading takes longer than its plateaus
        if not short and number == 0:
            day.append(_run(whole_day(scenario)))
    return figure(slow, offline, day)


def figure(
    slow: Sequence[compare.Document], offline: Sequence[compare.Document], day: Sequence[compare.Document]
) -> compare.Figure:
    """What the runs came to."""
    rows = [*_rows("", slow), *_offline_rows(slow, offline)]
    documents = {"fig5": slow, "fig5-offline": offline}
    if day:
        rows += _rows("whole day: ", day)
        documents["fig5-day"] = day
    title = "Fig. 5: 22 models, 175 variants, a load between 10 and 1,000 queries/s"
    return compare.Figure("fig5", title, rows, documents)


def whole_day(scenario: Scenario) -> Scenario:
    """The same with all 24 hours in about as many queries: plateaus pass in one to four seconds."""
    loads = tuple(replace(one, seconds_per_line=zoo.DAY_S / zoo.DAY_LINES) for one in scenario.loads)
    return replace(scenario, name="fig5, whole day", duration_s=zoo.DAY_S, loads=loads)


def _run(scenario: Scenario, short: bool = False) -> compare.Document:
    scenario = replace(scenario, duration_s=SHORT_S) if short else scenario
    print(f"{scenario.name}, seed {scenario.seed}", file=sys.stderr)
    return simulate_all(scenario)


def _rows(of: str, runs: Sequence[compare.Document]) -> Iterator[compare.Row]:
    for rival in RIVALS:
        ours, theirs = (compare.each(runs, name, "throughput_qps") for name in (OURS, rival))
        yield compare.at_least(f"{of}throughput, times {rival}'s", MORE[rival], compare.ratios(ours, theirs), " x")
    for rival in RIVALS:
        ours, theirs = (compare.each(runs, name, "slo_violation_ratio") for name in (OURS, rival))
        yield compare.at_least(
            f"{of}times fewer SLO violations than {rival}", FEWER[rival], compare.ratios(theirs, ours), " x"
        )
    violations = compare.each(runs, OURS, "slo_violation_ratio")
    yield compare.at_most(f"{of}SLO violations", 0.04, violations, tolerance=0.0, form=".1%")
    for rival in RIVALS:
        yield compare.stated(
            f"{of}SLO violations of {rival}", compare.each(runs, rival, "slo_violation_ratio"), form=".1%"
        )
    ours, theirs = (compare.each(runs, name, "cost") for name in (OURS, "clipper+"))
    yield compare.at_least(f"{of}times cheaper than clipper+", 1.23, compare.ratios(theirs, ours), " x", tolerance=0.02)
    yield compare.at_least(f"{of}mean utilisation", 0.489, compare.each(runs, OURS, "mean_utilisation"), form=".1%")
    for rival in RIVALS:
        yield compare.stated(
            f"{of}mean utilisation of {rival}", compare.each(runs, rival, "mean_utilisation"), form=".1%"
        )
    added = compare.each(runs, OURS, lambda one: _first_added(one, "inferentia"))
    yield compare.stated(f"{of}a third Inferentia worker is there at", added, " s", paper="40 s", form=".0f")
    loads = compare.each(runs, OURS, lambda one: sum(n for kind, n in one["scale_actions"].items() if kind in LOADING))
    minutes = [len(one["policies"][0]["series"]["time"]) * 2 / 60 for one in runs]
    yield compare.stated(f"{of}orders to load, a minute", compare.ratios(loads, minutes), form=".0f")


LOADING = ("load", "replicate", "upgrade", "downgrade")


def _first_added(run: compare.Result, kind: str) -> float:
    """Seconds until there are more machines of a kind than at the begin; the run's length where there never are."""
    counts, times = run["series"]["workers"][kind], run["series"]["time"]
    return next((float(at) for at, n in zip(times, counts, strict=True) if n > counts[0]), float(times[-1]))


def _offline_rows(runs: Sequence[compare.Document], both: Sequence[compare.Document]) -> Iterator[compare.Row]:
    ours, alone = (compare.each(one, OURS, "throughput_qps") for one in (both, runs))
    more = compare.ratios(ours, alone)
    yield compare.at_least("+ offline: throughput, times that without", 1.0, more, " x", tolerance=NOISE)
    ours, alone = (compare.each(one, OURS, "slo_violation_ratio") for one in (both, runs))
    told = compare.stated("", alone, form=".1%").text
    good = sum(ours) <= sum(alone) + NOISE * len(ours)
    yield compare.Row("+ offline: SLO violations", f"as without: {told}", ours, good, form=".1%")
    done = compare.each(both, OURS, lambda one: sum(job["done"] for job in one["jobs"]))
    yield compare.at_least("+ offline: images of 2,000 done", 756, done, form=".0f")


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--trace", type=Path)
    given, rest = parser.parse_known_args()
    sys.argv[1:] = rest
    counts = None if given.trace is None else read_counts(given.trace)[: zoo.DAY_LINES * EVERY : EVERY]
    compare.main(lambda seeds, short: build(seeds, short, counts), __doc__)


if __name__ == "__main__":
    main()

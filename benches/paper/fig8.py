"""INFaaS, Fig. 8: an offline job beside online queries on one CPU worker. Each scenario runs twice, with and without the job.

python benches/paper/fig8.py             three seeds
python benches/paper/fig8.py --short     one
"""

import itertools
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path

import compare
from msgspec.structs import replace

from services.simulation.run import simulate_all
from services.simulation.scenario.model import Scenario
from services.simulation.scenario.read import read_scenario

LIMIT = 0.4  # of the worker, above which offline work waits
SETTLED_S = 3  # s for which it must have been so: until its use is told, and two images that had begun are done
HARDLY = 0.05  # of the rate at other times: what the figure would show as 0
NOISE = 0.02  # by which a figure with the job may be worse than without it
BUSY = ((22, 40), (62, 80))  # s; the rate is 8 queries/s


def build(seeds: Sequence[int], short: bool) -> compare.Figure:
    """Both policies, alone and with the job."""
    del short  # it takes a second or two
    alone, both, shared = [], [], []
    for seed in seeds:
        scenario = read_scenario(compare.HERE / "fig8.toml", seed=seed)
        alone.append(simulate_all(replace(scenario, name="fig8, without the job", jobs=())))
        both.append(simulate_all(scenario))
        shared.append(simulate_all(_shared(scenario)))
    rows = [row for policy in ("static", "infaas") for row in _rows(policy, alone, both)]
    rows += _notes(alone, shared)
    title = "Fig. 8: online queries with an offline job of 500 images (ResNet50, one CPU worker)"
    return compare.Figure("fig8", title, rows, {"fig8-online": alone, "fig8": both, "fig8-shared": shared}, draw)


def _shared(scenario: Scenario) -> Scenario:
    """The same without the job's own variant: it computes with the two instances that serve queries."""
    variants = tuple(one for one in scenario.variants if one.model != scenario.jobs[0].model)
    jobs = tuple(replace(job, model=None) for job in scenario.jobs)
    policies = tuple(one for one in scenario.policies if one.name == "static")
    return replace(scenario, name="fig8, one variant for both", variants=variants, jobs=jobs, policies=policies)


def _notes(alone: Sequence[compare.Document], shared: Sequence[compare.Document]) -> Iterator[compare.Row]:
    """What the paper does not show: an image takes as long as a query, and nothing interrupts it."""
    for what, key, unit, form in (
        ("answers in time", "answered", "", ".0f"),
        ("SLO violations", "slo_violation_ratio", "", ".1%"),
    ):
        without = compare.stated("", compare.each(alone, "static", key), unit, form=form).text
        name = f"two instances that the job shares: {what} with the job"
        yield compare.stated(
            name, compare.each(shared, "static", key), unit, paper=f"not stated; without it: {without}", form=form
        )


def _rows(policy: str, alone: Sequence[compare.Document], both: Sequence[compare.Document]) -> Iterator[compare.Row]:
    name = {"static": "two instances", "infaas": "INFaaS' autoscaler"}[policy]
    before, after = ([compare.of(one, policy) for one in documents] for documents in (alone, both))
    yield compare.at_least(f"{name}: images of the job in 100 s", 52, [one["jobs"][0]["done"] for one in after])
    yield compare.stated(
        f"{name}: worker used at 8 queries/s, by online work",
        [_used(one) for one in before],
        paper="60 to 70 %",
        form=".0%",
    )
    busy, calm = zip(*(_rates(*pair) for pair in zip(before, after, strict=True)), strict=True)
    stands = statistics.fmean(busy) <= HARDLY * statistics.fmean(calm)
    yield compare.Row(f"{name}: images/s while online work uses more than 40 %", "0", busy, stands)
    yield compare.stated(f"{name}: images/s at all other times", calm)
    for what, key, unit, form, more in (
        ("answers in time", "answered", "", ".0f", True),
        ("SLO violations", "slo_violation_ratio", "", ".1%", False),
        ("p50", "p50_ms", " ms", ".0f", False),
        ("p99", "p99_ms", " ms", ".0f", False),
    ):
        without, ours = ([float(one[key]) for one in found] for found in (before, after))
        mean, least = statistics.fmean(ours), statistics.fmean(without)
        good = mean >= least * (1 - NOISE) if more else mean <= least * (1 + NOISE)
        told = compare.stated("", without, unit, form=form).text
        yield compare.Row(f"{name}: {what} with the job", f"as without it: {told}", ours, good, unit, form)


def draw(figure: compare.Figure, out: Path) -> None:
    """The first seed: a column for each policy; queries, use of the worker, images of the job."""
    alone, both = figure.documents["fig8-online"][0]["policies"], figure.documents["fig8"][0]["policies"]
    picture, panels = compare.canvas(3, len(both), (11, 7), 85, sharex=True, sharey="row")
    for column, before, after in zip(panels.T, alone, both, strict=True):
        queries, used, images = column
        series, at = after["series"], after["series"]["time"]
        queries.plot(at, _smooth(series["offered_qps"]), "k", lw=1, label="offered")
        queries.plot(at, _smooth(series["answered_qps"]), lw=1, label="answered, with the job")
        queries.plot(at, _smooth(before["series"]["answered_qps"]), "--", lw=1, label="answered, without it")
        used.plot(at, _smooth(before["series"]["utilisation"]), lw=1, label="online work (without the job)")
        used.plot(at, _smooth(series["utilisation"]), lw=1, label="with the job")
        used.axhline(LIMIT, color="grey", lw=1, ls=":")
        images.fill_between(at, _smooth(series["offline_done"]), step="post", alpha=0.6)
        queries.set_title(f"{after['policy']}: {after['jobs'][0]['done']} images", fontsize=10)
        images.set_xlabel("time, s")
    for row in panels:
        row[0].set_ylim(0, 1.25 * row[0].get_ylim()[1])  # room for the legend
    panels[0][-1].legend(fontsize=8, frameon=False, loc="upper right", ncols=3)
    panels[1][-1].legend(fontsize=8, frameon=False, loc="upper right", ncols=2)
    title, labels = (
        "An offline job beside online queries (INFaaS, Fig. 8; simulated)",
        ("queries/s", "use of the worker", "images/s"),
    )
    compare.saved(picture, panels, title, out / "fig8.png", labels)


def _smooth(row: Sequence[float]) -> list[float]:
    """Means over two seconds."""
    return [sum(row[max(0, i - 3) : i + 1]) / len(row[max(0, i - 3) : i + 1]) for i in range(len(row))]


def _used(run: compare.Result) -> float:
    """Of the worker, while the rate is highest. A sample says what was used before it."""
    series = run["series"]
    samples = zip(series["time"], series["utilisation"], strict=True)
    found = [used for at, used in samples if any(begin < at <= end for begin, end in BUSY)]
    return sum(found) / len(found)


def _rates(alone: compare.Result, both: compare.Result) -> tuple[float, float]:
    """Images/s while online work alone has used more than LIMIT for SETTLED_S, and at all other times."""
    used, done = alone["series"]["utilisation"], both["series"]["offline_done"]
    windows = [0.0, *((a + b) / 2 for a, b in itertools.pairwise(used))]  # of a second, as runners see them
    settled = round(SETTLED_S / 0.5)
    found: dict[bool, list[float]] = {True: [], False: []}
    for i, rate in enumerate(done):
        found[min(windows[max(0, i - settled) : i + 1]) > LIMIT].append(rate)
    return sum(found[True]) / max(1, len(found[True])), sum(found[False]) / max(1, len(found[False]))


if __name__ == "__main__":
    compare.main(build, __doc__)

"""Releases on simulated queries: how often a version that is worse goes back, and one that is as good does (`python -m benches.release`).

Each run is one release of two versions whose answers are drawn: the judge of the registrar (services/core/release.py) looks after every second.
"""

import argparse
from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from bus.messages.quality import ArmCounts, VersionRelease
from services.core.release import bucket_of, verdict

LONGEST_S = 7 * 86400


class Version(NamedTuple):
    """What its answers are like. latency_ms: the median; they scatter by a factor of 1.3."""

    accuracy: float = 0.95
    errors: float = 0.0
    latency_ms: float = 20.0


class Case(NamedTuple):
    new: Version
    labelled: float = 0.2
    prove: bool = True
    steps: tuple[float, ...] = (0.01, 0.1, 0.25, 0.5)


OLD = Version()
CASES: Mapping[str, Case] = {
    "worse by 3 points, 20 % labelled, proving": Case(Version(0.92)),
    "worse by 3 points, 20 % labelled": Case(Version(0.92), prove=False),
    "equal, 20 % labelled, proving": Case(OLD),
    "equal, 20 % labelled": Case(OLD, prove=False),
    "equal, no labels": Case(OLD, labelled=0.0, prove=False),
    "3 times slower, no labels": Case(Version(latency_ms=60.0), labelled=0.0, prove=False),
    "2 % errors, no labels": Case(Version(errors=0.02), labelled=0.0, prove=False),
}


class Outcome(NamedTuple):
    """state: that the release ended in. step: from 0. share: the largest that the new version had. seconds, queries: until then."""

    state: str
    step: int
    share: float
    seconds: int
    queries: int
    reason: str


def run(case: Case, seed: int, qps: float = 200.0, every_s: int = 5) -> Outcome:
    """One release from its start to its end, or for a week."""
    rng = np.random.default_rng(seed)
    release = VersionRelease(
        release="r", model="m", version="2", old_version="1", steps=[*case.steps], least=60.0, margin=0.005, prove=case.prove
    )  # fmt: skip
    counted: dict[tuple[int, bool], ArmCounts] = {}
    share, since, seconds = 0.0, 0, 0
    while release.active and seconds < LONGEST_S:
        seconds += every_s
        share = max(share, release.share)
        for version, new in ((OLD, False), (case.new, True)):
            arm = counted.get((release.step, new), ArmCounts(release.step, new))
            counted[release.step, new] = _more(
                arm, version, rng.poisson(qps * every_s * (release.share if new else 1.0 - release.share)), case, rng
            )
        found = verdict(_at(release, since), counted, seconds)
        if found is not None:
            state, step, reason = found
            since = seconds
            release = VersionRelease(**{**_fields(release), "state": state, "step": step, "reason": reason})
    queries = sum(arm.queries for arm in counted.values())
    return Outcome(release.state, release.step, share, seconds, queries, release.reason)


def _fields(release: VersionRelease) -> dict[str, object]:
    return {name: getattr(release, name) for name in VersionRelease.__struct_fields__}


def _at(release: VersionRelease, since: float) -> VersionRelease:
    return VersionRelease(**{**_fields(release), "since": since})  # type: ignore[arg-type]


def _more(arm: ArmCounts, version: Version, queries: int, case: Case, rng: np.random.Generator) -> ArmCounts:
    errors = int(rng.binomial(queries, version.errors))
    labels = int(rng.binomial(queries - errors, case.labelled))
    within: Counter[int] = Counter()
    for latency in rng.lognormal(np.log(version.latency_ms), np.log(1.3), min(queries - errors, 50)):
        within[bucket_of(latency)] += 1
    right = int(rng.binomial(labels, version.accuracy))
    return arm.plus(ArmCounts(arm.step, arm.new, queries, errors, 0, labels, right, dict(within)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--case", choices=[*CASES], help="only this one")
    given = parser.parse_args()
    print("case | runs | rolled back | promoted | in its first step | largest share | median s | median queries")
    for name, case in CASES.items():
        if given.case not in (None, name):
            continue
        found = [run(case, seed) for seed in range(given.runs)]
        ended = Counter(one.state for one in found)
        first = sum(one.step == 0 for one in found)
        middle = [int(np.median([getattr(one, what) for one in found])) for what in ("seconds", "queries")]
        print(
            f"{name} | {given.runs} | {ended['rolled-back']} | {ended['promoted']} | {first} |"
            f" {max(one.share for one in found):g} | {middle[0]} | {middle[1]}", flush=True
        )  # fmt: skip


if __name__ == "__main__":
    main()

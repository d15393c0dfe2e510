"""Releases on simulated queries: how often a version that is worse goes back, and one that is as good does (`python -m benches.release`).

Each run is one release of two versions whose answers are drawn: the judge of the registrar (services/core/release.py) looks after every second.
"""

import argparse
from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from bus.messages.quality import ArmCounts, VersionRelease
from services.core.release import bucket_of, verdict

LONGEST_S = 7 * 86400


class Version(NamedTuple):
    """What its answers are like. latency_ms: the median; they scatter by a factor of 1.3. classes: a permutation of them: what it answers in place of
    each. single: of its wrong answers, the share that are all class 0; the others are of any class.
    """

    accuracy: float = 0.95
    errors: float = 0.0
    latency_ms: float = 20.0
    classes: tuple[int, ...] = ()
    single: float = 0.0


class Case(NamedTuple):
    """shares: of the true classes. mirror: before the steps."""

    new: Version
    labelled: float = 0.2
    prove: bool = True
    steps: tuple[float, ...] = (0.01, 0.1, 0.25, 0.5)
    shares: tuple[float, ...] = (0.1,) * 10
    mirror: float = 0.0
    old: Version = Version()


OLD = Version()
UNEVEN = (0.28, 0.2, 0.14, 0.1, 0.08, 0.06, 0.05, 0.04, 0.03, 0.02)
TURNED = (*range(1, 10), 0)
CASES: Mapping[str, Case] = {
    "worse by 3 points, 20 % labelled, proving": Case(Version(0.92)),
    "worse by 3 points, 20 % labelled": Case(Version(0.92), prove=False),
    "equal, 20 % labelled, proving": Case(OLD),
    "equal, 20 % labelled": Case(OLD, prove=False),
    "equal, no labels": Case(OLD, labelled=0.0, prove=False),
    "3 times slower, no labels": Case(Version(latency_ms=60.0), labelled=0.0, prove=False),
    "2 % errors, no labels": Case(Version(errors=0.02), labelled=0.0, prove=False),
    "classes permuted, uneven, no labels": Case(Version(classes=TURNED), shares=UNEVEN, labelled=0.0, prove=False),
    "classes permuted, uneven, no labels, mirror": Case(
        Version(classes=TURNED), shares=UNEVEN, mirror=0.1, labelled=0.0, prove=False
    ),
    "classes permuted, even, no labels, mirror": Case(Version(classes=TURNED), mirror=0.1, labelled=0.0, prove=False),
    "3 times slower, no labels, mirror": Case(Version(latency_ms=60.0), mirror=0.1, labelled=0.0, prove=False),
    "2 % errors, no labels, mirror": Case(Version(errors=0.02), mirror=0.1, labelled=0.0, prove=False),
    "equal, uneven, no labels, mirror": Case(OLD, shares=UNEVEN, mirror=0.1, labelled=0.0, prove=False),
    "better by 4 points, all in one class, no labels, mirror": Case(
        Version(0.96), old=Version(0.92, single=1.0), mirror=0.1, labelled=0.0, prove=False
    ),
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
        release="r", model="m", version="2", old_version="1", steps=[*case.steps], least=60.0, margin=0.005, prove=case.prove,
        mirror=case.mirror, differs=0.1 + 2.0 - case.old.accuracy - case.new.accuracy,
    )  # fmt: skip
    if case.mirror:
        release = replace(release, state="mirror", step=-1)
    counted: dict[tuple[int, bool], ArmCounts] = {}
    share, since, seconds = 0.0, 0, 0
    while release.active and seconds < LONGEST_S:
        seconds += every_s
        share = max(share, release.share)
        copies = rng.poisson(qps * every_s * release.mirror)
        true = rng.choice(len(case.shares), copies, p=case.shares)  # a mirror's versions have the same queries
        answers = {}
        for version, new in ((case.old, False), (case.new, True)):
            arm = counted.get((release.step, new), ArmCounts(release.step, new))
            if release.mirrors:
                answers[new] = _answers(version, true, rng)
                classes, of = np.bincount(answers[new], minlength=10), case._replace(labelled=0.0)
            else:
                queries = rng.poisson(qps * every_s * (release.share if new else 1.0 - release.share))
                classes, of = rng.multinomial(queries, _shares(version, case.shares)), case
            counted[release.step, new] = _more(arm, version, classes, of, rng)
        if release.mirrors:
            agreed = float((answers[True] == answers[False]).sum())
            counted[-1, True] = counted[-1, True].plus(ArmCounts(-1, True, compared=copies, agreed=agreed))
            others = rng.poisson(qps * every_s * (1.0 - release.mirror))  # of which nobody has the new version's answer
            failed = int(rng.binomial(others, case.old.errors))
            counted[-1, False] = counted[-1, False].plus(ArmCounts(-1, False, others, failed))
        found = verdict(replace(release, since=since), counted, seconds)
        if found is not None:
            state, step, reason = found
            since = seconds
            release = replace(release, state=state, step=step, reason=reason)
    queries = sum(arm.queries for arm in counted.values())
    return Outcome(release.state, release.step, share, seconds, queries, release.reason)


def _answers(version: Version, true: NDArray[np.int64], rng: np.random.Generator) -> NDArray[np.int64]:
    """The classes that it answers."""
    found = np.where(rng.random(len(true)) < version.single, 0, rng.integers(0, 10, len(true)))
    found = np.where(rng.random(len(true)) < version.accuracy, true, found)
    return np.array(version.classes)[found] if version.classes else found


def _shares(version: Version, true: tuple[float, ...]) -> NDArray[np.float64]:
    """Of its answers, by class, as `_answers` draws them."""
    wrong = version.single * np.eye(10)[0] + (1.0 - version.single) / 10.0
    found = version.accuracy * np.array(true) + (1.0 - version.accuracy) * wrong
    return np.array(found[np.argsort(version.classes)]) if version.classes else found


def _more(
    arm: ArmCounts, version: Version, classes: NDArray[np.int64], case: Case, rng: np.random.Generator
) -> ArmCounts:
    queries = int(classes.sum())
    errors = int(rng.binomial(queries, version.errors))
    labels = int(rng.binomial(queries - errors, case.labelled))
    within: Counter[int] = Counter()
    for latency in rng.lognormal(np.log(version.latency_ms), np.log(1.3), min(queries - errors, 50)):
        within[bucket_of(latency)] += 1
    right = int(rng.binomial(labels, version.accuracy))
    return arm.plus(
        ArmCounts(
            arm.step,
            arm.new,
            queries,
            errors,
            0,
            labels,
            right,
            dict(within),
            {str(name): float(n) for name, n in enumerate(classes)},
        )
    )


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
        first = sum(one.step <= 0 and (one.step < 0 or not case.mirror) for one in found)
        middle = [int(np.median([getattr(one, what) for one in found])) for what in ("seconds", "queries")]
        print(
            f"{name} | {given.runs} | {ended['rolled-back']} | {ended['promoted']} | {first} |"
            f" {max(one.share for one in found):g} | {middle[0]} | {middle[1]}", flush=True
        )  # fmt: skip


if __name__ == "__main__":
    main()

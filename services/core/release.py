"""Releases: which version a query gets, and whether the new one is worse than the old one at the same time. Pure. docs/registering.md has the rules.

Each step is judged by itself, since arms that have other shares at other times have other queries. Labels that come late count for the step of
their query. All tests of all steps hold together, at every moment, with probability 1 - LEVEL (services/core/confidence.py). A mirror is a step, too, -1,
whose answers nobody gets.
"""

from collections.abc import Iterable, Iterator, Mapping
from hashlib import blake2b
from math import ceil, floor, log
from typing import NamedTuple

from bus.codec import decode_kept
from bus.messages.quality import ArmCounts, ReleaseFigures, ReleaseState, VersionRelease
from services.core.confidence import Sampled, apart, difference

LEVEL = 0.01
MEASURES = ("accuracy", "errors", "attainment", "latency", "classes", "agreement")
MARGINS = {"errors": 0.001, "attainment": 0.02, "latency": 0.1}  # shares of answers; of accuracy the release says it
MARGINS["classes"] = 0.1  # of the share of any class: who is right some points more often shifts none so far
SAID = ("accuracy", "agreement")  # measures whose figures a good end names
CLASSES, OTHERS = 50, "others"  # told apart; the rest together
LEAST = 400  # answers of the new version in a step: of 2 % errors one is among them
DOUBTS = 2000  # answers for which a step waits that looks worse and is not shown to be
RATIO, FIRST_MS, BUCKETS = 1.25, 0.1, 72  # of latency
SLOWER, SLOWER_MS = 2, 1.0  # buckets (1.56 times) and ms that count as equally fast
KEY = "release."


class Arm(NamedTuple):
    """Which version of a model a query gets in a release, and in which step."""

    release: str
    step: int
    new: bool
    model: str
    version: str


def arm_of(release: VersionRelease, key: bytes) -> Arm:
    """Of a query. key: its context, else its uid: whoever decides finds the same, and who had the new version keeps it in later steps."""
    digest = blake2b(key, digest_size=8, key=release.release.encode()[:64]).digest()
    new = int.from_bytes(digest, "little") < release.share * 2.0**64
    return Arm(release.release, release.step, new, release.model, release.version)


def mirrored(release: VersionRelease, uid: bytes) -> bool:
    """Whether a query with this uid is copied to the new version."""
    digest = blake2b(uid, digest_size=8, key=release.release.encode()[:64], person=b"infaas mirror").digest()
    return int.from_bytes(digest, "little") < release.mirror * 2.0**64


def bucket_of(latency_ms: float) -> int:
    """The bucket of a latency: the answers of all buckets up to b came within FIRST_MS x RATIO ** b."""
    return min(BUCKETS, max(0, ceil(log(max(latency_ms, FIRST_MS) / FIRST_MS, RATIO))))


def _slack(bucket: int) -> int:
    """The bucket up to which an answer counts as being as fast as one of this bucket."""
    ms = FIRST_MS * RATIO ** (bucket + SLOWER) + SLOWER_MS
    return floor(log(ms / FIRST_MS, RATIO))


Counted = Mapping[tuple[int, bool], ArmCounts]  # by step, and whether of the new version


def totals(counted: Mapping[str, Iterable[ArmCounts]]) -> dict[tuple[int, bool], ArmCounts]:
    """Of all dispatchers together."""
    found: dict[tuple[int, bool], ArmCounts] = {}
    for arms in counted.values():
        for one in arms:
            found[one.step, one.new] = found.get((one.step, one.new), ArmCounts(one.step, one.new)).plus(one)
    return found


class Figure(NamedTuple):
    """One measure of one step, in which more is better. worse: by more than the margin, shown. proven: a loss of more than the margin is excluded. of: which
    answers it counts, where that are not all.
    """

    name: str
    step: int
    new: Sampled
    old: Sampled
    margin: float
    level: float
    of: str = ""

    @property
    def apart(self) -> float:
        return self.new.mean - self.old.mean

    @property
    def doubtful(self) -> bool:
        """Whether it looks worse."""
        return bool(self.new.count and self.old.count) and self.apart < -self.margin

    @property
    def worse(self) -> bool:
        return self.doubtful and apart(self.new, self.old, -self.margin, self.level)

    @property
    def proven(self) -> bool:
        return not self.doubtful and apart(self.new, self.old, -self.margin, self.level)

    @property
    def interval(self) -> tuple[float, float]:
        """Of the difference."""
        return difference(self.new, self.old, self.level)

    @property
    def words(self) -> str:
        low, high = self.interval
        return (
            f"{self.name}{f' ({self.of})' if self.of else ''} {self.new.mean:.4g} ({self.new.count:g}) against {self.old.mean:.4g} ({self.old.count:g}):"
            f" {low:+.4f} to {high:+.4f}, margin {self.margin:g}"
        )


def figures(release: VersionRelease, counted: Counted, step: int | None = None) -> list[Figure]:
    """What each step shows of each measure. step: of this one alone."""
    steps = [step] if step is not None else [one for one in release.stages if one <= release.step]
    return [one for k in steps for one in _of(release, counted, k)]


def _of(release: VersionRelease, counted: Counted, step: int) -> Iterator[Figure]:
    new, old = counted.get((step, True)), counted.get((step, False))
    if new is None or old is None:
        return
    level = LEVEL / len(MEASURES) / len(release.stages)
    yield Figure(
        "accuracy", step, Sampled(new.right, new.labels), Sampled(old.right, old.labels), release.margin, level
    )
    for name in ("errors", "attainment") if step >= 0 else ("errors",):
        ours, theirs = (
            Sampled(one.queries - (one.errors if name == "errors" else one.missed), one.queries) for one in (new, old)
        )
        yield Figure(name, step, ours, theirs, MARGINS[name], level)
    yield _latency(step, new, old, level)
    if new.classes and old.classes:
        yield _classes(step, new, old, level)
    if new.compared:
        both = Sampled(new.compared, new.compared)
        yield Figure("agreement", step, Sampled(new.agreed, new.compared), both, release.differs, level)


def _classes(step: int, new: ArmCounts, old: ArmCounts, level: float) -> Figure:
    """The class that the new version answers too rarely, or too often: then all other answers are too rare."""
    found = []
    ours, theirs = sum(new.classes.values()), sum(old.classes.values())
    each = level / 2 / (CLASSES + 1)
    for name in sorted(new.classes | old.classes):
        here, there = new.classes.get(name, 0.0), old.classes.get(name, 0.0)
        for of, a, b in ((name, here, there), (f"all but {name}", ours - here, theirs - there)):
            found.append(Figure("classes", step, Sampled(a, ours), Sampled(b, theirs), MARGINS["classes"], each, of))
    return min(found, key=lambda one: (not one.worse, one.apart))


def _latency(step: int, new: ArmCounts, old: ArmCounts, level: float) -> Figure:
    """At which latency the new version looks worst: the answers within that, and a little more for the new one."""
    ours, theirs = _cumulative(new), _cumulative(old)
    found = []
    for bucket in range(BUCKETS + 1):
        fast = Sampled(ours[min(BUCKETS, _slack(bucket))], ours[-1])
        found.append(
            Figure("latency", step, fast, Sampled(theirs[bucket], theirs[-1]), MARGINS["latency"], level / BUCKETS)
        )
    return min(found, key=lambda one: one.apart)


def _cumulative(arm: ArmCounts) -> list[int]:
    found, sum_ = [], 0
    for bucket in range(BUCKETS + 1):
        sum_ += arm.within.get(bucket, 0)
        found.append(sum_)
    return found


# -- what becomes of a release


def lacks(release: VersionRelease, counted: Counted, now: float) -> str:
    """What the present step waits for; empty: nothing."""
    new = counted.get((release.step, True), ArmCounts(release.step, True))
    here = figures(release, counted, release.step)
    wanted = DOUBTS if any(one.doubtful for one in here) else LEAST
    waits = [f"{ceil(release.since + release.least - now)} s more"] if now < release.since + release.least else []
    if new.queries < wanted:
        waits.append(f"{wanted - new.queries} answers of version {release.version} more")
    if (
        release.prove
        and not release.mirrors
        and not any(one.proven for one in figures(release, counted) if one.name == "accuracy")
    ):
        waits.append(_labels(release, next((one for one in here if one.name == "accuracy"), None)))
    return ", ".join(waits)


def _labels(release: VersionRelease, here: Figure | None) -> str:
    if here is None or not (here.new.count and here.old.count):
        return "labels of answers of both versions"
    if here.doubtful:
        return f"labels: so far version {release.version} looks worse by {-here.apart:.3f}"
    have, times = here.new.count + here.old.count, 1.0
    while (
        times < 1e6
        and not here._replace(
            new=Sampled(here.new.total * times, here.new.count * times),
            old=Sampled(here.old.total * times, here.old.count * times),
        ).proven
    ):
        times *= 1.1
    return f"about {float(f'{have * (times - 1):.1g}'):.0f} labels more"


class Judgement(NamedTuple):
    """What a release goes over to. step: its step then."""

    state: ReleaseState
    step: int
    reason: str


def verdict(release: VersionRelease, counted: Counted, now: float) -> Judgement | None:
    """None: it stays as it is."""
    if not release.active:
        return None
    found = figures(release, counted)
    worse = next((one for one in found if one.worse), None)
    if worse is not None:
        at = f"in the mirror of a share of {release.mirror:g}"
        if worse.step >= 0:
            at = f"in step {worse.step + 1} of {len(release.steps)}, share {release.steps[worse.step]:g}"
        return Judgement("rolled-back", release.step, f"shown to be worse: {worse.words}; {at}")
    last = release.step + 1 == len(release.steps)
    if release.state == "paused" or (last and release.hold) or lacks(release, counted, now):
        return None
    new = counted[release.step, True]
    said = "; ".join(one.words for one in found if one.step == release.step and one.name in SAID and one.new.count)
    reason = (
        f"{'not worse' if release.prove else 'not shown to be worse'} in {new.queries} answers{'; ' * bool(said)}{said}"
    )
    return Judgement("promoted", release.step, reason) if last else Judgement("step", release.step + 1, reason)


class ReleaseBook(dict[str, ReleaseFigures]):
    """By app, what was counted of its last release: from the entries of the control bucket, which has others, too."""

    def change(self, key: str, value: bytes | None) -> None:
        """An entry of the bucket has this value now; None: it is gone."""
        if not key.startswith(KEY):
            return
        app, found = key.removeprefix(KEY), decode_kept(ReleaseFigures, value)
        if found is None:
            self.pop(app, None)
        else:
            self.add(app, found)

    def add(self, app: str, found: ReleaseFigures) -> bool:
        """Take over what is newer. What a dispatcher has counted only grows. Returns whether anything was."""
        known = self.get(app)
        if known is None or known.release != found.release:
            self[app] = found
            return True
        newer = {
            name: arms
            for name, arms in found.counted.items()
            if name not in known.counted or _size(arms) > _size(known.counted[name])
        }
        known.counted.update(newer)
        return bool(newer)

    def of(self, app: str, release: VersionRelease) -> Counted:
        """All that was counted of this release."""
        found = self.get(app)
        return {} if found is None or found.release != release.release else totals(found.counted)


def _size(arms: Iterable[ArmCounts]) -> int:
    return sum(one.queries + one.labels + one.compared for one in arms)

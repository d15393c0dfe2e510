"""How good answers are in production: what labels say of them, and releases: a new version of a model on its way to an app's queries."""

from typing import Any, Literal

from msgspec import Struct

ReleaseState = Literal["mirror", "step", "paused", "promoted", "rolled-back", "aborted"]


class Cascade(Struct, frozen=True, kw_only=True):
    """A variant of two parts: the first one answers, and the second one those items of which the first is less sure than `threshold`.

    parts: names of variants. versions: their models with the versions. share: of the validation samples that go on to the second part.
    """

    parts: list[str]
    versions: list[tuple[str, str]]
    threshold: float = 0.0
    share: float = 0.0

    @property
    def words(self) -> str:
        """For people: "a, then b for 13 % below 0.82"."""
        return f"{self.parts[0]}, then {self.parts[1]} for {self.share:.0%} below {self.threshold:.3g}".replace(
            "%", " %"
        )


class LiveAccuracy(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What labels say of a variant in an app: its accuracy, 0..1, with an interval that holds at every moment, since so many Unix seconds. source
    "reference": what a more accurate variant's answers to so many of the same queries say of it.
    """

    accuracy: float
    low: float
    high: float
    labels: int
    since: float
    source: str = "labels"

    def excludes(self, registered: float | None) -> bool:
        """Whether its interval has left what was measured at registration."""
        return registered is not None and not self.low <= registered <= self.high

    def wins(self, app: "LiveAccuracy | None", registered: float | None) -> bool:
        """Whether labels of a context count in place of the app's: they have left what was registered, contradict those, or say more."""
        narrower = app is not None and (self.excludes(app.accuracy) or self.high - self.low <= app.high - app.low)
        return self.excludes(registered) or narrower


class AppQuality(Struct, frozen=True, kw_only=True, weakref=True):
    """What labels say of an app: of each variant, and of its answers, which are promised to reach so much on average. revision: of the selection
    bucket's value from which a dispatcher has made it. variants: also of each combination of those that answered a pipeline's stages, as "stage=variant, ...",
    or for an ensemble's members, as "=" and their twins. products: of the accuracies of a pipeline's; the mean of an ensemble's.
    """

    app: str
    revision: int
    variants: dict[str, LiveAccuracy] = {}
    answers: LiveAccuracy | None = None
    promised: float = 0.0
    products: dict[str, float] = {}


class VersionRelease(Struct, frozen=True, kw_only=True):
    """The last release of an app, in its record.

    steps: shares of the queries that get the new version, in turn. least: seconds that a step takes at least. margin: of accuracy. prove: the
    next step only once labels exclude a loss larger than that. hold: the last step stays. mirror: the share of the queries that the new version
    answers, too, before the first step; 0: none. differs: the share of answers that may differ from the old one's then. step: the place in steps;
    -1: the mirror. started, since (of the state): Unix seconds. reason: of the state.
    """

    model: str
    version: str
    old_version: str
    steps: list[float]
    least: float
    margin: float
    release: str = ""
    prove: bool = False
    hold: bool = False
    mirror: float = 0.0
    differs: float = 1.0
    state: ReleaseState = "step"
    step: int = 0
    started: float = 0.0
    since: float = 0.0
    reason: str = ""

    @property
    def active(self) -> bool:
        """Whether both versions answer."""
        return self.state in ("mirror", "step", "paused")

    @property
    def mirrors(self) -> bool:
        """Whether the new version answers copies, whose answers nobody gets."""
        return self.active and self.step < 0

    @property
    def stages(self) -> range:
        """All steps, the mirror with them."""
        return range(-1 if self.mirror else 0, len(self.steps))

    @property
    def share(self) -> float:
        """Of the queries that get the new version."""
        if self.mirrors:
            return 0.0
        return self.steps[self.step] if self.active else float(self.state == "promoted")


class ArmCounts(Struct, frozen=True, array_like=True, gc=False):
    """What one dispatcher, or all, counted of the queries that one version answered in one step, since the dispatcher's start.

    errors: the model failed. missed: late, or refused for want of time. labels: items with a label. right: the sum of 1 - loss over these.
    within: answers by bucket of latency (services/core/release.py). classes: queries by the class of their answers; the first few that this
    dispatcher has seen, and the others together. Of a mirror: compared: answers beside the old version's to the same queries; agreed: the sum
    of the shares of items in which they are equal.
    """

    step: int
    new: bool
    queries: int = 0
    errors: int = 0
    missed: int = 0
    labels: int = 0
    right: float = 0.0
    within: dict[int, int] = {}
    classes: dict[str, float] = {}
    compared: int = 0
    agreed: float = 0.0

    def plus(self, other: "ArmCounts") -> "ArmCounts":
        """Both together."""
        return ArmCounts(
            self.step,
            self.new,
            self.queries + other.queries,
            self.errors + other.errors,
            self.missed + other.missed,
            self.labels + other.labels,
            self.right + other.right,
            _sum(self.within, other.within),
            _sum(self.classes, other.classes),
            self.compared + other.compared,
            self.agreed + other.agreed,
        )


def _sum(one: dict[Any, Any], other: dict[Any, Any]) -> dict[Any, Any]:
    return {key: one.get(key, 0) + other.get(key, 0) for key in one | other}


class ReleaseCounted(Struct, frozen=True, array_like=True):
    """`infaas.registrar.release`: what a dispatcher has counted of a release since its start. It says so again whenever that has changed."""

    dispatcher: str
    app: str
    release: str
    arms: list[ArmCounts]


class ReleaseFigures(Struct, frozen=True, kw_only=True):
    """The same of all dispatchers, by name, those that are gone included. Key in the control bucket: `release.<app>`."""

    release: str
    counted: dict[str, list[ArmCounts]]

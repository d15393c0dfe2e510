"""Releases as a dispatcher sees them: which version a query gets, and what it counts of both for the registrar. Pure."""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from msgspec.structs import replace

from bus.messages.catalog import TARGETS, VariantRecord
from bus.messages.events import OutcomeEvent
from bus.messages.flow import DoneBatch
from bus.messages.quality import ArmCounts, ReleaseCounted
from bus.subjects import Subjects
from services.core.actor import Effect, Publish
from services.core.outcomes import is_client_error
from services.core.release import CLASSES, OTHERS, Arm, ReleaseBook, bucket_of, mirrored
from services.core.selection.cluster import ClusterView
from services.core.selection.eligibility import INFINITE, Ask
from services.dispatcher.copies import Copied, Copies, named
from services.dispatcher.query import Query

MISSED = frozenset({"deadline", "overloaded"})
FAILED = frozenset({"model_error", "internal"})
UNCOUNTED = frozenset({"bad_request", "unsatisfiable", "cancelled"})  # they say nothing of a version
REPEAT = 20  # reports after which figures are said again that have not changed


def lacks_new(ask: Ask, view: ClusterView) -> bool:
    """Whether a query is to get the new version, and no instance of it can serve it yet: then the old one answers, and it counts for neither."""
    if ask.arm is None or not ask.arm.new or (app := view.apps.get(ask.app)) is None:
        return False
    found = app.eligibility(ask)
    return not (found.active or found.troubled)


class Mirrored(NamedTuple):
    """What the old version did with a query that is copied. said: as in `DoneBatch`; seconds: of computing that alone; 0: not known."""

    app: str
    arm: Arm
    record: VariantRecord
    said: list[Any] | None
    failed: bool
    seconds: float


class Releases:
    """book: what all dispatchers have counted."""

    def __init__(self, name: str, subjects: Subjects, view: ClusterView, copies: Copies) -> None:
        self.book = ReleaseBook()
        self._view = view
        self._copies = copies
        self._classes: dict[str, tuple[str, set[str]]] = {}  # by app, of its last release: those that are told apart
        self._name = name
        self._subject = subjects.registrar("release")
        self._counted: dict[str, tuple[str, dict[tuple[int, bool], ArmCounts]]] = {}  # by app, of its last release
        self.by_app = (self._classes, self._counted)
        self._changed: set[str] = set()
        self._reports = 0

    def _count(self, app: str, arm: Arm, **more: Any) -> None:
        known = self._counted.get(app)
        if known is None or known[0] != arm.release:
            known = self._counted[app] = arm.release, {}
        self._changed.add(app)
        counts = known[1].get((arm.step, arm.new), ArmCounts(arm.step, arm.new))
        known[1][arm.step, arm.new] = counts.plus(ArmCounts(arm.step, arm.new, **more))

    def ended(
        self, query: Query, event: OutcomeEvent, said: Sequence[Any] | None = None, by: VariantRecord | None = None
    ) -> None:
        """A query has ended, or a part that the released model, or any, was to answer. said: of each item, as in `DoneBatch`. by: who answered."""
        arm = query.ask.arm
        if arm is None or not _concerns(query, arm) or is_client_error(event) or event.code in UNCOUNTED:
            return
        if arm.step < 0:  # the rest is counted of what is copied alone
            if (event.code is None or event.code in FAILED) and event.model in (None, arm.model):
                self._count(query.ask.app, arm, queries=1, errors=int(event.code is not None))
            return
        app, alike = query.ask.app, query.ask.context is not None  # what has one context may have few classes
        self._count(
            app,
            arm,
            queries=1,
            errors=int(event.code in FAILED),
            missed=int(event.code in MISSED or event.outcome == "late"),
            within={} if event.code or event.latency_ms is None else {bucket_of(event.latency_ms): 1},
            classes={} if alike or by is None else self._shares(app, arm, said, by),
        )

    def _shares(self, app: str, arm: Arm, said: Sequence[Any] | None, by: VariantRecord) -> dict[str, float]:
        """Of each class, the share of a query's items that it was said of: one observation, since they may be alike."""
        if not said or by.metric in TARGETS:
            return {}
        if (known := self._classes.get(app)) is None or known[0] != arm.release:
            known = self._classes[app] = arm.release, set()
        shares: dict[str, float] = {}
        for word in said:
            name = named(word, by)
            if name not in known[1]:
                if len(known[1]) < CLASSES:
                    known[1].add(name)
                else:
                    name = OTHERS
            shares[name] = shares.get(name, 0.0) + 1.0 / len(said)
        return shares

    # -- the mirror: a second answer to some queries, by the new version

    def done(self, batch: DoneBatch, queries: Iterable[Query | None], now: float) -> list[Effect]:
        """A batch is done: have some of its queries answered by the new version, too."""
        effects: list[Effect] = []
        for i, query in enumerate(queries):
            if query is not None and (arm := query.ask.arm) is not None and arm.step < 0 and _concerns(query, arm):
                effects += self._copy(query, arm, batch, i, now)
        return effects

    def _copy(self, query: Query, arm: Arm, batch: DoneBatch, i: int, now: float) -> list[Effect]:
        ask, view = query.ask, self._view.apps.get(query.ask.app)
        release = None if view is None else view.app.releasing
        code = "" if batch.codes is None else batch.codes[i]
        if view is None or release is None or not release.mirrors or (code and code not in FAILED):
            return []
        place = view.index.get(batch.variant)
        if arm.release != release.release or not mirrored(release, query.uid) or place is None:
            return []
        if (view.records[place].model, view.records[place].version) != (arm.model, release.old_version):
            return []  # another model of the app answered
        # Nobody gets its answer: what the query demands of one is no reason to know less of the new version.
        free = replace(ask, model=arm.model, version=arm.version, arm=None, accuracy=0.0, cost=INFINITE)
        able = view.eligibility(free).active
        on = self._copies.idle(one for group in able for one in group.active)
        if on is None:
            return []
        table = view.groups[place].table.at(ask.length)
        alone = (batch.finished - batch.started) * table.seconds(ask.items) / table.seconds(max(ask.items, batch.batch))
        said = None if batch.said is None else batch.said[i]
        about = Mirrored(ask.app, arm, view.records[place], said, bool(code), alone)
        return self._copies.send(query, on, about, "mirror", now)

    def copied(self, one: Copied) -> None:
        """The new version has answered a copy, or failed: both versions count, by what they computed."""
        old: Mirrored = one.about
        view = self._view.apps.get(old.app)
        release = None if view is None else view.app.release
        if (one.code and one.code not in FAILED) or release is None or release.release != old.arm.release:
            return
        pair = (old.said, old.failed, old.seconds, old.record), (one.said, bool(one.code), one.seconds, one.record)
        words = [[named(word, record) for word in said or ()] for said, _, _, record in pair]
        alike = [ours == theirs for theirs, ours in zip(*words, strict=False)]
        fits = bool(alike) and old.record.metric not in TARGETS
        beside = old.seconds > 0.0 and one.record.hardware == old.record.hardware  # else times say nothing
        for new, (said, failed, seconds, record) in zip((False, True), pair, strict=True):
            self._count(
                old.app,
                old.arm._replace(new=new),
                queries=int(new),
                errors=int(new and failed),
                within={bucket_of(1000.0 * seconds): 1} if beside and not failed else {},
                classes=self._shares(old.app, old.arm, said, record),
                compared=int(new and fits),
                agreed=sum(alike) / len(alike) if new and fits else 0.0,
            )

    def labelled(self, app: str, arm: Arm | None, right: float | None, copy: float | None = None) -> None:
        """A label has counted. arm: the version that answered; None: its query was in no release. right: 0..1; None: it says nothing of that. copy: the
        same of the new version in a mirror.
        """
        if arm is not None and right is not None:
            self._count(app, arm, labels=1, right=right)
        if arm is not None and copy is not None and arm.step < 0:
            self._count(app, arm._replace(new=True), labels=1, right=copy)

    def report(self) -> Iterable[Publish]:
        """What has changed since the last report; all now and then, for registrars that have not heard it."""
        self._reports += 1
        apps = set(self._counted) if self._reports % REPEAT == 0 else self._changed & self._counted.keys()
        self._changed = set()
        return [Publish(self._subject, self._report(app)) for app in sorted(apps)]

    def _report(self, app: str) -> ReleaseCounted:
        release, counted = self._counted[app]
        return ReleaseCounted(self._name, app, release, [*counted.values()])


def _concerns(query: Query, arm: Arm) -> bool:
    """Whether it is one that the released model, or any, was to answer."""
    if query.ensemble is not None or query.pipeline is not None:
        return False
    return query.part is None or query.ask.model in (None, arm.model)

"""Releases as a dispatcher sees them: which version a query gets, and what it counts of both for the registrar. Pure."""

from collections.abc import Iterable
from typing import Any

from bus.messages.events import OutcomeEvent
from bus.messages.quality import ArmCounts, ReleaseCounted
from bus.subjects import Subjects
from services.core.actor import Publish
from services.core.outcomes import is_client_error
from services.core.release import Arm, ReleaseBook, bucket_of
from services.core.selection.cluster import ClusterView
from services.core.selection.eligibility import Ask
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


class Releases:
    """book: what all dispatchers have counted."""

    def __init__(self, name: str, subjects: Subjects) -> None:
        self.book = ReleaseBook()
        self._name = name
        self._subject = subjects.registrar("release")
        self._counted: dict[str, tuple[str, dict[tuple[int, bool], ArmCounts]]] = {}  # by app, of its last release
        self._changed: set[str] = set()
        self._reports = 0

    def _count(self, app: str, arm: Arm, **more: Any) -> None:
        known = self._counted.get(app)
        if known is None or known[0] != arm.release:
            known = self._counted[app] = arm.release, {}
        self._changed.add(app)
        counts = known[1].get((arm.step, arm.new), ArmCounts(arm.step, arm.new))
        known[1][arm.step, arm.new] = counts.plus(ArmCounts(arm.step, arm.new, **more))

    def ended(self, query: Query, event: OutcomeEvent) -> None:
        """A query has ended, or a part that the released model, or any, was to answer."""
        arm, part = query.ask.arm, query.part
        if arm is None or query.ensemble is not None or query.pipeline is not None or is_client_error(event):
            return
        model = query.ask.model if part is not None else None
        if model not in (None, arm.model) or event.code in UNCOUNTED:
            return
        self._count(
            query.ask.app,
            arm,
            queries=1,
            errors=int(event.code in FAILED),
            missed=int(event.code in MISSED or event.outcome == "late"),
            within={} if event.code or event.latency_ms is None else {bucket_of(event.latency_ms): 1},
        )

    def labelled(self, app: str, arm: Arm | None, right: float | None) -> None:
        """A label has counted. arm: the version that answered; None: its query was in no release. right: 0..1; None: it says nothing of that."""
        if arm is not None and right is not None:
            self._count(app, arm, labels=1, right=right)

    def report(self) -> Iterable[Publish]:
        """What has changed since the last report; all now and then, for registrars that have not heard it."""
        self._reports += 1
        apps = set(self._counted) if self._reports % REPEAT == 0 else self._changed
        self._changed = set()
        return [Publish(self._subject, self._report(app)) for app in sorted(apps)]

    def _report(self, app: str) -> ReleaseCounted:
        release, counted = self._counted[app]
        return ReleaseCounted(self._name, app, release, [*counted.values()])

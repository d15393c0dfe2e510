"""Releases at the registrar: what dispatchers have counted is kept, and each release judged by it. Pure.

Every registrar hears all counts and judges all releases; the record of the app is changed by compare-and-set, so one of them acts.
"""

from collections.abc import Iterable

from msgspec.structs import replace

from bus.fields import filled
from bus.messages.catalog import AppRecord, ModelRecord
from bus.messages.events import ReleaseEvent
from bus.messages.public import Error
from bus.messages.quality import ReleaseCounted, ReleaseFigures, ReleaseState, VersionRelease
from bus.messages.verbs import StartRelease
from bus.subjects import Subjects
from services.core.actor import NOTHING, Changed, Do, Effect, Envelope, Inlet, Record, Watch
from services.core.catalog import Catalog
from services.core.release import ReleaseBook, verdict
from services.registrar.commands import PutFigures, ReleaseMoved, StepRelease, error_of

COMMAND_S = 5.0
STEPS = (0.01, 0.1, 0.5)
MIRROR = 0.1  # of a registration
DIFFER = 0.1  # of the answers in a mirror, beyond what both versions' errors make possible
UNKNOWN = 0.95  # in place of an accuracy that nobody has measured
MOVE, KEEP = "release", "figures"  # commands, each with its app


class ReleaseJudge:
    """catalog: the registrar's."""

    def __init__(self, subjects: Subjects, catalog: Catalog) -> None:
        self.inlet = Inlet(subject=subjects.registrar("release"), message=ReleaseCounted)
        self.watch = Watch(bucket=subjects.control_bucket)
        self._catalog = catalog
        self._book = ReleaseBook()
        self._unsaved: set[str] = set()
        self._under_way: set[tuple[str, str]] = set()

    def changed(self, change: Changed) -> None:
        """An entry of the control bucket has changed."""
        self._book.change(change.key, change.value)

    def heard(self, envelope: Envelope) -> Iterable[Effect]:
        """A dispatcher says what it has counted."""
        said: ReleaseCounted = envelope.message
        release = self._of(said.app)
        if release is None or release.release != said.release:
            return NOTHING
        if self._book.add(said.app, ReleaseFigures(release=said.release, counted={said.dispatcher: said.arms})):
            self._unsaved.add(said.app)
        return self._judge(said.app, release, envelope.now)

    def _of(self, app: str) -> VersionRelease | None:
        record = self._catalog.app(app)
        return None if record is None else record.release

    def _judge(self, app: str, release: VersionRelease, now: float) -> Iterable[Effect]:
        found = verdict(release, self._book.of(app, release), now)
        if found is None or (MOVE, app) in self._under_way:
            return NOTHING
        was = (release.release, release.state, release.step)
        return self._start(MOVE, app, StepRelease(app=app, was=was, **found._asdict()))

    def _start(self, kind: str, app: str, command: StepRelease | PutFigures) -> Iterable[Effect]:
        self._under_way.add((kind, app))
        return (Do((kind, app), command, COMMAND_S),)

    def check(self, now: float) -> list[Effect]:
        """To be called every second: keep what is new, and go on with what had to wait."""
        effects: list[Effect] = []
        for app in sorted(self._unsaved):
            if (KEEP, app) not in self._under_way:
                self._unsaved.discard(app)
                effects += self._start(KEEP, app, PutFigures(app=app, figures=self._book[app]))
        for record in self._catalog.apps:
            if record.releasing is not None:
                effects += self._judge(record.app, record.releasing, now)
        return effects

    def ended(self, id: tuple[str, str], *, failed: bool) -> None:
        """One of its commands has ended."""
        self._under_way.discard(id)
        if failed and id[0] == KEEP:
            self._unsaved.add(id[1])


def moved(result: object) -> tuple[Effect, ...]:
    """The event of a release that has changed."""
    if not isinstance(result, ReleaseMoved):
        return NOTHING
    release = result.release
    return (Record(filled(ReleaseEvent, release, time=release.since, app=result.app, share=release.share)),)


# -- how the verbs change an app's record


def refused_by(record: AppRecord, model: str) -> Error | None:
    """Why the versions of a model that an app links are not changed by hand: a release does."""
    release = record.releasing
    if release is None or release.model != model:
        return None
    return error_of(
        f"app: {record.app} has a release of {release.model} under way, from version {release.old_version} to {release.version}: end it by"
        f" infaas.admin.promote-release or infaas.admin.abort-release first"
    )


def started(record: AppRecord, change: StartRelease, found: ModelRecord, catalog: Catalog) -> AppRecord | Error:
    """The app with a release of this version, which fits it."""
    if record.releasing is not None:
        return error_of(
            f"app: {record.app} has a release of {record.releasing.model} under way, and has one at a time: end it by"
            " infaas.admin.promote-release or infaas.admin.abort-release first"
        )
    old = record.links[change.model]
    if found.version == old:
        return error_of(
            f"version: app {record.app} serves version {old} of {change.model} already; register another one with release=hold, or name one"
        )
    steps = change.steps or [*STEPS] * (not (change.mirror and change.hold))
    release = filled(
        VersionRelease, change, version=found.version, old_version=old, steps=steps, reason="an operator's order"
    )
    if change.mirror:
        errors = [
            1.0 - max((one.accuracy or UNKNOWN for one in catalog.seen(record.app, variants)), default=UNKNOWN)
            for variants in (catalog.variants_at(found.model, version) for version in (old, found.version))
        ]
        release = replace(release, state="mirror", step=-1, differs=min(1.0, sum(errors) + DIFFER))
    return replace(record, release=release)


def moved_to(record: AppRecord, state: ReleaseState, step: int, reason: str) -> AppRecord | Error:
    """The app with its release in another state."""
    if record.releasing is None:
        return error_of(f"app: {record.app} has no release under way: see infaas.list.releases")
    return replace(record, release=replace(record.releasing, state=state, step=step, reason=reason))


def stamped(before: AppRecord | None, after: AppRecord, now: float) -> AppRecord:
    """The app whose release has its time, and a name if it is new."""
    release, was = after.release, None if before is None else before.release
    if release is None or release == was:
        return after
    if not release.release:
        release = replace(release, release=f"{after.app}-{int(1000 * now)}", started=now)
    return replace(after, release=replace(release, since=now))

"""Releases as a dispatcher sees them: which version a query gets, and what it counts of both for the registrar. Pure."""

from collections.abc import Iterable
from contextlib import suppress
from typing import Any

from bus.messages.catalog import VariantRecord
from bus.messages.events import OutcomeEvent
from bus.messages.flow import DoneBatch
from bus.messages.releases import ArmCounts, ReleaseCounted
from bus.subjects import Subjects
from bus.tensors import BadTensor, to_array
from services.core.actor import Publish
from services.core.ensemble.base import Member
from services.core.ensemble.outputs import BadLabel, BadOutputs, losses
from services.core.outcomes import is_client_error
from services.core.release import Arm, ReleaseBook, bucket_of
from services.core.selection.cluster import ClusterView
from services.core.selection.eligibility import Ask
from services.dispatcher.predictions import Prediction, Predictions, digest_of
from services.dispatcher.query import Query

MISSED = frozenset({"deadline", "overloaded"})
FAILED = frozenset({"model_error", "internal"})
REPEAT = 20  # reports after which figures are said again that have not changed


def lacks_new(ask: Ask, view: ClusterView) -> bool:
    """Whether a query is to get the new version, and no instance of it can serve it yet: then the old one answers, and it counts for neither."""
    if ask.arm is None or not ask.arm.new or (app := view.apps.get(ask.app)) is None:
        return False
    found = app.eligibility(ask)
    return not (found.active or found.troubled)


class Releases:
    """book: what all dispatchers have counted. predictions: gets the answers that labels may come for."""

    def __init__(self, name: str, subjects: Subjects, predictions: Predictions) -> None:
        self.book = ReleaseBook()
        self._name = name
        self._subject = subjects.registrar("release")
        self._predictions = predictions
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
        if model not in (None, arm.model) or event.code in ("bad_request", "unsatisfiable"):
            return
        self._count(
            query.ask.app,
            arm,
            queries=1,
            errors=int(event.code in FAILED),
            missed=int(event.code in MISSED or event.outcome == "late"),
            within={} if event.code or event.latency_ms is None else {bucket_of(event.latency_ms): 1},
        )

    def done(self, query: Query, event: OutcomeEvent, record: VariantRecord, batch: DoneBatch, now: float) -> None:
        """An executor has ended it. Where it says what it has answered, a label may come for that."""
        self.ended(query, event)
        head, ask = query.head, query.ask
        outputs = None if batch.outputs is None else batch.outputs.get(query.uid)
        if outputs is None:
            return
        with suppress(BadTensor):
            arrays = {name: to_array(tensor, f"outputs.{name}") for name, tensor in outputs.items()}
            member = Member(
                model=record.model, version=record.version, accuracy=record.accuracy, metric=record.metric, labels=record.labels
            )  # fmt: skip
            digest = digest_of(head.inputs) if head.inputs_ref is None and query.refs is None else None
            found = Prediction(
                query.uid, ask.app, ask.context, digest, now, (member,), {}, {record.model: arrays}, ask.items, head.id
            )
            found.arm = ask.arm
            self._predictions.add(found)

    def labelled(self, prediction: Prediction, item: int, label: Any) -> None:
        """A label has come for an item of a query: it counts once for the version that answered."""
        arm = prediction.arm
        if arm is None or item in prediction.labelled or not 0 <= item < prediction.items:
            return
        members = [one for one in prediction.members if one.model == arm.model or len(prediction.members) == 1]
        with suppress(BadLabel, BadOutputs):
            for lost in losses(label, members, prediction.of_item(item)).values():
                prediction.labelled.add(item)
                self._count(prediction.app, arm, labels=1, right=1.0 - lost)

    def report(self) -> Iterable[Publish]:
        """What has changed since the last report; all now and then, for registrars that have not heard it."""
        self._reports += 1
        apps = set(self._counted) if self._reports % REPEAT == 0 else self._changed
        self._changed = set()
        return [Publish(self._subject, self._report(app)) for app in sorted(apps)]

    def _report(self, app: str) -> ReleaseCounted:
        release, counted = self._counted[app]
        return ReleaseCounted(self._name, app, release, [*counted.values()])

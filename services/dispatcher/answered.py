"""What labels are compared with: what each variant answered to the last queries; and what the labels say of variants, put into the catalogue. Pure."""

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import msgspec
from msgspec import Struct

from bus.codec import encode
from bus.messages.catalog import TARGETS, VariantRecord
from bus.messages.events import FeedbackEvent
from bus.messages.flow import DoneBatch, Payload
from bus.messages.quality import AppQuality, LiveAccuracy
from bus.tensors import BadTensor, to_array
from services.core.actor import Do
from services.core.catalog import Catalog
from services.core.ensemble.outputs import aim_of, reached, said, score
from services.core.quality import Score, by_reference, compared
from services.core.release import Arm
from services.dispatcher.commands import PutQuality
from services.dispatcher.predictions import Claim, Prediction, Predictions, digest_of, uid_of
from services.dispatcher.query import Join, Query

KEPT = 100_000  # queries, at least: 250 bytes each
PIECES = 16  # they go a piece at a time, so that memory stays as it is once they are so many
PUBLISH_S = 0.5  # between two times that an app's figures are put into the catalogue
WRITE_S = 5.0
LABELLED = 64  # items of a query that labels measure
FEW_LABELS = 4  # fewer say nothing: one of them may itself be wrong
ANSWERS = ""  # in place of a variant: the app's answers, whoever made them


class Answered(msgspec.Struct, gc=False):
    """A query of an app without a policy, a stage's, or a pipeline's. variant: "" if it was refused, and copies alone are answered, or of a pipeline. floor: the
    accuracy that it stated. said: of each item (`services.core.ensemble.outputs.said`). claim: a pipeline's.
    arm: of the release. id: its client's; None for a stage's. at: Unix seconds; asked. context: its own, if that is known. copies: other variants that have
    answered it, too, and what those said.
    """

    uid: bytes
    app: str
    variant: str
    floor: float | None
    said: list[Any]
    arm: Arm | None
    id: str | None
    at: float
    context: str | None = None
    copies: tuple[tuple[str, list[Any]], ...] = ()
    claim: Claim | None = None


class Piece:
    """So many of them. They are indexed once somebody looks for one: most are never looked for, and what is kept of each takes time from the next."""

    def __init__(self) -> None:
        self.queries: list[Answered] = []
        self.copies: defaultdict[bytes, tuple[tuple[str, list[Any]], ...]] = defaultdict(tuple)
        self._by: dict[bytes | tuple[str, str], Answered] = {}
        self._indexed = 0

    def find(self, name: bytes | tuple[str, str] | None) -> Answered | None:
        """By uid, or by app and id: the latest."""
        for one in self.queries[self._indexed :]:
            self._by[one.uid] = one
            if one.id is not None:
                self._by[one.app, one.id] = one
        self._indexed = len(self.queries)
        return None if name is None else self._by.get(name)


class AnsweredQueries:
    """The last queries that one variant answered."""

    def __init__(self) -> None:
        self._pieces = deque([Piece()], PIECES + 1)  # the latest comes last
        self._classes: dict[int, list[Any]] = {}  # what most say, once

    def ended(self, batch: DoneBatch, queries: Iterable[Query | None]) -> None:
        """A batch is done."""
        for query, words in zip(queries, batch.said or (), strict=False):
            if query is None or words is None:
                continue
            part = query.part
            if part is not None and part.join.query.ensemble is not None:
                continue  # what members say is in the prediction of their query, or is added when that ends
            if len(words) == 1 and type(words[0]) is int:
                words = self._classes.get(words[0]) or self._classes.setdefault(words[0], words)
            self.add(query, words, batch.variant)
        if len(self._pieces[-1].queries) >= KEPT // PIECES:
            self._pieces.append(Piece())

    def add(self, query: Query, words: list[Any], variant: str = "", claim: Claim | None = None) -> None:
        """A variant has answered, in an app that keeps answers perhaps before; or a pipeline; or nobody, where copies may."""
        name, ask = query.head.id if query.part is None else None, query.ask
        floor, arm = ask.accuracy or None, ask.arm if variant or claim else None
        self._pieces[-1].queries.append(
            Answered(query.uid, ask.app, variant, floor, words, arm, name, query.arrived, ask.context, claim=claim)
        )

    def copied(self, uid: bytes, variant: str, words: list[Any] | None) -> None:
        """Another variant has answered this query, too."""
        if words is not None:
            self._pieces[-1].copies[uid] += ((variant, words),)

    def find(self, app: str, uid: bytes | None, id: str | None) -> Answered | None:
        """The query with this uid, else the latest with the client's id, or whose answer named that, if it is this app's."""
        names: list[bytes | tuple[str, str]] = (
            [uid] if uid is not None else [] if id is None else [(app, id), uid_of(id)]
        )
        tries = (piece.find(name) for name in names for piece in reversed(self._pieces))
        found = next((one for one in tries if one is not None), None)
        if found is None or found.app != app:
            return None
        found.copies = tuple(copy for piece in self._pieces for copy in piece.copies.get(found.uid, ()))
        return found


class Scored(NamedTuple):
    """What one label says: of each variant whose answer to the query is known, by its `twins`, and of the answer. promised: what that should have
    reached. aims: the mean score of each variant at registration. copy: of the new version's answer in a mirror.
    """

    variants: Mapping[str, float] = {}
    answer: float | None = None
    promised: float | None = None
    aims: Mapping[str, float] = {}
    copy: float | None = None

    def of(self, record: VariantRecord | None) -> float | None:
        """What it says of one variant."""
        return None if record is None else self.variants.get(record.twins)


def score_answered(label: Any, item: int, of: Answered, record_of: Callable[[str], VariantRecord | None]) -> Scored:
    """By the answer of the one variant that was asked, if there is one, and of those that answered copies, or a pipeline's. record_of: variants as they were
    registered.
    """
    one: dict[str, float] = {}
    aims: dict[str, float] = {}
    answer = promised = copy = None
    if of.claim is not None:
        return _scored_whole(label, of.said[item], of.claim, of.floor)
    for variant, words in ((of.variant, of.said), *of.copies):
        record = record_of(variant)
        if record is None or (found := _score(label, words[item], record)) is None:
            continue
        one[record.twins], aims[record.twins] = found, aim_of(record.metric, record.accuracy)
        if words is of.said:
            if record.metric not in TARGETS:
                answer, promised = found, of.floor or record.accuracy
        elif of.arm is not None and (record.model, record.version) == (of.arm.model, of.arm.version):
            copy = found
    return Scored(one, answer, promised, aims, copy)


def score_prediction(label: Any, item: int, of: Prediction, record_of: Callable[[str], VariantRecord | None]) -> Scored:
    """By the outputs of all members of an ensemble that have answered, and by the answer."""
    found: dict[str, float] = {}
    aims: dict[str, float] = {}
    for model, outputs in of.of_item(item).items():
        record = record_of(of.variants.get(model, ""))
        words = None if record is None else said(outputs, record.metric)
        if record is None or words is None or (one := _score(label, words[0], record)) is None:
            continue
        found[record.twins], aims[record.twins] = one, aim_of(record.metric, record.accuracy)
    if of.answer is None or of.claim is None:
        return Scored(found, aims=aims)
    words = said({name: array[item : item + 1] for name, array in of.answer.items()}, of.claim.metric)
    whole = Scored() if not words else _scored_whole(label, words[0], of.claim, of.floor)
    return whole._replace(variants={**whole.variants, **found}, aims={**whole.aims, **aims})


def _scored_whole(label: Any, words: Any, claim: Claim, floor: float | None) -> Scored:
    """An answer that several have made."""
    found = score(label, words, claim.metric, claim.classes, None)
    return Scored({} if found is None else {claim.by: found}, found, floor or claim.least, {claim.by: claim.product})


def _score(label: Any, words: Any, record: VariantRecord) -> float | None:
    error = 1.0 / record.accuracy - 1.0 if record.accuracy else None
    return score(label, words, record.metric, record.labels, error)


def prediction_of(join: Join, predictions: Predictions, now: float) -> Prediction:
    """What feedback to a pipeline is about: the prediction of the stage that made the answer. join: its query, which has been answered."""
    query, run = join.query, join.plan
    chosen = (
        next((ref.vertex for ref in refs if run.answered(ref.vertex)), None) for refs in run.served.outputs.values()
    )
    made = [name for name in dict.fromkeys(chosen) if name is not None]
    of: Prediction | str | None = (
        f"{' and '.join(made)} made this answer together" if made else "no stage made this answer"
    )
    if len(made) == 1 and made[0] in run.fans:
        of = f"{made[0]} answered for each item"
    elif len(made) == 1:
        app = run.served.stages[made[0]].vertex.app
        found = predictions.by_query(app, run.parts[made[0]].uid)
        of = f"{made[0]} made this answer, and its app {app} has no policy" if found is None else found.of or found
    if isinstance(of, str):
        of = f"{of}: nothing learns from it; send feedback to the app of a stage that has one, with its `inputs`"
    head = query.head
    digest = digest_of(head.inputs) if head.inputs_ref is None and query.refs is None else None
    return Prediction(
        query.uid, query.ask.app, query.ask.context, digest, now, (), {}, {}, query.ask.items, head.id, of
    )


def kept_answer(
    uid: bytes | None, app: str, kept: Payload, record_of: Callable[[str], VariantRecord | None]
) -> Answered | None:
    """A query that all dispatchers have forgotten, and that its app keeps. uid: of a stage, if that is named. None: a label says nothing of it."""
    record = record_of(kept.variant)
    try:
        outputs = {name: to_array(one, name) for name, one in kept.outputs.items()}
    except BadTensor:  # bytes
        return None
    words = None if record is None else said(outputs, record.metric)
    if words is None:
        return None
    return Answered(uid or bytes.fromhex(kept.query), app, kept.variant, None, words, None, kept.id, kept.time)


def scored_event(event: FeedbackEvent, scored: Scored, of: Answered | Prediction) -> FeedbackEvent:
    """With what it says. Of a prediction several variants made the answer."""
    query, variant = (of.uid, of.variant or None) if isinstance(of, Answered) else (event.query, None)
    what = {"score": scored.answer, "promised": scored.promised}
    context = event.context if of.context is None else of.context
    return msgspec.structs.replace(event, query=query, variant=variant, asked=of.at, context=context, **what)


class Publisher(Struct, eq=False):
    """Puts what labels and references say of apps into the catalogue bucket, where all that decide see it."""

    catalog: Catalog
    _changed: dict[str, tuple[int, Mapping[str, Score], float]] = {}
    _next: dict[str, float] = {}

    def changed(self, app: str, revision: int, scores: Mapping[str, Score], promised: float) -> None:
        """Labels have been stored. revision: of the value with them."""
        if scores:
            self._changed[app] = revision, scores, promised

    def due(self, now: float) -> list[Do]:
        """To be called now and then."""
        effects = []
        self._next = {app: at for app, at in self._next.items() if now < at}
        for app in [app for app in self._changed if app not in self._next]:  # in order: a set has none of its own
            revision, scores, promised = self._changed.pop(app)
            if self.catalog.app(app) is None:  # nobody deletes what is put after it
                continue
            self._next[app] = now + PUBLISH_S
            records = [one for one in self._variants(app) if one.accuracy]
            live = ((one.variant, _live(one, records, scores, now)) for one in records)
            found = AppQuality(
                app=app,
                revision=revision,
                variants={name: one for name, one in live if one is not None} | of_several(scores, now),
                answers=_figures(scores[ANSWERS], now, lambda share: share) if ANSWERS in scores else None,
                promised=round(promised, 6),
                products={name: one.aim for name, one in scores.items() if "=" in name},
            )
            effects.append(Do(("quality", app), PutQuality(app, encode(found), revision), WRITE_S))
        return effects

    def _variants(self, app: str) -> Iterable[VariantRecord]:
        """Those of all versions of its models, as they were registered."""
        record, catalog = self.catalog.app(app), self.catalog
        for model in () if record is None else record.links:
            for version in catalog.versions(model):
                yield from catalog.variants_at(model, version)
        yield from () if record is None else catalog.cascades_of(record)


def of_several(scores: Mapping[str, Score], now: float) -> dict[str, LiveAccuracy]:
    """What labels say of combinations of variants: of a pipeline's stages, or an ensemble's members."""
    return {name: _figures(one, now, lambda share: share) for name, one in scores.items() if "=" in name}


def _live(
    of: VariantRecord, records: Iterable[VariantRecord], scores: Mapping[str, Score], now: float
) -> LiveAccuracy | None:
    """What labels say of a variant, or its references: the latest one that shows it to have left what was registered, else the latest. Labels win where
    they show that, where they say more, and where both contradict each other: then the reference is wrong.
    """
    labels = by_labels(of, scores, now)
    found = []
    for by in records:
        one = scores.get(compared(of, by))
        if one is None or not by.accuracy:
            continue
        known = by_labels(by, scores, now)
        sure = known.low if known is not None and known.excludes(by.accuracy) else by.accuracy
        accuracy, low, high = by_reference(one, of, sure, now)
        count = int(one.observed.count)
        said = LiveAccuracy(accuracy=accuracy, low=low, high=high, labels=count, since=one.since, source="reference")
        found.append((said.excludes(of.accuracy), one.at, said))
    if not found:
        return labels
    said = max(found, key=lambda each: each[:2])[2]
    if labels is None or not (
        labels.excludes(of.accuracy)
        or labels.high - labels.low <= said.high - said.low
        or labels.high < said.low
        or said.high < labels.low
    ):
        return said
    return labels


def by_labels(record: VariantRecord, scores: Mapping[str, Score], now: float) -> LiveAccuracy | None:
    """What labels say of a variant; None: there are none."""
    one = scores.get(record.twins)
    return None if one is None else _figures(one, now, lambda x: reached(x, record.metric, record.accuracy or 0.0))


def _figures(one: Score, now: float, reaches: Callable[[float], float]) -> LiveAccuracy:
    low, high = one.interval(now)
    seen = one.observed
    if seen.count < FEW_LABELS:
        low, high = 0.0, 1.0
    return LiveAccuracy(
        accuracy=reaches(seen.mean), low=reaches(low), high=reaches(high), labels=int(seen.count), since=one.since
    )

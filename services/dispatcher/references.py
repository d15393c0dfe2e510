"""References: a share of the queries is answered once more by the app's most accurate variant, so that a variant that alone went wrong is found without
labels. Pure.

The second answer is offline work for an instance that is loaded and idle. The system pays for it, it is no demand of the app, and what it says comes with
`DoneBatch` alone. Of two variants the more accurate one is the reference, whichever answered the client: so one that was found wrong, and that gets no
queries any more, is still compared, and is seen to go back. One of which few samples were measured is compared before queries show what it is worth, in every
second of these answers. A reference that is lost stays lost.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple
from zlib import crc32

from bus.messages.catalog import TARGETS, VariantRecord
from bus.messages.flow import DoneBatch
from bus.subjects import WITHOUT_APP
from services.core.actor import Effect
from services.core.catalog import Catalog
from services.core.ensemble.outputs import score
from services.core.placement import REMOTE
from services.core.quality import CLOSER, COMPARED, Pace, compared, least_agreement
from services.core.selection.cluster import ClusterView
from services.core.selection.eligibility import AppView
from services.core.selection.instances import Instance
from services.core.settings import JobsSettings, QualitySettings
from services.dispatcher.answered import Scored
from services.dispatcher.copies import Copied, Copies
from services.dispatcher.learning import Learning
from services.dispatcher.query import Query

COUNT_S = 2.0  # between two times that what references said is stored
DOUBT = 0.05  # width of an accuracy's interval, from which on it is in doubt
FEW = 400  # labels or references that end that
PROBED = 10  # times as large a share of what is refused: nothing else is computed for it, and some 100 labels show that the world went back


class Asked(NamedTuple):
    """A query that is answered once more. of: the variant that is compared with `by`, the more accurate one, as they were registered. first: what was said to
    the client. by_first: by the reference.
    """

    app: str
    of: VariantRecord
    by: VariantRecord
    first: Sequence[Any]
    by_first: bool


class Probe(NamedTuple):
    """A query that is refused, since no variant reaches its accuracy any more: one that was registered with it answers for nobody, so that labels and
    references show when it does again.
    """

    app: str
    query: Query


@dataclass(eq=False)
class References:
    """The second answers under way, and what those said that have come."""

    view: ClusterView
    catalog: Catalog
    copies: Copies
    learning: Learning
    quality: QualitySettings
    jobs: JobsSettings

    def __post_init__(self) -> None:
        self._below = int(self.quality.reference_share * 2**32)
        self._closer = CLOSER * self._below
        self._paces: defaultdict[str, Pace] = defaultdict(Pace)  # by app
        self.by_app = (self._paces,)
        self._calm = self.jobs.utilisation_below
        self._found: defaultdict[str, list[Scored]] = defaultdict(list)
        self._count_at = 0.0

    def done(self, batch: DoneBatch, queries: Sequence[Query | None], now: float) -> list[Effect]:
        """A batch is done: have some of its queries answered once more."""
        effects: list[Effect] = []
        if self._below and batch.said is not None:
            for query, words in zip(queries, batch.said, strict=False):
                if query is None or not words or (place := crc32(query.uid)) >= self._closer:
                    continue
                if self._paces[query.ask.app].asks(place / self._below):
                    effects.extend(self.ask(query, words, batch.variant, now))
        return effects

    def check(self, now: float) -> list[Effect]:
        """To be called now and then."""
        if not self._found or now < self._count_at:
            return []
        self._count_at = now + COUNT_S
        found, self._found = self._found, defaultdict(list)
        return [
            effect
            for app, scores in found.items()
            if self.catalog.app(app) is not None
            for effect in self.learning.compared(app, scores, now)
        ]

    def refuses(self, query: Query) -> bool:
        """Whether a query that finds no variant is refused for what labels or references show, as far as its app goes."""
        view = self.view.apps.get(query.ask.app)
        return (
            view is not None
            and view.app.quality_act == "refuse"
            and query.why is None
            and bool(view.promised(query.ask).any())
        )

    def refused(self, query: Query, now: float) -> tuple[list[Effect], str | None]:
        """Have a variant answer it for nobody, whatever else its device does: answering it was its work before. Else the variant that should be loaded."""
        ask, view = query.ask, self.view.apps.get(query.ask.app)
        if view is None or crc32(query.uid) >= PROBED * self._below:
            return [], None
        left = [
            group
            for group, promised in zip(view.groups, view.promised(ask).tolist(), strict=True)
            if promised and group.record.hardware != REMOTE
        ]
        loaded = [one for group in left for one in group.active]
        if not loaded:
            absent = min(left, key=lambda group: view.cost[view.index[group.record.variant]], default=None)
            return [], None if absent is None else absent.record.variant
        on = self.copies.idle(loaded[crc32(query.uid, 1) % len(loaded) :] + loaded)
        return [] if on is None else self.copies.send(query, on, Probe(ask.app, query), "probe", now), None

    def ask(self, query: Query, words: Sequence[Any], variant: str, now: float) -> list[Effect]:
        """Have a query answered once more, if it can be."""
        ask, view = query.ask, self.view.apps.get(query.ask.app)
        if view is None or view.app.app == WITHOUT_APP:
            return []
        if view.app.selection is not None and view.app.selection.policy is not None:
            return []  # its members answer side by side
        found = self._second(view, variant, query.uid)
        if found is None:
            return []
        on, of, by = found
        asked = Asked(ask.app, of, by, words, on.record.variant == of.variant)
        return self.copies.send(query, on, asked, "reference", now)

    def _second(self, view: AppView, variant: str, uid: bytes) -> tuple[Instance, VariantRecord, VariantRecord] | None:
        """Who answers once more, which variant is compared, and which is its reference."""
        if not any(self._is_calm(one) for group in view.groups for one in group.active):
            return None
        place = view.index.get(variant)
        if place is None or not _comparable(first := view.records[place], first):
            return None
        there = [
            (_rank(group.record), group)
            for group, current in zip(view.groups, view.current, strict=True)
            if current and group.active and group.record.hardware != REMOTE and _comparable(group.record, first)
        ]
        best = max(there, key=lambda one: one[0], default=None)
        new = [one for rank, one in there if rank < _rank(first) and _is_unsure(one.record)]
        if best is not None and best[0] > _rank(first) and (not new or crc32(uid, 2) % 2):
            by, group = best[1].record, best[1]
            of = first
        else:  # it is the reference itself: of a variant that references have found wrong, or of a new one
            left = [one for _, one in there if (one.record.production or (0.0, ""))[1] == "reference"]
            left = new or [one for one in left if one.record.twins != first.twins]
            if not left:
                return None
            group = left[crc32(uid, 1) % len(left)]
            of, by = group.record, first
        idle = self.copies.idle(one for one in group.active if self._is_calm(one))
        records = self.view.records
        return None if idle is None else (idle, records[of.variant], records[by.variant])

    def _is_calm(self, instance: Instance) -> bool:
        """Whether its device has little to do."""
        device = instance.worker.devices.get(instance.device)
        return device is not None and device.utilisation - device.offline <= self._calm

    def copied(self, one: Copied) -> None:
        """A second answer has come, or could not be made."""
        asked: Asked = one.about
        of, by = asked.of, asked.by
        if one.said is None:
            return
        said, true = (one.said, asked.first) if asked.by_first else (asked.first, one.said)
        error = 1.0 / of.accuracy - 1.0 if of.accuracy and of.metric in TARGETS else None
        scores = [score(_named(b, by), a, of.metric, of.labels, error) for a, b in zip(said, true, strict=False)]
        known = [each for each in scores if each is not None]
        if known:  # one observation: the items of a query may be alike
            name = compared(of, by)
            mean = sum(known) / len(known)
            self._paces[asked.app].said(mean)
            self._found[asked.app].append(Scored({name: mean}, aims={name: least_agreement(of, by)}))


def _rank(record: VariantRecord) -> tuple[float, str]:
    """The more accurate one has more, as far as is known now; of equal ones always the same, and twins have the same."""
    accuracy = record.accuracy if record.production is None else record.production[0]
    return accuracy or 0.0, record.twins


def _is_unsure(record: VariantRecord) -> bool:
    """Whether few samples have shown how accurate it is, and few queries since."""
    if (
        record.accuracy_low is None
        or record.accuracy_high is None
        or record.accuracy_high - record.accuracy_low <= DOUBT
    ):
        return False
    return record.live is None or record.live.labels < FEW


def _comparable(one: VariantRecord, first: VariantRecord) -> bool:
    return (
        bool(one.measured) and one.metric in COMPARED and (one.metric, one.simulated) == (first.metric, first.simulated)
    )


def _named(word: Any, by: VariantRecord) -> Any:
    """A class by its name, where it has one: another model may number them otherwise."""
    return by.labels[word] if type(word) is int and 0 <= word < len(by.labels) else word

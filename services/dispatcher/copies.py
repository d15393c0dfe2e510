"""Copies of queries whose answers nobody gets: a second variant answers what a client has got an answer to, and both answers are compared. Pure.

A copy is offline work for an instance that is loaded and idle: one at a time there, behind all else, in a batch of its own. The system pays for it, it is
no demand of its app, and what it says comes with `DoneBatch` alone. One that is lost stays lost.
"""

from collections.abc import Iterable, Mapping
from hashlib import blake2b
from typing import Any, NamedTuple

from msgspec import Struct

from bus.messages.catalog import VariantRecord
from bus.messages.fleet import ExecutorExited
from bus.messages.flow import DoneBatch, Execute, Route
from bus.messages.jobs import OFFLINE, SYSTEM
from bus.rights import OWN
from bus.subjects import Subjects
from services.core.actor import Effect, Publish
from services.core.selection.instances import Instance
from services.dispatcher.query import Query

NOBODY = f"{OWN}.{SYSTEM}.copy"  # where its answer goes
DEADLINE_S = 3600.0  # far behind every query's, so that those go first
LOST_S = 60.0


class Copy(NamedTuple):
    """One under way. uid: of the query. about: whatever its sender keeps here. labels: of items of the query, that came meanwhile."""

    uid: bytes
    route: Route
    on: Instance
    about: Any
    labels: dict[int, Any]


class Copied(NamedTuple):
    """One that has ended. said: of each item, as in `DoneBatch`; None: it is not known. code: "", or why there is no answer. seconds: of computing. labels: as
    in `Copy`.
    """

    uid: bytes
    about: Any
    record: VariantRecord
    said: list[Any] | None
    code: str
    seconds: float
    labels: dict[int, Any]


class Copies(Struct, eq=False):
    """Those under way. None has a row: what they cost is the system's, and nobody was answered."""

    name: str
    subjects: Subjects
    _open: dict[bytes, Copy] = {}

    def idle(self, instances: Iterable[Instance]) -> Instance | None:
        """The first of these that has nothing to do. Where its device has, all that came with a deadline goes before a copy there."""
        taken = {one.on.id for one in self._open.values()}
        return next((one for one in instances if not one.own + one.others and one.id not in taken), None)

    def send(self, query: Query, on: Instance, about: Any, kind: str, now: float) -> list[Effect]:
        """Have this instance answer a query once more; nothing if the inputs are in the object store. kind: what for, 16 bytes at most."""
        if query.refs or query.head.inputs_ref is not None:
            return []
        ask, record = query.ask, on.record
        uid = blake2b(query.uid, digest_size=16, person=kind.encode()).digest()
        route = Route(
            uid, 0, 0, NOBODY, now + DEADLINE_S, now, self.name, on.id, ask.app, ask.items, f"{kind}/{query.uid.hex()}",
            None, None, None, 9, None, None, OFFLINE, None, record.model, record.version, record.variant, False, True,
            ask.length, payer=SYSTEM,
        )  # fmt: skip
        self._open[uid] = Copy(query.uid, route, on, about, {})
        return [Publish(self.subjects.execute(on.worker.name, on.device), Execute(route, query.raw))]

    def labelled(self, uid: bytes, item: int, label: Any) -> None:
        """A label of a query counts: copies of it that are under way are scored when they come."""
        for one in self._open.values():
            if one.uid == uid:
                one.labels.setdefault(item, label)

    def done(self, batch: DoneBatch, records: Mapping[str, VariantRecord]) -> list[Copied]:
        """Those of a batch."""
        found: list[Copied] = []
        record = records.get(batch.variant)
        for i, uid in enumerate(batch.uids) if self._open else ():
            one = self._open.pop(uid, None)
            if one is None or record is None:
                continue
            code = batch.codes[i] if batch.codes is not None else ""
            said = None if batch.said is None else batch.said[i]
            found.append(Copied(one.uid, one.about, record, said, code, batch.finished - batch.started, one.labels))
        return found

    def exited(self, gone: ExecutorExited) -> list[Copied]:
        """An executor has ended: what it computed then ended it, or may have. Its other copies are lost."""
        found: list[Copied] = []
        for uid, one in [*self._open.items()]:
            if (one.on.worker.name, one.on.device) != (gone.worker, gone.device):
                continue
            del self._open[uid]
            if gone.running and uid in gone.running:
                found.append(Copied(one.uid, one.about, one.on.record, None, "model_error", 0.0, {}))
        return found

    def lost(self, route: Route) -> bool:
        """An executor could not answer this. Whether it is a copy."""
        self._open.pop(route.uid, None)
        return route.payer == SYSTEM

    def check(self, now: float) -> None:
        """To be called now and then."""
        self._open = {uid: one for uid, one in self._open.items() if now < one.route.arrived + LOST_S}


def named(word: Any, record: VariantRecord) -> str:
    """The class of an item's answer by its name, if it has one: another version may number them otherwise. word: as in `said`."""
    first = word[0] if isinstance(word, list) else word
    return record.labels[first] if type(first) is int and 0 <= first < len(record.labels) else str(first)

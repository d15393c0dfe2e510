"""Which columns of the apps' queries have drifted from the validation set, as the leader finds it in executors' counts. Pure.

A column that has drifted is open until two windows in a row, each as large as the one that showed it, look like the validation set again.
The control bucket has what is open, and how many tests were made, for the next leader: it must not spend the level once more.
"""

import json
from collections.abc import Iterable
from zlib import decompressobj, error

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from bus.codec import decode_kept
from bus.fields import filled
from bus.messages.events import DriftEvent
from bus.messages.scaling import DriftRecord, OpenDrift, QueriesSampled
from services.autoscaler.vms.commands import DRIFT, STORE_S, FetchDistribution, SaveDrift, Turn
from services.core.actor import NOTHING, Do, Effect, Record
from services.core.catalog import Catalog
from services.core.drift import (
    BACK,
    CELLS,
    EDGES,
    ITEMS,
    Array,
    CountedWindow,
    Distribution,
    Windows,
    distance,
    evidence,
)
from services.core.metric import MetricFamily, gauge

MOST_OPEN = 32  # columns of an app; the farthest
MOST_KEPT = 32  # distributions of an app whose tests are remembered
MOST_WAITING = 64  # messages until a distribution has come


class DriftWatch(Struct, eq=False):
    """It acts only in turns in which its controller leads. records: by app."""

    catalog: Catalog
    records: dict[str, DriftRecord] = {}
    _windows: dict[tuple[str, str], Windows] = {}  # by app and distribution
    _known: dict[str, Distribution | None] = {}
    _waiting: dict[str, list[QueriesSampled]] = {}

    def stored(self, key: str, value: bytes | None) -> None:
        """An entry of the control bucket has this value now; None: it is gone. The bucket has others, too."""
        if key.startswith(DRIFT):
            self.records.pop(key.removeprefix(DRIFT), None)
            if (record := decode_kept(DriftRecord, value)) is not None:
                self.records[record.app] = record

    def forget(self) -> None:
        """A new epoch begins, with what an earlier leader has left."""
        self._windows.clear()
        self._waiting.clear()

    def told(self, message: QueriesSampled, turn: Turn) -> Iterable[Effect]:
        """An executor has counted queries."""
        key = message.distribution
        if key not in self._served(message.app):
            return NOTHING
        if key in self._known:
            return self._judge(message, self._known[key], turn)
        waiting = self._waiting.setdefault(key, [])
        if len(waiting) < MOST_WAITING:
            waiting.append(message)
        return (Do(("distribution", key), FetchDistribution(key), STORE_S),) if len(waiting) == 1 else NOTHING

    def fetched(self, key: str, found: Distribution | None, reason: str | None, turn: Turn) -> list[Effect]:
        """found: None with an empty reason: it cannot be read."""
        waiting = self._waiting.pop(key, [])
        if reason != "":
            return []  # the next message asks for it again
        self._known[key] = found
        return [effect for message in waiting for effect in self._judge(message, found, turn)]

    def review(self, turn: Turn) -> list[Effect]:
        """What no variant of its app is compared with any more has ended."""
        effects: list[Effect] = []
        for app, record in [*self.records.items()]:
            served = self._served(app)
            gone = [one for one in record.open if one.distribution not in served]
            effects += [self._event(record, one, turn.now, ended=turn.now) for one in gone]
            if self.catalog.app(app) is None:
                del self.records[app]
                effects.append(self._save(app))
            elif gone:
                self.records[app] = replace(record, open=[one for one in record.open if one not in gone])
                effects.append(self._save(app))
        used = {key for app in self.records for key in self._served(app)}
        self._known = {key: one for key, one in self._known.items() if key in used}
        self._windows = {of: one for of, one in self._windows.items() if of[1] in used}
        return effects

    def families(self) -> Iterable[MetricFamily]:
        columns = gauge("infaas_drifted_columns", "By app: columns of its queries that differ from the validation set.")
        for app, record in self.records.items():
            columns.add(len(record.open), app=app)
        yield columns

    def _served(self, app: str) -> set[str]:
        return {one.distribution for one in self.catalog.variants_of(app)}

    def _judge(self, message: QueriesSampled, known: Distribution | None, turn: Turn) -> list[Effect]:
        counts = None if known is None else _unpacked(message.counts, 8 * len(known.columns) * CELLS)
        items = _unpacked(message.items, ITEMS // 8) if message.items else b""
        if known is None or counts is None or items is None:
            return []
        told = CountedWindow(
            message.start,
            message.end,
            np.frombuffer(counts, np.int64).reshape(-1, CELLS),
            np.frombuffer(items, np.uint8) if items else None,
        )
        app, key = message.app, message.distribution
        record = self.records.get(app) or DriftRecord(app=app)
        windows = self._windows.get((app, key))
        if windows is None:
            windows = self._windows[app, key] = Windows([2 * t for t in record.tests.get(key, ())])
        effects: list[Effect] = []
        saved = False
        for size, window in windows.add(told):
            shown = evidence(known.seen, known.independent(window))
            record, ended = self._ended(record, message.model, known, shown, size, window, turn)
            if ended:
                windows.forget()
            before, far = {(one.model, one.column) for one in record.open}, distance(known.seen, window.counts)
            drifted = np.flatnonzero(shown > windows.bound(size, len(shown)))
            new = [  # the farthest first
                OpenDrift(
                    model=message.model,
                    column=known.columns[i],
                    since=window.start,
                    distance=float(far[i]),
                    size=size,
                    distribution=key,
                )
                for i in sorted(drifted, key=lambda i: -far[i])
                if (message.model, known.columns[i]) not in before
            ][: max(0, MOST_OPEN - len(before))]
            record = replace(record, open=[*record.open, *new])
            effects += ended
            effects += [self._event(record, one, turn.now, cells=_cells(known, one.column, window)) for one in new]
            # Half of what the next leader assumes.
            saved = saved or bool(ended or new) or windows.tests[size].bit_count() == 1
        tests = {of: made for of, made in record.tests.items() if of != key}
        self.records[app] = replace(record, tests=dict([*tests.items()][-MOST_KEPT:]) | {key: [*windows.tests]})
        return [*effects, self._save(app)] if saved else effects

    def _ended(
        self,
        record: DriftRecord,
        model: str,
        known: Distribution,
        shown: Array,
        size: int,
        window: CountedWindow,
        turn: Turn,
    ) -> tuple[DriftRecord, list[Effect]]:
        """The record after this window, and the events of what it has ended."""
        at = {name: i for i, name in enumerate(known.columns)}
        stay, effects = list[OpenDrift](), list[Effect]()
        for one in record.open:
            if one.model != model or one.column not in at or size < one.size or window.start <= one.back:
                stay.append(one)  # it says nothing of this column, or is partly of before
            elif shown[at[one.column]] > BACK:
                stay.append(replace(one, back=0.0))
            elif not one.back:
                stay.append(replace(one, back=window.start))
            else:
                effects.append(self._event(record, one, turn.now, ended=one.back))
        return replace(record, open=stay), effects

    def _event(
        self, record: DriftRecord, one: OpenDrift, now: float, ended: float | None = None, cells: str = ""
    ) -> Effect:
        return Record(
            filled(DriftEvent, one, time=now, app=record.app, column_name=one.column, ended=ended, cells=cells)
        )

    def _save(self, app: str) -> Effect:
        return Do(("drift", app), SaveDrift(app, self.records.get(app)), STORE_S)


def _unpacked(data: bytes, size: int) -> bytes | None:
    """None: it is not of this size, or not compressed."""
    try:
        found = decompressobj().decompress(data, size + 1)
    except error:
        return None
    return found if len(found) == size else None


def _cells(known: Distribution, column: str, window: CountedWindow) -> str:
    """For a picture: the edges, and how many items of both are in each cell."""
    i = known.columns.index(column)
    edges = np.frombuffer(known.edges).reshape(-1, EDGES)[i]
    finite = edges[np.isfinite(edges)]
    kept = [*range(len(finite) + 1), CELLS - 1]
    return json.dumps(
        {
            "edges": [float(f"{edge:.6g}") for edge in finite],
            "expected": known.seen[i, kept].tolist(),
            "found": window.counts[i, kept].tolist(),
        }
    )

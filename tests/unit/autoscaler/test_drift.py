"""What the leader makes of executors' counts: a column that drifted is told once, and once that it has ended; the next leader goes on."""

from typing import Any
from zlib import compress

import numpy as np
import pytest
from numpy.typing import NDArray

from bus.codec import encode
from bus.messages.catalog import AppRecord, ModelRecord, Signature, TensorSpec, VariantRecord
from bus.messages.events import DriftEvent
from bus.messages.scaling import DriftRecord, QueriesSampled
from services.autoscaler import drift
from services.autoscaler.drift import DriftWatch
from services.autoscaler.vms.commands import FetchDistribution, SaveDrift, Turn
from services.core.actor import Do, Effect, Record
from services.core.catalog import Catalog, key_of
from services.core.drift import LEAST, Distribution, columns_of, measure
from tests.support.data.events import variant_record
from tests.support.simulated.fleet import catalogue

Array = NDArray[Any]
SIGNATURE = Signature(
    inputs=[TensorSpec(name="x", datatype="FP64", shape=[12])],
    outputs=[TensorSpec(name="y", datatype="FP32", shape=[1])],
)
RANDOM = np.random.default_rng(0)
COLUMNS = len(columns_of(SIGNATURE))


def items(n: int, shift: float = 0.0, columns: int = 1) -> Array:
    x = RANDOM.normal(size=(n, 12))
    x[:, :columns] += shift
    return x


def answers(x: Array) -> dict[str, Array]:
    return {"y": np.zeros((len(x), 1), np.float32)}


X = items(400)
KNOWN = Distribution.of(SIGNATURE, measure(SIGNATURE, {"x": X}, answers(X), b""), b"")


class Watched:
    """A leader's watch over the app "hid" with a variant of each of these distributions."""

    def __init__(self, *distributions: str) -> None:
        self.catalog = Catalog()
        self.serve(*distributions)
        self.watch = DriftWatch(self.catalog)
        self.now = 1000.0
        self.events: list[DriftEvent] = []
        self.saved: DriftRecord | None = None
        self.fetches = 0

    def serve(self, *distributions: str) -> None:
        records: list[AppRecord | ModelRecord | VariantRecord] = []
        for i, distribution in enumerate(distributions):
            one = variant_record(
                variant=f"m{i}", model="m", version="1", signature=SIGNATURE, distribution=distribution
            )
            records = [*records, *catalogue(one, app="hid")]
        for record in records:
            self.catalog.apply(key_of(record), encode(record))

    def apply(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case Record(event=DriftEvent() as event):
                    self.events.append(event)
                case Do(command=SaveDrift(record=record)):
                    self.saved = record
                case Do(command=FetchDistribution(key=key)):
                    self.fetches += 1
                    self.apply(self.watch.fetched(key, KNOWN, "", self.turn))

    @property
    def turn(self) -> Turn:
        return Turn(self.now, 1)

    def told(
        self, x: Array, distribution: str = "d", counts: bytes | None = None, app: str = "hid"
    ) -> list[DriftEvent]:
        """An executor tells of these queries; returns the new events."""
        before = len(self.events)
        packed = compress(KNOWN.count({"x": x}, answers(x)).tobytes()) if counts is None else counts
        self.now += 1.0
        message = QueriesSampled(
            app=app, model="m", distribution=distribution, start=self.now - 1.0, end=self.now, counts=packed
        )
        self.apply([*self.watch.told(message, self.turn)])
        return self.events[before:]

    @property
    def metric(self) -> list[Any]:
        (family,) = self.watch.families()
        return family.samples


def test_a_drift_is_told_once_with_its_column_and_picture_and_once_that_it_ended() -> None:
    system = Watched("d")
    assert [event for _ in range(20) for event in system.told(items(LEAST))] == []
    (began,) = system.told(items(LEAST, 3.0))
    assert (began.app, began.model, began.column_name, began.since, began.ended) == ("hid", "m", "x[0]", 1020.0, None)
    assert 0.8 < began.distance <= 1.0
    assert '"found": [0, ' in began.cells
    assert [event for _ in range(5) for event in system.told(items(LEAST, 3.0))] == [], "it is told once"
    assert system.metric == [({"app": "hid"}, 1)]
    assert system.told(items(LEAST)) == [], "one window may be a chance"
    (ended,) = system.told(items(LEAST))
    assert (ended.column_name, ended.since, ended.ended) == ("x[0]", 1020.0, 1026.0)
    assert [event for _ in range(20) for event in system.told(items(LEAST))] == [], "larger windows begin anew"
    assert system.fetches == 1
    assert system.metric == [({"app": "hid"}, 0)]


def test_a_small_drift_is_found_by_larger_windows_and_ends_by_such() -> None:
    system = Watched("d")
    told = [system.told(items(LEAST, 0.6)) for _ in range(64)]
    first = next(i for i, events in enumerate(told) if events)
    assert first > 0
    assert [event.column_name for events in told for event in events] == ["x[0]"]
    assert told[first][0].since < system.now - 63 + first, "when the window began"
    back = [system.told(items(LEAST)) for _ in range(64)]
    assert [event.ended is not None for events in back for event in events] == [True]
    assert not back[0]
    assert not back[1]


def test_the_next_leader_goes_on_and_spends_no_level_once_more() -> None:
    system = Watched("d")
    for _ in range(9):
        system.told(items(LEAST))
    system.told(items(LEAST, 3.0))
    assert system.saved is not None
    heir = Watched("d")
    heir.watch.stored("drift.hid", encode(system.saved))
    heir.watch.stored("controller", b"")
    assert heir.told(items(LEAST, 3.0)) == [], "it is open already"
    assert heir.watch.records["hid"].tests["d"][0] >= 10
    assert [event.ended is None for _ in range(2) for event in heir.told(items(LEAST))] == [False]
    assert heir.saved.open == []
    heir.watch.stored("drift.hid", None)
    assert heir.watch.records == {}


def test_what_is_not_served_any_more_has_ended() -> None:
    system = Watched("d")
    system.told(items(LEAST, 3.0))
    system.apply(system.watch.review(system.turn))
    assert len(system.events) == 1
    system.serve("other")
    system.apply(system.watch.review(system.turn))
    assert [event.ended for event in system.events] == [None, system.now]
    assert system.told(items(LEAST, 3.0)) == [], "the version has gone"
    system.catalog.apply("app.hid", None)
    system.apply(system.watch.review(system.turn))
    assert system.saved is None
    assert system.watch.records == {}


def test_variants_with_distributions_of_their_own_tell_one_drift() -> None:
    system = Watched("d", "e")
    assert len(system.told(items(LEAST, 3.0), "d")) == 1
    assert system.told(items(LEAST, 3.0), "e") == []
    assert [event.ended is None for _ in range(2) for event in system.told(items(LEAST), "e")] == [False]


def test_the_farthest_columns_are_told_where_many_drift(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drift, "MOST_OPEN", 5)
    system = Watched("d")
    found = system.told(items(LEAST, 3.0, columns=12))
    assert len(found) == 5
    assert found == sorted(found, key=lambda event: -event.distance)


def test_what_no_executor_says_is_left_alone() -> None:
    system = Watched("d")
    for counts in (b"", b"nothing", compress(b"short"), compress(bytes(8 * 10**6))):
        assert system.told(items(1), counts=counts) == []
    assert system.told(items(LEAST, 3.0), app="nobody") == []
    assert system.told(items(LEAST, 3.0), distribution="nothing") == []
    system.apply(system.watch.fetched("d", None, "not there", system.turn))
    assert len(system.told(items(LEAST, 3.0))) == 1

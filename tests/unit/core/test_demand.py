"""Requirement classes: near needs together, the strictest of them asked for, and never too many."""

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from bus.messages.scaling import ClassDemand
from services.core.demand import MOST, band, classes


def row(latency_ms: float | None = None, accuracy: float = 0.0, items: int = 1, worker: str = "w", **more: object) -> ClassDemand:  # fmt: skip
    return ClassDemand("app", worker, items, latency_ms, accuracy, **more)  # type: ignore[arg-type]


def fold(rows: list[ClassDemand]) -> list[ClassDemand]:
    """One row for each class and worker."""
    counted = classes((replace(one, items=0, worker=""), {one.worker: one.items}) for one in rows)
    return [
        replace(needs, worker=worker, items=items)
        for needs, by_worker in counted
        for worker, items in by_worker.items()
    ]


def test_needs_are_classes_by_nearness_and_few() -> None:
    (found,) = fold([row(100.0, 0.90, 3), row(97.0, 0.91, 4)])
    assert (found.items, found.latency_ms, found.accuracy) == (7, 97.0, 0.91)
    rows = [row(50.0), row(200.0), row(50.0, 0.8), row(50.0, worker=""), row(None), row(50.0, model="m"), row(50.0, cost=0.1)]  # fmt: skip
    assert sorted(fold(rows), key=repr) == sorted(rows, key=repr)
    found = fold([row(1.0 + 0.7 * i, (i % 50) / 50) for i in range(2000)])
    assert len(found) <= MOST
    assert sum(one.items for one in found) == 2000


needs = st.builds(
    row, st.none() | st.floats(0.1, 60_000), st.floats(0, 1), st.integers(1, 100), st.sampled_from(["w", "v", ""]),
    cost=st.none() | st.floats(1e-6, 10),
)  # fmt: skip


@given(st.lists(needs, max_size=200))
def test_no_item_is_lost_and_every_class_is_as_strict_as_its_members(rows: list[ClassDemand]) -> None:
    found = fold(rows)
    assert sum(one.items for one in found) == sum(one.items for one in rows)
    assert len({band(one, 64) for one in found}) <= len(found)
    for one in rows:
        assert any(
            other.worker == one.worker
            and other.accuracy >= one.accuracy
            and (one.latency_ms is None or (other.latency_ms is not None and other.latency_ms <= one.latency_ms))
            and (one.cost is None or (other.cost is not None and other.cost <= one.cost))
            for other in found
        )

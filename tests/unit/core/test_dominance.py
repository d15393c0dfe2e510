"""Marking variants that are worse than another in every respect."""

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from bus.messages.catalog import ProfileRow, VariantRecord
from services.core.dominance import dominates, mark
from tests.support.simulated.registrations import PROFILE, variant_record


def variant(name: str, accuracy: float | None = 0.9, ms: float = 1.0, **changes: object) -> VariantRecord:
    rows = [ProfileRow(batch=1, p50_ms=ms, p99_ms=ms, cpu_ms=ms, wall_over_cpu=1.0)]
    return variant_record(name, accuracy=accuracy, profile=replace(PROFILE, rows=rows), **changes)


def test_the_slower_and_less_accurate_one_is_marked() -> None:
    marked = mark([variant("slow", 0.8, 2.0), variant("fast", 0.9, 1.0)])
    assert [(v.variant, v.dominated) for v in marked] == [("slow", True), ("fast", False)]


def test_any_advantage_saves_a_variant() -> None:
    best = variant("best", 0.9, 1.0)
    assert not dominates(best, variant("more accurate", 0.91, 5.0))
    assert not dominates(best, variant("larger batch", 0.5, 5.0, max_batch=64))
    assert not dominates(variant("two threads", 0.9, 1.0, threads=2), variant("one thread", 0.9, 1.0))
    lean = replace(PROFILE, memory_mb=1.0)
    assert not dominates(best, variant_record("lean", accuracy=0.1, profile=lean))


def test_equals_do_not_dominate_each_other() -> None:
    assert not any(v.dominated for v in mark([variant("a"), variant("b")]))


def test_other_hardware_is_not_compared() -> None:
    assert not dominates(variant("cpu", 0.9, 1.0), variant("gpu", 0.1, 9.0, hardware="gpu"))
    assert not dominates(variant("real", 0.9, 1.0), variant("pretended", 0.1, 9.0, simulated=True))


def test_a_cell_that_was_not_measured_counts_as_infinitely_slow() -> None:
    two_cells = variant_record("two", accuracy=0.5)
    assert not dominates(variant("one", 0.9, 0.1), two_cells)
    assert dominates(two_cells, variant("one", 0.4, 9.0))


def test_an_unknown_accuracy_is_the_worst() -> None:
    assert dominates(variant("known", 0.0), variant("unknown", None))
    assert not dominates(variant("unknown", None), variant("known", 0.0))


@given(st.lists(st.tuples(st.sampled_from([0.1, 0.5, 0.9]), st.sampled_from([1.0, 2.0, 3.0])), max_size=8))
def test_the_undominated_cover_all(points: list[tuple[float, float]]) -> None:
    """Every marked variant is dominated by one that is not marked, and marking again changes nothing."""
    marked = mark([variant(f"v{n}", accuracy, ms) for n, (accuracy, ms) in enumerate(points)])
    kept = [v for v in marked if not v.dominated]
    assert all(any(dominates(k, v) for k in kept) for v in marked if v.dominated)
    assert not points or kept
    assert mark(marked) == marked

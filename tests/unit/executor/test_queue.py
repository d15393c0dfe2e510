"""The queue's promises, for any mix of queries: nothing is lost, nothing late is begun, batches hold what may share one."""

from hypothesis import given
from hypothesis import strategies as st
from msgspec import Raw

from bus.messages.catalog import Profile, ProfileRow, VariantRecord
from bus.messages.flow import Route
from services.core.cost import LatencyTable
from services.executor.queue import EdfQueue, QueuedQuery
from tests.support.simulated.fleet import variant

NOW = 1000.0


def work(
    number: int, slack: float, items: int = 1, shape: str = "a", *, alone: bool = False, length: int | None = None
) -> QueuedQuery:
    uid = number.to_bytes(16, "big")
    route = Route(uid, 0, 0, "r", NOW + slack, NOW, "d", "i", "app", items, None, alone=alone, length=length)
    return QueuedQuery(route, Raw(b""), None, items, shape)


def by_length() -> VariantRecord:
    """1 ms an item at length 8, 4 ms at length 32."""
    rows = [
        ProfileRow(batch=b, p50_ms=ms * b, p99_ms=ms * b, cpu_ms=ms, wall_over_cpu=1.0, length=n)
        for n, ms in ((8, 1.0), (32, 4.0))
        for b in (1, 8)
    ]
    return variant(profile=Profile(rows=rows, load_ms=1.0, memory_mb=1.0, saturation_qps=100.0))


works = st.lists(
    st.tuples(st.floats(-0.01, 0.05), st.integers(1, 12), st.sampled_from("ab"), st.booleans()), max_size=40
)


@given(works)
def test_every_query_leaves_once_in_a_batch_that_is_in_time_or_as_late(
    given_works: list[tuple[float, int, str, bool]],
) -> None:
    record = variant()
    queue = EdfQueue(LatencyTable(record), record.max_batch)
    for number, (slack, items, shape, alone) in enumerate(given_works):
        queue.push(work(number, slack, items, shape, alone=alone))
    left = []
    while len(queue):
        batch, late = queue.form(NOW)
        for one in late:
            assert queue.table.seconds(one.items) > one.route.deadline - NOW
        left += [*batch, *late]
        if batch:
            items = sum(one.items for one in batch)
            assert items <= record.max_batch or len(batch) == 1
            assert len({one.shape for one in batch}) == 1
            assert len(batch) == 1 or not any(one.alone for one in batch)
            first = min(one.route.deadline for one in batch)
            assert batch[0].route.deadline == first
            assert queue.table.seconds(items) <= first - NOW
    assert sorted(one.route.uid for one in left) == [n.to_bytes(16, "big") for n in range(len(given_works))]
    assert queue.items == 0


@given(works)
def test_what_could_not_be_in_time_any_more_is_taken_out_while_others_compute(
    given_works: list[tuple[float, int, str, bool]],
) -> None:
    record = variant()
    queue = EdfQueue(LatencyTable(record), record.max_batch)
    for number, (slack, items, shape, alone) in enumerate(given_works):
        queue.push(work(number, slack, items, shape, alone=alone))
    late = queue.overdue(NOW)
    assert all(queue.table.seconds(one.items) > one.route.deadline - NOW for one in late)
    assert len(late) + len(queue) == len(given_works)
    assert queue.items == sum(one.items for one in queue)
    if len(queue):  # the next batch may begin
        assert not queue.form(NOW)[1]


def test_the_most_urgent_leads_and_sets_the_size() -> None:
    queue = EdfQueue(LatencyTable(variant()), 8)  # 2 ms and 0.5 ms an item
    for number, slack in enumerate((0.1, 0.1, 0.1, 0.0031)):
        queue.push(work(number, slack))
    assert queue.most_urgent == NOW + 0.0031
    batch, late = queue.form(NOW)
    assert not late
    assert [one.route.uid[-1] for one in batch] == [3, 0]  # two items take 3 ms, three would take 3.5


def test_short_inputs_are_predicted_as_short() -> None:
    queue = EdfQueue(LatencyTable(by_length()), 8)
    for number in range(8):
        queue.push(work(number, 0.0085, length=8))
    assert len(queue.form(NOW)[0]) == 8
    for number in range(8):
        queue.push(work(number, 0.0085, length=32))
    assert len(queue.form(NOW)[0]) == 2

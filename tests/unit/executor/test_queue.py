"""The queue's promises, for any mix of queries: nothing is lost, nothing late is begun, batches hold what may share one."""

from hypothesis import given
from hypothesis import strategies as st
from msgspec import Raw
from msgspec.structs import replace

from bus.messages.catalog import Profile, ProfileRow, VariantRecord
from bus.messages.flow import Route
from services.core.cost import LatencyTable
from services.executor.queue import RECENT, EdfQueue, QueuedQuery
from tests.support.simulated.fleet import variant

NOW = 1000.0


def work(
    number: int,
    slack: float,
    items: int = 1,
    shape: str = "a",
    *,
    alone: bool = False,
    length: int | None = None,
    priority: int = 5,
) -> QueuedQuery:
    uid = number.to_bytes(16, "big")
    route = Route(
        uid, 0, 0, "r", NOW + slack, NOW, "d", "i", "app", items, None, alone=alone, length=length, priority=priority
    )
    return QueuedQuery(route, Raw(b""), None, items, shape, alone)


def by_length() -> VariantRecord:
    """1 ms an item at length 8, 4 ms at length 32."""
    rows = [
        ProfileRow(batch=b, p50_ms=ms * b, p99_ms=ms * b, cpu_ms=ms, wall_over_cpu=1.0, length=n)
        for n, ms in ((8, 1.0), (32, 4.0))
        for b in (1, 8)
    ]
    return variant(profile=Profile(rows=rows, load_ms=1.0, memory_mb=1.0, saturation_qps=100.0))


def queue_of(record: VariantRecord, *queries: QueuedQuery, most: int = 8) -> EdfQueue:
    """A queue with these. most: items of a batch."""
    queue = EdfQueue(LatencyTable(record), most)
    for query in queries:
        queue.push(query)
    return queue


Works = list[tuple[float, int, str, bool]]  # slack, items, shape, alone
works = st.lists(
    st.tuples(st.floats(-0.01, 0.05), st.integers(1, 12), st.sampled_from("ab"), st.booleans()), max_size=40
)


def late_in_order(table: LatencyTable, queries: list[QueuedQuery]) -> int:
    """How many of these would be late if they were computed one after the other, in batches as large as the first deadline allows."""
    at, late, queries = NOW, 0, list(queries)
    while queries:
        first = queries.pop(0)
        slack, items = first.route.deadline - at, first.items
        if table.seconds(items) > slack:
            late += 1
            continue
        while queries and not first.alone and items + queries[0].items <= min(8, table.largest_batch_within(slack)):
            items += queries.pop(0).items
        at += table.seconds(items)
    return late


def answered(queries: list[QueuedQuery]) -> set[bytes]:
    """Which of these are in time, if nothing else comes."""
    queue, at, found = EdfQueue(LatencyTable(variant()), 8), NOW, set()
    for query in queries:
        queue.push(query)
    while len(queue):
        batch, _ = queue.form(at)
        if batch:
            at += queue.table.seconds(sum(one.items for one in batch))
            found |= {one.route.uid for one in batch}
            assert at <= batch[0].route.deadline + 1e-9
    return found


def filled(given_works: Works) -> EdfQueue:
    record = variant()
    queue = EdfQueue(LatencyTable(record), record.max_batch)
    for number, (slack, items, shape, alone) in enumerate(given_works):
        queue.push(work(number, slack, items, shape, alone=alone))
    return queue


@given(works)
def test_every_query_leaves_once_in_a_batch_that_is_in_time_or_as_late(given_works: Works) -> None:
    queue = filled(given_works)
    left = []
    while len(queue):
        waiting = sorted(queue, key=lambda one: one.route.deadline)
        batch, late = queue.form(NOW)
        early = [one for one in late if queue.table.seconds(one.items) <= one.route.deadline - NOW]
        if early:  # they could still be in time: only where that halves what is lost
            assert 2 * len(early) <= late_in_order(queue.table, waiting)
        left += [*batch, *late]
        if batch:
            items = sum(one.items for one in batch)
            assert items <= variant().max_batch or len(batch) == 1
            assert len({one.shape for one in batch}) == 1
            assert len(batch) == 1 or not any(one.alone for one in batch)
            first = min(one.route.deadline for one in batch)
            assert batch[0].route.deadline == first
            assert queue.table.seconds(items) <= first - NOW
    assert sorted(one.route.uid for one in left) == [n.to_bytes(16, "big") for n in range(len(given_works))]
    assert queue.items == 0


@given(works)
def test_what_could_not_be_in_time_any_more_is_taken_out_while_others_compute(given_works: Works) -> None:
    queue = filled(given_works)
    late = queue.overdue(NOW)
    assert all(queue.table.seconds(one.items) > one.route.deadline - NOW for one in late)
    assert len(late) + len(queue) == len(given_works)
    assert queue.items == sum(one.items for one in queue)
    if len(queue):  # the next batch may begin
        assert all(queue.table.seconds(one.items) > one.route.deadline - NOW for one in late)


def test_urgency_and_length_set_the_size() -> None:
    queue = EdfQueue(LatencyTable(variant()), 8)  # 2 ms and 0.5 ms an item
    for number, slack in enumerate((0.1, 0.1, 0.1, 0.0031)):
        queue.push(work(number, slack))
    assert queue.most_urgent == NOW + 0.0031
    batch, late = queue.form(NOW)
    assert not late
    assert [one.route.uid[-1] for one in batch] == [3, 0]  # two items take 3 ms, three would take 3.5
    queue = queue_of(by_length(), *(work(number, 0.0085, length=8) for number in range(8)))
    assert len(queue.form(NOW)[0]) == 8
    for number in range(8):
        queue.push(work(number, 0.0085, length=32))
    assert len(queue.form(NOW)[0]) == 2


@given(st.lists(st.tuples(st.floats(0.05, 0.2), st.integers(1, 9)), max_size=24))
def test_priority_changes_nothing_while_all_can_be_in_time(given_works: list[tuple[float, int]]) -> None:
    """24 take 18 ms. After a full batch there is time for all that are here."""
    queues = [EdfQueue(LatencyTable(variant()), 8) for _ in range(2)]
    for number, (slack, priority) in enumerate(given_works):
        queues[0].push(work(number, slack))
        queues[1].push(work(number, slack, priority=priority))
    while len(queues[0]):
        first, second = ([one.route.uid for one in queue.form(NOW)[0]] for queue in queues)
        assert first == second


@given(st.lists(st.tuples(st.floats(0.0, 0.03), st.sampled_from([2, 7])), max_size=60))
def test_those_with_the_larger_number_take_nothing_from_the_others(given_works: list[tuple[float, int]]) -> None:
    queries = [work(number, slack, priority=priority) for number, (slack, priority) in enumerate(given_works)]
    all_in_time = answered(queries)
    urgent = [query for query in queries if query.route.priority <= 3]
    assert len(all_in_time & {query.route.uid for query in urgent}) >= len(answered(urgent))


def test_the_larger_number_gives_way_at_once_and_only_as_many_as_must() -> None:
    """All twelve take 10 ms, and eleven 9.5 ms. Beside that the high ones have a margin, of a fifth of both batches in quadrature: 1.4 ms."""
    queue = EdfQueue(LatencyTable(variant()), 8)  # eight take 6 ms
    for number in range(12):
        query = work(number, 0.011 + number * 1e-6, priority=9 if number < 8 else 1)
        query.route = replace(query.route, arrived=NOW - 0.05)  # one that comes now has 60 ms
        queue.push(query)
    batch, late = queue.form(NOW)
    assert [one.route.priority for one in late] == [9]
    assert len(batch) == 8
    assert len(batch) + len(late) + len(queue) == 12
    assert queue.form(NOW + 0.006)[1] == []


def test_a_first_one_that_allows_no_batch_leaves_if_that_keeps_the_others() -> None:
    queue = EdfQueue(LatencyTable(variant(base_ms=20.0, per_item_ms=0.5)), 8)
    queue.push(work(0, 0.0206))  # time for it alone
    for number in range(1, 9):
        queue.push(work(number, 0.030))  # eight take 24 ms
    batch, late = queue.form(NOW)
    assert [one.route.uid[-1] for one in late] == [0]
    assert len(batch) == 8


def test_what_comes_too_late_only_itself_leaves_or_stays_alone() -> None:
    # eight take 6 ms, the ninth would be late
    queue = queue_of(variant(), *(work(number, 0.0065) for number in range(9)))
    batch, late = queue.form(NOW)
    assert (len(batch), late, len(queue)) == (8, [], 1)
    assert len(queue.form(NOW + 0.006)[1]) == 1
    queue = queue_of(variant(), *(work(number, 0.0065) for number in range(9)))
    batch, late = queue.form(NOW, lambda _: True)
    assert (len(batch), len(late), len(queue)) == (8, 1, 0)


def test_of_many_that_wait_the_larger_number_gives_way_to_what_comes_last() -> None:
    """All of the larger number could be in time, and have earlier deadlines; the others are behind more of them than are compared else."""
    queue = EdfQueue(LatencyTable(variant()), 8)  # eight take 6 ms, so 640 take 480 ms
    for number in range(400):
        queue.push(work(number, 0.4 + number * 1e-6, priority=9))
    for number in range(400, 640):
        queue.push(work(number, 0.401 + number * 1e-6, priority=1))
    now, ended, gone = NOW, [], []
    while len(queue):
        batch, late = queue.form(now)
        now += 0.006
        ended += [one.route for one in batch if now <= one.route.deadline]
        gone += [one.route for one in late]
    assert sum(route.priority == 1 for route in ended) >= 232, "all but a batch at the edge"
    assert len(ended) >= 0.95 * 0.4 / 0.006 * 8
    assert {route.priority for route in gone[:200]} == {9}
    kept = [route.deadline for route in ended if route.priority == 9]
    assert max(kept) < min(route.deadline for route in gone), "among equals the earliest deadline is first"


# -- batches that leave room

FORTY = variant(base_ms=0.0, per_item_ms=40.0, max_batch=64)


def batches(
    priorities: list[int], slack: float = 0.5, max_batch: int = 64, contexts: int = 1
) -> tuple[EdfQueue, list[list[int]]]:
    """What a queue makes of these, which come at once, while all that it forms is in time: the priorities in each batch."""
    queue, now, found = EdfQueue(LatencyTable(FORTY), max_batch), NOW, []
    queue.contexts = contexts
    for number, priority in enumerate(priorities):
        queue.push(work(number, slack, priority=priority))
    while len(queue):
        batch, _ = queue.form(now)
        now += queue.table.seconds(len(batch)) if batch else 0.001
        found.append([one.route.priority for one in batch])
    return queue, found


def test_what_waits_is_counted_by_priority() -> None:
    queue = EdfQueue(LatencyTable(FORTY), 64)
    assert queue.levels == {}
    for number in range(3):
        queue.push(work(number, 0.5, items=2, priority=9))
    assert queue.levels == {9: 6}
    queue.push(work(3, 0.4, priority=1))
    assert queue.levels == {9: 6, 1: 1}
    queue.form(NOW)
    assert sum(queue.levels.values()) == queue.items < 7
    queue.drop()
    assert queue.levels == {}


def test_equal_priorities_and_rules_bound_a_batch() -> None:
    for priority in (1, 5, 9):
        queue, [first, *_] = batches([priority] * 12)
        assert (first, queue.mixed) == ([priority] * 12, 0)
    assert len(batches([1, 1, *[9] * 12], max_batch=2)[1][0]) == 2
    assert len(batches([1, 1, *[9] * 12], max_batch=5)[1][0]) <= 5


def test_a_batch_of_lower_ones_leaves_a_higher_one_time_to_come_and_be_answered() -> None:
    queue = EdfQueue(LatencyTable(FORTY), 64)
    for number, priority in enumerate([1, 1, *[9] * 12]):
        queue.push(work(number, 0.5, priority=priority))
    first = [one.route.priority for one in queue.form(NOW)[0]]
    assert 0 < len(first) == queue.mixed < 12
    assert 1.2 * (0.04 * len(first) + 0.04 * (1 + 2)) <= 0.5, (
        "one that comes as it begins waits for it, with those that wait already"
    )
    assert len(batches([9, *[1] * 2, *[9] * 11])[1][0]) == len(first), "whoever came first"


def test_room_is_left_only_by_lower_ones_while_higher_ones_come() -> None:
    """But it is to be in time though it takes a fifth longer."""
    assert batches([9, *[1] * 12, 9], slack=0.52)[1][0].count(1) <= 12
    queue = queue_of(FORTY, *(work(number, 0.6 if number else 0.58, priority=1) for number in range(12)), most=64)
    queue.push(work(12, 2.0, priority=9))
    queue.push(work(13, 2.0, priority=9))
    assert [one.route.priority for one in queue.form(NOW)[0]] == [1] * 12
    queue, _ = batches([1, 1, 9])
    for number in range(20, 32):
        query = work(number, RECENT + 1.0 + 0.5, priority=9)
        query.route = replace(query.route, arrived=NOW + RECENT + 1.0)
        queue.push(query)
    batch, _ = queue.form(NOW + RECENT + 1.0)
    assert (len(batch), queue.mixed) == (12, 0)


def test_a_higher_one_that_had_no_time_is_left_room_though_it_never_came() -> None:
    queue = EdfQueue(LatencyTable(FORTY), 64)
    for number in range(12):
        query = work(number, 0.5, priority=9)
        if number == 3:
            query.route = replace(query.route, higher=(1, 0.3))
        queue.push(query)
    batch, _ = queue.form(NOW)
    assert len(batch) == queue.mixed
    assert 1.2 * (0.04 * len(batch) + 0.04) <= 0.3

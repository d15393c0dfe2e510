"""What selection policies have learnt is kept by app and context: bounded in memory, read on demand, never older than what is known."""

import gc
import tracemalloc
from collections.abc import Sequence
from typing import Any

import pytest

from bus.codec import encode
from bus.messages.catalog import AppRecord, Ensemble
from bus.messages.flow import ContextChanged
from bus.messages.public import ListRequest
from bus.subjects import Subjects
from services.core.actor import Do, Done, Failed
from services.core.ensemble.base import EnsemblePolicy, Member
from services.core.ensemble.policies import Exp4, make_policy
from services.dispatcher.commands import ReadContext, StoredContext
from services.dispatcher.contexts import COUNTS, Contexts, ContextValue, Held, SelectionList, context_key, read_value
from services.dispatcher.counted import MARK, MOVED, NONE, OlderMarks
from tests.support.data.events import catalog_of

SELECTION = Ensemble(policy="counts", contextual=True)
MEMBERS = (Member(model="m", version="1"),)


class Counts:
    """A policy whose state is a number."""

    name = "counts"

    def init(self, members: Sequence[Member]) -> int:
        return 100 * len(members)

    def load(self, data: bytes) -> int:
        return int(data)

    def dump(self, state: int) -> bytes:
        return str(state).encode()


def make(selection: Ensemble) -> EnsemblePolicy[Any] | None:
    return None if ":" in (selection.policy or "") else Counts()  # type: ignore[return-value]


def contexts(most: int = 3) -> Contexts:
    return Contexts(Subjects(), most, lambda app: MEMBERS, make)


def value(state: int, n: int = 1, policy: str = "counts") -> bytes:
    return ContextValue(policy, str(state).encode(), n).encoded()


def arrive(found: Contexts, context: str | None, data: bytes | None, revision: int) -> Held:
    """The context is read, with this result."""
    [do] = found.read("a", SELECTION, context)
    assert isinstance(do.command, ReadContext)
    found.took(Done(do.id, StoredContext(data, revision)))
    held = found.held("a", SELECTION, context)
    assert held is not None
    return held


def test_a_context_is_read_once_at_a_time_and_then_held() -> None:
    found = contexts()
    assert found.held("a", SELECTION, "me") is None
    held = arrive(found, "me", value(7, n=4), 5)
    assert (held.state, held.n, held.revision) == (7, 4, 5)
    assert found.held("a", SELECTION, "me") is held
    found = contexts()
    assert len(list(found.read("a", SELECTION, "me"))) == 1
    assert not list(found.read("a", SELECTION, "me"))


def test_keys_are_apart_where_policies_keep_contexts_apart_and_impossible_ones_are_refused() -> None:
    together = Ensemble(policy="counts")
    assert context_key("a", together, "me") == context_key("a", together, "you") == "a._"
    assert len({context_key("a", SELECTION, c) for c in (None, "me", "you", "_")}) == 4
    catalog = catalog_of(AppRecord(app="a", links={"m": "1"}, selection=SELECTION))
    [reply] = SelectionList(catalog, contexts()).ask("_INBOX.1", ListRequest(app="a", context="c" * 1001))
    assert reply.message.error.code == "bad_request"
    assert reply.message.error.message.startswith("context must be at most 1000 characters")
    found = contexts()
    found.changed(ContextChanged("a", "a.x", 1, value(8)))
    assert len(found) == 0


def test_what_nobody_or_another_policy_has_taught_begins_at_the_beginning() -> None:
    held = arrive(contexts(), "me", None, 0)
    assert (held.state, held.n, held.revision) == (100, 0, 0)
    held = arrive(contexts(), "me", value(7, n=4, policy="another"), 5)
    assert (held.state, held.n, held.revision) == (100, 0, 5)
    found = contexts()
    arrive(found, "me", value(7), 5)
    held = found.held("a", Ensemble(policy="module:Class", contextual=True), "me")
    assert (held.state, held.n, held.revision) == (b"", 0, 5)


def test_memory_is_bounded_and_the_least_recently_used_goes() -> None:
    found = contexts(most=3)
    for name in ("1", "2", "3"):
        arrive(found, name, value(1), 1)
    assert found.held("a", SELECTION, "1") is not None
    arrive(found, "4", value(1), 1)
    assert found.held("a", SELECTION, "2") is None
    assert found.held("a", SELECTION, "1") is not None
    for number in range(1000):
        arrive(found, f"x{number}", None, 0)
    assert len(found) == 3


@pytest.mark.parametrize("data", [b"", b"\xc1", b"\x94\xa6counts\xc4\x01x\x01\xc4\x00"])
def test_a_value_that_cannot_be_read_begins_anew(data: bytes) -> None:
    held = arrive(contexts(), "me", data, 5)
    assert (held.state, held.n, held.revision) == (100, 0, 5)


@pytest.mark.parametrize(("revision", "state"), [(4, 7), (5, 7), (6, 8)])
def test_what_another_dispatcher_has_stored_replaces_what_is_older(revision: int, state: int) -> None:
    found = contexts()
    found.changed(ContextChanged("a", arrive(found, "me", value(7), 5).key, revision, value(8)))
    assert found.held("a", SELECTION, "me").state == state


def test_a_reset_drops_one_context_or_all_of_the_app() -> None:
    found = contexts(most=10)
    key = arrive(found, "me", value(7), 5).key
    arrive(found, "you", value(7), 6)
    found.changed(ContextChanged("a", key, 0, None))
    assert found.held("a", SELECTION, "me") is None
    assert found.held("a", SELECTION, "you") is not None
    found.changed(ContextChanged("ab", "", 0, None))
    assert found.held("a", SELECTION, "you") is not None
    found.changed(ContextChanged("a", "", 0, None))
    assert found.held("a", SELECTION, "you") is None


def test_queries_are_served_while_the_bucket_is_away_and_it_is_read_again_later() -> None:
    found = contexts()
    [do] = found.read("a", SELECTION, "me")
    found.took(Failed(do.id, "nobody is there"))
    held = found.held("a", SELECTION, "me")
    assert held.state == 100
    [again] = found.retry()
    assert not found.retry()
    found.took(Done(again.id, StoredContext(value(7), 5)))
    held = found.held("a", SELECTION, "me")
    assert (held.state, held.revision) == (7, 5)
    assert not found.retry()


def mark(number: int) -> bytes:
    return number.to_bytes(MARK, "big")


def test_values_keep_marks_and_what_has_counted_when_policies_change() -> None:
    kept = ContextValue("counts", b"1", moved=0)
    for number in range(MOVED // 2 + 10):
        kept = kept.after(b"1", (mark(2 * number), mark(2 * number + 1)))
    assert (kept.n, kept.known()) == (MOVED // 2 + 10, {mark(number) for number in range(MOVED + 20)})
    kept = kept.without(OlderMarks(NONE.plus(kept.marks[: MARK * MOVED]), 7, 0))
    assert kept.known() == {mark(number) for number in range(MOVED, MOVED + 20)}
    assert (kept.moved, kept.full, kept.n) == (7, False, MOVED // 2 + 10)
    before = ContextValue("other", b"7", 3, mark(1), 5, True)
    now = arrive(contexts(), "me", before.encoded(), 5).value
    assert (now.policy, now.n, now.marks, now.moved, now.full) == ("counts", 0, mark(1), 5, True)
    found = contexts()
    [do] = found.read("a", COUNTS, None)
    found.took(Done(do.id, StoredContext(before.encoded(), 5)))
    held = found.held("a", COUNTS, None)
    assert held.value == before, "an app without a policy keeps what an earlier one had learnt"


@pytest.mark.parametrize(("marks", "full"), [(20, False), (128, True)])
def test_a_value_of_before_older_marks_moved_is_read(marks: int, full: bool) -> None:
    """It had the marks of its last 64 feedbacks. Where it has so many, others are forgotten."""
    old = encode(("counts", b"7", 90, b"".join(map(mark, range(marks)))))
    value = read_value(old)
    assert (value.n, value.known(), value.moved) == (90, set(map(mark, range(marks))), -1)
    now = value.beside(NONE)
    assert (now.state, now.n, now.marks, now.full) == (b"7", 90, value.marks, full)
    assert arrive(contexts(), "me", old, 5).state == 7


@pytest.mark.slow
def test_a_hundred_times_as_many_contexts_as_are_held_take_no_more_memory() -> None:
    """By the same bound, 10^6 take no more. Half of them have learnt, and the bucket is away for some."""
    found = Contexts(Subjects(), 200, lambda app: MEMBERS, make_policy)
    taught = ContextValue("exp4", Exp4().dump(Exp4().init(MEMBERS)), 3, b"m" * MARK * MOVED).encoded()
    rules = Ensemble(policy="exp4", contextual=True)

    def serve(numbers: range) -> int:
        for number in numbers:
            name = f"user-{number}"
            [do] = found.read("a", rules, name)
            assert isinstance(do, Do)
            data = bytes(taught) if number % 2 else None
            found.took(Failed(do.id, "away") if number % 7 == 0 else Done(do.id, StoredContext(data, number % 2)))
            assert found.held("a", rules, name) is not None
        gc.collect()
        return tracemalloc.get_traced_memory()[0]

    tracemalloc.start()
    try:
        first = serve(range(400))
        assert serve(range(400, 20_000)) < 1.2 * first
    finally:
        tracemalloc.stop()
    assert len(found) == 200
    assert len(found.retry()) <= 200

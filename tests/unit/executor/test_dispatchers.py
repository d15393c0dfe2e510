"""What an executor does for the queries of a dispatcher that has died, or that it does not hear."""

from collections.abc import Iterable

import msgspec
import pytest
from msgspec.structs import replace

from bus.codec import encode
from bus.messages.events import OutcomeEvent, SelectionEvent
from bus.messages.fleet import DispatcherHeartbeat, UnloadInstance
from bus.messages.flow import DoneBatch, HandBack, Origin, PartsEnded, Route, Withdraw
from bus.messages.public import Answer, Tensor
from bus.subjects import Subjects
from services.core.actor import Done, Effect, Envelope, Publish, Record, Stopping, Undelivered
from services.core.outcomes import MISSING, OutcomeLog, answered
from services.core.settings import Settings
from services.executor.commands import BatchResult
from services.executor.dispatchers import FORGET, HEARD, KnownDispatchers
from services.executor.instances import REPORT
from tests.support.simulated.fleet import variant
from tests.unit.executor.test_actor import Alone, published

NOW = 1000.0
BY_REFERENCE = msgspec.Raw(encode({"inputs_ref": {"bucket": "infaas-inputs", "key": "k"}}))

SILENCE = Settings().dispatcher.failure_timeout_s + REPORT


def beats(dispatchers: KnownDispatchers, name: str, since: float, until: float) -> None:
    """Heartbeats of this dispatcher, twice a second."""
    at = since
    while at <= until:
        dispatchers.heartbeat(DispatcherHeartbeat(dispatcher=name, incarnation=1, at=at, adopts=True), at)
        at += 0.5


def with_a_part(deadline: float) -> KnownDispatchers:
    """What an executor knows that has got a part of a query of `d1`, which was heard last at NOW."""
    found = KnownDispatchers(Subjects(), "w/cpu/1", "w", SILENCE, "unheard.")
    beats(found, "d1", NOW - 2, NOW)
    query = Route(b"q" * 16, 0, 0, "_INBOX.q", deadline, NOW, "d1", "", "app", 1, None)
    part = Route(
        b"p" * 16, 0, 0, "d1", deadline, NOW, "d1", "i", "app", 1, None, parent=query.uid, origin=Origin(query)
    )
    found.keep(part, BY_REFERENCE, NOW)
    return found


def in_vain(dispatchers: KnownDispatchers, back: HandBack) -> list[Effect]:
    """It is handed to its dispatcher, and NATS says that nobody is there."""
    said = dispatchers.hand(back.route.dispatcher, back)
    assert (said.subject, said.message) == (Subjects().resubmit(back.route.dispatcher), back)
    return dispatchers.unheard(said.reply.removeprefix(dispatchers.inbox))


def handed_on(effects: Iterable[Effect]) -> list[str]:
    """To whom."""
    found = [each for each in effects if isinstance(each, Publish) and isinstance(each.message, HandBack)]
    return [each.subject for each in found if each.message.reason == "orphaned"]


@pytest.mark.parametrize("left", [0.1, 60.0], ids=["over when it is known", "in time"])
def test_a_dead_dispatchers_query_with_parts_is_handed_on_also_after_its_deadline(left: float) -> None:
    dispatchers = with_a_part(NOW + left)
    beats(dispatchers, "d2", NOW - 2, NOW + SILENCE)
    assert handed_on(dispatchers.check(NOW + SILENCE)) == []
    assert handed_on(dispatchers.check(NOW + SILENCE + 0.1)) == [Subjects().resubmit("d2")]
    assert handed_on(dispatchers.check(NOW + SILENCE + 0.6)) == [], "once"


def test_what_is_over_or_ended_by_another_is_not_handed_on() -> None:
    dispatchers = with_a_part(NOW - 0.1)
    beats(dispatchers, "d2", NOW - 2, NOW + SILENCE)
    assert handed_on(dispatchers.check(NOW + SILENCE + 0.1)) == []
    dispatchers = with_a_part(NOW + 60.0)
    beats(dispatchers, "d2", NOW - 2, NOW + SILENCE)
    dispatchers.parts_ended("d2", PartsEnded([b"q" * 16]))
    assert handed_on(dispatchers.check(NOW + SILENCE + 0.1)) == []


@pytest.mark.parametrize("way", ["its link is clogged", "they were read late"])
def test_heartbeats_of_a_dispatcher_that_has_heard_nothing_since_do_not_end_its_queries(way: str) -> None:
    """It says how long it has heard itself. A stopped executor reads heartbeats of one that has died since."""
    dispatchers = with_a_part(NOW + 0.1)
    said = DispatcherHeartbeat(dispatcher="d1", incarnation=1, at=NOW, adopts=True)
    dispatchers.heartbeat(said, NOW + 3.0)
    beats(dispatchers, "d2", NOW, NOW + 3.0 + SILENCE)
    assert handed_on(dispatchers.check(NOW + 3.1 + SILENCE)) == [Subjects().resubmit("d2")]


def test_what_a_dispatcher_did_not_get_back_goes_to_another_one_if_it_is_dead_and_again_to_it_if_not() -> None:
    subjects = Subjects()
    back = HandBack(Route(b"u" * 16, 0, 0, "_INBOX.u", NOW + 9, NOW, "d1", "i", "app", 1, None), "late", BY_REFERENCE)
    found = KnownDispatchers(subjects, "w/cpu/1", "w", SILENCE, "unheard.")
    beats(found, "d1", NOW - 2, NOW)
    assert in_vain(found, back) == []
    assert found.missed("d1") == [(back, None)]
    assert found.missed("d1") == [], "once"
    assert in_vain(found, back) == []
    told = [one for one in found.check(NOW + 0.1 + SILENCE) if isinstance(one, Publish)]
    assert [one.subject for one in told] == [subjects.resubmit(), subjects.resubmit("d1")]
    assert told[0].message == back
    assert in_vain(found, back) == told, "it is known to be dead"


def test_a_query_with_parts_whose_heir_is_away_is_handed_on_again() -> None:
    dispatchers = with_a_part(NOW + 60)
    beats(dispatchers, "d2", NOW - 2, NOW + SILENCE)
    for later in (0.1, 0.6):
        [given] = dispatchers.check(NOW + SILENCE + later)
        assert isinstance(given, Publish)
        assert (given.subject, given.message.reason) == (Subjects().resubmit("d2"), "orphaned")
        assert dispatchers.unheard(given.reply.removeprefix("unheard.")) == []
    beats(dispatchers, "d2", NOW + SILENCE + 1, NOW + SILENCE + 1)
    [given] = dispatchers.check(NOW + SILENCE + 1.1)
    beats(dispatchers, "d1", NOW + SILENCE + 1.2, NOW + SILENCE + 1.2)
    assert isinstance(given, Publish)
    assert handed_on(dispatchers.unheard(given.reply.removeprefix("unheard."))) == [Subjects().resubmit("d1")], (
        "it lives"
    )


def test_a_query_waits_for_a_dispatcher_that_is_heard_for_a_while() -> None:
    """Who hears nobody may be cut off itself. The first that it hears again says nothing about the others."""
    dispatchers = with_a_part(NOW + 0.1)
    beats(dispatchers, "d2", NOW - 2, NOW)
    assert handed_on(dispatchers.check(NOW + SILENCE + 0.1)) == []
    back = NOW + SILENCE + 1
    beats(dispatchers, "d2", back, back)
    assert handed_on(dispatchers.check(back)) == []
    beats(dispatchers, "d2", back + 0.5, back + HEARD)
    assert handed_on(dispatchers.check(back + HEARD)) == [Subjects().resubmit("d2")]


def test_dispatchers_heard_again_keep_their_queries_and_standing_still_forgets_nothing() -> None:
    dispatchers = with_a_part(NOW + 0.1)
    assert handed_on(dispatchers.check(NOW + SILENCE + 0.1)) == []
    beats(dispatchers, "d1", NOW + 4, NOW + 6)
    beats(dispatchers, "d2", NOW + 4, NOW + 6)
    assert handed_on(dispatchers.check(NOW + 6)) == []
    assert handed_on(dispatchers.parts_ended("d1", PartsEnded([b"q" * 16]))) == []
    dispatchers = with_a_part(NOW + 0.1)
    dispatchers.stood_still(NOW + 4)
    beats(dispatchers, "d2", NOW + 4, NOW + 4 + HEARD)
    assert handed_on(dispatchers.check(NOW + 4 + HEARD)) == [], "it may be heard again"
    assert handed_on(dispatchers.check(NOW + 4.1 + HEARD)) == [Subjects().resubmit("d2")]


def test_an_executor_that_was_not_heard_has_heard_a_dispatcher_die() -> None:
    """Only what it said was held up."""
    dispatchers = with_a_part(NOW + 60)
    beats(dispatchers, "d1", NOW + 0.5, NOW + 2)
    beats(dispatchers, "d2", NOW - 2, NOW + 2 + SILENCE)
    dispatchers.stood_still(NOW + 2.5)
    assert handed_on(dispatchers.check(NOW + 2 + SILENCE)) == []
    assert handed_on(dispatchers.check(NOW + 2.1 + SILENCE)) == [Subjects().resubmit("d2")]


@pytest.mark.parametrize(("off", "dies"), [(0.0, 1.4 + SILENCE), (-5.0, 2.0 + HEARD), (5.0, 2.0 + SILENCE)])
def test_last_words_that_waited_say_that_a_dispatcher_lived_when_it_said_them(off: float, dies: float) -> None:
    """It says them 1.4 s after it was heard last, and they are read 0.6 s later. off: s by which its clock is. dies: when it counts as dead."""
    dispatchers = with_a_part(NOW + 60)
    said = DispatcherHeartbeat(dispatcher="d1", incarnation=1, at=NOW + 1.4 + off, adopts=True)
    dispatchers.heartbeat(said, NOW + 2.0)
    beats(dispatchers, "d2", NOW - 2, NOW + 2.0 + SILENCE)
    assert handed_on(dispatchers.check(NOW + dies - 0.01)) == []
    assert handed_on(dispatchers.check(NOW + dies + 0.01)) == [Subjects().resubmit("d2")]


def test_what_was_handed_back_in_vain_is_handed_back_again_with_the_next_heartbeat() -> None:
    """That may be the last words of one that has died since: NATS says so again."""
    alone = Alone()
    alone.tell(DispatcherHeartbeat(dispatcher="d1", incarnation=0, at=NOW))
    [(_, back)] = published(alone.execute(deadline=NOW, at=NOW + 1.0), HandBack)
    assert in_vain(alone.actor.dispatchers, back) == []
    [again] = alone.tell(DispatcherHeartbeat(dispatcher="d1", incarnation=0, at=NOW))
    assert isinstance(again, Publish)
    assert (again.subject, again.message) == ("infaas.resubmit.d1", back)
    assert alone.actor.handle(Envelope(NOW, Undelivered(again.reply), again.reply)) == []
    dead = DispatcherHeartbeat(dispatcher="d1", incarnation=0, at=NOW, leaving=True)
    assert published(alone.tell(dead), HandBack)[0] == ("infaas.resubmit", back)


def test_a_client_that_asks_again_is_not_put_off_for_a_query_whose_time_is_over() -> None:
    dispatchers = with_a_part(NOW + 0.1)
    assert not dispatchers.has_parts_of(b"q" * 16)
    beats(dispatchers, "d2", NOW - 2, NOW + SILENCE)
    assert handed_on(dispatchers.check(NOW + SILENCE + 0.1)) == [], "who asked ends it"
    assert with_a_part(NOW + 60).has_parts_of(b"q" * 16)


def test_what_is_handed_back_to_a_dispatcher_that_is_not_there_is_kept_until_it_is_known_whether_it_is_dead() -> None:
    alone = Alone()
    alone.tell(DispatcherHeartbeat(dispatcher="d1", incarnation=0, at=NOW))
    alone.take("u", NOW + 30)
    alone.tell(UnloadInstance(instance="i"))
    [back] = [
        one for one in alone.tell(Stopping(1.0)) if isinstance(one, Publish) and isinstance(one.message, HandBack)
    ]
    assert alone.actor.handle(Envelope(NOW, Undelivered(back.reply), back.reply)) == []
    dead = DispatcherHeartbeat(dispatcher="d1", incarnation=0, at=NOW, leaving=True)
    assert published(alone.tell(dead), HandBack)[0] == ("infaas.resubmit", back.message)
    assert alone.actor.handle(Envelope(NOW, Undelivered(back.reply), back.reply)) == [], "once"


@pytest.mark.parametrize(("at", "handed"), [(NOW + 0.05, 1), (NOW + 0.2, 0)], ids=["not before it died", "before"])
def test_what_came_late_another_dispatcher_ends_only_if_its_own_had_not(at: float, handed: int) -> None:
    alone = Alone()
    alone.tell(DispatcherHeartbeat(dispatcher="d1", incarnation=0, at=at))
    [(_, back)] = published(alone.execute(deadline=NOW, at=NOW + 1.0), HandBack)
    assert in_vain(alone.actor.dispatchers, back) == []
    handed_over = published(alone.actor.dispatchers.check(NOW + SILENCE + 0.1), HandBack)
    assert [one.reason for subject, one in handed_over if subject == "infaas.resubmit"] == ["late"] * handed
    later = published(in_vain(alone.actor.dispatchers, back), HandBack)
    assert [one.reason for subject, one in later if subject == "infaas.resubmit"] == ["late"] * handed, "it is dead"


def test_what_an_executor_reads_after_its_deadline_only_its_dispatcher_ends_or_who_has_it_since() -> None:
    """An executor without queries does not hear itself, and cannot know what held it up."""
    alone = Alone()
    [(subject, back)] = published(alone.execute(deadline=NOW, at=NOW + 0.01), HandBack)
    assert (subject, back.reason) == ("infaas.resubmit.d1", "late")
    assert published(alone.execute(uid=b"p" * 16, deadline=NOW, at=NOW + 0.01, parent=b"q" * 16), HandBack) == []


@pytest.mark.parametrize("dead", [False, True], ids=["before it was taken for dead", "after"])
def test_a_dispatcher_that_was_cut_off_hears_again_what_its_executor_has_recorded_in_its_place(dead: bool) -> None:
    alone = Alone()
    alone.tell(DispatcherHeartbeat(dispatcher="d1", incarnation=0, at=NOW))
    alone.take("u", NOW + 30)
    silent = NOW + SILENCE + 0.1
    effects = alone.actor.dispatchers.check(silent) if dead else []
    effects += alone.run()
    [(_, done)] = published(effects, DoneBatch)
    effects += alone.actor.dispatchers.check(silent)
    assert len(rows(effects)) == 1
    alone.tell(DispatcherHeartbeat(dispatcher="d1", incarnation=0, at=silent), silent)
    again = published(alone.tell(Withdraw("d1", "i", [], 0, again=True), silent), DoneBatch)
    assert [one.uids for _, one in again] == [done.uids]
    assert rows(alone.actor.dispatchers.check(silent + SILENCE + 0.1)) == [], "they were recorded"
    stored = DispatcherHeartbeat(dispatcher="d1", incarnation=0, at=silent, flushed={done.queue: done.seq})
    alone.tell(stored, silent + SILENCE + 1.0)
    assert published(alone.tell(Withdraw("d1", "i", [], 0, again=True), silent), DoneBatch) == []


def test_an_executor_that_ends_records_what_no_dispatcher_has_stored_which_may_have_died() -> None:
    alone = Alone()
    alone.tell(DispatcherHeartbeat(dispatcher="d1", incarnation=0, at=NOW))
    alone.take("u", NOW + 30)
    assert rows(alone.run()) == []
    alone.take("v", NOW + 30)
    run = alone.begin()
    assert len(rows(alone.tell(Stopping(1.0)))) == 1
    assert len(rows(alone.end(run))) == 1, "what it was running then"


def test_a_dispatcher_that_was_cut_off_is_told_again_what_others_got() -> None:
    alone = Alone()
    alone.tell(DispatcherHeartbeat(dispatcher="d1", incarnation=0, at=NOW))
    alone.take("u", NOW + 30)
    silent = NOW + SILENCE + 0.1
    alone.actor.dispatchers.check(silent)
    assert [back.reason for _, back in published(alone.tell(Stopping(1.0), silent), HandBack)] == ["gone", "taken"]
    alone.tell(DispatcherHeartbeat(dispatcher="d1", incarnation=0, at=silent), silent)
    asks = Withdraw("d1", "i", [], 0, again=True)
    [(subject, back)] = published(alone.tell(asks, silent), HandBack)
    assert (subject, back.reason) == ("infaas.resubmit.d1", "taken")
    for later in (0.6, HEARD + 0.1):
        alone.tell(DispatcherHeartbeat(dispatcher="d1", incarnation=0, at=silent + later), silent + later)
    assert published(alone.tell(asks, silent + 2.0), HandBack) == [], "it has been there for long enough to ask"


# -- which batches' outcomes a dispatcher has stored


def batch(seq: int) -> DoneBatch:
    return DoneBatch("w/cpu/1", "w", seq, "i", "v", 1, NOW, NOW + 0.1, 0.0, 0, [seq.to_bytes(16, "little")])


def stored(log: OutcomeLog, *seqs: int, now: float = NOW) -> int:
    """Up to which batch executors need say nothing again, once these have come."""
    for seq in seqs:
        log.covers(batch(seq), now)
    return log.flushed.get("w/cpu/1", 0)


def test_a_batch_that_was_lost_is_not_taken_for_stored_since_later_ones_are() -> None:
    log = OutcomeLog(("w",))
    assert stored(log, 1, 2) == 2
    assert stored(log, 4, 5) == 2
    assert stored(log, 3) == 5, "it was said again"
    assert stored(log, 2) == 5, "so was this one, which was known"
    assert stored(log, 7, 9) == 5
    assert stored(log, 10, now=NOW + MISSING) == 7, "its executor's connection broke: nobody will say it"
    assert stored(log, 11, now=NOW + MISSING) == 7
    assert stored(log, 8, 12) == 12
    assert OutcomeLog(("w",)).flushed == {} and stored(OutcomeLog(("w",)), 2) == 0, "the first one was lost"


def test_of_executors_that_are_gone_nothing_is_told_any_more() -> None:
    workers = {"w", "other"}
    log = OutcomeLog(workers)
    for incarnation in range(1, 5):
        log.covers(replace(batch(1), queue=f"w/cpu/{incarnation}"), NOW)
    log.covers(replace(batch(1), queue="w/gpu/1"), NOW)
    assert log.flushed == {"w/cpu/3": 1, "w/cpu/4": 1, "w/gpu/1": 1}, "one may still end while its successor begins"
    workers.remove("w")
    log.covers(replace(batch(1), queue="other/cpu/1"), NOW)
    assert log.flushed == {"other/cpu/1": 1}


def test_what_is_not_on_disk_is_not_stored_however_many_batches_come_again() -> None:
    log = OutcomeLog(("w",))
    event = SelectionEvent(
        time=NOW, app="app", context=None, query=b"q" * 16, member="m", probability=1.0, loss=0.0, weight=1.0
    )
    log.record(event)
    assert stored(log, 2, 1) == 0
    log.stored(1)
    assert stored(log) == 2


def test_an_executor_says_again_all_that_its_dispatcher_has_not_stored_in_its_order() -> None:
    """Also what told it only that the executor turns: without that one would be missing for ever."""
    alone = Alone()
    for label in ("u", "v"):
        alone.take(label, NOW + 30)
        alone.run()
        alone.tell(Withdraw("d1", "i", []))
    again = [one for _, one in published(alone.tell(Withdraw("d1", "i", [], 0, again=True)), DoneBatch)]
    assert [(one.seq, len(one.uids)) for one in again] == [(1, 1), (2, 0), (3, 1), (4, 0)]
    known = DispatcherHeartbeat(dispatcher="d1", incarnation=0, at=NOW, flushed={again[0].queue: 2})
    alone.tell(known)
    again = [one for _, one in published(alone.tell(Withdraw("d1", "i", [], 0, again=True)), DoneBatch)]
    assert [one.seq for one in again] == [3, 4]


def test_a_dispatcher_that_comes_back_after_it_was_forgotten_takes_no_batch_for_an_earlier_one() -> None:
    alone = Alone()
    alone.tell(DispatcherHeartbeat(dispatcher="d1", incarnation=0, at=NOW))
    alone.take("u", NOW + 30)
    [(_, first)] = published(alone.run(), DoneBatch)
    gone = NOW + SILENCE + 0.1
    alone.actor.dispatchers.check(gone)
    alone.actor.dispatchers.check(gone + FORGET)
    alone.take("v", NOW + 30)
    [(_, later)] = published(alone.run(), DoneBatch)
    assert (first.seq, later.seq) == (1, 2)


def rows(effects: Iterable[Effect]) -> list[Record]:
    return [each for each in effects if isinstance(each, Record) and isinstance(each.event, OutcomeEvent)]


def test_an_answer_takes_no_less_than_its_batch_though_clocks_differ() -> None:
    """The dispatcher's is ahead by more than the way there: its query came after its batch had begun."""
    alone = Alone()
    alone.take("u", NOW + 1)
    run = alone.begin()
    result = BatchResult(NOW - 0.002, NOW - 0.0015, [{"y": Tensor("FP32", [1, 1], bytes(4))}])
    effects = alone.tell(Done(run.id, result))
    [(_, answer)] = published(effects, Answer)
    assert (answer.queue_ms, answer.latency_ms) == (0.0, pytest.approx(0.5))
    [(_, done)] = published(effects, DoneBatch)
    route = run.command.queries[0].route
    row = answered(
        route, variant(), worker="w", started=done.started, finished=done.finished, batch=1, cost_per_item=0.0
    )
    assert row.latency_ms == answer.latency_ms

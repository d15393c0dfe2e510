"""What actors may rely on. Every test runs on the kernel, and on production's runtime with a clock that jumps."""

import itertools
from collections.abc import Iterator
from typing import Any

import pytest

from bus.messages.events import WorkerEvent
from services.core.actor import (
    After,
    Cancel,
    Changed,
    Do,
    Done,
    Failed,
    Halt,
    Publish,
    Record,
    Recorded,
    Started,
    Stopping,
    Synced,
    TimedOut,
    Undelivered,
)
from services.shell.runtime.outbox import LATEST, ROWS
from services.simulation.hosts import Promised
from services.simulation.kernel import ActorHalted, Kernel
from tests.support.simulated.runtime_driver import Bed
from tests.support.simulated.scripted_actors import DELAY, Play, Puppet, Ring, Word, played


@pytest.fixture(params=[Kernel, Bed], ids=["kernel", "runtime"])
def play(request: pytest.FixtureRequest) -> Iterator[Play]:
    yield from played(request.param)


@pytest.fixture
def alone() -> Iterator[Play]:
    """On the kernel only."""
    yield from played(Kernel)


def on(kind: type, *effects: Any) -> Any:
    """Says these when a message of this type comes."""
    return lambda message: effects if type(message) is kind else None


def event(number: int = 0) -> WorkerEvent:
    return WorkerEvent(time=float(number), worker="w", hardware="cpu", from_state="a", to_state="b", reason="test")


# -- timers


def test_a_timer_rings_after_its_delay_and_once(play: Play) -> None:
    puppet = play.enter("p", Puppet(says=on(Started, After("k", 0.5, Ring("late")), After("j", 0.2, Ring("soon")))))
    play.run(3.0)
    assert puppet.got(Ring) == [(0.2, Ring("soon")), (0.5, Ring("late"))]


def test_a_timer_with_the_same_key_takes_the_others_place(play: Play) -> None:
    says = on(Started, After("k", 0.5, Ring("first")), After("k", 0.9, Ring("second")))
    assert play.enter("p", Puppet(says=says), seconds=3.0).got(Ring) == [(0.9, Ring("second"))]


def test_a_timer_is_cancelled(play: Play) -> None:
    says = on(Started, After("k", 0.5, Ring("no")), After("j", 0.5, Ring("yes")), Cancel("k"), Cancel("unknown"))
    assert play.enter("p", Puppet(says=says), seconds=3.0).got(Ring) == [(0.5, Ring("yes"))]


def test_a_timer_of_no_delay_rings_in_a_turn_of_its_own_at_the_same_moment(play: Play) -> None:
    def says(message: Any) -> Any:
        if type(message) is Ring and message.text == "now":
            return [After("k", 0.0, Ring("again"))]
        return [After("k", 0.0, Ring("now")), After("l", 0.3, Ring("end"))] if type(message) is Started else None

    puppet = play.enter("p", Puppet(says=says), seconds=1.0)
    assert puppet.seen == [(0.0, Started()), (0.0, Ring("now")), (0.0, Ring("again")), (0.3, Ring("end"))]


def test_a_key_can_be_used_again_after_it_rang_and_by_another_actor(play: Play) -> None:
    left = itertools.count(1)

    def says(message: Any) -> Any:
        return [After("k", 0.1, Ring(str(next(left))))] if type(message) in (Started, Ring) else None

    one = play.enter("one", Puppet(says=says))
    two = play.enter("two", Puppet(says=on(Started, After("k", 0.25, Ring("other")))), seconds=0.35)
    assert [at for at, _ in one.got(Ring)] == [0.1, 0.2, 0.3]
    assert two.got(Ring) == [(0.25, Ring("other"))]


# -- messages


def test_a_message_is_under_way_for_the_delay_and_reaches_everybody_who_listens(play: Play) -> None:
    exact, wild = play.enter("e", Puppet("a.b")), play.enter("w", Puppet("a.*"))
    deaf = play.enter("d", Puppet("a.c", "a.b.c"))
    play.say("a.b", "hello", seconds=1.0)
    assert exact.got(Word) == wild.got(Word) == [(DELAY, Word("hello"))]
    assert deaf.words == []


def test_a_group_takes_turns_and_everybody_else_hears_all(play: Play) -> None:
    group = [play.enter(f"g{n}", Puppet("q", queue="workers")) for n in range(3)]
    other, listener = play.enter("o", Puppet("q", queue="others")), play.enter("l", Puppet("q"))
    play.say("q", *"abcdef", seconds=1.0)
    assert [one.words for one in group] == [["a", "d"], ["b", "e"], ["c", "f"]]
    assert other.words == listener.words == list("abcdef")


def test_a_groups_turns_go_on_over_all_subjects_of_its_pattern_and_when_one_leaves(play: Play) -> None:
    group = [play.enter(f"g{n}", Puppet("q.*", queue="workers")) for n in range(3)]
    for subject, text in (("q.x", "a"), ("q.y", "b"), ("q.z", "c"), ("q.x", "d")):
        play.say(subject, text)
    play.run(1.0)
    assert [one.words for one in group] == [["a", "d"], ["b"], ["c"]]
    play.stage.leave("g1", goodbye=False)
    play.run(1.0)
    play.say("q.x", "e", "f", seconds=1.0)
    assert sorted(group[0].words + group[2].words) == ["a", "c", "d", "e", "f"]
    assert group[1].words == ["b"]


def test_who_speaks_first_is_heard_first_also_when_the_delay_ends(play: Play) -> None:
    listener = play.enter("l", Puppet("s"))
    play.stage.delay = 0.5
    play.say("s", "slow", seconds=0.2)
    play.stage.delay = DELAY
    play.say("s", "fast", "faster", seconds=0.1)
    assert listener.words == []
    play.run(1.0)
    assert listener.got(Word) == [(0.5, Word("slow")), (0.5, Word("fast")), (0.5, Word("faster"))]
    play.say("s", "quick", seconds=1.0)
    assert listener.words[-1] == "quick"
    assert listener.got(Word)[-1][0] == pytest.approx(1.3 + DELAY)


def test_a_message_of_another_type_passes_through_the_codec(play: Play) -> None:
    class Longer(Word, frozen=True):
        more: int = 1

    one, raw = play.enter("l", Puppet("s")), play.enter("raw", Puppet("s", message=bytes))
    play.stage.publish("s", Longer("x", 2))
    play.run(1.0)
    assert one.got(Word) == [(DELAY, Word("x"))]
    assert [type(message) for _, message in raw.seen] == [Started, bytes]


def test_the_sender_hears_that_nobody_listens_where_it_would_get_the_reply(play: Play) -> None:
    def ask(subject: str, reply: str) -> Publish:
        return Publish(subject, Word("?"), reply)

    says = on(Started, ask("nobody", "mine.1"), ask("nobody", "theirs.1"), ask("nobody", ""), ask("heard", "mine.2"))
    heard = play.enter("h", Puppet("heard"))
    theirs = play.enter("t", Puppet("theirs.*"))
    mine = play.enter("m", Puppet("mine.*", says=says), seconds=1.0)
    assert mine.seen == [(0.0, Started()), (DELAY, Undelivered("mine.1"))]
    assert theirs.seen == [(0.0, Started())]
    assert heard.words == ["?"]


# -- edges


def test_an_edges_result_comes_after_its_time(play: Play) -> None:
    outcomes: dict[str, tuple[float, Any]] = {
        "works": (0.4, "good"),
        "fails": (0.3, ValueError("too bad")),
        "hangs": (9.0, "late"),
        "hurries": (0.6, "in time"),
    }
    timeouts = {"hangs": 0.5, "hurries": 0.7}
    says = on(Started, *(Do(name, name, timeouts.get(name, 0.0)) for name in outcomes))
    puppet = play.enter("p", Puppet(says=says), outcomes.__getitem__, seconds=20.0)
    assert puppet.seen[1:] == [
        (0.3, Failed("fails", "too bad")),
        (0.4, Done("works", "good")),
        (0.5, TimedOut("hangs")),
        (0.6, Done("hurries", "in time")),
    ]


def test_an_edge_may_promise_a_result_whose_time_it_does_not_know_yet(play: Play) -> None:
    promised = Promised()
    puppet = play.enter("p", Puppet(says=on(Started, Do("later", "x"))), lambda _: promised)
    play.stage.at(0.7, promised.keep, "kept")
    play.run(0.6)
    assert puppet.seen[1:] == []
    play.run(1.0)
    assert puppet.seen[1:] == [(0.7, Done("later", "kept"))]


# -- events


def test_events_are_on_disk_when_the_outbox_sends_them(play: Play) -> None:
    def says(message: Any) -> Any:
        if type(message) is Started:
            return [Record(event(1)), Record(event(2)), After("k", 0.15, Ring("")), After("l", 0.5, Ring(""))]
        return [Record(event(3))] if type(message) is Ring else None

    puppet = play.enter("p", Puppet(says=says), seconds=2.0)
    assert puppet.got(Recorded) == [(LATEST, Recorded(3)), (0.5 + LATEST, Recorded(4))]
    assert [(name, each.time) for name, each in play.told] == [("p", 1.0), ("p", 2.0), ("p", 3.0), ("p", 3.0)]


def test_many_events_are_sent_at_once(play: Play) -> None:
    many = [Record(event()) for _ in range(ROWS + 1)]
    puppet = play.enter("p", Puppet(says=on(Started, *many)), seconds=1.0)
    assert puppet.got(Recorded) == [(0.0, Recorded(ROWS)), (LATEST, Recorded(ROWS + 1))]


# -- buckets


def test_who_comes_hears_what_a_bucket_holds_then_each_change(play: Play) -> None:
    stage = play.stage
    for key, value in (("a", b"1"), ("b", b"2"), ("a", b"3"), ("c", b"4"), ("c", None)):
        stage.put("bucket", key, value)
    play.run(1.0)
    early = play.enter("p", Puppet(watches=["bucket"]))
    stage.put("bucket", "b", b"5")
    play.run(0.5 * DELAY)
    late = play.enter("q", Puppet(watches=["bucket"]), seconds=1.0)
    stage.put("elsewhere", "b", b"6")
    play.run(1.0)
    entries = [Changed("bucket", "b", b"2"), Changed("bucket", "a", b"3"), Changed("bucket", "c", None)]
    assert early.seen == [
        *((1.0, each) for each in (Started(), *entries, Synced("bucket"))),
        (1.0 + DELAY, Changed("bucket", "b", b"5")),
    ]
    assert [message for _, message in late.seen] == [
        Started(), *entries[1:], Changed("bucket", "b", b"5"), Synced("bucket")
    ]  # fmt: skip
    assert stage.get("bucket", "b") == b"5"
    assert stage.get("bucket", "c") is stage.get("bucket", "z") is stage.get("unknown", "a") is None


# -- coming and going


def test_who_is_asked_to_leave_says_goodbye_and_hears_nothing_more(play: Play) -> None:
    says = on(Stopping, Publish("s", Word("goodbye")), After("k", 0.1, Ring("never")))
    leaver = play.enter("p", Puppet("p", watches=["bucket"], says=says))
    listener = play.enter("l", Puppet("s"), seconds=1.0)
    play.stage.leave("p", goodbye=True)
    play.say("p", "too late")
    play.stage.put("bucket", "a", b"1")
    play.run(1.0)
    assert [type(message) for _, message in leaver.seen] == [Started, Synced, Stopping]
    assert listener.words == ["goodbye"]
    play.stage.leave("p", goodbye=True)
    play.stage.leave("nobody", goodbye=True)


def test_work_under_way_is_finished_within_the_grace(play: Play) -> None:
    def says(message: Any) -> Any:
        if type(message) is Started:
            return [
                Do("quick", 1.5),
                Do("long", 30.0),
                After("k", 2.0, Ring("meanwhile")),
                After("l", 9.0, Ring("never")),
            ]
        return [Publish("s", Word("done"))] if type(message) is Done else None

    leaver = play.enter("p", Puppet(says=says), lambda seconds: (seconds, seconds))
    listener = play.enter("l", Puppet("s"), seconds=1.0)
    play.stage.leave("p", goodbye=True)
    play.run(60.0)
    assert [message for _, message in leaver.seen[2:]] == [Done("quick", 1.5), Ring("meanwhile")]
    assert listener.words == ["done"]


def test_who_is_killed_says_nothing_and_what_is_sent_to_it_is_undelivered(play: Play) -> None:
    says = on(Started, Do("work", "work"), After("k", 0.5, Ring("never")))
    victim = play.enter("v", Puppet("v", says=says), lambda _: (0.5, "never"))
    sender = play.enter("s", Puppet("s", "s.*", says=on(Word, Publish("v", Word("?"), "s.reply"))))
    play.say("s", "go")
    play.run(1.5 * DELAY)  # the question is under way
    play.stage.leave("v", goodbye=False)
    play.run(2.0)
    assert victim.seen == [(0.0, Started())]
    assert sender.got(Undelivered) == [(2 * DELAY, Undelivered("s.reply"))]


def test_a_name_can_come_back(play: Play) -> None:
    first = play.enter("p", Puppet("s", says=on(Started, After("k", 0.5, Ring("first")))), seconds=0.1)
    play.stage.leave("p", goodbye=False)
    second = play.enter("p", Puppet("s", says=on(Started, After("k", 0.7, Ring("second")))))
    play.say("s", "hello", seconds=2.0)
    assert first.seen == [(0.0, Started())]
    assert [message for _, message in second.seen] == [Started(), Word("hello"), Ring("second")]


def test_actions_from_outside_are_called_at_their_time(play: Play) -> None:
    called: list[tuple[float, Any]] = []
    for delay in (0.3, 0.1, 0.2, 0.1):
        play.stage.at(delay, lambda what: called.append((round(play.stage.now - 1000.0, 6), what)), delay)
    play.run(0.25)
    assert called == [(0.1, 0.1), (0.1, 0.1), (0.2, 0.2)]
    assert play.stage.now == 1000.25


# -- where a simulation must not go on


def test_an_actor_that_gives_up_ends_the_run(alone: Play) -> None:
    with pytest.raises(ActorHalted, match="p: enough"):
        alone.enter("p", Puppet(says=on(Started, Halt("enough"))))


def test_an_actor_that_fails_ends_the_run(alone: Play) -> None:
    def says(message: Any) -> Any:
        raise ZeroDivisionError(message)

    with pytest.raises(ZeroDivisionError):
        alone.enter("p", Puppet(says=says))


def test_work_for_an_actor_without_an_edge_ends_the_run(alone: Play) -> None:
    with pytest.raises(ActorHalted, match="p has no edge for str"):
        alone.enter("p", Puppet(says=on(Started, Do("id", "command"))))


def test_an_actor_that_fails_later_is_named(alone: Play) -> None:
    def says(message: Any) -> Any:
        return [After("k", 0.5, Ring("now"))] if type(message) is Started else {}["x"]

    alone.enter("p", Puppet(says=says))
    with pytest.raises(ActorHalted, match=r"p failed: KeyError\('x'\)"):
        alone.run(3.0)

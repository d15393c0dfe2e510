"""What NATS and Linux may do to processes and their connections, and no more than that."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

from services.core.actor import (
    After,
    Cancel,
    Changed,
    Do,
    Done,
    Failed,
    Publish,
    Started,
    Stopping,
    Synced,
    TimedOut,
    Undelivered,
)
from services.simulation.connections import ANSWERED, CLIENTS, Connections
from services.simulation.hosts import Promised
from tests.support.simulated.scripted_actors import DELAY, START, Play, Puppet, Ring, Word, played
from tests.unit.simulation.test_kernel import on


@pytest.fixture
def play() -> Iterator[Play]:
    """Actors "p.a" and "p.b" are of one process, "p"."""
    yield from played(partial(Connections, seed=3, process_of=lambda name: name.partition(".")[0]))


def net(play: Play) -> Connections:
    assert isinstance(play.stage, Connections)
    return play.stage


def words(subject: str, *texts: str) -> list[Publish]:
    return [Publish(subject, Word(text)) for text in texts]


MANY = [str(number) for number in range(50)]


# -- order


def test_a_connection_keeps_its_order_and_others_overtake_it(play: Play) -> None:
    listener = play.enter("l", Puppet("s"))
    play.enter("one", Puppet(says=on(Started, *words("s", *(f"a{n}" for n in MANY)))))
    play.enter("two", Puppet(says=on(Started, *words("s", *(f"b{n}" for n in MANY)))), seconds=1.0)
    got = listener.words
    assert [word for word in got if word[0] == "a"] == [f"a{n}" for n in MANY]
    assert [word for word in got if word[0] == "b"] == [f"b{n}" for n in MANY]
    assert got not in (sorted(got), sorted(got, reverse=True))
    assert any(got[i][0] == "b" and got[i + 1][0] == "a" for i in range(len(got) - 1))


def test_actors_of_one_process_share_its_connection(play: Play) -> None:
    listener = play.enter("l", Puppet("s"))
    play.enter("p.a", Puppet("go.a", says=on(Word, *words("s", "first"))))
    play.enter("p.b", Puppet("go.b", says=on(Word, *words("s", "second"))))
    for n in range(20):
        play.say("go.a", str(n))
        play.say("go.b", str(n), seconds=1.0)
    assert len(listener.words) == 40
    play.enter("starts", Puppet(says=on(Started, Publish("go.a", Word("!")), Publish("go.b", Word("!")))))
    play.run(1.0)
    assert listener.words[-2:] == ["first", "second"]


def test_a_message_takes_as_long_as_on_the_kernel_on_average_and_later_all_by_so_much(play: Play) -> None:
    listener = play.enter("l", Puppet("s"))
    for _ in range(400):
        play.say("s", "x", seconds=1.0)
    took = [at % 1.0 for at, _ in listener.got(Word)]
    assert 0.8 * DELAY < sum(took) / len(took) < 1.2 * DELAY
    play.stage.delay = DELAY + 0.3
    play.say("s", "late", seconds=1.0)
    assert listener.got(Word)[-1][0] % 1.0 >= 0.3


# -- clogged and lost


def test_what_a_clogged_process_sends_waits_and_comes_at_once(play: Play) -> None:
    listener = play.enter("l", Puppet("s"))
    play.enter("p.a", Puppet("go", says=on(Word, *words("s", "a", "b", "c"))))
    net(play).block("p", into=False, lost=False)
    play.say("go", "now", seconds=0.5)
    play.say("s", "overtakes", seconds=1.5)
    assert listener.words == ["overtakes"]
    net(play).unblock("p", into=False, lost=False)
    play.run(1.0)
    assert listener.words == ["overtakes", "a", "b", "c"]
    assert all(2.0 < at < 2.3 for at, word in listener.got(Word) if word.text in "abc")


def test_what_a_clogged_process_gets_waits_and_it_is_still_subscribed(play: Play) -> None:
    clogged = play.enter("p.a", Puppet("s", queue="q"))
    other = play.enter("other", Puppet("s", queue="q"))
    asking = play.enter("asks", Puppet("mine.*"))
    net(play).block("p", into=True, lost=False)
    play.say("s", *"abcd", seconds=2.0)
    assert (clogged.words, len(other.words)) == ([], 2)
    net(play).unblock("p", into=True, lost=False)
    play.run(1.0)
    assert [at for at, _ in clogged.got(Word)] == [2.0, 2.0]
    assert sorted(clogged.words + other.words) == list("abcd")
    assert asking.got(Undelivered) == []


def test_what_a_lost_process_would_get_is_lost_and_nobody_listens_there(play: Play) -> None:
    lost = play.enter("p.a", Puppet("s"))
    asking = play.enter("asks", Puppet("mine.*", "go", says=on(Word, Publish("s", Word("?"), "mine.1"))))
    net(play).block("p", into=True, lost=True)
    play.say("go", "1", seconds=1.0)
    assert [message for _, message in asking.got(Undelivered)] == [Undelivered("mine.1")]
    net(play).unblock("p", into=True, lost=True)
    play.run(1.0)
    assert lost.words == []
    play.say("go", "2", seconds=1.0)
    assert lost.words == ["?"]
    assert len(asking.got(Undelivered)) == 1


def test_a_process_that_starts_while_it_is_lost_listens_once_it_is_found(play: Play) -> None:
    net(play).block("p", into=True, lost=True)
    lost = play.enter("p.a", Puppet("s"))
    asking = play.enter("asks", Puppet("mine.*", says=on(Started, Publish("s", Word("no"), "mine.1"))))
    play.run(1.0)
    assert [message for _, message in asking.got(Undelivered)] == [Undelivered("mine.1")]
    net(play).unblock("p", into=True, lost=True)
    play.say("s", "yes", seconds=1.0)
    assert lost.words == ["yes"]


def test_an_answer_on_a_lost_connection_is_lost_for_good(play: Play) -> None:
    bucket = Bucket()
    net(play).block("p", into=True, lost=True)
    puppet = play.enter("p.a", Puppet(says=on(Started, Do("id", "x", 4.0))), bucket, seconds=2.0)
    net(play).unblock("p", into=True, lost=True)
    play.run(3.0)
    assert bucket.asked == ["x"]
    assert puppet.seen[1:] == [(4.0, TimedOut("id"))]


def test_faults_of_one_link_that_overlap_end_with_the_last(play: Play) -> None:
    clogged = play.enter("p.a", Puppet("s"))
    net(play).block("p", into=True, lost=False)
    net(play).block("p", into=True, lost=False)
    play.say("s", "x", seconds=1.0)
    net(play).unblock("p", into=True, lost=False)
    play.run(1.0)
    assert clogged.words == []
    net(play).unblock("p", into=True, lost=False)
    play.run(1.0)
    assert clogged.words == ["x"]


def test_clients_have_connections_and_hear_that_nobody_listens(play: Play) -> None:
    replies: list[Publish] = []
    play.stage.received = replies.append
    play.enter("p.a", Puppet("s", says=on(Word, Publish("_INBOX.c.2", Word("!")))))
    play.stage.publish("nobody", Word("?"), "_INBOX.c.1")
    play.run(1.0)
    assert replies == [Publish("_INBOX.c.1", Undelivered("_INBOX.c.1"))]
    net(play).block(CLIENTS, into=True, lost=False)
    play.say("s", "?", seconds=1.0)
    assert len(replies) == 1
    net(play).unblock(CLIENTS, into=True, lost=False)
    play.run(1.0)
    assert replies[1:] == [Publish("_INBOX.c.2", Word("!"))]


# -- requests to buckets, and watches


class Bucket:
    """An edge whose commands travel. asked: when each came to the server."""

    remote = frozenset((str,))

    def __init__(self) -> None:
        self.asked: list[str] = []

    def __call__(self, command: Any) -> tuple[float, Any]:
        self.asked.append(command)
        return 0.0, command.upper()


@pytest.mark.parametrize(
    ("into", "timeout", "answer", "asked"),
    [
        (True, 0.0, Failed("id", "the server does not answer"), 1),
        (False, 0.0, Failed("id", "the server does not answer"), 0),
        (True, 2.0, TimedOut("id"), 1),
        (False, 2.0, TimedOut("id"), 0),
    ],
)
def test_a_request_without_an_answer_fails_and_may_be_carried_out_all_the_same(
    play: Play, into: bool, timeout: float, answer: Any, asked: int
) -> None:
    bucket = Bucket()
    net(play).block("p", into=into, lost=False)
    puppet = play.enter("p.a", Puppet(says=on(Started, Do("id", "x", timeout))), bucket)
    play.run(ANSWERED + 1.0)
    assert puppet.seen[1:] == [(timeout or ANSWERED, answer)]
    assert len(bucket.asked) == asked
    net(play).unblock("p", into=into, lost=False)
    play.run(1.0)
    assert len(bucket.asked) == 1
    assert [message for _, message in puppet.seen[1:]] == [answer]


def test_a_request_travels_both_ways(play: Play) -> None:
    puppet = play.enter("p.a", Puppet(says=on(Started, Do("id", "x"))), Bucket(), seconds=1.0)
    ((at, message),) = puppet.seen[1:]
    assert message == Done("id", "X")
    assert at > 0.0


def test_a_bucket_that_is_there_comes_before_it_is_said_to_be_complete(play: Play) -> None:
    play.stage.put("b", "k", b"1")
    watching = play.enter("p.a", Puppet(watches=["b"]), seconds=1.0)
    assert [type(message) for _, message in watching.seen] == [Started, Changed, Synced]


def test_requests_wait_where_the_server_serves_them_late_while_other_messages_pass(play: Play) -> None:
    bucket = Bucket()
    puppet = play.enter("p.a", Puppet("s", says=on(Started, Do("id", "x", 9.0))), bucket)
    net(play).process("p").served = START + 2.0
    play.say("s", "passes", seconds=1.9)
    assert (puppet.words, bucket.asked) == (["passes"], [])
    play.run(1.0)
    assert bucket.asked == ["x"]
    assert [message for _, message in puppet.got(Done)] == [Done("id", "X")]


def test_a_watch_is_late_and_says_each_change_twice_but_none_after_a_later_one(play: Play) -> None:
    watching = play.enter("p.a", Puppet(watches=["b"]))
    prompt = play.enter("q.a", Puppet(watches=["b"]))
    net(play).process("p").late = 1.0
    play.stage.put("b", "k", b"1")
    play.run(0.5)
    assert (len(watching.got(Changed)), len(prompt.got(Changed))) == (0, 1)
    net(play).process("p").late = 0.0
    play.stage.put("b", "k", b"2")
    play.run(2.0)
    values = [message.value for _, message in watching.got(Changed)]
    assert values in ([b"1", b"1", b"2"], [b"1", b"1", b"2", b"2"])
    assert all(1.0 <= at < 1.2 for at, _ in watching.got(Changed))


def test_a_lost_process_gets_the_changes_that_it_missed(play: Play) -> None:
    watching = play.enter("p.a", Puppet(watches=["b"]), seconds=1.0)
    net(play).block("p", into=True, lost=True)
    play.stage.put("b", "k", b"1")
    play.run(1.0)
    assert watching.got(Changed) == []
    net(play).unblock("p", into=True, lost=True)
    play.run(1.0)
    assert [at for at, _ in watching.got(Changed)] == [2.0]


# -- stopped


def test_a_stopped_process_handles_nothing_and_then_all_at_once_with_the_time_that_it_is(play: Play) -> None:
    says = on(Started, After("k", 0.5, Ring("rings")), Do("id", "x"))
    puppet = play.enter("p.a", Puppet("s", says=says), lambda _: (0.6, "done"), seconds=0.1)
    net(play).stop("p")
    play.say("s", "waits", seconds=2.0)
    assert puppet.seen == [(0.0, Started())]
    net(play).go_on("p")
    play.run(0.0)
    assert sorted(map(repr, puppet.seen[1:])) == sorted(
        map(repr, [(2.1, Ring("rings")), (2.1, Done("id", "done")), (2.1, Word("waits"))])
    )


def test_a_timer_that_is_cancelled_at_the_wake_does_not_ring(play: Play) -> None:
    rang = 0
    for n in range(12):  # the order of what waits is drawn

        def says(message: Any) -> Any:
            if type(message) is Started:
                return [After("k", 0.5, Ring("no"))]
            return [Cancel("k")] if type(message) is Word else None

        puppet = play.enter(f"p{n}.a", Puppet(f"s{n}", says=says))
        net(play).stop(f"p{n}")
        play.say(f"s{n}", "cancels", seconds=1.0)
        net(play).go_on(f"p{n}")
        play.run(1.0)
        rang += len(puppet.got(Ring))
    assert 0 < rang < 12


class Device:
    """An edge whose work stops with its process."""

    computes = True

    def __init__(self, promised: Promised | None = None) -> None:
        self.promised = promised

    def __call__(self, _: Any) -> tuple[float, Any] | Promised:
        return self.promised or (1.0, "done")


@pytest.mark.parametrize(("until", "done"), [(0.7, 1.3), (2.4, 3.0)])
def test_the_device_of_a_stopped_process_stops_too(play: Play, until: float, done: float) -> None:
    promised = Promised()
    one = play.enter("p.a", Puppet(says=on(Started, Do("id", "x"))), Device())
    two = play.enter("p.b", Puppet(says=on(Started, Do("id", "x"))), Device(promised))
    play.stage.at(1.0, promised.keep, "kept")
    play.run(0.4)
    net(play).stop("p")
    play.run(until - 0.4)
    net(play).go_on("p")
    play.run(5.0)
    assert one.got(Done) == [(pytest.approx(done), Done("id", "done"))]
    assert two.got(Done) == [(pytest.approx(done), Done("id", "kept"))]


# -- dead


def test_a_dead_process_takes_nothing_and_its_successor_starts_anew(play: Play) -> None:
    first = play.enter("p.a", Puppet("s", says=on(Started, After("k", 0.5, Ring("no")))))
    asking = play.enter("asks", Puppet("mine.*", "go", says=on(Word, Publish("s", Word("?"), "mine.1"))))
    net(play).stop("p")
    play.say("s", "dies unread", seconds=0.2)
    net(play).die("p")
    play.say("go", "1", seconds=1.0)
    assert first.seen == [(0.0, Started())]
    assert len(asking.got(Undelivered)) == 1
    second = play.enter("p.a", Puppet("s"))
    net(play).go_on("p")  # of the first
    play.say("go", "2", seconds=1.0)
    assert second.words == ["?"]
    assert first.words == []


def test_what_a_process_dies_without_having_read_is_said(play: Play) -> None:
    unread: list[str] = []
    net(play).unread = lambda envelope: unread.append(envelope.reply)
    play.enter("p.a", Puppet("s"))
    net(play).stop("p")
    play.stage.publish("s", Word("waits"), "mine.1")
    play.run(0.5)
    net(play).block("p", into=True, lost=False)
    play.stage.publish("s", Word("is on its way"), "mine.2")
    play.run(0.5)
    net(play).die("p")
    net(play).unblock("p", into=True, lost=False)
    play.run(1.0)
    assert unread == ["mine.1", "mine.2"]


def test_a_reply_that_is_lost_is_said(play: Play) -> None:
    unread: list[str] = []
    replies: list[Publish] = []
    net(play).unread = lambda envelope: unread.append(envelope.reply)
    play.stage.received = replies.append
    net(play).block(CLIENTS, into=True, lost=True)
    play.enter("p.a", Puppet(says=on(Started, Publish("_INBOX.c.2", Word("!")))), seconds=1.0)
    net(play).unblock(CLIENTS, into=True, lost=True)
    play.run(1.0)
    assert (unread, replies) == (["_INBOX.c.2"], [])


def test_one_that_is_asked_to_stop_handles_what_is_on_its_way_first(play: Play) -> None:
    puppet = play.enter("p.a", Puppet("s"))
    net(play).block("p", into=True, lost=False)
    play.say("s", "before", seconds=0.5)
    play.stage.leave("p.a", goodbye=True)
    play.say("s", "after", seconds=0.5)
    net(play).unblock("p", into=True, lost=False)
    play.run(1.0)
    assert [type(message) for _, message in puppet.seen] == [Started, Word, Stopping]


# -- clocks


def test_the_clock_of_a_process_is_off_and_nobody_elses(play: Play) -> None:
    net(play).process("p").skew = -5.0
    off = play.enter("p.a", Puppet("s", says=on(Started, After("k", 1.0, Ring("rings")))))
    right = play.enter("q.a", Puppet("s"))
    play.say("s", "x", seconds=2.0)
    ((at, _),) = off.got(Word)
    assert -5.0 < at < -4.5
    assert right.got(Word)[0][0] > 0.0
    assert off.got(Ring) == [(-4.0, Ring("rings"))]

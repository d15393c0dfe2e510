"""A query that is sent again is one query, whichever dispatcher gets it: one meaning, one row, computed once. Virtual time."""

from typing import Any

import pytest

from bus.codec import decode, encode
from bus.messages.flow import DoneBatch, PartsEnded, ResentSought
from bus.messages.public import RESENT, Error, QueryHead, Tensor
from infaas.queries import DEADLINE, GRACE
from services.core.actor import Changed, Envelope, Will
from services.core.line import ECHO_S
from services.core.selection.policy import Decision
from services.dispatcher.resent import AGAIN_S, KEPT, MOST_S, PIECES, SAYS_S, SEEK_S
from tests.support.simulated.fleet import Fleet, refused
from tests.unit.dispatcher.test_join import Several, members

KEY = b"k" * 16


def ready(dispatchers: int = 2, fleet: Fleet | None = None) -> Fleet:
    fleet = fleet or Fleet(dispatchers=dispatchers)
    fleet.asks(dispatchers, seconds=2.0)
    fleet.stage.records.clear()
    fleet.devices["w0"].batches.clear()
    return fleet


def send(fleet: Fleet, to: str, *, age_ms: int | None = None, app: str = "app", **needs: Any) -> None:
    """The query reaches this dispatcher. age_ms: it is sent again, and is so old."""
    body = encode({"inputs": Tensor("FP32", [1, 2], b"\0" * 8), "id": "q", "retry_key": KEY, **needs})
    mark = None if age_ms is None else {RESENT: str(age_ms)}
    head = decode(QueryHead, body)
    envelope = Envelope(fleet.stage.now, head, fleet.subjects.query(app), "_INBOX.test.q", body, mark)
    fleet.stage.kernel._deliver(fleet.stage.members[to], envelope)


def rows(fleet: Fleet) -> list[Any]:
    return [row for row in fleet.outcomes() if row.id == "q"]


def runs(fleet: Fleet) -> int:
    return sum(labels.count("q") for labels in fleet.devices["w0"].batches)


def ends(fleet: Fleet) -> list[str]:
    return [row.outcome for row in rows(fleet)]


def twice(fleet: Fleet, seconds: float = 3.0) -> dict[str, Any]:
    """After so much more time the client has got the same reply twice, and there is one row of it; the reply."""
    fleet.stage.run(seconds)
    first, again = fleet.replies("q")
    assert first == again
    assert len([row for row in rows(fleet) if row.parent is None]) == 1
    return first


def sought(fleet: Fleet) -> list[ResentSought]:
    """What dispatchers have asked each other, where the test listens to that."""
    return fleet.sent(ResentSought, fleet.subjects.resent())


def test_while_another_dispatcher_has_it_nothing_is_said() -> None:
    fleet = ready()
    fleet.devices["w0"].slow = 200.0
    send(fleet, "d0")
    fleet.stage.run(0.05)
    send(fleet, "d1", age_ms=50, accuracy=0.5)
    assert "outputs" in fleet.reply("q", 3.0)
    assert (ends(fleet), runs(fleet)) == (["ok"], 1)
    assert fleet.dispatcher("d1").resent.ends == {"had": 1}


def test_what_a_dispatcher_has_itself_it_seeks_nowhere() -> None:
    fleet = ready()
    fleet.stage.listen(fleet.subjects.resent())
    fleet.devices["w0"].slow = 200.0
    send(fleet, "d0")
    fleet.stage.run(0.05)
    send(fleet, "d0", age_ms=50)
    fleet.reply("q", 3.0)
    assert (runs(fleet), sought(fleet)) == (1, [])


@pytest.mark.parametrize("to", ["d0", "d1"])
def test_what_an_executor_has_answered_it_says_again(to: str) -> None:
    fleet = ready()
    send(fleet, "d0")
    fleet.stage.run(0.5)
    send(fleet, to, age_ms=500)
    twice(fleet)
    assert (ends(fleet), runs(fleet)) == (["ok"], 1)


@pytest.mark.parametrize("to", ["d0", "d1"])
def test_what_several_models_have_answered_is_said_again(to: str) -> None:
    fleet = ready(fleet=Several(*members("a", "b"), dispatchers=2))
    send(fleet, "d0")
    fleet.stage.run(0.5)
    send(fleet, to, age_ms=500)
    assert len(twice(fleet)["members"]) == 2
    assert [row.outcome for row in rows(fleet) if row.parent is None] == ["ok"]


@pytest.mark.parametrize("to", ["d0", "d1"])
@pytest.mark.parametrize(("app", "needs"), [("app", {"accuracy": 0.99}), ("nothing", {})])
def test_what_a_dispatcher_has_refused_it_refuses_again(to: str, app: str, needs: dict[str, Any]) -> None:
    fleet = ready()
    send(fleet, "d0", app=app, **needs)
    fleet.stage.run(0.5)
    send(fleet, to, age_ms=500, app=app, **needs)
    fleet.stage.run(3.0)
    first, again = fleet.replies("q")
    assert first["error"] == again["error"]
    assert len(rows(fleet)) == 1


@pytest.mark.parametrize("to", ["d0", "d1"])
def test_a_default_output_stays_one_though_a_model_could_answer_now(to: str) -> None:
    fleet = ready()
    fleet.change(default_output=7)
    fleet.devices["w0"].slow = 200.0
    send(fleet, "d0", latency_ms=100.0)
    fleet.stage.run(2.0)
    fleet.devices["w0"].slow = 1.0
    send(fleet, to, age_ms=2000, latency_ms=100.0)
    assert twice(fleet)["default"] is True
    assert ends(fleet) == ["default"]


def test_what_nobody_has_is_begun_and_counts_from_when_it_was_sent_first() -> None:
    fleet = ready()
    asked = fleet.stage.now
    send(fleet, "d1", age_ms=1500, latency_ms=1000.0)
    reply = fleet.reply("q", 3.0)
    assert reply["missed"] == ["latency"]
    assert reply["latency_ms"] >= 1500.0
    [row] = rows(fleet)
    assert (row.outcome, row.latency_ms) == ("late", reply["latency_ms"])
    assert row.time == pytest.approx(asked - 1.5, abs=SAYS_S + 0.2)


def test_what_an_executor_has_forgotten_is_computed_again() -> None:
    fleet = ready()
    send(fleet, "d0")
    fleet.stage.run(0.5)
    answers = fleet.stage.members["w0/cpu"].actor.answers
    answers._young.clear()
    answers._old.clear()
    send(fleet, "d1", age_ms=1500)
    fleet.reply("q", AGAIN_S + 1.0)
    send(fleet, "d1", age_ms=4500)  # its client has not got it
    fleet.stage.run(AGAIN_S + 1.0)
    assert len(fleet.replies("q")) == 2
    assert {row.outcome for row in rows(fleet)} == {"ok"}


def test_while_the_executor_that_has_answered_stands_still_nothing_else_is_said() -> None:
    fleet = ready()
    send(fleet, "d0", latency_ms=300.0)
    fleet.stage.run(0.5)
    fleet.stage.pause("w0/cpu")
    send(fleet, "d1", age_ms=500, latency_ms=300.0)
    fleet.stage.run(3.0)
    fleet.stage.go_on("w0/cpu")
    twice(fleet)
    assert ends(fleet) == ["ok"]


@pytest.mark.parametrize("slow_s", [0.0, 0.25, 0.6])
def test_what_the_executor_of_a_dead_dispatcher_has_is_not_taken(slow_s: float) -> None:
    """Also where each message takes so long, as on a busy machine: the question travels, and the executor's word."""
    fleet = ready()
    fleet.devices["w0"].slow = 4000.0
    fleet.stage.delay = slow_s
    fleet.stage.run(5.0 + slow_s)
    send(fleet, "d0")
    fleet.stage.run(0.05 + slow_s)
    fleet.stage.kill("d0", seconds=3.0)
    send(fleet, "d1", age_ms=3050)
    assert "outputs" in fleet.reply("q", 9.0)
    assert (ends(fleet), runs(fleet)) == (["ok"], 1)


@pytest.mark.parametrize("stopped_s", [2.0, 8.0])
def test_a_dispatcher_that_was_stopped_says_nothing_else_about_what_another_one_has_taken(stopped_s: float) -> None:
    fleet = ready()
    fleet.stage.pause("d0", seconds=0.2)
    send(fleet, "d0", latency_ms=300.0)  # unread
    fleet.stage.run(1.5)
    send(fleet, "d1", age_ms=1500, latency_ms=300.0)
    fleet.stage.run(stopped_s - 1.7)
    fleet.stage.go_on("d0", seconds=4.0)
    first, *more = fleet.replies("q")
    assert all(one == first for one in more)
    assert len(more) <= 1
    assert len(rows(fleet)) == 1


def test_a_dispatcher_that_has_it_and_was_stopped_drops_what_another_one_has_begun() -> None:
    fleet = ready()
    fleet.kill_worker("w0", seconds=4.0)
    send(fleet, "d0", deadline=fleet.stage.now + 20.0)  # it waits for a worker
    fleet.stage.run(0.1)
    assert fleet.dispatcher().in_flight.waiting
    fleet.stage.pause("d0", seconds=3.0)
    send(fleet, "d1", age_ms=3100)
    fleet.stage.run(1.0)
    fleet.stage.go_on("d0")
    fleet.start_worker("w0", seconds=25.0)
    assert (len(fleet.replies("q")), len(rows(fleet))) == (1, 1)


def test_a_dispatcher_that_stands_still_for_a_moment_is_waited_for() -> None:
    fleet = ready()
    send(fleet, "d0", accuracy=0.99)  # refused there
    fleet.stage.run(0.3)
    fleet.stage.pause("d0", seconds=0.2)
    send(fleet, "d1", age_ms=500, accuracy=0.99)
    fleet.stage.run(0.8)
    fleet.stage.go_on("d0")
    twice(fleet)


def test_a_dispatcher_that_has_not_got_the_question_is_asked_again() -> None:
    fleet = ready()
    send(fleet, "d0", accuracy=0.99)  # refused there
    fleet.stage.run(0.52)  # its next heartbeat is not due soon
    fleet.stage.clog("d0")
    send(fleet, "d1", age_ms=300, accuracy=0.99)
    fleet.stage.run(1.5 * ECHO_S)
    fleet.stage._held["d0"].clear()  # its connection begins anew
    fleet.stage.go_on("d0")
    twice(fleet, 3.0 * ECHO_S)  # it finds that, and beats at once


def test_a_dispatcher_that_never_answers_is_not_waited_for_for_ever() -> None:
    fleet = ready()
    log = fleet.dispatcher()._outcomes.log

    def beat() -> None:
        odd = log.heartbeat("odd", fleet.stage.now, leaving=False, adopts=True)
        fleet.stage.publish(fleet.subjects.dispatcher_heartbeat("odd"), odd)

    for number in range(30):
        fleet.stage.at(0.5 * number, beat)
    fleet.stage.run(0.1)
    send(fleet, "d1", age_ms=300)
    fleet.stage.run(MOST_S - 0.5)
    assert not fleet.replies("q")
    fleet.reply("q", 2.0)


def test_a_dispatcher_whose_heartbeats_come_late_is_waited_for_no_longer_than_it_has_lived() -> None:
    """They were on a clogged link, and it has died since."""
    fleet = ready()
    log = fleet.dispatcher()._outcomes.log
    subject, began = fleet.subjects.dispatcher_heartbeat("odd"), fleet.stage.now
    fleet.stage.publish(subject, log.heartbeat("odd", began, leaving=False, adopts=True), seconds=5.0)
    fleet.stage.publish(subject, log.heartbeat("odd", began + 0.5, leaving=False, adopts=True))
    fleet.stage.run(0.1)
    send(fleet, "d1", age_ms=300)
    fleet.reply("q", 0.5)


@pytest.mark.parametrize("again", [False, True])
def test_an_executor_says_again_what_it_has_answered_only_when_it_is_asked_first(again: bool) -> None:
    fleet = ready()
    send(fleet, "d0")
    fleet.stage.run(0.5)
    [row] = rows(fleet)
    fleet.stage.publish(fleet.subjects.resent(), ResentSought("odd", row.uid, "_INBOX.test.q", again))
    fleet.stage.run(0.5)
    assert len(fleet.replies("q")) == 1 + (not again)


def test_a_runner_of_offline_jobs_is_not_waited_for() -> None:
    fleet = ready(dispatchers=1)
    others = fleet.dispatcher().resent._others
    runner = fleet.dispatcher()._outcomes.log.heartbeat("runner-w0", fleet.stage.now, leaving=False)
    fleet.stage.publish(fleet.subjects.dispatcher_heartbeat("runner-w0"), runner, seconds=0.1)
    assert not others


def test_what_a_busy_dispatcher_reads_a_little_late_is_sought_nowhere() -> None:
    """No client has sent it again so soon, and asking all for each query would make a busy machine busier."""
    fleet = ready()
    fleet.stage.listen(fleet.subjects.resent())
    fleet.stage.pause("d0", seconds=0.1)
    send(fleet, "d0")
    fleet.stage.run(SEEK_S - 0.3)
    fleet.stage.go_on("d0")
    fleet.reply("q", 1.0)
    assert not sought(fleet)


@pytest.mark.parametrize("again", [True, False], ids=["it has begun it", "nobody has it"])
def test_what_was_over_before_it_was_read_is_not_refused_before_another_dispatcher_may_have_said_that_it_has_it(
    again: bool,
) -> None:
    """A client sends it again sooner than the library does."""
    fleet = ready()
    fleet.stage.clog("d0", seconds=3.0)
    send(fleet, "d0", latency_ms=600.0)
    fleet.stage.run(0.3)
    if again:
        send(fleet, "d1", age_ms=300, latency_ms=600.0)
    fleet.stage.run(0.5)
    assert len(fleet.replies("q")) == again
    fleet.stage.go_on("d0")
    assert ("outputs" in fleet.reply("q", 2.0 * ECHO_S)) == again
    fleet.stage.run(2.0)
    assert (len(fleet.replies("q")), ends(fleet)) == (1, ["ok" if again else "refused"])


@pytest.mark.parametrize("read_s", [0.3, 0.7])
def test_what_a_dispatcher_reads_soon_that_had_heard_nothing_for_long_is_not_refused_as_it_knows_no_better(
    read_s: float,
) -> None:
    """Others have not waited for it."""
    fleet = ready()
    fleet.stage.clog("d0", seconds=8.0)
    fleet.stage.send("d0", Changed("infaas-catalog", "app.app", None))
    send(fleet, "d0")
    send(fleet, "d1", age_ms=300)
    fleet.stage.run(read_s)
    assert "outputs" in fleet.reply("q")
    fleet.stage.go_on("d0", seconds=3.0)
    assert ({*map(str, fleet.replies("q"))}, ends(fleet)) == ({str(fleet.replies("q")[0])}, ["ok"])


@pytest.mark.parametrize("age_s", [1.5, 22.5])
def test_what_is_begun_late_has_no_more_time_than_its_client_has_patience(age_s: float) -> None:
    fleet = ready()
    fleet.devices["w0"].slow = 1e6
    send(fleet, "d1", age_ms=round(1000 * age_s))
    seconds, reply = fleet.timed("q", 32.0)
    refused(reply, "deadline")
    assert seconds + age_s < DEADLINE + GRACE


def test_what_is_begun_after_its_client_has_lost_patience_is_refused() -> None:
    fleet = ready()
    send(fleet, "d1", age_ms=31_000)
    refused(fleet.reply("q", 2.0), "deadline")
    assert runs(fleet) == 0


def test_of_two_dispatchers_that_begin_it_as_neither_hears_the_other_one_goes_on() -> None:
    fleet = Fleet(dispatchers=2, workers=0)
    fleet.stage.run(2.0)
    for name in ("d0", "d1"):
        fleet.stage.clog(name, fleet.subjects.resent())
        send(fleet, name, age_ms=1500)
    fleet.stage.run(MOST_S + 1.0)
    assert [fleet.stage.members[name].actor.resent.ends["taken"] for name in ("d0", "d1")] == [1, 1]
    refused(fleet.reply("q", 20.0), "deadline")
    assert len(rows(fleet)) == 1


def test_what_an_executor_answers_that_had_it_from_a_dispatcher_that_was_silent_is_what_is_recorded() -> None:
    """Nobody hears the question who has it, so another dispatcher begins it, on another worker, which would refuse it at its deadline."""
    fleet = ready(fleet=Fleet(dispatchers=2, workers=2))
    first, second = (fleet.dispatcher(name) for name in ("d0", "d1"))
    fleet.order(next(iter(first.view.records.values())), "w1", seconds=3.0)
    fleet.devices["w1"].slow, fleet.devices["w0"].slow = 6_000.0, 30_000.0
    for name in ("d0", "w0/cpu", "w1/cpu"):
        fleet.stage.clog(name, fleet.subjects.resent())
    send(fleet, "d0")
    fleet.stage.run(0.05)
    [query] = first.in_flight.dispatched.values()
    send(fleet, "d1", age_ms=50)
    while query.uid not in second.in_flight.dispatched:
        second.view.remove(query.instance.id)
        fleet.stage.run(0.01)
    assert "outputs" in fleet.reply("q", 8.0)
    fleet.stage.run(20.0)
    assert (ends(fleet), [row.worker for row in rows(fleet)]) == (["ok"], ["w1"])
    assert len(fleet.replies("q")) == 1, "it is withdrawn from the other one"


@pytest.mark.parametrize("back_s", [0.0, 1.0], ids=["before its answer", "after it"])
def test_what_a_silent_dispatcher_may_have_another_one_does_not_refuse_for_want_of_room(back_s: float) -> None:
    """It stands still, and its executor answers: the row says so, whoever hears of it first."""
    fleet = ready()
    fleet.devices["w0"].slow = 1600.0  # 4 s
    first, second = (fleet.dispatcher(name) for name in ("d0", "d1"))
    send(fleet, "d0")
    fleet.stage.run(0.05)
    [query] = first.in_flight.dispatched.values()
    fleet.stage.pause("d0")
    fleet.stage.clog("w0/cpu", fleet.subjects.resent(), seconds=2.5)
    full = Error(code="overloaded", message="all of them have too much to do")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(second, "_select", lambda *_: Decision(refusal=full))
        send(fleet, "d1", age_ms=2500)
        fleet.stage.run(0.5)
        assert query.uid in second.in_flight.waiting
    fleet.stage.run(1.0 + back_s)
    fleet.stage.go_on("d0", seconds=10.0)
    assert all("outputs" in reply for reply in fleet.replies("q"))
    assert set(ends(fleet)) == {"ok"}


@pytest.mark.parametrize(("asked_ms", "computed"), [(300, 1), (4500, 2)])
def test_what_was_answered_is_not_computed_again_for_a_dispatcher_that_died_asking(
    asked_ms: int, computed: int
) -> None:
    """Nor is it if nobody else knows of that answer, unless the client has asked so late that it has not got it."""
    fleet = ready()
    send(fleet, "d0")
    assert "outputs" in fleet.reply("q", 0.5)
    body = encode({"inputs": Tensor("FP32", [1, 2], b"\0" * 8), "id": "q", "retry_key": KEY})
    again = Envelope(
        fleet.stage.now,
        decode(QueryHead, body),
        fleet.subjects.query("app"),
        "_INBOX.test.q",
        body,
        {RESENT: str(asked_ms)},
    )
    [will] = [one.publish for one in fleet.dispatcher("d0").handle(again) if type(one) is Will]
    fleet.stage.kill("d0", seconds=6.0)
    executor: Any = fleet.stage.members["w0/cpu"].actor
    executor.answers._young.clear()  # as one that was replaced
    fleet.stage.publish(will.subject, encode(will.message), seconds=5.0)
    assert runs(fleet) == computed


def test_so_many_queries_that_have_ended_are_known_and_hardly_more() -> None:
    resent = ready().dispatcher("d0").resent
    uids = [number.to_bytes(16, "little") for number in range(2 * KEPT)]
    for first in range(0, len(uids), 64):
        resent.ended(DoneBatch("q", "w", 1, "i", "v", 64, 1.0, 2.0, 0.0, 0, uids[first : first + 64]))
    known = [resent.has_ended(uid) for uid in uids]
    assert all(known[-KEPT:]) and sum(known) <= KEPT + KEPT // PIECES


# -- of several models


@pytest.mark.parametrize("latency_ms", [300.0, 20_000.0])
def test_what_a_dead_dispatcher_had_asked_several_models_is_answered_once(latency_ms: float) -> None:
    fleet = ready(fleet=Several(*members("a", "b"), dispatchers=2))
    fleet.devices["w0"].slow = 20.0
    send(fleet, "d0", latency_ms=latency_ms)
    fleet.stage.run(0.01)
    fleet.stage.kill("d0", seconds=0.05)
    send(fleet, "d1", age_ms=60, latency_ms=latency_ms)  # with an objective nobody hands it on in time
    assert "outputs" in fleet.reply("q", 6.0)
    assert len([row for row in rows(fleet) if row.parent is None]) == 1


def test_what_a_dead_dispatcher_has_ended_is_not_begun_again_though_the_executor_of_its_parts_does_not_know() -> None:
    fleet = Several(*members("a", "b"), dispatchers=2, workers=2)
    ready(fleet=fleet)
    deaf: Any = fleet.stage.members["w0/cpu"].actor
    deaf._on[PartsEnded] = lambda _: ()  # its connection is broken for a moment
    send(fleet, "d0", latency_ms=20_000.0)
    assert "outputs" in fleet.reply("q", 1.0)
    computed = fleet.computed
    fleet.stage.kill("d0")
    fleet.stage.run(8.0)
    assert len(fleet.replies("q")) == 1
    assert len([row for row in rows(fleet) if row.parent is None]) == 1
    assert fleet.computed == computed


@pytest.mark.parametrize("begun", [False, True])
def test_who_took_over_what_a_silent_dispatcher_had_ended_drops_it_once_executors_hear_of_that_end(begun: bool) -> None:
    fleet = ready(fleet=Several(*members("a", "b"), dispatchers=2))
    fleet.stage.clog("w0/cpu", fleet.subjects.ended("d0"))
    send(fleet, "d0", latency_ms=20_000.0)
    assert "outputs" in fleet.reply("q", 1.0)
    fleet.stage.kill("d0")
    executor: Any = fleet.stage.members["w0/cpu"].actor
    executor.answers._young.clear()  # else they are repeated at once
    fleet.devices["w0"].slow = 200.0
    heir = fleet.dispatcher("d1")
    while not (heir.composites.joins.open if begun else heir.resent._asked):
        fleet.stage.run(0.01)
    fleet.stage.go_on("w0/cpu", seconds=5.0)
    assert len(fleet.replies("q")) == 1
    assert [row.outcome for row in rows(fleet) if row.parent is None] == ["ok"]


def test_what_was_taken_from_a_dispatcher_that_was_stopped_is_handed_on_again_if_the_one_that_took_it_dies() -> None:
    """The first one does not say that it has ended."""
    fleet = ready(fleet=Several(*members("a", "b"), dispatchers=2))
    fleet.devices["w0"].slow = 6_000.0
    send(fleet, "d0", latency_ms=60_000.0)
    fleet.stage.run(0.05)
    fleet.stage.pause("d0", seconds=4.0)
    assert fleet.dispatcher("d1").composites.joins.open
    fleet.stage.go_on("d0", seconds=1.0)
    assert not fleet.dispatcher("d0").composites.joins.open
    fleet.stage.kill("d1")
    assert "outputs" in fleet.reply("q", 30.0)
    assert [row.outcome for row in rows(fleet) if row.parent is None] == ["ok"]

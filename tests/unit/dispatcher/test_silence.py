"""Who speaks for a query whose executor is silent, or whose dispatcher was: one process, and the row is what the client got. Virtual time."""

from collections.abc import Callable
from typing import Any

import pytest
from msgspec import Raw

from bus.messages.events import OutcomeEvent
from bus.messages.flow import DoneBatch, HandBack
from bus.port import ECHO
from services.core.actor import Publish, PublishBehind
from services.core.line import ECHO_S, WINDOW_S
from services.core.outcomes import CUT_OFF, ECHO_LOST, SILENT
from services.core.settings import DispatcherSettings, Settings
from services.dispatcher.silence import STALE
from tests.support.simulated.fleet import Fleet, asked_for, metrics, refused
from tests.unit.dispatcher.test_join import Several, holders
from tests.unit.dispatcher.test_refusals import LATEST, fall_silent, hang, warm

SLO = 0.2


def row(fleet: Fleet, label: str) -> OutcomeEvent:
    [found] = [one for one in fleet.outcomes() if one.id == label]
    return found


def reply(fleet: Fleet, label: str) -> tuple[float, dict[str, Any]]:
    """When the client got its one reply, and that."""
    [at] = [at for at, subject, _ in fleet.stage.heard if subject == f"_INBOX.test.{label}"]
    [one] = fleet.replies(label)
    return at, one


@pytest.mark.parametrize("late_s", [0.05, 0.5, 5.0])
def test_an_answer_in_time_is_what_is_recorded_however_late_its_dispatcher_hears_of_it(late_s: float) -> None:
    fleet = warm()
    label = fleet.ask(latency_ms=1000.0 * SLO)
    fleet.stage.run(0.0003)  # it is with its executor
    fleet.stage.clog("d0")
    assert "outputs" in fleet.reply(label, SLO + late_s)
    fleet.stage.go_on("d0")
    assert "outputs" in fleet.reply(label, ECHO_LOST + 1.0)
    assert row(fleet, label).outcome == "ok"


def test_a_dispatcher_that_does_not_hear_itself_refuses_what_is_not_answered_once_it_does() -> None:
    fleet = warm()
    fall_silent(fleet)
    label = fleet.ask(latency_ms=1000.0 * SLO, seconds=0.01)
    fleet.stage.clog("d0", seconds=1.0)
    assert not fleet.replies(label)
    again = fleet.stage.now
    fleet.stage.go_on("d0", seconds=1.0)
    at, refusal = reply(fleet, label)
    refused(refusal, "deadline")
    assert at - again < ECHO_S + 0.01, "it asks executors first what they have said meanwhile"
    assert row(fleet, label).outcome == "refused"


def test_a_dispatcher_that_never_hears_itself_again_refuses_in_the_end() -> None:
    fleet = warm()
    fall_silent(fleet)
    asked = fleet.stage.now
    label = fleet.ask(latency_ms=1000.0 * SLO, seconds=0.01)
    fleet.stage.clog("d0", seconds=CUT_OFF + 2.0)
    assert reply(fleet, label)[0] - asked == pytest.approx(SLO + CUT_OFF, abs=0.5)


def test_what_an_executor_says_after_its_dispatcher_has_spoken_for_it_is_counted_and_changes_nothing() -> None:
    fleet = warm()
    fall_silent(fleet)
    asked = fleet.stage.now
    label = fleet.ask(latency_ms=1000.0 * SLO, seconds=1.0)
    assert reply(fleet, label)[0] - asked <= SLO + LATEST
    [instance] = fleet.dispatcher().view.instances
    done = DoneBatch(
        "w0/cpu/1", "w0", 9, instance, fleet.records[0].variant, 1, asked, asked + 0.1, 1.0, 0, [row(fleet, label).uid]
    )
    for _ in range(2):
        fleet.stage.publish(fleet.subjects.done("d0"), done)
    fleet.stage.run(1.0)
    assert (row(fleet, label).outcome, row(fleet, label).cost) == ("refused", 0.0)
    assert metrics(fleet)["infaas_crossed_replies_total", "app"] == 1


# -- a bus of several servers


class Route:
    """Between the executors' server and the dispatchers', and slow: what is on it waits until `go_on`. lossy: then it breaks instead."""

    def __init__(self, fleet: Fleet) -> None:
        self.slow = self.lossy = False
        self._waiting: list[tuple[Any, Publish]] = []
        self._kernel = fleet.stage.kernel
        self._done = fleet.subjects.done("d0")
        self._publish = self._kernel._perform[Publish]
        self._kernel._perform |= {Publish: self._said, PublishBehind: self._echo}

    def _said(self, member: Any, effect: Publish) -> None:
        if self.slow and effect.subject == self._done:
            self._waiting.append((member, effect))
        else:
            self._publish(member, effect)

    def _echo(self, member: Any, effect: Publish) -> None:
        self._come(member, effect, "early")
        if self.slow:
            self._waiting.append((member, effect))
        else:
            self._publish(member, effect)

    def _come(self, member: Any, effect: Publish, how: str) -> None:
        self._kernel._post(self._kernel._route, (effect.subject, effect.message, "", member, b"", {ECHO: how}))

    def go_on(self) -> None:
        self.slow = False
        for member, effect in self._waiting:
            if not self.lossy:
                self._publish(member, effect)
            elif isinstance(effect, PublishBehind):
                self._come(member, effect, "lost")
        self._waiting.clear()


@pytest.mark.parametrize("lossy", [False, True])
def test_a_notice_that_is_long_on_its_way_between_two_servers_is_waited_for(lossy: bool) -> None:
    fleet = warm()
    route = Route(fleet)
    label = fleet.ask(latency_ms=1000.0 * SLO)
    fleet.stage.run(0.0003)  # it is with its executor
    route.slow, route.lossy = True, lossy
    fleet.stage.run(SLO + 1.0)
    assert "outputs" in reply(fleet, label)[1]
    assert [one for one in fleet.outcomes() if one.id == label] == []
    route.go_on()
    fleet.stage.run(1.0)
    assert "outputs" in reply(fleet, label)[1]
    assert row(fleet, label).outcome == "ok"


def test_with_several_servers_an_executor_that_is_silent_is_spoken_for_as_early() -> None:
    fleet = warm()
    Route(fleet)
    fall_silent(fleet)
    asked = fleet.stage.now
    at, refusal = reply(fleet, fleet.ask(latency_ms=1000.0 * SLO, seconds=1.0))
    assert refusal["error"]["code"] == "deadline"
    assert at - asked <= SLO + LATEST


def test_while_another_server_says_nothing_a_dispatcher_hears_itself_and_takes_queries() -> None:
    fleet = warm()
    Route(fleet).slow = True
    fleet.stage.run(2.0 * STALE)
    assert "outputs" in reply(fleet, fleet.ask(latency_ms=1000.0 * SLO, seconds=SLO))[1]


# -- a dispatcher that was stopped


def test_what_a_stopped_dispatcher_reads_late_counts_from_when_it_came_to_its_host() -> None:
    fleet = warm()
    fleet.stage.pause("d0", seconds=0.2)
    came = fleet.stage.now
    hurried, patient = fleet.ask(latency_ms=300.0), fleet.ask()
    fleet.stage.run(2.3)
    fleet.stage.go_on("d0")
    assert (fleet.reply(hurried, 1.0)["error"]["code"], row(fleet, hurried).outcome) == ("deadline", "refused")
    answer = fleet.reply(patient)
    assert answer["latency_ms"] >= 2300.0
    assert row(fleet, patient).latency_ms == answer["latency_ms"]
    assert row(fleet, patient).time <= came
    assert "outputs" in fleet.reply(fleet.ask(latency_ms=300.0), 1.0)


def test_what_a_busy_dispatcher_reads_a_little_late_counts_as_new() -> None:
    fleet = warm()
    fleet.stage.pause("d0")
    label = fleet.ask(latency_ms=300.0, seconds=STALE - 0.11)
    fleet.stage.go_on("d0")
    assert "outputs" in fleet.reply(label, 1.0)


def test_a_dispatcher_that_was_stopped_takes_no_worker_for_dead_before_it_has_heard_what_waited() -> None:
    fleet = warm()
    fleet.devices["w0"].slow = 1000.0
    label = fleet.ask(seconds=0.01)
    fleet.stage.pause("d0", seconds=2.2)
    fleet.stage.go_on("d0")
    assert "outputs" in fleet.reply(label, 5.0)
    assert fleet.devices["w0"].batches.count([label]) == 1


def test_a_dispatcher_that_was_taken_for_dead_leaves_what_others_have_ended_or_taken() -> None:
    fleet = warm(dispatchers=2)
    fleet.devices["w0"].slow = 2000.0  # 5 s a batch
    labels = fleet.asks(4, seconds=0.01)
    assert [q.head.id for q in fleet.dispatcher().in_flight.dispatched.values()]
    fleet.stage.pause("d0", seconds=4.0)
    fleet.devices["w0"].slow = 1.0
    fleet.stage.run(3.0)  # they are answered, and their outcomes recorded in its place
    fleet.stage.go_on("d0", seconds=60.0)
    for label in labels:
        assert "outputs" in fleet.reply(label)
        assert {one.outcome for one in fleet.outcomes() if one.id == label} == {"ok"}


def test_a_query_with_parts_that_another_dispatcher_has_taken_over_ends_there_alone() -> None:
    fleet = Several(dispatchers=2)
    fleet.change(latency_ms=20_000.0)
    fleet.devices["w0"].slow = 2000.0
    labels = fleet.asks(2, seconds=0.01)
    assert holders(fleet) == ["d0", "d1"]
    fleet.stage.pause("d0", seconds=25.0)
    fleet.stage.go_on("d0", seconds=30.0)
    for label in labels:
        assert "outputs" in fleet.reply(label)
        assert [one.outcome for one in fleet.outcomes() if one.id == label] == ["ok"]


def test_a_model_that_hangs_is_its_executors_matter() -> None:
    fleet = warm()
    hang(fleet)
    refused(fleet.reply(fleet.ask(latency_ms=1000.0 * SLO), 2.0), "deadline")
    assert not fleet.dispatcher().silence.crossings


# -- a line that is always slow, as that of a busy machine


def slow(fleet: Fleet, seconds: float) -> None:
    """Each message takes so long from now on, and all have found that out."""
    fleet.stage.delay = seconds
    fleet.stage.run(3.0 * WINDOW_S + seconds)


@pytest.mark.parametrize("seconds", [0.25, 0.6])
def test_on_a_slow_line_queries_are_answered(seconds: float) -> None:
    fleet = warm(dispatchers=2)
    slow(fleet, seconds)
    labels = asked_for(fleet, 10.0, every=0.5)
    assert all("outputs" in one for one in fleet.each(labels, 10.0))
    assert {row(fleet, label).outcome for label in labels} == {"ok"}
    computed = [label for batch in fleet.devices["w0"].batches for label in batch]
    assert [computed.count(label) for label in labels] == [1] * len(labels)


@pytest.mark.parametrize("seconds", [0.25, 0.6])
@pytest.mark.parametrize("broken", [hang, fall_silent])
def test_on_a_slow_line_a_query_that_nobody_answers_is_refused_at_its_deadline(
    broken: Callable[[Fleet], None], seconds: float
) -> None:
    fleet = warm()
    slow(fleet, seconds)
    broken(fleet)
    after, refusal = fleet.timed(fleet.ask(latency_ms=8000.0), 20.0)
    refused(refusal, "deadline")
    assert after < 8.0 + SILENT + 5.0 * seconds + 0.2


def test_a_dispatcher_that_turns_seldom_refuses_what_is_not_answered() -> None:
    """It stands still for a moment again and again, and is in time between."""
    fleet = warm()
    fall_silent(fleet)
    stage, asked = fleet.stage, fleet.stage.now
    label = fleet.ask(latency_ms=1000.0)
    for _ in range(40):
        stage.pause("d0", seconds=0.55)
        stage.go_on("d0", seconds=0.05)
        if fleet.replies(label):
            break
    at, refusal = reply(fleet, label)
    refused(refusal, "deadline")
    assert at - asked < 4.0


# -- a worker that is taken for dead


@pytest.mark.parametrize("other", [False, True], ids=["nobody else has the model", "another worker gets it"])
def test_what_a_worker_has_whose_supervisor_is_silent_is_answered_once(other: bool) -> None:
    """As long as nobody else has it, its executor may still answer it."""
    fleet = warm()
    fleet.devices["w0"].slow = 1600.0  # 4 s a batch
    label = fleet.ask(latency_ms=30_000.0, seconds=0.01)
    fleet.stage.kill("w0", seconds=3.0)
    assert len(fleet.dispatcher().in_flight.waiting) == 1
    if other:
        fleet.start_worker("w1")
    assert "outputs" in fleet.reply(label, 20.0)
    assert row(fleet, label).worker == ("w1" if other else "w0")


def test_what_such_a_worker_has_is_refused_here_only_if_its_executor_has_not_spoken() -> None:
    fleet = warm()
    hang(fleet)
    asked = fleet.stage.now
    label = fleet.ask(latency_ms=4000.0, seconds=0.01)
    fleet.stage.kill("w0", seconds=6.0)
    at, refusal = reply(fleet, label)
    assert refusal["error"]["message"].startswith("the model had not answered"), "its executor's words"
    assert at - asked <= 4.0 + LATEST
    assert row(fleet, label).outcome == "refused"


def test_what_waits_for_its_turn_as_a_retry_stays_with_such_a_worker() -> None:
    fleet = warm()
    fleet.devices["w0"].slow = 1600.0  # 4 s a batch
    first = fleet.ask(latency_ms=30_000.0, seconds=0.01)
    second = fleet.ask(latency_ms=30_000.0, seconds=0.01)
    fleet.stage.kill("w0", seconds=3.0)
    fleet.start_worker("w1")
    hang(fleet, "w1")
    fleet.stage.run(1.0)
    flight = fleet.dispatcher().in_flight
    assert flight.retrying is not None
    assert [query.head.id for query in flight.retries.values()] == [second], "the first one runs alone"
    fleet.stage.run(10.0)
    assert not fleet.replies(first)
    assert "outputs" in fleet.reply(second)
    assert row(fleet, second).worker == "w0"


@pytest.mark.parametrize(("reason", "default"), [("deadline", None), ("failed", 7)])
def test_what_was_taken_from_an_executor_that_has_answered_it_unheard_is_not_refused(
    reason: str, default: int | None
) -> None:
    fleet = warm()
    fleet.change(default_output=default)
    fleet.start_worker("w1")
    fleet.stage.run(2.0)
    hang(fleet, "w1")
    route = Route(fleet)
    route.slow = True
    label = fleet.ask(latency_ms=20_000.0, seconds=0.5)
    assert "outputs" in fleet.reply(label)
    fleet.stage.kill("w0", seconds=3.0)
    flight = fleet.dispatcher().in_flight
    [query] = flight.dispatched.values()
    assert query.sent is not None
    assert (query.instance and query.instance.worker.name) == "w1"
    fleet.stage.publish(fleet.subjects.resubmit("d0"), HandBack(query.sent, reason, Raw(query.body)))
    fleet.stage.run(1.0)
    assert len(fleet.replies(label)) == 1
    route.go_on()
    fleet.stage.run(1.0)
    assert row(fleet, label).outcome == "ok"


def test_a_flood_that_waits_behind_the_batches_of_such_a_worker_is_not_tried_one_by_one() -> None:
    """Only what may have run is suspect: the rest goes to whoever serves the model next, all of it at once."""
    fleet = warm()
    fleet.devices["w0"].slow = 1600.0  # 4 s a batch
    labels = [fleet.ask(latency_ms=30_000.0 + n) for n in range(60)]
    fleet.stage.run(0.01)
    flight = fleet.dispatcher().in_flight
    [instance] = {query.instance for query in flight.dispatched.values()}
    assert instance is not None and len(flight.dispatched) == 60 > 3 * instance.most
    fleet.stage.kill("w0")
    fleet.stage.run(3.0)
    assert len(flight.waiting) == 60
    assert {query.head.id for query in flight.waiting.values() if query.crashes} == set(labels[: 2 * instance.most])


@pytest.mark.parametrize("hangs", [False, True])
def test_what_a_worker_has_that_is_taken_for_dead_twice_is_not_refused_before_its_executor_has_spoken(
    hangs: bool,
) -> None:
    """Nobody has said that its executor died, so no query counts as one that ends executors."""
    fleet = warm()
    fleet.devices["w0"].slow = 1e6 if hangs else 4000.0  # 10 s a batch
    asked = fleet.stage.now
    label = fleet.ask(latency_ms=15_000.0, seconds=0.01)
    for _ in range(2):
        fleet.stage.clog("w0", seconds=3.0)
        assert not fleet.dispatcher().in_flight.dispatched
        fleet.stage.go_on("w0", seconds=0.1)
    assert not fleet.replies(label)
    fleet.stage.run(15.0)
    at, said = reply(fleet, label)
    assert ("error" in said) == hangs
    assert at - asked < 15.0 + LATEST
    assert row(fleet, label).outcome == ("refused" if hangs else "ok")


def test_what_such_a_worker_has_is_not_refused_for_want_of_room() -> None:
    fleet = warm(settings=Settings(dispatcher=DispatcherSettings(max_queue=2)))
    fleet.devices["w0"].slow = 400.0  # a second a batch and more
    labels = fleet.asks(8, seconds=0.01)
    fleet.stage.kill("w0", seconds=3.0)
    late = fleet.ask(priority=1, seconds=0.1)
    refused(fleet.reply(late), "overloaded")
    assert all("outputs" in one for one in fleet.each(labels, 20.0))
    assert {row(fleet, label).outcome for label in labels} <= {"ok", "late"}

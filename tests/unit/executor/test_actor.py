"""The executor's actor by itself: inputs that come by reference, and the same query sent twice."""

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from bus.codec import encode
from bus.messages.events import OutcomeEvent
from bus.messages.fleet import DispatcherHeartbeat, InstanceSample, InstanceUnloaded, LoadInstance, UnloadInstance
from bus.messages.flow import DoneBatch, Echo, Execute, HandBack, Route, Withdraw
from bus.messages.public import Answer, ObjectRef, Refusal, Tensor
from bus.subjects import Subjects
from services.core.actor import After, Do, Done, Effect, Envelope, Failed, Publish, Record, Stopping, TimedOut
from services.core.cost import LatencyTable
from services.core.deadlines import DeadlineReached
from services.core.outcomes import GRACE, NOT_ANSWERED, NOT_STORED, SILENT
from services.core.placement import Device
from services.core.settings import DispatcherSettings, ExecutorSettings, Settings
from services.executor.actor import BatchesDue, make_executor
from services.executor.commands import BatchResult, FetchInputs, LoadedModel, RunBatch, UnloadModel
from tests.support.simulated.fleet import variant

CPU = Device(name="cpu", kind="cpu", cores=1, memory_mb=1000.0)
NOW = 1000.0
LEAVING = DispatcherHeartbeat(dispatcher="d1", incarnation=1, at=NOW, leaving=True)
INPUTS = encode(Tensor("FP32", [1, 2], bytes(8)))
BY_REFERENCE = msgspec.Raw(encode({"inputs_ref": {"bucket": "infaas-inputs", "key": "k"}}))


class Alone:
    """One executor with one loaded instance `i`; effects are sorted by what they are."""

    def __init__(self, given: Settings | None = None, **settings: Any) -> None:
        given = given or Settings(executor=ExecutorSettings(**settings))
        self.actor = make_executor(given, Subjects(), "w", CPU, 1)
        self.tell(LoadInstance(instance="i", variant=variant(), price_per_s=1e-5))
        self.tell(Done(("load", "i"), LoadedModel(load_ms=1.0, memory_mb=1.0, proof="")))

    def tell(self, message: Any, now: float = NOW) -> list[Effect]:
        return list(self.actor.handle(Envelope(now, message)))

    def execute(
        self,
        dispatcher: str = "d1",
        *,
        uid: bytes = b"u" * 16,
        attempt: int = 0,
        deadline: float = NOW + 5,
        at: float = NOW,
        **needs: Any,
    ) -> list[Effect]:
        inbox = f"_INBOX.{dispatcher}"
        route = Route(
            uid, 0, attempt, inbox, deadline, NOW, dispatcher, "i", "app", 1, "label", resendable=True, **needs
        )
        return self.tell(Execute(route, BY_REFERENCE), at)

    def take(self, label: str, deadline: float, attempt: int = 0, **needs: Any) -> list[Effect]:
        """A query whose reply subject is its label."""
        body = msgspec.Raw(encode({"inputs": {"x": Tensor("FP32", [1, 2], bytes(8))}}))
        route = Route(label.encode() * 16, 0, attempt, label, deadline, NOW, "d1", "i", "app", 1, label, **needs)
        return self.tell(Execute(route, body))

    def sample(self) -> InstanceSample:
        """What it reports of its instance."""
        return self.actor.instances["i"].sample(NOW + 5)

    def begin(self, now: float = NOW) -> Do:
        """Let it form a batch."""
        run = command(self.tell(BatchesDue(), now))
        assert isinstance(run.command, RunBatch)
        return run

    def end(self, run: Do, at: float = NOW + 0.001, told: float | None = None, **result: Any) -> list[Effect]:
        """The batch was computed until then, and it hears of it at that time or later."""
        outputs = [{"y": Tensor("FP32", [1, 1], bytes(4))} for _ in run.command.queries]
        return self.tell(Done(run.id, BatchResult(NOW, at, outputs, **result)), at if told is None else told)

    def run(self) -> list[Effect]:
        """Let it form a batch and compute it."""
        return self.end(self.begin())


def command(effects: list[Effect]) -> Do:
    [found] = [effect for effect in effects if isinstance(effect, Do)]
    return found


def published(effects: list[Effect], kind: type) -> list[Any]:
    found = []
    for effect in effects:
        if isinstance(effect, Publish):
            message = effect.message
            if isinstance(message, bytes):  # an answer that is kept is sent as it is kept
                message = msgspec.msgpack.decode(message, type=Answer if b"outputs" in message else Refusal)
            if isinstance(message, kind):
                found.append((effect.subject, message))
    return found


def test_inputs_by_reference_are_fetched_and_answered() -> None:
    alone = Alone()
    [fetch, _] = alone.execute()
    assert isinstance(fetch.command, FetchInputs)
    alone.tell(Done(fetch.id, INPUTS))
    effects = alone.run()
    [(subject, answer)] = published(effects, Answer)
    assert (subject, answer.id) == ("_INBOX.d1", "label")
    [(_, done)] = published(effects, DoneBatch)
    assert done.uids == [b"u" * 16]


@pytest.mark.parametrize(("attempt", "replies"), [(0, 1), (1, 0)])
def test_what_was_answered_is_said_again_to_its_client_and_not_for_its_dispatchers_retry(
    attempt: int, replies: int
) -> None:
    alone = Alone()
    [fetch, _] = alone.execute()
    alone.tell(Done(fetch.id, INPUTS))
    alone.run()
    effects = alone.execute(attempt=attempt)
    assert len(published(effects, Answer)) == replies
    [(_, done)] = published(effects, DoneBatch)
    assert done.uids == [b"u" * 16]


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("runs", [False, True])
def test_what_came_twice_ends_without_a_word_once_its_dispatcher_takes_back_the_last_one(
    again: bool, runs: bool
) -> None:
    """again: the last one is not taken back."""
    alone = Alone()
    alone.take("q", NOW + 5)
    alone.take("q", NOW + 5, attempt=1)
    run = alone.begin() if runs else None
    for attempt in (0,) if again else (0, 1):
        alone.tell(Withdraw("d1", "i", [b"q" * 16], attempt))
    assert bool(alone.actor.pending) == again
    said = alone.end(run) if run is not None else alone.run() if again else alone.tell(BatchesDue())
    assert len(published(said, Answer)) == again


def test_what_another_dispatcher_has_sent_as_well_is_answered_though_one_takes_it_back() -> None:
    alone = Alone()
    [fetch, _] = alone.execute("d1")
    alone.execute("d2")
    alone.tell(Withdraw("d1", "i", [b"u" * 16]))
    alone.tell(Done(fetch.id, INPUTS))
    assert len(published(alone.run(), Answer)) == 1


def test_what_came_by_reference_is_recorded_with_its_items_whoever_records_it() -> None:
    alone = Alone()
    [fetch, _] = alone.execute("d1")
    alone.execute("d2")
    alone.tell(Done(fetch.id, encode(Tensor("FP32", [3, 2], bytes(24)))))
    effects = alone.run()
    [(_, answer)] = published(effects, Answer)
    for _, done in published(effects, DoneBatch):
        assert done.items == [3]
        assert done.cost * 3 == pytest.approx(answer.cost)
    left = alone.tell(LEAVING)
    [row] = [e.event for e in left if isinstance(e, Record) and isinstance(e.event, OutcomeEvent)]
    assert (row.items, row.cost) == (3, pytest.approx(answer.cost))


def test_a_query_that_comes_again_while_its_inputs_are_fetched_is_fetched_once_and_both_are_told() -> None:
    alone = Alone()
    [fetch, _] = alone.execute("d1")
    assert alone.execute("d2") == []
    alone.tell(Done(fetch.id, INPUTS))
    effects = alone.run()
    assert len(published(effects, Answer)) == 1
    assert {subject for subject, _ in published(effects, DoneBatch)} == {Subjects().done("d1"), Subjects().done("d2")}


def test_inputs_that_cannot_be_read_are_a_bad_request_of_everybody_who_waits() -> None:
    for failure in (Failed(("fetch", b"u" * 16), "no such object"), Done(("fetch", b"u" * 16), b"\xc1")):
        alone = Alone()
        alone.execute("d1")
        alone.execute("d2")
        effects = alone.tell(failure)
        [(_, refusal)] = published(effects, Refusal)
        assert refusal.error.code == "bad_request"
        assert "inputs_ref" in refusal.error.message
        assert [done.codes for _, done in published(effects, DoneBatch)] == [["bad_request"]] * 2
        assert len(alone.execute("d1")) == 2  # known: the refusal again, and that it is done


def test_a_query_that_no_longer_fits_or_whose_instance_left_goes_back_to_everybody() -> None:
    alone = Alone()
    [fetch, _] = alone.execute()
    [unload, *_] = alone.tell(UnloadInstance(instance="i"))
    assert isinstance(unload.command, UnloadModel)
    [(_, back)] = published(alone.tell(Done(fetch.id, INPUTS)), HandBack)
    assert (back.reason, bytes(back.body)) == ("gone", bytes(BY_REFERENCE))
    assert alone.tell(BatchesDue()) == []
    alone = Alone()
    [fetch, _] = alone.execute("d1", deadline=NOW + 0.001)
    alone.execute("d2", deadline=NOW + 0.001)
    alone.tell(Done(fetch.id, INPUTS))
    backs = published(alone.tell(BatchesDue()), HandBack)
    assert {back.route.dispatcher for _, back in backs} == {"d1", "d2"}
    assert {back.reason for _, back in backs} == {"deadline"}


def test_an_instance_that_leaves_goes_too_when_all_that_was_queued_for_it_is_too_late() -> None:
    alone = Alone()
    [fetch, _] = alone.execute(deadline=NOW + 0.001)
    alone.tell(Done(fetch.id, INPUTS))
    assert alone.tell(UnloadInstance(instance="i")) == []  # something waits
    effects = alone.tell(BatchesDue())
    assert [type(effect.command) for effect in effects if isinstance(effect, Do)] == [UnloadModel]
    assert len(published(effects, InstanceUnloaded)) == 1


# -- a model that hangs


def test_what_runs_and_what_waits_behind_it_is_refused_at_its_deadline_and_its_result_is_nobodys() -> None:
    alone = Alone()
    alone.take("u", NOW + 1)
    run = alone.begin()
    alone.take("v", NOW + 2)
    assert published(alone.tell(DeadlineReached(), NOW + 1), Refusal) == []  # its batch may end shortly after
    effects = alone.tell(DeadlineReached(), NOW + 1 + GRACE)
    [(subject, refusal)] = published(effects, Refusal)
    assert (subject, refusal.error.code, refusal.error.message[: len(NOT_ANSWERED)]) == ("u", "deadline", NOT_ANSWERED)
    [(_, done)] = published(effects, DoneBatch)
    assert (done.uids, done.codes) == ([b"u" * 16], ["deadline"])
    [timer] = [e for e in effects if isinstance(e, After) and e.key == "deadline"]
    assert timer.delay == pytest.approx(1.0)
    assert [subject for subject, _ in published(alone.tell(DeadlineReached(), NOW + 2 + GRACE), Refusal)] == ["v"]
    assert alone.actor.instances["i"].queue.items == 0
    effects = alone.end(run, NOW + 5)
    assert published(effects, Answer) == published(effects, DoneBatch) == []


def test_late_answers_and_parts_are_of_use() -> None:
    alone = Alone()
    alone.take("u", NOW + 1)
    [(_, answer)] = published(alone.end(alone.begin(), NOW + 1.01), Answer)
    assert answer.missed == ["latency"]
    alone = Alone()
    alone.take("u", NOW + 1, parent=b"p" * 16)
    run = alone.begin()
    assert published(alone.tell(DeadlineReached(), NOW + 1.5), Refusal) == []
    assert len(published(alone.end(run, NOW + 1.6), Answer)) == 1


def test_an_executor_that_was_stopped_beyond_a_deadline_leaves_the_query_to_its_dispatcher() -> None:
    for late in (True, False):
        alone = Alone()
        alone.take("u", NOW + 1)
        run = alone.begin()
        at = NOW + 1 + SILENT
        effects = alone.end(run, NOW + 0.5, at) if late else alone.tell(DeadlineReached(), at)
        assert published(effects, Answer) == published(effects, Refusal) == []
        [(_, back)] = published(effects, HandBack)
        assert (back.reason, back.route.uid) == ("late", b"u" * 16)


def test_without_a_dispatcher_or_inputs_the_executor_ends_it_in_time() -> None:
    alone = Alone()
    alone.take("u", NOW + 1)
    alone.tell(DispatcherHeartbeat(dispatcher="d1", incarnation=0, at=NOW, flushed={}, leaving=True))
    effects = alone.end(alone.begin(), NOW + 1.5)
    assert [answer.missed for _, answer in published(effects, Answer)] == [["latency"]]
    alone = Alone()
    [fetch, timer] = alone.execute(deadline=NOW + 1)
    assert timer.delay == pytest.approx(1 + GRACE)
    [(_, refusal)] = published(alone.tell(DeadlineReached(), NOW + 1 + GRACE), Refusal)
    assert refusal.error.code == "deadline"
    assert alone.tell(Done(fetch.id, INPUTS), NOW + 1.5) == []


def storing(parent: bytes | None = None, **needs: Any) -> tuple[Alone, Do, list[Effect]]:
    """A query with a deadline in 1 s was computed in 0.5 s, and its outputs go to the object store; the effects at that time."""
    alone = Alone(given=Settings(dispatcher=DispatcherSettings(max_inline=1)))
    alone.take("u", NOW + 1, parent=parent, **needs)
    effects = alone.end(alone.begin(), NOW + 0.5, bytes=4)
    [store] = [e for e in effects if isinstance(e, Do)]
    return alone, store, effects


def test_a_query_whose_outputs_are_stored_is_reported_when_they_are_and_its_batch_at_once() -> None:
    alone, store, effects = storing()
    [(_, batch)] = published(effects, DoneBatch)
    assert (batch.uids, batch.storing, batch.batch, batch.finished) == ([], [b"u" * 16], 1, NOW + 0.5)
    assert published(alone.tell(Execute(sent_again(), BY_REFERENCE), NOW + 0.6), Answer) == []
    effects = alone.tell(Done(store.id, ObjectRef("infaas-outputs", "k", 4)), NOW + 0.7)
    [(_, answer)] = published(effects, Answer)
    assert answer.outputs_ref.key == "k"
    ended = published(effects, DoneBatch)
    assert [(done.uids, done.codes) for _, done in ended] == [([b"u" * 16], None)] * 2
    for _, done in ended:
        assert (done.finished, done.cost) == pytest.approx((NOW + answer.latency_ms / 1000.0, answer.cost))
        assert done.started == done.finished, "not another batch"
    assert {subject for subject, _ in ended} == {Subjects().done("d1"), Subjects().done("d2")}
    assert alone.tell(DeadlineReached(), NOW + 1 + GRACE) == []
    [app] = alone.sample().apps
    assert app.items == 1


def sent_again(parent: bytes | None = None) -> Route:
    """By another dispatcher."""
    return Route(b"u" * 16, 0, 0, "u", NOW + 1, NOW, "d2", "i", "app", 1, "u", parent=parent)


@pytest.mark.parametrize("late", [lambda of: Done(of, ObjectRef("infaas-outputs", "k", 4)), lambda of: Failed(of, "")])
@pytest.mark.parametrize(("ends", "code"), [("time", "deadline"), ("failure", "internal"), ("limit", "deadline")])
def test_the_row_of_a_query_whose_outputs_cannot_be_stored_says_what_its_client_got(
    ends: str, code: str, late: Callable[[Any], Any]
) -> None:
    alone, store, _ = storing()
    at, message = {
        "time": (NOW + 1 + GRACE, DeadlineReached()),
        "failure": (NOW + 0.7, Failed(store.id, "no space")),
        "limit": (NOW + 0.7, TimedOut(store.id)),
    }[ends]
    effects = alone.tell(message, at)
    [(_, refusal)] = published(effects, Refusal)
    assert (refusal.error.code, refusal.error.message.startswith(NOT_STORED)) == (code, ends == "time")
    [(_, done)] = published(effects, DoneBatch)
    assert (done.uids, done.codes) == ([b"u" * 16], [code])
    if ends == "time":
        assert alone.tell(late(store.id), at + 0.1) == []
    assert alone.tell(DeadlineReached(), at + 1.0) == []
    [app] = alone.sample().apps
    assert app.items == 1
    [row] = [e.event for e in alone.tell(LEAVING, at + 1.0) if isinstance(e, Record)]
    assert row.code == code


def test_what_a_hung_store_holds_is_given_up_and_defaults_given_instead() -> None:
    alone, _, _ = storing(fallback=True)
    [(_, back)] = published(alone.tell(DeadlineReached(), NOW + 1), HandBack)
    assert back.reason == "late"
    _, store, _ = storing()
    assert store.timeout is not None
    assert GRACE < 0.5 + store.timeout - 1 < 2 * SILENT


def test_a_part_gives_its_instance_free_before_its_outputs_are_stored() -> None:
    alone, store, effects = storing(parent=b"p" * 16)
    [(_, done)] = published(effects, DoneBatch)
    assert (done.uids, done.storing) == ([b"u" * 16], None)
    effects = alone.tell(Done(store.id, ObjectRef("infaas-outputs", "k", 4)), NOW + 1.5)
    assert len(published(effects, Answer)) == 1
    assert published(effects, DoneBatch) == []


@pytest.mark.parametrize("fails", [False, True])
def test_who_asks_for_a_part_while_its_outputs_are_stored_is_told_and_who_knew_is_not_told_again(fails: bool) -> None:
    alone, store, _ = storing(parent=b"p" * 16)
    assert alone.tell(Execute(sent_again(b"p" * 16), BY_REFERENCE), NOW + 0.6)[1:] == [], "it is not computed again"
    end = Failed(store.id, "no space") if fails else Done(store.id, ObjectRef("infaas-outputs", "k", 4))
    effects = alone.tell(end, NOW + 0.7)
    assert len(published(effects, Refusal if fails else Answer)) == 1
    [(subject, done)] = published(effects, DoneBatch)
    assert (subject, done.uids) == (Subjects().done("d2"), [b"u" * 16])
    assert done.codes == (["internal"] if fails else None)


@pytest.mark.parametrize("fails", [False, True])
def test_outputs_that_are_stored_when_the_dispatcher_has_refused_the_query_make_no_second_reply(fails: bool) -> None:
    alone, store, _ = storing()
    end = Failed(store.id, "no space") if fails else Done(store.id, ObjectRef("infaas-outputs", "k", 4))
    [effect] = alone.tell(end, NOW + 1 + SILENT)
    [(_, back)] = published([effect], HandBack)
    assert back.reason == "late"


@pytest.mark.parametrize("kind", ["answer", "refusal", "bad inputs", "unread"])
def test_nothing_is_said_about_a_query_that_its_dispatcher_may_have_spoken_for(kind: str) -> None:
    """Whatever this process was about to say when it was stopped: it comes to it too late."""
    alone = Alone()
    late = NOW + 1 + SILENT
    if kind == "unread":
        effects = alone.execute(deadline=NOW + 1, at=late)
    elif kind == "bad inputs":
        fetch = command(alone.execute(deadline=NOW + 1))
        effects = alone.tell(Failed(fetch.id, "no such object"), late)
    else:
        alone.take("u", NOW + 1)
        errors = ["it broke"] if kind == "refusal" else None
        effects = alone.end(alone.begin(), NOW + 0.5, late, errors=errors)
    assert published(effects, Answer) == published(effects, Refusal) == published(effects, DoneBatch) == []
    [(subject, back)] = published(effects, HandBack)
    assert (subject, back.reason) == ("infaas.resubmit.d1", "late")
    assert not alone.actor.pending


def test_a_dispatcher_that_was_taken_for_dead_hears_what_became_of_its_queries() -> None:
    alone = Alone()
    alone.take("u", NOW + 1)
    alone.tell(DispatcherHeartbeat(dispatcher="d1", incarnation=0, at=NOW, flushed={}, leaving=True))
    effects = alone.run()
    assert [
        each.event.outcome for each in effects if isinstance(each, Record) and isinstance(each.event, OutcomeEvent)
    ] == ["ok"]
    assert [subject for subject, _ in published(effects, DoneBatch)] == ["infaas.done.d1"]
    alone.take("v", NOW + 2)
    alone.tell(UnloadInstance(instance="i"))
    backs = published(alone.tell(Stopping(1.0)), HandBack)
    assert [(subject, back.reason) for subject, back in backs] == [
        ("infaas.resubmit", "gone"),
        ("infaas.resubmit.d1", "taken"),
    ]


def test_what_an_executor_has_when_it_was_still_beyond_the_time_out_is_decided_again() -> None:
    """Others may have it. It says nothing itself, also about what it was computing."""
    alone = Alone()
    alone.take("u", NOW + 30)
    effects = alone.tell(BatchesDue())
    run = command(effects)
    [(_, echo)] = published(effects, Echo)
    alone.take("v", NOW + 30)
    assert published(alone.tell(echo, NOW + 0.001), HandBack) == []
    backs = [back for _, back in published(alone.tell(Echo(NOW + 3), NOW + 3.001), HandBack)]
    assert [(back.route.reply_to, back.reason) for back in backs] == [("u", "stopped"), ("v", "stopped")]
    assert published(alone.end(run, NOW + 3, NOW + 3.1), Answer) == []
    assert alone.actor.instances["i"].queue.items == 0


def test_an_answer_that_is_repeated_for_another_dispatcher_is_charged_as_it_was() -> None:
    """Whichever dispatcher's outcome comes to the database first, it is the one that counts."""
    alone = Alone()
    done = []
    for dispatcher in ("d1", "d2"):
        [fetch, *_] = alone.execute(dispatcher)
        if isinstance(fetch, Do):
            alone.tell(Done(fetch.id, INPUTS))
            done += published(alone.run(), DoneBatch)
        else:
            done += published([fetch, *_], DoneBatch)
    (_, first), (_, again) = done
    assert again.cost == pytest.approx(first.cost) != 0.0
    assert again.batch == first.batch


@pytest.mark.parametrize(("within", "attempt", "goes"), [(0.0049, 0, True), (0.0049, 1, False), (0.0051, 0, False)])
def test_what_comes_to_a_batch_that_ends_too_late_for_it_goes_back_at_once_for_another_instance(
    within: float, attempt: int, goes: bool
) -> None:
    """One item takes 2.5 ms. What has been back is here since there is no other instance: it may go faster than predicted."""
    alone = Alone()
    alone.take("a", NOW + 5)
    alone.tell(BatchesDue())
    back = published(alone.take("b", NOW + within, attempt), HandBack)
    assert [one.reason for _, one in back] == ["deadline"] * goes
    assert len(alone.actor.pending) == 2 - goes


def test_while_others_compute_on_all_cores_what_cannot_wait_is_refused_and_not_kept() -> None:
    alone = Alone()
    alone.tell(LoadInstance(instance="j", variant=variant(), price_per_s=1e-5))
    alone.tell(Done(("load", "j"), LoadedModel(load_ms=1.0, memory_mb=1.0, proof="")))
    body = msgspec.Raw(encode({"inputs": {"x": Tensor("FP32", [1, 2], bytes(8))}}))
    for uid, instance in ((b"u" * 16, "i"), (b"v" * 16, "j")):
        route = Route(uid, 0, 0, f"_INBOX.{instance}", NOW + 5, NOW, "d1", instance, "app", 1, "label")
        alone.tell(Execute(route, body))
        alone.tell(BatchesDue())
    assert published(alone.tell(BatchesDue(), NOW + 4), Refusal) == []
    [(subject, refusal)] = published(alone.tell(BatchesDue(), NOW + 5), Refusal)
    assert (subject, refusal.error.code) == ("_INBOX.j", "deadline")
    assert published(alone.tell(BatchesDue(), NOW + 6), Refusal) == []


@pytest.mark.parametrize(("times", "fits"), [(1.001, True), (0.999, False)])
def test_a_query_whose_items_nobody_had_counted_is_refused_before_it_runs_if_it_costs_too_much(
    times: float, fits: bool
) -> None:
    """The dispatcher saw a reference. Twenty items run in three batches."""
    alone = Alone()
    limit = times * 1000.0 * 1e-5 * LatencyTable(variant()).charged_seconds(20)
    [fetch, _] = alone.execute(cost=limit)
    effects = alone.tell(Done(fetch.id, encode(Tensor("FP32", [20, 2], bytes(160)))))
    if fits:
        assert published(alone.run(), Answer)[0][1].missed == []
        return
    [(_, refusal)] = published(effects, Refusal)
    assert refusal.error.code == "unsatisfiable"
    assert refusal.error.message.startswith("cost: 20 items cost US$ ")
    [(_, done)] = published(effects, DoneBatch)
    assert (done.codes, done.cost) == (["unsatisfiable"], 0.0)


@pytest.mark.parametrize(("inline_below_ms", "inline"), [(1.0, False), (5.0, True)])
def test_a_short_batch_runs_on_the_loop_itself(inline_below_ms: float, inline: bool) -> None:
    """One item is predicted to take 2.5 ms."""
    alone = Alone(inline_below_ms=inline_below_ms)
    alone.take("a", NOW + 5)
    [run] = [effect.command for effect in alone.tell(BatchesDue()) if isinstance(effect, Do)]
    assert run.inline is inline

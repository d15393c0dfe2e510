"""The executor's actor by itself: inputs that come by reference, and the same query sent twice."""

from typing import Any

import msgspec

from bus.codec import encode
from bus.messages.fleet import InstanceUnloaded, LoadInstance, UnloadInstance
from bus.messages.flow import DoneBatch, Execute, HandBack, Route
from bus.messages.public import Answer, Refusal, Tensor
from bus.subjects import Subjects
from services.core.actor import Do, Done, Effect, Envelope, Failed, Publish
from services.core.placement import Device
from services.core.settings import Settings
from services.executor.actor import BatchesDue, make_executor
from services.executor.commands import BatchResult, FetchInputs, LoadedModel, RunBatch, UnloadModel
from tests.support.simulated.fleet import variant

CPU = Device(name="cpu", kind="cpu", cores=1, memory_mb=1000.0)
NOW = 1000.0
INPUTS = encode(Tensor("FP32", [1, 2], bytes(8)))
BY_REFERENCE = msgspec.Raw(encode({"inputs_ref": {"bucket": "infaas-inputs", "key": "k"}}))


class Alone:
    """One executor with one loaded instance `i`; effects are sorted by what they are."""

    def __init__(self) -> None:
        self.actor = make_executor(Settings(), Subjects(), "w", CPU, 1)
        self.tell(LoadInstance(instance="i", variant=variant(), price_per_s=1e-5))
        self.tell(Done(("load", "i"), LoadedModel(load_ms=1.0, memory_mb=1.0, proof="")))

    def tell(self, message: Any, now: float = NOW) -> list[Effect]:
        return list(self.actor.handle(Envelope(now, message)))

    def execute(self, dispatcher: str = "d1", *, uid: bytes = b"u" * 16, deadline: float = NOW + 5) -> list[Effect]:
        route = Route(
            uid, 0, 0, f"_INBOX.{dispatcher}", deadline, NOW, dispatcher, "i", "app", 1, "label", resendable=True
        )
        return self.tell(Execute(route, BY_REFERENCE))

    def run(self) -> list[Effect]:
        """Let it form a batch and compute it."""
        [run] = [e for e in self.tell(BatchesDue()) if isinstance(e, Do)]
        assert isinstance(run.command, RunBatch)
        outputs = [{"y": Tensor("FP32", [1, 1], bytes(4))} for _ in run.command.queries]
        return self.tell(Done(run.id, BatchResult(NOW, NOW + 0.001, outputs)))


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
    [fetch] = alone.execute()
    assert isinstance(fetch, Do)
    assert isinstance(fetch.command, FetchInputs)
    alone.tell(Done(fetch.id, INPUTS))
    effects = alone.run()
    [(subject, answer)] = published(effects, Answer)
    assert (subject, answer.id) == ("_INBOX.d1", "label")
    [(_, done)] = published(effects, DoneBatch)
    assert done.uids == [b"u" * 16]


def test_a_query_that_comes_again_while_its_inputs_are_fetched_is_fetched_once_and_both_are_told() -> None:
    alone = Alone()
    [fetch] = alone.execute("d1")
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


def test_an_instance_that_left_while_inputs_were_fetched_sends_the_query_back() -> None:
    alone = Alone()
    [fetch] = alone.execute()
    [unload, *_] = alone.tell(UnloadInstance(instance="i"))
    assert isinstance(unload, Do)
    assert isinstance(unload.command, UnloadModel)
    [(_, back)] = published(alone.tell(Done(fetch.id, INPUTS)), HandBack)
    assert (back.reason, bytes(back.body)) == ("gone", bytes(BY_REFERENCE))
    assert alone.tell(BatchesDue()) == []


def test_what_no_longer_fits_goes_back_to_everybody_who_sent_it() -> None:
    alone = Alone()
    [fetch] = alone.execute("d1", deadline=NOW + 0.001)
    alone.execute("d2", deadline=NOW + 0.001)
    alone.tell(Done(fetch.id, INPUTS))
    backs = published(alone.tell(BatchesDue()), HandBack)
    assert {back.route.dispatcher for _, back in backs} == {"d1", "d2"}
    assert {back.reason for _, back in backs} == {"deadline"}


def test_an_instance_that_leaves_goes_too_when_all_that_was_queued_for_it_is_too_late() -> None:
    alone = Alone()
    [fetch] = alone.execute(deadline=NOW + 0.001)
    alone.tell(Done(fetch.id, INPUTS))
    assert alone.tell(UnloadInstance(instance="i")) == []  # something waits
    effects = alone.tell(BatchesDue())
    assert [type(effect.command) for effect in effects if isinstance(effect, Do)] == [UnloadModel]
    assert len(published(effects, InstanceUnloaded)) == 1


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

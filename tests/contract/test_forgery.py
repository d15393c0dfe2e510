"""What rights alone cannot stop, since NATS checks no reply subject: orders that a stream is made to send, answers to somebody else."""

from collections.abc import Iterable

import pytest
from msgspec import json

from bus.codec import encode
from bus.port import Bus, Delivery, Forbidden
from bus.rights import ReplyCheck, from_stream
from bus.subjects import Subjects
from infaas.credentials import User
from services.core.actor import Effect, Envelope, Inlet, Publish, Started, Watch
from services.core.selection.policy import InfaasPolicy
from services.core.settings import JobsSettings, RegistrarSettings, Settings
from services.dispatcher.actor import make_dispatcher
from services.jobs.actor import Coordinator
from services.registrar.actor import Registrar
from services.shell.runtime.runtime import Runtime
from tests.support.clients.responders import until
from tests.support.servers.secured_nats import Secured, ignored

SUBJECTS = Subjects()
LOAD = SUBJECTS.worker("w1", "load")
ORDER = encode({"variant": "evil"})


class Listener:
    """Keeps what it is told, and answers what has a reply."""

    watches: tuple[Watch, ...] = ()

    def __init__(self, *subjects: str) -> None:
        self.heard: list[Envelope] = []
        self.inlets = tuple(Inlet(subject=subject, message=dict) for subject in subjects)

    def handle(self, envelope: Envelope) -> Iterable[Effect]:
        if isinstance(envelope.message, Started):
            return ()
        self.heard.append(envelope)
        return (Publish(envelope.reply, {"answer": 1}),) if envelope.reply else ()


async def listening(bus: Bus, *subjects: str) -> tuple[Listener, Runtime]:
    listener = Listener(*subjects)
    runtime = Runtime("listener", lambda: listener, bus, SUBJECTS)
    await runtime.start()
    return listener, runtime


async def test_a_stream_that_is_made_to_send_orders_is_not_obeyed(server: Secured) -> None:
    """An executor writes an order as an object's chunk, and has it delivered where its monitor takes orders."""
    names = ("registrar", "monitor", "executor", "dispatcher")
    buses = [await server.bus(name, ignored) for name in names]
    registrar, monitor, executor, dispatcher = buses
    try:
        await registrar.object_store(SUBJECTS.outputs_bucket)
        raw: list[Delivery] = []
        await monitor.subscribe(LOAD, raw.append)
        listener, runtime = await listening(monitor, LOAD)
        stream, chunk = f"OBJ_{SUBJECTS.outputs_bucket}", f"$O.{SUBJECTS.outputs_bucket}.C.evil"
        await executor.request(chunk, ORDER, 5.0)
        config = {
            "deliver_policy": "all",
            "ack_policy": "none",
            "filter_subject": chunk,
            "inactive_threshold": 10**10,
        }
        for name, more in (("push", {"deliver_subject": LOAD}), ("pull", {})):
            body = json.encode({"stream_name": stream, "config": {"name": name} | config | more})
            made = await executor.request(f"$JS.API.CONSUMER.CREATE.{stream}.{name}.{chunk}", body, 5.0)
            assert b'"error"' not in made.data, made.data
        executor.publish(f"$JS.API.CONSUMER.MSG.NEXT.{stream}.pull", b"1", reply=LOAD)
        executor.publish(f"$JS.API.STREAM.MSG.GET.{stream}", json.encode({"last_by_subj": chunk}), reply=LOAD)
        # NATS does deliver all three: the order itself twice, and once in JSON.
        await until(lambda: len(raw) == 3)
        assert [delivery.data for delivery in raw].count(ORDER) == 2
        assert listener.heard == []
        dispatcher.publish(LOAD, ORDER)  # who may order is obeyed
        await until(lambda: len(listener.heard) == 1)
        assert runtime.counts.forged == 2
        assert runtime.counts.undecodable == 1
        await runtime.stop()
    finally:
        for bus in buses:
            await bus.close()


async def test_a_client_with_a_bucket_makes_no_stream_that_hears_others(server: Secured) -> None:
    server.credentials.add(User(name="keeper", roles=("client",), app="numbers", buckets=("mine",)))
    server.reload()

    operator, keeper, phone = (
        await server.bus("operator"),
        await server.bus("keeper", ignored),
        await server.bus("phone"),
    )
    try:
        for verb in ("CREATE", "UPDATE"):
            config = json.encode({"name": "OBJ_mine", "subjects": ["infaas.query.faces"]})
            with pytest.raises(Forbidden):
                await keeper.request(f"$JS.API.STREAM.{verb}.OBJ_mine", config, 5.0)
        await operator.object_store("mine")
        bucket = await keeper.object_store("mine")
        await bucket.put("inputs.npy", b"ours")
        assert await bucket.get("inputs.npy") == b"ours"
        with pytest.raises(Forbidden):
            await phone.request("$JS.API.STREAM.INFO.OBJ_mine", b"", 5.0)
    finally:
        for bus in (operator, keeper, phone):
            await bus.close()


def test_requests_of_outsiders_are_checked_and_what_services_tell_is_not() -> None:
    assert from_stream("$JS.ACK.S.c.1.1.1.1.0", None)
    assert from_stream("", {"Nats-Stream": "S"})
    assert not from_stream("_INBOX.a", {"traceparent": "x"})
    assert not from_stream("", None)
    callers = ReplyCheck(SUBJECTS, "_INBOX.x")
    inner = (SUBJECTS.execute("w", "cpu"), LOAD, SUBJECTS.done("d"), SUBJECTS.worker_heartbeat())
    assert not any(map(callers.applies_to, inner))
    # The actors answer wherever they are asked to.
    callers = ReplyCheck(SUBJECTS, "_INBOX.x")
    registrar = Registrar("r", SUBJECTS, RegistrarSettings(), str)
    coordinator = Coordinator("c", SUBJECTS, JobsSettings(), {}, str)
    dispatcher = make_dispatcher(Settings(), SUBJECTS, "d", InfaasPolicy(), {}, bytes)
    for actor in (registrar, coordinator, dispatcher):
        shared = {inlet.subject for inlet in actor.inlets if inlet.queue} - {SUBJECTS.resubmit()}
        assert shared
        assert all(map(callers.applies_to, shared))


async def test_answers_go_to_the_inbox_of_the_app_that_was_asked_for(server: Secured) -> None:
    dispatcher = await server.bus("dispatcher", ignored)
    thief, phone, gateway = await server.bus("thief"), await server.bus("phone"), await server.bus("gateway")
    heard: list[Delivery] = []
    listener, runtime = await listening(dispatcher, SUBJECTS.query(), SUBJECTS.list())
    try:
        await phone.subscribe("_INBOX_.faces.phone.>", heard.append)
        for reply in (
            "_INBOX_.faces.phone.x.1", "_INBOX.x.1", "_INBOX_.numbers", "infaas.admin.delete-app", LOAD,
            "$KV.infaas-catalog.app.faces", "$JS.API.STREAM.DELETE.KV_infaas-catalog", "_SERVICE_.registrar.x",
        ):  # fmt: skip
            thief.publish(SUBJECTS.query("numbers"), b"\x80", reply)
        assert (await thief.request(SUBJECTS.query("numbers"), b"\x80", 5.0)).data == encode({"answer": 1})
        assert len(listener.heard) == 1
        assert runtime.counts.forged == 8
        assert (await phone.request(SUBJECTS.query("faces"), b"\x80", 5.0)).data
        for app in ("faces", "numbers"):  # who asks for any app
            assert (await gateway.request(SUBJECTS.query(app), b"\x80", 5.0)).data
        assert (await thief.request(SUBJECTS.list("apps"), b"\x80", 5.0)).data
        await phone.flush()
        assert "_INBOX_.faces.phone.x.1" not in [delivery.subject for delivery in heard]
        await runtime.stop()
    finally:
        for bus in (dispatcher, thief, phone, gateway):
            await bus.close()


@pytest.mark.parametrize(
    ("reply", "open_", "closed"),
    [
        ("_INBOX.abc.1", True, False),
        ("my.own.inbox", True, False),
        ("_INBOX_.faces.phone.x.1", True, True),
        ("_INBOX_.@.gateway.x.1", True, True),
        ("_INBOX_.numbers.thief.x.1", True, False),
        ("_INBOX_.faces", True, False),
        ("infaas.admin.delete-app", False, False),
        ("$KV.infaas-catalog.app.faces", False, False),
        ("_SERVICE_.registrar.x", True, False),
    ],
)
def test_whose_reply_subject_it_is(reply: str, open_: bool, closed: bool) -> None:
    inlet = SUBJECTS.query()
    for inbox, answered in (("_INBOX.x", open_), ("_SERVICE_.dispatcher.x", closed), ("_INBOX_.@.gateway.x", closed)):
        callers = ReplyCheck(SUBJECTS, inbox)
        assert callers.applies_to(inlet)
        assert callers.may_answer(inlet, SUBJECTS.query("faces"), reply) is answered

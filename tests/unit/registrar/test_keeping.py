"""What outlives a registrar: statuses, unfinished registrations, writes that are repeated."""

from typing import Any

from msgspec.structs import replace

from bus.codec import decode, encode
from bus.messages.public import Refusal, RegistrationStatus
from bus.messages.work import InspectModel, RegistrarHeartbeat, WorkProgress
from services.core.actor import Done, Failed, Publish, Stopping, TimedOut
from services.registrar.commands import ChangeRefused, PutRecords, PutStatus, RegistrationRecord
from tests.support.simulated.registrations import (
    REQUEST,
    SUBJECTS,
    Stage,
    build_order,
    built,
    complete,
    finished,
    heartbeat,
    inspected,
    to_building,
    variant_record,
)


def test_the_catalogue_may_still_refuse() -> None:
    stage = Stage()
    order = to_building(stage)
    for plan in order.plans:
        stage.tell(built(plan))
    stage.tell(finished("build"))
    put = next(do for do in stage.commands if isinstance(do.command, PutRecords))
    stage.commands.remove(put)
    stage.tell(Done(put.id, ChangeRefused("bad_request", "somebody was faster")))
    stage.perform()
    assert stage.ends() == ["failed"]
    assert stage.last().reason == "somebody was faster"


def test_writes_are_repeated_until_they_succeed() -> None:
    stage = Stage()
    order = to_building(stage)
    for plan in order.plans:
        stage.tell(built(plan))
    stage.tell(finished("build"))
    for turn in range(4):
        for do in list(stage.commands):
            stage.tell(Failed(do.id, "disconnected") if turn % 2 else TimedOut(do.id))
        stage.commands.clear()
        assert stage.ends() == []
        stage.now += 3
        stage.ring()
    stage.perform()
    assert stage.ends() == ["done"]
    assert len(stage.forgotten) == 1


def test_a_status_is_kept_once_at_a_time_and_the_last_one_always() -> None:
    stage = Stage()
    order = to_building(stage)
    for _ in range(100):
        stage.tell(WorkProgress(registration="r1", worker="w1", step="profiling", progress=0.5))
    saves = [do for do in stage.commands if isinstance(do.command, PutStatus)]
    assert len(saves) == 1
    complete(stage, order)
    kept = decode(RegistrationStatus, stage.status["registration.r1"])
    assert kept == stage.last()


def test_a_request_for_the_status_gets_the_last_one() -> None:
    stage = Stage()
    stage.register()
    stage.tell(b"", SUBJECTS.registration("r1"), "_INBOX.2")
    assert stage.sent[-1] == ("_INBOX.2", stage.last())
    stage.tell(encode(stage.last()), SUBJECTS.registration("r1"))  # our own publication comes by
    assert stage.sent[-1][0] == "_INBOX.2"
    stage.tell(b"whatever", SUBJECTS.registration("nobody"), "_INBOX.3")
    assert isinstance(stage.sent[-1][1], Refusal)


def test_a_restarted_registrar_goes_on_with_its_own_work() -> None:
    first = Stage("a")
    to_building(first)
    second = Stage("a", buckets=first)
    second.tell(heartbeat())
    second.tick()
    assert isinstance(second.orders()[0], InspectModel)
    second.tell(inspected())
    complete(second, build_order(second))
    assert second.ends() == ["done"]
    assert "work.r1" not in second.status


def test_work_of_a_dead_registrar_is_taken_over_and_that_of_a_live_one_is_not() -> None:
    first = Stage("a")
    to_building(first)
    second = Stage("b", buckets=first)
    second.tell(heartbeat())
    for _ in range(20):
        second.now += 1
        second.tell(RegistrarHeartbeat(registrar="a"))
        second.tick()
    assert second.commands == []
    second.pass_time(10, ["w1"])
    assert decode(RegistrationRecord, second.status["work.r1"]).registrar == "b"
    assert isinstance(second.orders()[0], InspectModel)


def test_a_registrar_that_leaves_hands_over_at_once() -> None:
    first = Stage("a")
    to_building(first)
    goodbye = next(iter(first.registrar.handle(_stopping(first))))
    assert isinstance(goodbye, Publish)
    second = Stage("b", buckets=first)
    second.tell(RegistrarHeartbeat(registrar="a"))
    second.tell(goodbye.message)
    second.tick()
    second.perform()
    assert decode(RegistrationRecord, second.status["work.r1"]).registrar == "b"


def _stopping(stage: Stage) -> Any:
    from services.core.actor import Envelope

    return Envelope(stage.now, Stopping(1.0))


def test_ended_work_found_after_a_restart_is_only_cleared_away() -> None:
    first = Stage("a")
    to_building(first)
    over = replace(first.last(), state="failed", reason="x")
    first.put(SUBJECTS.status_bucket, "registration.r1", encode(over))
    second = Stage("a", buckets=first)
    second.tell(heartbeat())
    second.tick()
    second.perform()
    assert second.orders() == []
    assert second.statuses() == []
    assert len(second.forgotten) == 1


def test_a_late_record_of_ended_work_starts_nothing() -> None:
    stage = Stage()
    order = to_building(stage)
    work = stage.status["work.r1"]
    complete(stage, order)
    stage.put(SUBJECTS.status_bucket, "work.r1", work)
    before = len(stage.orders())
    stage.pass_time(20, ["w1"])
    assert len(stage.orders()) == before
    assert len(stage.forgotten) == 1


def test_a_late_status_does_not_hide_the_last_one() -> None:
    stage = Stage()
    order = to_building(stage)
    old = stage.status["registration.r1"]
    complete(stage, order)
    stage.put(SUBJECTS.status_bucket, "registration.r1", old)
    stage.tell(b"", SUBJECTS.registration("r1"), "_INBOX.2")
    assert stage.sent[-1][1].state == "done"


def test_other_registrars_statuses_are_answered_too() -> None:
    stage = Stage()
    status = RegistrationStatus(registration="r9", state="building", app="a", model="m")
    stage.put(SUBJECTS.status_bucket, "registration.r9", encode(status))
    stage.tell(b"", SUBJECTS.registration("r9"), "_INBOX.2")
    assert stage.sent[-1] == ("_INBOX.2", status)


def test_unreadable_entries_harm_nobody() -> None:
    stage = Stage()
    stage.put(SUBJECTS.status_bucket, "work.x", b"\xc1")
    stage.put(SUBJECTS.status_bucket, "registration.x", b"\xc1")
    stage.put(SUBJECTS.status_bucket, "job.x", b"\xc1")
    stage.put(SUBJECTS.catalog_bucket, "app.digits", b"\xc1")
    stage.put(SUBJECTS.catalog_bucket, "variant.v", encode(variant_record("v")))
    complete(stage, to_building(stage))
    assert stage.ends() == ["done"]


def test_uploads_under_other_names_stay() -> None:
    stage = Stage()
    request = replace(REQUEST, object="shared.onnx", validation="shared.npz")
    complete(stage, to_building(stage, request))
    assert stage.forgotten[0].uploads == ()

"""The registrar on a stage: from request to catalogue, refusals, operators' verbs."""

from typing import Any

import pytest
from msgspec import Raw
from msgspec.structs import replace

from bus.codec import decode, encode
from bus.messages.catalog import AppRecord, ModelRecord, Signature
from bus.messages.flow import ContextChanged
from bus.messages.public import AdminDone, Refusal, RegistrationAccepted, RegistrationStatus
from bus.messages.work import InspectModel, RegistrarHeartbeat, WorkProgress
from services.core.actor import Done, Failed, Malformed, Publish, Stopping, Synced, TimedOut
from services.core.catalog import selection_key
from services.core.settings import RegistrarSettings
from services.registrar.commands import AlreadyTaken, Finish, PutRecords, PutStatus, RegistrationRecord, error_of
from services.registrar.registration import KEPT, KEPT_OF_EACH
from tests.support.simulated.registrations import (
    REQUEST,
    SIGNATURE,
    SUBJECTS,
    Stage,
    build_order,
    building,
    built,
    complete,
    finished,
    heartbeat,
    inspected,
    model_record,
    registered,
    registering,
    to_building,
    variant_record,
)

STATES = ["accepted", "inspecting", "building", "profiling", "done"]


def test_a_registration_becomes_an_app_a_model_and_variants() -> None:
    stage = Stage()
    stage.tell(heartbeat())
    assert stage.register() == RegistrationAccepted(registration="r1")
    inspect = stage.orders()[0]
    assert isinstance(inspect, InspectModel)
    assert (inspect.object, inspect.validation, inspect.format) == ("r1.model", "r1.validation", "onnx")
    stage.hear(inspected(), finished("inspect"))
    order = build_order(stage)
    assert (order.source, order.validation, order.version) == ("aa", "bb", "1")
    assert len(order.plans) == 8  # fp32 and int8, 1 and 2 threads, 2 batch limits
    complete(stage, order)
    assert stage.ends() == ["done"]
    assert sorted(stage.last().variants) == sorted(plan.variant for plan in order.plans)
    assert stage.last().progress == 1.0
    app = decode(AppRecord, stage.catalog["app.digits"])
    assert (app.links, app.signature) == ({"mlp": "1"}, SIGNATURE)
    model = decode(ModelRecord, stage.catalog["model.mlp.1"])
    assert (model.source, model.validation, model.registration) == ("aa", "bb", "r1")
    variants = stage.variants
    assert {v.variant for v in variants} == set(stage.last().variants)
    assert {(v.model, v.version, v.artifact, v.accuracy, v.hardware) for v in variants} == {
        ("mlp", "1", "cc", 0.9, "cpu")
    }
    assert any(v.dominated for v in variants), "two threads that are no faster than one are dominated"
    assert stage.forgotten == [
        Finish(registration="r1", model="mlp", version="1", uploads=("r1.model", "r1.validation"))
    ]
    assert [*dict.fromkeys(record.event.state for record in stage.records)] == STATES
    assert stage.registrar._registrations.open == {}
    assert not [key for key in stage.status if key.startswith("work.")]


def test_an_announcement_goes_to_the_worker_that_would_get_the_model_and_starts_nothing() -> None:
    stage, coming = Stage(), replace(REQUEST, object="", validation="", format="pt2")
    stage.register(coming, reply="")
    stage.hear(heartbeat("w1", utilisation=0.5), heartbeat("w2", utilisation=0.1))
    stage.register(coming, reply="")
    assert [(order.format, order.object) for order in stage.orders("w2")] == [("pt2", "")]
    assert stage.orders("w1") + stage.ends() == []
    assert "object: " in stage.register(coming).error.message, "who asks for an answer hears what is wrong"


def test_progress_and_states_only_go_forward() -> None:
    stage, order = building()
    for step, share in (
        ("building int8", 0.2),
        ("profiling int8", 0.6),
        ("building again", 0.1),
        ("odd", float("nan")),
    ):
        stage.tell(WorkProgress(registration="r1", worker="w1", step=step, progress=share))
    complete(stage, order)
    states = [STATES.index(status.state) for status in stage.statuses()]
    progress = [status.progress for status in stage.statuses()]
    assert states == sorted(states)
    assert progress == sorted(progress)
    assert all(0.0 <= share <= 1.0 for share in progress)
    assert "profiling int8" in [status.step for status in stage.statuses()]


def test_the_worst_requests_are_refused_at_once_and_counted() -> None:
    stage = Stage()
    reply = stage.register(replace(REQUEST, app="../x\0", metric="f 1"))
    assert reply.error.code == "bad_request"
    assert "app: " in reply.error.message
    assert "metric: " in reply.error.message
    assert stage.statuses() == []
    (refused,) = [record.event for record in stage.records]
    assert (refused.state, refused.app, refused.registration) == ("refused", "../x\ufffd", "made-0")
    assert refused.reason == reply.error.message
    stage = Stage()
    stage.tell(Malformed("Object missing required field `model`"), SUBJECTS.register(), "_INBOX.1")
    subject, reply = stage.sent[-1]
    assert (subject, reply.error.code) == ("_INBOX.1", "bad_request")
    assert "`model`" in reply.error.message
    assert [(record.event.state, record.event.app) for record in stage.records] == [("refused", "")]


def test_an_id_and_a_version_are_taken_once() -> None:
    stage = Stage()
    stage.register()
    again = stage.register(replace(REQUEST, app="other"))
    assert again.error.message.startswith("registration: ")
    stage.put(SUBJECTS.catalog_bucket, "model.mlp.7", encode(model_record(version="7")))
    taken = stage.register(replace(REQUEST, registration="r2", version="7"))
    assert taken.error.message.startswith("version: version 7 of model mlp")
    assert taken.error.field == "version"
    free = stage.register(replace(REQUEST, registration=None))
    assert isinstance(free, RegistrationAccepted)
    assert stage.last(free.registration).version == "8"


@pytest.mark.parametrize("field", ["registration", "version"])
def test_what_another_registrar_has_claimed_is_refused(field: str) -> None:
    stage = Stage()
    stage.tell(replace(REQUEST, version="1"), SUBJECTS.register(), "_INBOX.1")
    stage.tell(Done(stage.commands.pop().id, AlreadyTaken(field)))
    subject, reply = stage.sent[-1]
    assert subject == "_INBOX.1"
    assert reply.error.message.startswith(f"{field}: ")
    assert stage.statuses() == []


@pytest.mark.parametrize("trouble", [Failed, TimedOut])
def test_a_bucket_that_cannot_be_written_is_an_overload(trouble: Any) -> None:
    stage = Stage()
    stage.tell(REQUEST, SUBJECTS.register(), "_INBOX.1")
    claim = stage.commands.pop().id
    stage.tell(Failed(claim, "the disk is full") if trouble is Failed else TimedOut(claim))
    reply = stage.sent[-1][1]
    assert reply.error.code == "overloaded"


def test_requests_wait_until_the_catalogue_is_known() -> None:
    stage = Stage()
    fresh = Stage()
    fresh.registrar = type(stage.registrar)("b", SUBJECTS, RegistrarSettings(), lambda: "x")
    fresh.tell(REQUEST, SUBJECTS.register(), "_INBOX.1")
    fresh.tell(Synced(SUBJECTS.status_bucket))
    fresh.tell(Synced(SUBJECTS.control_bucket))
    assert fresh.commands == []
    fresh.tell(Synced(SUBJECTS.catalog_bucket))
    assert len(fresh.commands) == 1


def test_a_second_model_must_fit_the_app() -> None:
    stage = registered()
    stage.register(replace(REQUEST, registration="r2", model="cnn"))
    other = Signature(inputs=SIGNATURE.inputs, outputs=SIGNATURE.inputs)
    stage.settle(inspected("r2", signature=other))
    assert stage.ends("r2") == ["failed"]
    assert "fixed its signature" in str(stage.last("r2").reason)
    assert len(stage.orders()) == 3, "the second model is inspected and not built"


def test_a_new_version_takes_the_link_over_and_an_older_one_does_not_take_it_back() -> None:
    stage = Stage()
    stage.hear(heartbeat(), heartbeat("w2", utilisation=0.9))
    stage.register()
    stage.tell(inspected())
    slow = build_order(stage)
    stage.now += 1
    stage.register(replace(REQUEST, registration="r2", version="2"))
    stage.tell(inspected("r2", "w2"))
    complete(stage, build_order(stage, "w2"), "w2")
    assert decode(AppRecord, stage.catalog["app.digits"]).links == {"mlp": "2"}
    complete(stage, slow)
    assert stage.ends("r1") == ["done"]
    assert decode(AppRecord, stage.catalog["app.digits"]).links == {"mlp": "2"}
    assert "model.mlp.1" in stage.catalog


def test_operators_change_the_catalogue() -> None:
    stage = Stage()

    def ask(verb: str, **fields: Any) -> Any:
        stage.tell(Raw(encode(fields)), SUBJECTS.admin(verb), "_INBOX.9")
        stage.perform()
        return stage.sent[-1][1]

    stage.put(SUBJECTS.catalog_bucket, "model.mlp.1", encode(model_record()))
    assert ask("add-app", app="a") == AdminDone()
    assert ask("link-model", app="a", model="mlp") == AdminDone()
    assert decode(AppRecord, stage.catalog["app.a"]).links == {"mlp": "1"}
    assert ask("link-model", app="b", model="mlp").error.code == "unknown_app"
    assert ask("unlink-model", app="a", model="mlp") == AdminDone()
    assert ask("reset-selection", app="b").error.code == "unknown_app"
    for fields in ({}, {"context": "me"}):
        assert ask("reset-selection", app="a", **fields) == AdminDone()
        said = [message for subject, message in stage.sent if subject == SUBJECTS.selection("changed")]
        assert said[-1] == ContextChanged("a", selection_key("a", "me") if fields else "", 0, None)
    assert ask("delete-app", app="a") == AdminDone()
    assert "app.a" not in stage.catalog
    assert "delete-app" in ask("explode").error.message
    assert stage.commands == []
    for _ in range(2):  # its client sends it again, since it takes long
        stage.tell(Raw(encode({"app": "b"})), SUBJECTS.admin("add-app"), "_INBOX.9")
    stage.tell(Failed(stage.commands.pop().id, "disconnected"))
    assert stage.commands == []
    assert stage.sent[-1][1].error.code == "overloaded"


def test_a_model_may_be_registered_without_any_app() -> None:
    stage = Stage()
    stage.tell(heartbeat())
    assert stage.register(replace(REQUEST, app="_")) == RegistrationAccepted(registration="r1")
    stage.hear(inspected(), finished("inspect"))
    complete(stage, build_order(stage))
    assert stage.ends() == ["done"]
    assert "model.mlp.1" in stage.catalog
    assert not [key for key in stage.catalog if key.startswith("app.")]


def test_a_variant_that_computes_items_alone_is_recorded_with_its_reason_and_a_largest_batch_of_one() -> None:
    stage = registering()
    stage.hear(inspected(baseline_accuracy=0.95), finished("inspect"))
    order = build_order(stage)
    for plan in order.plans:
        stage.tell(built(plan, alone="mixes" if plan.precision == "int8" else ""))
    stage.settle(finished("build"))
    found = {record.variant: record for record in stage.variants}
    assert set(found) == set(stage.last().variants)
    int8 = {name: record for name, record in found.items() if record.precision == "int8"}
    assert set(int8) == {"mlp-v1-ort-int8-t1-b1", "mlp-v1-ort-int8-t2-b1"}
    assert {(record.alone, record.max_batch) for record in int8.values()} == {("mixes", 1)}
    assert {(record.alone, record.max_batch) for name, record in found.items() if name not in int8} == {("", 8), ("", 64)}  # fmt: skip
    assert {record.model_accuracy for record in found.values()} == {0.95}


def test_a_model_that_takes_single_items_says_why_in_all_its_variants() -> None:
    stage = registering()
    stage.hear(inspected(fixed_batch=True, alone="its batch is fixed"), finished("inspect"))
    complete(stage, build_order(stage))
    records = stage.variants
    assert {(record.alone, record.max_batch) for record in records} == {("its batch is fixed", 1)}


# -- What outlives a registrar: statuses, unfinished registrations, writes that are repeated.


def test_the_catalogue_may_still_refuse() -> None:
    stage, order = building()
    for plan in order.plans:
        stage.tell(built(plan))
    stage.tell(finished("build"))
    for _first_and_all in range(2):
        put = next(do for do in stage.commands if isinstance(do.command, PutRecords))
        stage.commands.remove(put)
        stage.hear(Done(put.id, error_of("somebody was faster")))
    stage.perform()
    assert stage.ends() == ["failed"]
    assert stage.last().reason == "somebody was faster"


def test_writes_are_repeated_until_they_succeed() -> None:
    stage, order = building()
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


def test_statuses_are_kept_once_at_a_time_and_the_last_one_always() -> None:
    stage, order = building()
    for _ in range(100):
        stage.tell(WorkProgress(registration="r1", worker="w1", step="profiling", progress=0.5))
    assert len([do for do in stage.commands if isinstance(do.command, PutStatus)]) == 1
    complete(stage, order)
    assert decode(RegistrationStatus, stage.status["registration.r1"]) == stage.last()
    stage, order = building()
    old = stage.status["registration.r1"]
    complete(stage, order)
    stage.put(SUBJECTS.status_bucket, "registration.r1", old)
    stage.tell(b"", SUBJECTS.registration("r1"), "_INBOX.2")
    assert stage.sent[-1][1].state == "done"


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
    second.pass_time(1, ["w1"])
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
    [goodbye] = first.tell(Stopping(1.0))
    assert isinstance(goodbye, Publish)
    second = Stage("b", buckets=first)
    second.hear(RegistrarHeartbeat(registrar="a"), goodbye.message)
    second.tick()
    second.perform()
    assert decode(RegistrationRecord, second.status["work.r1"]).registrar == "b"


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
    stage, order = building()
    work = stage.status["work.r1"]
    complete(stage, order)
    stage.put(SUBJECTS.status_bucket, "work.r1", work)
    before = len(stage.orders())
    stage.pass_time(20, ["w1"])
    assert len(stage.orders()) == before
    assert len(stage.forgotten) == 1


def test_statuses_of_others_are_answered_and_foreign_uploads_stay() -> None:
    stage = Stage()
    status = RegistrationStatus(registration="r9", state="building", app="a", model="m")
    stage.put(SUBJECTS.status_bucket, "registration.r9", encode(status))
    stage.tell(b"", SUBJECTS.registration("r9"), "_INBOX.2")
    assert stage.sent[-1] == ("_INBOX.2", status)
    stage = Stage()
    request = replace(REQUEST, object="shared.onnx", validation="shared.npz")
    complete(stage, to_building(stage, request))
    assert stage.forgotten[0].uploads == ()


def test_of_ended_registrations_only_the_latest_are_remembered() -> None:
    stage = Stage()
    for number in range(KEPT + 3):
        name = f"r{number}"
        status = RegistrationStatus(registration=name, state="building" if number == 1 else "done", app="a", model="m")
        stage.put(SUBJECTS.status_bucket, f"registration.{name}", encode(status))
    stage.put(SUBJECTS.status_bucket, "registration.r0", stage.status["registration.r0"])  # it has changed since
    stage.tick()
    stage.perform()
    assert {f"r{number}" for number in range(4)} - {key.removeprefix("registration.") for key in stage.status} == {
        "r2",
        "r3",
    }
    assert len(stage.status) == KEPT + 1, "one is under way"
    stage.tell(b"", SUBJECTS.registration("r2"), "_INBOX.2")
    assert isinstance(stage.sent[-1][1], Refusal)
    late = RegistrationStatus(registration="late", state="done", app="a", model="m")
    stage.put(SUBJECTS.catalog_bucket, "model.mlp.1", encode(model_record()))
    for number in range(KEPT_OF_EACH + 1):
        stage.put(
            SUBJECTS.status_bucket, f"registration.late{number}", encode(replace(late, registration=f"late{number}"))
        )
    stage.tick()
    stage.perform()
    assert len(stage.status) == KEPT + 1 + KEPT_OF_EACH, "what failed with a version is not tried again"


def test_unreadable_entries_harm_nobody() -> None:
    stage = Stage()
    stage.put(SUBJECTS.status_bucket, "work.x", b"\xc1")
    stage.put(SUBJECTS.status_bucket, "registration.x", b"\xc1")
    stage.put(SUBJECTS.status_bucket, "job.x", b"\xc1")
    stage.put(SUBJECTS.catalog_bucket, "app.digits", b"\xc1")
    stage.put(SUBJECTS.catalog_bucket, "variant.v", encode(variant_record("v")))
    complete(stage, to_building(stage))
    assert stage.ends() == ["done"]

"""The registrar on a stage: from request to catalogue, and everything that may go wrong on the way."""

from typing import Any

import pytest
from msgspec.structs import replace

from bus.codec import decode, encode
from bus.messages.catalog import AppRecord, ModelRecord, Signature, VariantRecord
from bus.messages.fleet import ExecutorExited
from bus.messages.public import AdminDone, AdminRequest, Refusal, Register, RegistrationAccepted, RegistrationStatus
from bus.messages.work import BuildVariants, InspectModel, RegistrarHeartbeat, WorkProgress
from services.core.actor import Done, Failed, Publish, Stopping, Synced, TimedOut, Undelivered
from services.registrar.commands import Finish, PutRecords, PutStatus, Refused, Taken, Work
from services.registrar.policy import Rules
from tests.unit.registrar.given import (
    REQUEST,
    SIGNATURE,
    SUBJECTS,
    Stage,
    built,
    failed,
    finished,
    heartbeat,
    inspected,
    model_record,
    variant_record,
)


def build_order(stage: Stage, worker: str = "w1") -> BuildVariants:
    order = stage.orders(worker)[-1]
    assert isinstance(order, BuildVariants)
    return order


def to_building(stage: Stage, request: Register = REQUEST) -> BuildVariants:
    """Register, have it inspected, and return the build order."""
    stage.tell(heartbeat())
    stage.register(request)
    stage.tell(inspected(request.registration or ""))
    stage.perform()
    return build_order(stage)


def complete(stage: Stage, order: BuildVariants, worker: str = "w1") -> None:
    for plan in order.plans:
        stage.tell(built(plan, order.registration, worker))
    stage.tell(finished("build", order.registration, worker))
    stage.perform()


def test_a_registration_becomes_an_app_a_model_and_variants() -> None:
    stage = Stage()
    stage.tell(heartbeat())
    assert stage.register() == RegistrationAccepted(registration="r1")
    inspect = stage.orders()[0]
    assert isinstance(inspect, InspectModel)
    assert (inspect.object, inspect.validation, inspect.format) == ("r1.model", "r1.validation", "onnx")
    stage.tell(inspected())
    stage.tell(finished("inspect"))
    order = build_order(stage)
    assert (order.source, order.validation, order.version) == ("aa", "bb", "1")
    assert len(order.plans) == 8  # fp32 and dynamic int8, 1 and 2 threads, 2 batch limits
    complete(stage, order)
    assert stage.ends() == ["done"]
    assert sorted(stage.last().variants) == sorted(plan.variant for plan in order.plans)
    assert stage.last().progress == 1.0
    app = decode(AppRecord, stage.catalog["app.digits"])
    assert (app.links, app.signature) == ({"mlp": "1"}, SIGNATURE)
    model = decode(ModelRecord, stage.catalog["model.mlp.1"])
    assert (model.source, model.validation, model.registration) == ("aa", "bb", "r1")
    variants = [decode(VariantRecord, value) for key, value in stage.catalog.items() if key.startswith("variant.")]
    assert {v.variant for v in variants} == set(stage.last().variants)
    assert {(v.model, v.version, v.artifact, v.accuracy, v.hardware) for v in variants} == {
        ("mlp", "1", "cc", 0.9, "cpu")
    }
    assert any(v.dominated for v in variants), "two threads that are no faster than one are dominated"
    assert stage.forgotten == [
        Finish(registration="r1", model="mlp", version="1", uploads=("r1.model", "r1.validation"))
    ]
    assert [record.event.state for record in stage.records] == [
        "accepted",
        "inspecting",
        "building",
        "profiling",
        "done",
    ]
    assert stage.registrar._floor.jobs == {}
    assert not [key for key in stage.status if key.startswith("work.")]


def test_progress_and_states_only_go_forward() -> None:
    stage = Stage()
    order = to_building(stage)
    for step, share in (
        ("building int8", 0.2),
        ("profiling int8", 0.6),
        ("building again", 0.1),
        ("odd", float("nan")),
    ):
        stage.tell(WorkProgress(registration="r1", worker="w1", step=step, progress=share))
    complete(stage, order)
    order_of = ["accepted", "inspecting", "building", "profiling", "done"]
    states = [order_of.index(status.state) for status in stage.statuses()]
    progress = [status.progress for status in stage.statuses()]
    assert states == sorted(states)
    assert progress == sorted(progress)
    assert all(0.0 <= share <= 1.0 for share in progress)
    assert "profiling int8" in [status.step for status in stage.statuses()]


def test_the_worst_request_is_refused_at_once() -> None:
    stage = Stage()
    reply = stage.register(replace(REQUEST, app="../x", metric="f1"))
    assert isinstance(reply, Refusal)
    assert reply.error.code == "bad_request"
    assert "app: " in reply.error.message
    assert "metric: " in reply.error.message
    assert stage.statuses() == []


def test_an_id_and_a_version_are_taken_once() -> None:
    stage = Stage()
    stage.register()
    again = stage.register(replace(REQUEST, app="other"))
    assert isinstance(again, Refusal)
    assert again.error.message.startswith("registration: ")
    stage.put(SUBJECTS.catalog_bucket, "model.mlp.7", encode(model_record(version="7")))
    taken = stage.register(replace(REQUEST, registration="r2", version="7"))
    assert isinstance(taken, Refusal)
    assert taken.error.message.startswith("version: version 7 of model mlp")
    free = stage.register(replace(REQUEST, registration=None))
    assert free == RegistrationAccepted(registration="made-0")
    assert stage.last("made-0").version == "8"


@pytest.mark.parametrize("field", ["registration", "version"])
def test_what_another_registrar_has_claimed_is_refused(field: str) -> None:
    stage = Stage()
    stage.tell(replace(REQUEST, version="1"), SUBJECTS.register(), "_INBOX.1")
    stage.tell(Done(stage.commands.pop().id, Taken(field)))
    subject, reply = stage.sent[-1]
    assert subject == "_INBOX.1"
    assert isinstance(reply, Refusal)
    assert reply.error.message.startswith(f"{field}: ")
    assert stage.statuses() == []


@pytest.mark.parametrize("trouble", [Failed, TimedOut])
def test_a_bucket_that_cannot_be_written_is_an_overload(trouble: Any) -> None:
    stage = Stage()
    stage.tell(REQUEST, SUBJECTS.register(), "_INBOX.1")
    claim = stage.commands.pop().id
    stage.tell(Failed(claim, "the disk is full") if trouble is Failed else TimedOut(claim))
    reply = stage.sent[-1][1]
    assert isinstance(reply, Refusal)
    assert reply.error.code == "overloaded"


def test_requests_wait_until_the_catalogue_is_known() -> None:
    stage = Stage()
    fresh = Stage()
    fresh.registrar = type(stage.registrar)("b", SUBJECTS, Rules(), lambda: "x")
    fresh.tell(REQUEST, SUBJECTS.register(), "_INBOX.1")
    fresh.tell(Synced(SUBJECTS.status_bucket))
    assert fresh.commands == []
    fresh.tell(Synced(SUBJECTS.catalog_bucket))
    assert len(fresh.commands) == 1


def test_variants_that_fail_do_not_stop_the_others() -> None:
    stage = Stage()
    order = to_building(stage)
    good, bad, nan, poor, *rest = order.plans
    stage.tell(failed(bad, reason="the compiler gave up"))
    stage.tell(built(nan, accuracy=float("nan")))
    stage.tell(built(poor, agreement=0.5))
    stage.tell(built(good))
    for plan in rest:
        stage.tell(failed(plan))
    stage.tell(finished("build"))
    stage.perform()
    assert stage.ends() == ["done"]
    assert stage.last().variants == [good.variant]
    reasons = {failure.variant: failure.reason for failure in stage.last().failures}
    assert reasons[bad.variant] == "the compiler gave up"
    assert "NaN" in reasons[nan.variant]
    assert "50.0%" in reasons[poor.variant]
    assert [key for key in stage.catalog if key.startswith("variant.")] == [f"variant.{good.variant}"]


def test_no_variant_no_model() -> None:
    stage = Stage()
    order = to_building(stage)
    for plan in order.plans:
        stage.tell(failed(plan, reason="out of memory"))
    stage.tell(finished("build"))
    stage.perform()
    assert stage.ends() == ["failed"]
    assert stage.last().reason == "no variant works: out of memory"
    assert stage.catalog == {}
    assert len(stage.forgotten) == 1


def test_an_order_that_a_stopping_worker_lays_down_is_given_once_more() -> None:
    stage = Stage()
    order = to_building(stage)
    stage.tell(finished("build", reason="the worker is stopping", lost=True))
    stage.perform()
    assert stage.ends() == []
    assert len(stage.orders()) == 3
    complete(stage, order)
    assert stage.ends() == ["done"]


def test_variants_the_worker_forgot_are_reported() -> None:
    stage = Stage()
    order = to_building(stage)
    stage.tell(built(order.plans[0]))
    stage.tell(finished("build", reason="the sandbox was killed"))
    stage.perform()
    assert stage.ends() == ["done"]
    assert {failure.reason for failure in stage.last().failures} == {"the sandbox was killed"}


@pytest.mark.parametrize("reason", ["not an ONNX file", None])
def test_a_failed_inspection_ends_it(reason: str | None) -> None:
    stage = Stage()
    stage.tell(heartbeat())
    stage.register()
    stage.tell(finished("inspect", reason=reason))
    stage.perform()
    assert stage.ends() == ["failed"]
    assert stage.last().reason == (reason or "the inspection ended without a result")


def test_no_framework_for_the_format() -> None:
    stage = Stage()
    stage.tell(heartbeat())
    stage.register(replace(REQUEST, format="pt2"))
    stage.tell(inspected(frameworks={"ort": "it cannot convert this", "torch": "not installed"}))
    stage.perform()
    assert stage.ends() == ["failed"]
    assert "torch: not installed" in str(stage.last().reason)


def test_a_second_model_must_fit_the_app() -> None:
    stage = Stage()
    complete(stage, to_building(stage))
    stage.register(replace(REQUEST, registration="r2", model="cnn"))
    other = Signature(inputs=SIGNATURE.inputs, outputs=SIGNATURE.inputs)
    stage.tell(inspected("r2", signature=other))
    stage.perform()
    assert stage.ends("r2") == ["failed"]
    assert "fixed its signature" in str(stage.last("r2").reason)
    assert len(stage.orders()) == 3, "the second model is inspected and not built"


def test_a_new_version_takes_the_link_over_and_an_older_one_does_not_take_it_back() -> None:
    stage = Stage()
    stage.tell(heartbeat())
    stage.tell(heartbeat("w2", utilisation=0.9))
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


def test_registrations_queue_for_a_worker_and_share_several() -> None:
    stage = Stage()
    stage.tell(heartbeat("w1", utilisation=0.5))
    stage.tell(heartbeat("w2", utilisation=0.1))
    for n in (1, 2, 3):
        stage.register(replace(REQUEST, registration=f"r{n}", model=f"m{n}"))
    assert [order.registration for order in stage.orders("w2")] == ["r1"], "the idler worker is first"
    assert [order.registration for order in stage.orders("w1")] == ["r2"]
    stage.tell(finished("inspect", "r2", "w1", "bad file"))
    assert [order.registration for order in stage.orders("w1")] == ["r2", "r3"]


def test_leaving_draining_and_silent_workers_get_no_orders() -> None:
    stage = Stage()
    stage.tell(heartbeat("leaving", leaving=True))
    stage.tell(heartbeat("draining", draining=True))
    stage.tell(heartbeat("silent"))
    stage.now += 10
    stage.register()
    assert [stage.orders(worker) for worker in ("leaving", "draining", "silent")] == [[], [], []]
    stage.tell(heartbeat("fresh"))
    assert len(stage.orders("fresh")) == 1


def test_without_a_worker_it_fails_with_the_remedy() -> None:
    stage = Stage()
    stage.register()
    stage.pass_time(119)
    assert stage.ends() == []
    stage.pass_time(5)
    assert stage.ends() == ["failed"]
    assert "infaas run" in str(stage.last().reason)


def test_waiting_behind_others_is_no_failure() -> None:
    stage = Stage()
    order = to_building(stage)
    stage.register(replace(REQUEST, registration="r2", model="cnn"))
    for _ in range(50):
        stage.tell(WorkProgress(registration="r1", worker="w1", step="profiling", progress=0.5))
        stage.pass_time(10, ["w1"])
    assert stage.ends("r1") + stage.ends("r2") == []
    complete(stage, order)
    assert isinstance(stage.orders()[-1], InspectModel)
    assert stage.orders()[-1].registration == "r2"


def test_a_silent_worker_is_tried_once_more_and_then_given_up() -> None:
    stage = Stage()
    stage.tell(heartbeat())
    stage.register()
    stage.pass_time(125, ["w1"])
    assert len(stage.orders()) == 2
    assert stage.ends() == []
    stage.pass_time(125, ["w1"])
    assert len(stage.orders()) == 2
    assert stage.ends() == ["failed"]
    assert "said nothing" in str(stage.last().reason)


def test_a_lost_build_is_given_to_another_worker_with_what_remains() -> None:
    stage = Stage()
    order = to_building(stage)
    stage.tell(built(order.plans[0]))
    stage.pass_time(30, ["w2"])  # w1 is gone
    rest = build_order(stage, "w2")
    assert [plan.variant for plan in rest.plans] == [plan.variant for plan in order.plans[1:]]
    stage.tell(built(order.plans[1], worker="w1"))  # too late: it is w2's now
    complete(stage, rest, "w2")
    assert stage.ends() == ["done"]
    assert len(stage.last().variants) == len(order.plans)


def test_what_was_built_before_the_worker_was_lost_for_good_is_kept() -> None:
    stage = Stage()
    order = to_building(stage)
    stage.tell(built(order.plans[0]))
    for _ in range(2):
        stage.tell(ExecutorExited(worker="w1", device="cpu", at=stage.now, reason="killed by signal 9"))
        stage.perform()
    assert stage.ends() == ["done"]
    assert stage.last().variants == [order.plans[0].variant]
    assert "signal 9" in stage.last().failures[0].reason


def test_an_executor_that_stops_loses_its_order_at_once() -> None:
    stage = Stage()
    stage.tell(heartbeat())
    stage.register()
    stage.tell(ExecutorExited(worker="other", device="cpu", at=stage.now, reason="x"))
    assert len(stage.orders()) == 1
    stage.tell(ExecutorExited(worker="w1", device="cpu", at=stage.now, reason="x"))
    assert len(stage.orders()) == 2
    stage.tell(ExecutorExited(worker="w1", device="cpu", at=stage.now, reason="x"))
    assert stage.ends() == ["failed"]


def test_a_workshop_that_does_not_listen_yet_gets_its_order_a_little_later() -> None:
    stage = Stage()
    stage.tell(heartbeat())
    stage.tell(REQUEST, SUBJECTS.register(), "_INBOX.1")
    stage.perform()
    reply = next(
        effect.reply
        for effect in stage.registrar._floor._order(stage.registrar._floor.jobs["r1"], "w1", stage.now)
        if isinstance(effect, Publish) and effect.reply
    )
    for _ in range(20):
        stage.tell(Undelivered(reply))
        stage.pass_time(2, ["w1"])
    assert len(stage.orders()) == 21
    stage.tell(inspected())
    assert isinstance(stage.orders()[-1], BuildVariants)
    for _ in range(80):
        stage.tell(Undelivered(reply))
        stage.pass_time(2, ["w1"])
    assert stage.ends() == ["failed"]
    assert "takes no orders" in str(stage.last().reason)


def test_facts_of_strangers_change_nothing() -> None:
    stage = Stage()
    order = to_building(stage)
    before = len(stage.sent)
    stage.tell(inspected("unknown"))
    stage.tell(inspected(worker="w2"))
    stage.tell(inspected())  # a second time
    stage.tell(built(replace(order.plans[0], variant="never-asked-for")))
    stage.tell(finished("inspect"))
    stage.tell(finished("build", worker="w2"))
    stage.tell(finished("nonsense"))
    assert stage.sent[before:] == []
    complete(stage, order)
    stage.tell(finished("build"))
    stage.tell(built(order.plans[0]))
    assert stage.ends() == ["done"]


def test_the_catalogue_may_still_refuse() -> None:
    stage = Stage()
    order = to_building(stage)
    for plan in order.plans:
        stage.tell(built(plan))
    stage.tell(finished("build"))
    put = next(do for do in stage.commands if isinstance(do.command, PutRecords))
    stage.commands.remove(put)
    stage.tell(Done(put.id, Refused("bad_request", "somebody was faster")))
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


def test_replies_never_go_into_the_system() -> None:
    stage = Stage()
    stage.register()
    before = len(stage.sent)
    stage.tell(b"", SUBJECTS.registration("r1"), "t.query.digits")
    stage.tell(replace(REQUEST, app="a b"), SUBJECTS.register(), "t.register")
    assert stage.sent[before:] == []


def test_operators_change_the_catalogue() -> None:
    stage = Stage()

    def ask(verb: str, **fields: Any) -> Any:
        stage.tell(AdminRequest(**fields), SUBJECTS.admin(verb), "_INBOX.9")
        stage.perform()
        return stage.sent[-1][1]

    stage.put(SUBJECTS.catalog_bucket, "model.mlp.1", encode(model_record()))
    assert ask("add-app", app="a") == AdminDone()
    assert ask("link-model", app="a", model="mlp") == AdminDone()
    assert decode(AppRecord, stage.catalog["app.a"]).links == {"mlp": "1"}
    assert ask("link-model", app="b", model="mlp").error.code == "unknown_app"
    assert ask("unlink-model", app="a", model="mlp") == AdminDone()
    assert ask("delete-app", app="a") == AdminDone()
    assert "app.a" not in stage.catalog
    assert "delete-app" in ask("explode").error.message
    stage.tell(AdminRequest(app="b"), SUBJECTS.admin("add-app"), "_INBOX.9")
    stage.tell(Failed(stage.commands.pop().id, "disconnected"))
    assert stage.sent[-1][1].error.code == "overloaded"


def test_a_restarted_registrar_goes_on_with_its_own_work() -> None:
    first = Stage("a")
    to_building(first)
    second = Stage("a", buckets=first)
    second.tell(heartbeat())
    second.sweep()
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
        second.sweep()
    assert second.commands == []
    second.pass_time(10, ["w1"])
    assert decode(Work, second.status["work.r1"]).registrar == "b"
    assert isinstance(second.orders()[0], InspectModel)


def test_a_registrar_that_leaves_hands_over_at_once() -> None:
    first = Stage("a")
    to_building(first)
    goodbye = next(iter(first.registrar.handle(_stopping(first))))
    assert isinstance(goodbye, Publish)
    second = Stage("b", buckets=first)
    second.tell(RegistrarHeartbeat(registrar="a"))
    second.tell(goodbye.message)
    second.sweep()
    second.perform()
    assert decode(Work, second.status["work.r1"]).registrar == "b"


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
    second.sweep()
    second.perform()
    assert second.orders() == []
    assert second.statuses() == []
    assert len(second.forgotten) == 1


def test_late_news_of_ended_work_starts_nothing() -> None:
    stage = Stage()
    order = to_building(stage)
    work = stage.status["work.r1"]
    complete(stage, order)
    stage.put(SUBJECTS.status_bucket, "work.r1", work)
    before = len(stage.orders())
    stage.pass_time(20, ["w1"])
    assert len(stage.orders()) == before
    assert len(stage.forgotten) == 1


def test_late_news_of_a_status_does_not_hide_the_last_one() -> None:
    stage = Stage()
    order = to_building(stage)
    old = stage.status["registration.r1"]
    complete(stage, order)
    stage.put(SUBJECTS.status_bucket, "registration.r1", old)
    stage.tell(b"", SUBJECTS.registration("r1"), "_INBOX.2")
    assert stage.sent[-1][1].state == "done"


def test_anothers_statuses_are_told_to_whoever_asks() -> None:
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

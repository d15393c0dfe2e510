"""Orders and facts on a stage: workers that fail, fall silent or leave, and variants that do not work."""

from math import inf
from typing import Any

import pytest
from msgspec.structs import replace

from bus.codec import decode, encode
from bus.messages.catalog import AppRecord, ModelRecord
from bus.messages.fleet import ExecutorExited
from bus.messages.public import ContainerReport, Refusal, RegistrationAccepted, RegistrationCancelled
from bus.messages.work import BuildVariants, CancelWork, InspectModel, WorkProgress
from services.core.actor import Publish, Undelivered
from services.core.placement import container_kind
from services.registrar.commands import AddVariants, PutRecords, RegistrationRecord
from services.registrar.policy import SILENCE_S
from tests.support.simulated.registrations import (
    PROFILE,
    REQUEST,
    SIGNATURE,
    SUBJECTS,
    Stage,
    build_order,
    building,
    built,
    complete,
    failed,
    finished,
    heartbeat,
    inspected,
    registered,
    registering,
    to_building,
)


def test_variants_that_fail_do_not_stop_the_others() -> None:
    stage = Stage()
    good, bad, nan, poor, *rest = to_building(stage).plans
    stage.tell(failed(bad, reason="the compiler gave up"))
    stage.tell(built(nan, accuracy=float("nan")))
    stage.tell(built(poor, agreement=0.5))
    stage.tell(built(good))
    for plan in rest:
        stage.tell(failed(plan))
    stage.settle(finished("build"))
    assert stage.ends() == ["done"]
    assert stage.last().variants == [good.variant]
    reasons = {failure.variant: failure.reason for failure in stage.last().failures}
    assert reasons[bad.variant] == "the compiler gave up"
    assert "NaN" in reasons[nan.variant]
    assert "50.0%" in reasons[poor.variant]
    assert [key for key in stage.catalog if key.startswith("variant.")] == [f"variant.{good.variant}"]


def test_no_variant_no_model() -> None:
    stage, order = building()
    for plan in order.plans:
        stage.tell(failed(plan, reason="out of memory"))
    stage.settle(finished("build"))
    assert stage.ends() == ["failed"]
    assert stage.last().reason == "no variant works: out of memory"
    assert stage.catalog == {}
    assert len(stage.forgotten) == 1


def test_orders_laid_down_are_given_again_and_forgotten_variants_reported() -> None:
    stage, order = building()
    stage.settle(finished("build", reason="the worker is stopping", lost=True))
    assert stage.ends() == []
    assert len(stage.orders()) == 3
    complete(stage, order)
    assert stage.ends() == ["done"]
    stage = Stage()
    stage.settle(built(to_building(stage).plans[0]), finished("build", reason="the sandbox was killed"))
    assert stage.ends() == ["done"]
    assert {failure.reason for failure in stage.last().failures} == {"the sandbox was killed"}


@pytest.mark.parametrize("reason", ["not an ONNX file", None])
def test_a_failed_inspection_ends_it(reason: str | None) -> None:
    stage = registering()
    stage.settle(finished("inspect", reason=reason))
    assert stage.ends() == ["failed"]
    assert stage.last().reason == (reason or "the inspection ended without a result")


def test_bad_models_fail_dry_runs_and_formats() -> None:
    stage = registering(replace(REQUEST, format="pt2"))
    stage.settle(inspected(frameworks={"ort": "it cannot convert this", "torch": "not installed"}))
    assert stage.ends() == ["failed"]
    assert "torch: not installed" in str(stage.last().reason)
    stage = registering(replace(REQUEST, dry_run=True))
    stage.settle(finished("inspect", reason="output 'p' holds NaN on the validation set"))
    assert (stage.last().state, stage.last().reason) == ("failed", "output 'p' holds NaN on the validation set")
    assert stage.records == []
    stage = registered()
    stage.register(replace(REQUEST, registration="r2", dry_run=True))
    other = replace(SIGNATURE, inputs=[replace(SIGNATURE.inputs[0], shape=[3])])
    stage.settle(inspected("r2", signature=other))
    assert "does not fit app digits" in str(stage.last("r2").reason)


def test_registrations_queue_for_a_worker_and_share_several() -> None:
    stage = Stage()
    stage.hear(heartbeat("w1", utilisation=0.5), heartbeat("w2", utilisation=0.1))
    for n in (1, 2, 3):
        stage.register(replace(REQUEST, registration=f"r{n}", model=f"m{n}"))
    assert [order.registration for order in stage.orders("w2")] == ["r1"], "the idler worker is first"
    assert [order.registration for order in stage.orders("w1")] == ["r2"]
    stage.tell(finished("inspect", "r2", "w1", "bad file"))
    assert [order.registration for order in stage.orders("w1")] == ["r2", "r3"]


def test_workers_that_are_gone_are_forgotten() -> None:
    stage = Stage()
    stage.tell(heartbeat("gone"))
    stage.now += SILENCE_S + 1.0
    stage.tell(heartbeat("there"))
    assert [one.worker for one in stage.registrar._registrations.workers.alive(stage.now, within=inf)] == ["there"]


def test_leaving_draining_and_silent_workers_get_no_orders() -> None:
    stage = Stage()
    stage.hear(heartbeat("leaving", leaving=True), heartbeat("draining", draining=True), heartbeat("silent"))
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
    stage, order = building()
    stage.register(replace(REQUEST, registration="r2", model="cnn"))
    for _ in range(50):
        stage.tell(WorkProgress(registration="r1", worker="w1", step="profiling", progress=0.5))
        stage.pass_time(10, ["w1"])
    assert stage.ends("r1") + stage.ends("r2") == []
    complete(stage, order)
    assert isinstance(stage.orders()[-1], InspectModel)
    assert stage.orders()[-1].registration == "r2"


def test_a_silent_worker_is_tried_once_more_and_then_given_up() -> None:
    stage = registering()
    stage.pass_time(125, ["w1"])
    assert len(stage.orders()) == 2
    assert stage.ends() == []
    stage.pass_time(125, ["w1"])
    assert len(stage.orders()) == 2
    assert stage.ends() == ["failed"]
    assert "said nothing" in str(stage.last().reason)


def test_a_lost_build_is_given_to_another_worker_with_what_remains() -> None:
    stage, order = building()
    stage.tell(built(order.plans[0]))
    stage.pass_time(30, ["w2"])  # w1 is gone
    rest = build_order(stage, "w2")
    assert [plan.variant for plan in rest.plans] == [plan.variant for plan in order.plans[1:]]
    stage.tell(built(order.plans[1], worker="w1"))  # too late: it is w2's now
    complete(stage, rest, "w2")
    assert stage.ends() == ["done"]
    assert len(stage.last().variants) == len(order.plans)


def test_what_was_built_before_the_worker_was_lost_for_good_is_kept() -> None:
    stage, order = building()
    stage.tell(built(order.plans[0]))
    for _ in range(2):
        stage.settle(ExecutorExited(worker="w1", device="cpu", at=stage.now, reason="killed by signal 9"))
    assert stage.ends() == ["done"]
    assert stage.last().variants == [order.plans[0].variant]
    assert "signal 9" in stage.last().failures[0].reason


def test_an_executor_that_stops_loses_its_order_at_once() -> None:
    stage = registering()
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
        for effect in stage.registrar._registrations._order(stage.registrar._registrations.open["r1"], "w1", stage.now)
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
    stage, order = building()
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
    stage.hear(finished("build"), built(order.plans[0]))
    assert stage.ends() == ["done"]


# -- a dry run


def test_a_dry_run_says_what_would_be_registered_and_keeps_nothing() -> None:
    stage = registering(replace(REQUEST, dry_run=True))
    (order,) = stage.orders()
    assert isinstance(order, InspectModel) and not order.keep
    stage.settle(inspected(baseline_accuracy=0.87))
    assert stage.ends() == ["done"]
    last = stage.last()
    assert (last.dry_run, last.accuracy, last.samples, last.signature) == (True, 0.87, 500, SIGNATURE)
    assert "mlp-v1-ort-fp32-t1-b8" in last.variants
    assert len(stage.orders()) == 1, "nothing is built"
    assert stage.catalog == {}
    assert stage.records == []
    assert [finish.forget for finish in stage.forgotten] == [True]


# -- a container: it has measured itself

CONTAINER = replace(
    REQUEST,
    format="container",
    object="ab" * 32,
    validation="",
    container=ContainerReport(
        signature=SIGNATURE, accuracy=0.8, max_batch=16, profile=PROFILE
    ),
)  # fmt: skip


def test_a_container_is_registered_without_a_worker() -> None:
    stage = Stage()
    assert stage.register(CONTAINER) == RegistrationAccepted(registration="r1")
    assert stage.ends() == ["done"]
    [record] = stage.variants
    assert record.variant == "mlp-v1-container-native-t1-b16"
    assert (record.framework, record.format, record.hardware) == ("container", "container", container_kind("mlp", "1"))
    assert (record.accuracy, record.max_batch) == (0.8, 16)
    assert decode(AppRecord, stage.catalog["app.digits"]).links == {"mlp": "1"}
    assert decode(ModelRecord, stage.catalog["model.mlp.1"]).source == CONTAINER.object


def test_containers_that_do_not_fit_or_have_no_accuracy_are_refused() -> None:
    stage = registered()
    other = replace(SIGNATURE, outputs=[replace(SIGNATURE.outputs[0], name="other")])
    report = replace(CONTAINER.container, signature=other)
    stage.register(replace(CONTAINER, registration="r2", container=report))
    assert "does not fit app digits" in str(stage.last("r2").reason)
    stage = Stage()
    stage.register(replace(CONTAINER, container=replace(CONTAINER.container, accuracy=float("nan"))))
    assert "NaN" in str(stage.last().reason)
    assert stage.catalog == {}


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"max_batch": 0}, "container.max_batch"),
        ({"signature": replace(SIGNATURE, outputs=[])}, "container.signature"),
    ],
)
def test_the_fields_of_a_container_are_checked(change: dict[str, Any], field: str) -> None:
    reply = Stage().register(replace(CONTAINER, container=replace(CONTAINER.container, **change)))
    assert isinstance(reply, Refusal) and field in reply.error.message


def test_the_work_of_a_registrar_that_died_over_a_container_goes_on() -> None:
    stage = Stage()
    stage.register(CONTAINER)
    left = Stage("b")
    record = RegistrationRecord(registration="r1", request=CONTAINER, registrar="a", created=1.0, version="1")
    left.put(SUBJECTS.status_bucket, "work.r1", encode(record))
    left.pass_time(10)
    assert left.ends() == ["done"]
    assert left.variants == stage.variants != []


def app_of(stage: Stage) -> AppRecord:
    return decode(AppRecord, stage.catalog["app.digits"])


def cancel(stage: Stage, registration: str = "r1") -> Any:
    """Ask for it; returns the reply."""
    stage.tell(b"", SUBJECTS.registration_cancel(registration), "_INBOX.9")
    stage.perform()
    return [message for subject, message in stage.sent if subject == "_INBOX.9"][-1]


def test_a_cancelled_registration_ends_and_its_worker_stops() -> None:
    stage, order = building()
    stage.tell(built(order.plans[0]))
    assert cancel(stage) == RegistrationCancelled()
    assert stage.ends() == ["cancelled"]
    assert stage.last().variants == []
    assert (SUBJECTS.workshop("w1", "cancel"), CancelWork(registration="r1")) in stage.sent
    assert stage.catalog == {}
    assert len(stage.forgotten) == 1
    stage.settle(built(order.plans[1]), finished("build"))
    assert stage.ends() == ["cancelled"]
    assert stage.records[-1].event.state == "cancelled"
    stage.register(replace(REQUEST, registration="r2"))
    assert stage.orders()[-1].registration == "r2"  # the worker is free


def test_an_app_answers_with_its_first_variant_while_the_others_are_built() -> None:
    stage, order = building()
    stage.settle(built(order.plans[0]))
    assert [record.variant for record in stage.variants] == [order.plans[0].variant]
    assert app_of(stage).links == {"mlp": "1"}
    assert stage.last().step == f"digits answers queries: 1 of {len(order.plans)} variants ready"
    told = stage.records[-1].event
    assert (told.reason, told.progress) == (stage.last().step, stage.last().progress)  # the dashboard's cards show it
    assert stage.ends() == []
    complete(stage, order)
    assert stage.ends() == ["done"]
    assert stage.records[-1].event.reason is None
    assert {record.variant for record in stage.variants} == {plan.variant for plan in order.plans}
    assert not any(isinstance(do.command, PutRecords) for do in stage.commands)


def test_what_is_ready_before_its_first_variant_is_written_follows_it() -> None:
    stage, order = building()
    for plan in order.plans:
        stage.tell(built(plan))
    (first,) = [do.command for do in stage.commands if isinstance(do.command, PutRecords | AddVariants)]
    assert isinstance(first, PutRecords)
    stage.settle(finished("build"))
    assert stage.ends() == ["done"]
    assert len(stage.variants) == len(order.plans)


def test_an_app_that_serves_a_version_serves_the_next_one_when_all_of_it_is_built() -> None:
    stage = registered()
    order = to_building(stage, replace(REQUEST, registration="r2"))
    stage.settle(built(order.plans[0], "r2"))
    assert app_of(stage).links == {"mlp": "1"}
    complete(stage, order)
    assert app_of(stage).links == {"mlp": "2"}


def test_a_version_that_is_measured_anew_is_the_next_one_of_the_same_file() -> None:
    stage = registered()
    request = replace(REQUEST, registration="r2", object="any", validation="r2.validation", remeasures="1")
    order = to_building(stage, request)
    first, again = (message for _, message in stage.sent if isinstance(message, InspectModel))
    assert (first.stored, first.object, again.stored, again.object) == (False, REQUEST.object, True, "aa")
    assert again.validation == "r2.validation"
    complete(stage, order)
    assert app_of(stage).links == {"mlp": "2"}
    assert stage.forgotten[-1].uploads == ("r2.validation",)


def test_a_registration_that_is_cancelled_while_its_first_variant_is_written_ends_after_that() -> None:
    stage, order = building()
    stage.tell(built(order.plans[0]))
    (put,) = [do for do in stage.commands if isinstance(do.command, PutRecords)]
    stage.commands.remove(put)
    assert cancel(stage) == RegistrationCancelled()
    assert stage.ends() == []
    stage.commands.append(put)
    stage.perform()
    assert stage.ends() == ["cancelled"]
    assert stage.catalog == {}


def test_what_waits_or_is_under_way_can_be_cancelled_and_nothing_else() -> None:
    stage = Stage()
    stage.register()
    assert cancel(stage) == RegistrationCancelled()
    assert stage.ends() == ["cancelled"]
    stage.tell(heartbeat())
    assert stage.orders() == []
    stage = registered()
    assert "has ended already: it is done" in cancel(stage).error.message
    assert "none with the id r7" in cancel(stage, "r7").error.message


def test_a_failed_one_is_dismissed_for_everybody_and_stays_in_the_history() -> None:
    stage = registering()
    stage.settle(finished("inspect", reason="not an ONNX file"))
    assert "registration.r1" in stage.status
    other = Stage("b", buckets=stage)
    assert cancel(other) == RegistrationCancelled()
    assert "registration.r1" not in stage.status
    last = other.records[-1].event
    assert (last.state, last.reason) == ("dismissed", "not an ONNX file")
    assert "none with the id r1" in cancel(other).error.message


def test_another_registrar_ends_what_was_cancelled_while_nobody_carried_it_on() -> None:
    stage = Stage()
    to_building(stage)
    other = Stage("b", buckets=stage)
    assert cancel(other) == RegistrationCancelled()
    assert other.ends() == []  # registrar a carries it on
    other.pass_time(60, heartbeats=["w1"])
    assert other.ends() == ["cancelled"]
    assert other.orders() == []


def test_what_is_being_written_is_not_cancelled() -> None:
    stage, order = building()
    for plan in order.plans:
        stage.tell(built(plan))
    stage.tell(finished("build"))
    held = [do for do in stage.commands if isinstance(do.command, PutRecords)]
    stage.commands = [do for do in stage.commands if do not in held]
    cancel(stage)
    stage.commands += held
    stage.perform()
    assert stage.ends() == ["done"]

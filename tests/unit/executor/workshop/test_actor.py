"""The workshop's queue: one order at a time, none twice, none silently lost."""

import asyncio
from pathlib import Path

import pytest
from msgspec.structs import replace

from bus.messages.catalog import Signature
from bus.messages.work import (
    BuildVariants,
    CancelWork,
    InspectModel,
    ModelInspected,
    VariantBuilt,
    VariantFailed,
    WorkFinished,
    WorkProgress,
)
from bus.subjects import Subjects
from services.core.actor import After, Cancel, Do, Done, Envelope, Failed, Publish, Stopping, TimedOut
from services.core.settings import RegistrarSettings
from services.executor.workshop.actor import RemindDue, StopOrder, WorkshopActor, WorkshopOrder
from services.executor.workshop.sandbox.lockdown import device_files
from services.shell.host.accelerators import accelerators
from tests.support.models import tiny_models
from tests.unit.executor.workshop.test_helper import Shop, plan

SUBJECTS = Subjects("t")


def actor() -> WorkshopActor:
    return WorkshopActor("w1", SUBJECTS, RegistrarSettings(seconds=600.0))


def inspect(registration: str) -> InspectModel:
    return InspectModel(
        registration=registration, format="onnx", object="m", validation="v", inputs_key="x", labels_key="y",
        metric="top1",
    )  # fmt: skip


def build(registration: str) -> BuildVariants:
    return BuildVariants(
        registration=registration, model="m", version="1", format="onnx", source="s", validation="v",
        inputs_key="x", labels_key="y", metric="top1", signature=Signature(inputs=[], outputs=[]), plans=[],
    )  # fmt: skip


def tell(subject, message) -> list:
    return list(subject.handle(Envelope(0.0, message)))


def works(effects) -> list[Do]:
    return [one for one in effects if isinstance(one, Do)]


def said(effects, kind) -> list:
    return [one.message for one in effects if isinstance(one, Publish) and isinstance(one.message, kind)]


def test_it_listens_to_the_orders_of_its_worker_only():
    orders = ("inspect", "build", "cancel")
    expected = {*(f"t.workshop.w1.{order}" for order in orders), "t.registrar.kept"}
    assert {inlet.subject for inlet in actor().inlets} == expected


def test_a_model_of_torch_that_will_come_is_prepared_for_where_nothing_else_is_done():
    workshop, coming = actor(), replace(inspect("a"), object="", validation="", format="pt2")
    assert not tell(workshop, replace(coming, format="onnx"))
    (first,) = works(tell(workshop, coming))
    assert first.command.announces
    assert not tell(workshop, replace(coming, registration="b"))
    assert not works(tell(workshop, replace(inspect("c"), format="pt2")))
    (then,) = works(tell(workshop, Done(first.id, None)))
    assert (then.command.registration, then.command.announces) == ("c", False)


def test_one_order_at_a_time_in_the_order_they_came():
    workshop = actor()
    first = works(tell(workshop, inspect("a")))
    assert [do.command.registration for do in first] == ["a"]
    assert not works(tell(workshop, build("b")))
    assert not works(tell(workshop, inspect("c")))
    second = works(tell(workshop, Done(first[0].id, None)))
    assert [(do.command.registration, do.command.kind) for do in second] == [("b", "build")]
    third = works(tell(workshop, Done(second[0].id, None)))
    assert [do.command.registration for do in third] == ["c"]
    assert not tell(workshop, Done(third[0].id, None))


def test_an_order_that_is_repeated_is_done_once():
    workshop = actor()
    do = works(tell(workshop, inspect("a")))[0]
    assert not tell(workshop, inspect("a"))
    tell(workshop, build("b"))
    assert not works(tell(workshop, build("b")))
    after = works(tell(workshop, Done(do.id, None)))
    assert len(after) == 1
    assert not works(tell(workshop, Done(after[0].id, None)))
    assert works(tell(workshop, inspect("a")))  # a later one is a new order


def test_those_who_wait_say_so_until_their_turn():
    workshop = actor()
    do = works(tell(workshop, inspect("a")))[0]
    effects = tell(workshop, inspect("b"))
    assert [one.registration for one in said(effects, WorkProgress)] == ["b"]
    assert any(isinstance(one, After) for one in effects)
    assert [one.registration for one in said(tell(workshop, RemindDue()), WorkProgress)] == ["b"]
    tell(workshop, Done(do.id, None))
    assert [type(one) for one in tell(workshop, RemindDue())] == [Cancel]


def test_a_helper_that_fails_is_reported_and_the_next_order_starts():
    workshop = actor()
    for failure, word in ((Failed(1, "it crashed"), "crashed"), (TimedOut(2), "longer")):
        do = works(tell(workshop, inspect("a")))[0]
        tell(workshop, inspect("b"))
        assert do.id == failure.id
        effects = tell(workshop, failure)
        (finished,) = said(effects, WorkFinished)
        assert (finished.registration, finished.order, finished.worker) == ("a", "inspect", "w1")
        assert word in finished.reason
        (following,) = works(effects)
        assert following.command.registration == "b"
        if failure.id == 1:
            assert not tell(workshop, Failed(1, "late news of an order that is over"))
            workshop = actor()
            tell(workshop, Done(works(tell(workshop, inspect("x")))[0].id, None))


def test_a_stopping_worker_gives_its_orders_back():
    workshop = actor()
    tell(workshop, inspect("a"))
    tell(workshop, build("b"))
    finished = said(tell(workshop, Stopping(5.0)), WorkFinished)
    assert [(one.registration, one.order) for one in finished] == [("a", "inspect"), ("b", "build")]
    assert all("stopping" in one.reason for one in finished)


def test_a_cancelled_order_is_stopped_or_never_begun():
    workshop = actor()
    first = works(tell(workshop, inspect("a")))[0]
    tell(workshop, build("b"))
    tell(workshop, inspect("c"))
    assert not works(tell(workshop, CancelWork(registration="b")))
    (stop,) = works(tell(workshop, CancelWork(registration="a")))
    assert stop.command == StopOrder("a")
    assert not tell(workshop, Done(stop.id, None))
    assert [do.command.registration for do in works(tell(workshop, Done(first.id, None)))] == ["c"]


# -- Orders for an accelerator, in real sandboxes, on a machine that has none: reasons instead of variants, and no CPU instead.


@pytest.fixture
def claiming(tmp_path) -> Shop:
    """A workshop whose worker claims a GPU that nobody has."""
    if any(one.kind == "gpu" for one in accelerators()):
        pytest.skip("this machine has a GPU")
    return Shop(tmp_path, devices={"gpu": "cuda:7"})


@pytest.mark.slow
def test_frameworks_are_looked_at_on_the_device_and_variants_never_measured_elsewhere(claiming):
    claiming.inspect(tiny_models.mlp(), hardware="gpu")
    assert claiming.reason is None
    (found,) = claiming.of(ModelInspected)
    assert (found.hardware, found.frameworks["ort"]) == ("gpu", "")
    for name in ("ort-cuda", "tensorrt", "torch-cuda"):
        assert "driver" in found.frameworks[name]
    gpu = replace(plan("fp16", framework="ort-cuda"), hardware="gpu")
    claiming.build(gpu, replace(plan("fp32", framework="ort-cuda"), hardware="inferentia"), plan())
    reasons = {one.plan.precision: one.reason for one in claiming.of(VariantFailed)}
    assert "driver" in reasons["fp16"]
    assert "no device of kind inferentia" in reasons["fp32"]
    assert [(one.hardware, one.plan.framework) for one in claiming.of(VariantBuilt)] == [("cpu", "ort")]


def test_a_stored_model_is_inspected_again_without_its_upload(tmp_path):
    shop = Shop(tmp_path)
    shop.inspect(tiny_models.mlp())
    (first,) = shop.of(ModelInspected)
    order = InspectModel(
        registration="r", format="onnx", object=first.source, validation=first.validation, inputs_key="x", labels_key="y",
        metric="top1", stored=True,
    )  # fmt: skip
    asyncio.run(shop._run(WorkshopOrder(worker="w", inspect=order), {}))
    assert shop.reason is None
    (second,) = shop.of(ModelInspected)
    assert second == first
    wrong = tiny_models.npz(x=tiny_models.digits()[0], y=(tiny_models.digits()[1] + 1) % tiny_models.CLASSES)
    anew = WorkshopOrder(worker="w", inspect=replace(order, validation="new", remeasures="1"))
    asyncio.run(shop._run(anew, {"new": wrong}))
    assert shop.reason is None
    (third,) = shop.of(ModelInspected)
    assert (third.source, third.baseline_accuracy) == (first.source, 0.0)
    assert third.validation != first.validation


def test_workers_and_sandboxes_have_their_own_devices_only(tmp_path) -> None:
    shop = Shop(tmp_path)
    assert shop.inspect(tiny_models.mlp(), hardware="gpu").reason == "worker w has no device of kind gpu"
    for name in ("nvidia0", "nvidiactl", "nvidia-uvm", "sda"):
        (tmp_path / name).touch()
    assert [Path(one).name for one in device_files("gpu", tmp_path)] == ["nvidia-uvm", "nvidia0", "nvidiactl"]
    assert device_files("cpu", tmp_path) == device_files("inferentia", tmp_path) == []

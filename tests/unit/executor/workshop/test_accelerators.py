"""Orders for an accelerator, in real sandboxes, on a machine that has none: reasons instead of variants, and no CPU instead."""

import asyncio
from pathlib import Path

import pytest
from msgspec.structs import replace

from bus.messages.work import InspectModel, ModelInspected, VariantBuilt, VariantFailed
from services.executor.workshop.actor import WorkshopOrder
from services.executor.workshop.sandbox.lockdown import device_files
from services.shell.host.accelerators import accelerators
from tests.support.models import tiny_models
from tests.unit.executor.workshop.test_helper import Shop, plan


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
    chip = replace(plan("fp32", framework="ort-cuda"), hardware="inferentia")
    claiming.build(gpu, chip, plan())
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


def test_a_worker_without_such_a_device_says_so(tmp_path):
    shop = Shop(tmp_path)
    assert shop.inspect(tiny_models.mlp(), hardware="gpu").reason == "worker w has no device of kind gpu"


def test_a_sandbox_sees_the_files_of_its_own_kind_of_device_only(tmp_path: Path):
    for name in ("nvidia0", "nvidiactl", "nvidia-uvm", "sda"):
        (tmp_path / name).touch()
    assert [Path(one).name for one in device_files("gpu", tmp_path)] == ["nvidia-uvm", "nvidia0", "nvidiactl"]
    assert device_files("cpu", tmp_path) == device_files("inferentia", tmp_path) == []

"""Variants that compute with small integers are measured again when a CPU joins that adds them otherwise."""

from msgspec.structs import replace

from bus.codec import encode
from bus.messages.catalog import VariantRecord
from bus.messages.fleet import WorkerHeartbeat
from bus.messages.work import BuildVariants
from tests.support.simulated.registrations import (
    PROFILE,
    REQUEST,
    Stage,
    app_record,
    build_order,
    built,
    finished,
    heartbeat,
    inspected,
    model_record,
    variant_record,
)
from tests.unit.registrar.test_hardware import CPU_ONLY, beats, finish, inspect, inspections, on, with_gpu, with_models

FP32, INT8 = "mlp-v1-ort-fp32-t1-b8", "mlp-v1-ort-int8-t1-b8"


def worker(name: str, arithmetic: str) -> WorkerHeartbeat:
    beat = heartbeat(name)
    return replace(beat, devices=[replace(beat.devices[0], arithmetic=arithmetic)])


VNNI, PLAIN = worker("w1", "exact"), worker("w2", "saturating")


def registered(*records: VariantRecord) -> Stage:
    """A registrar that starts with these variants of a model."""
    earlier = Stage()
    for record in records:
        earlier.put("t-catalog", f"variant.{record.variant}", encode(record))
    earlier.put("t-catalog", "model.mlp.1", encode(model_record("mlp")))
    earlier.put("t-catalog", "app.digits", encode(app_record()))
    return Stage(buckets=earlier)


def measured_again(stage: Stage, operators: tuple[str, ...] = ("Gemm",)) -> BuildVariants:
    """What the joined worker builds; it then reports a lower accuracy."""
    order = inspections(stage, "w2")[-1]
    stage.settle(inspected(order.registration, "w2", operators=list(operators), baseline_accuracy=0.7))
    build = build_order(stage, "w2")
    profile = replace(PROFILE, host={"arithmetic": "saturating"})
    for plan in build.plans:
        stage.tell(built(plan, order.registration, "w2", accuracy=0.8, profile=profile))
    stage.settle(finished("build", order.registration, "w2"))
    return build


def records(stage: Stage) -> dict[str, VariantRecord]:
    found = stage.variants
    return {record.variant: record for record in found}


def test_an_int8_variant_is_measured_again_on_a_cpu_without_vnni() -> None:
    int8 = variant_record(INT8, precision="int8", arithmetic="exact", accuracy=0.9, model_accuracy=0.9)
    stage = registered(variant_record(FP32, model_accuracy=0.9), int8)
    beats(stage, 3, VNNI)
    assert stage.orders() == []
    beats(stage, 2, VNNI, PLAIN)
    assert inspections(stage, "w1") == []
    build = measured_again(stage)
    assert {plan.precision for plan in build.plans} == {"int8"}
    after = records(stage)
    assert after[INT8] == int8
    new = after["mlp-v1-ort-int8-saturating-t1-b8"]
    assert (new.arithmetic, new.accuracy, new.model_accuracy) == ("saturating", 0.8, 0.9)
    assert new.precision == "int8"
    assert [name for name in after if "fp32" in name] == [FP32]
    beats(stage, 30, VNNI, PLAIN)
    assert len(inspections(stage, "w2")) == 1


def test_only_quantised_files_are_measured_again() -> None:
    stage = registered(variant_record(FP32, arithmetic="exact", model_accuracy=0.9))
    beats(stage, 2, VNNI, PLAIN)
    build = measured_again(stage, ("QLinearConv", "DequantizeLinear"))
    assert {plan.precision for plan in build.plans} == {"fp32"}
    assert records(stage)["mlp-v1-ort-fp32-saturating-t1-b8"].accuracy == 0.8
    stage = registered(variant_record(FP32))
    beats(stage, 3, VNNI, PLAIN)
    assert stage.orders() == stage.orders("w2") == []
    stage = registered(variant_record(INT8, precision="int8", arithmetic="exact"))
    beats(stage, 3, VNNI, worker("w2", "exact"), worker("w3", ""))
    assert stage.orders() == stage.orders("w2") == stage.orders("w3") == []


# -- Variants of a remote engine come from a worker that may use it.
REMOTE = replace(REQUEST, model="far", format="remote")


def test_a_remote_engine_gets_its_variants_from_a_worker_that_may_use_it() -> None:
    stage = with_models("mlp")
    beats(stage, 3, CPU_ONLY, with_gpu("w2", kind="remote"))
    assert inspections(stage, "w2") == [], "no other model gets variants for it"
    stage.register(REMOTE)
    stage.tell(with_gpu("w2", kind="remote"))
    order = inspect(stage, "w2", frameworks={"remote": ""}, most_batch=16, operators=[])
    assert (order.hardware, order.format, order.stored) == ("remote", "remote", False)
    plans = finish(stage, "w2").plans
    assert [(one.framework, one.precision, one.threads, one.max_batch) for one in plans] == [
        ("remote", "native", 1, 8),
        ("remote", "native", 1, 16),
    ]
    assert stage.ends() == ["done"]
    assert len(on(stage, "remote")) == 2
    beats(stage, 3, CPU_ONLY, with_gpu())
    assert {one.format for one in inspections(stage)} == {"onnx"}, "an engine gets no variants for a GPU"


def test_without_a_worker_that_may_use_engines_it_fails_with_the_remedy() -> None:
    stage = with_models("mlp")
    stage.register(REMOTE)
    beats(stage, 5, CPU_ONLY)
    assert stage.ends() == ["failed"]
    assert "executor.remote_hosts" in str(stage.last().reason)

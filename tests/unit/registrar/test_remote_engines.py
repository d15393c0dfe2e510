"""Variants of a remote engine come from a worker that may use it."""

from msgspec.structs import replace

from tests.support.simulated.registrations import REQUEST
from tests.unit.registrar.test_hardware import CPU_ONLY, beats, finish, inspect, inspections, on, with_gpu, with_models

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
    beats(stage, 18, CPU_ONLY)
    assert stage.ends() == ["failed"]
    assert "executor.remote_hosts" in str(stage.last().reason)

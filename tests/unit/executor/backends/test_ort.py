"""onnxruntime on a GPU as far as a CPU can show: options, proof of placement, IO binding."""

import warnings

import onnxruntime as ort
import pytest

from services.executor.backends.base import BackendUnavailable, LoadFailed, LoadSpec
from services.executor.backends.ort import (
    CPU,
    CUDA,
    NO_FALLBACK,
    Placement,
    accept,
    build,
    opened,
    place,
    placement,
    profiled,
    provider_of,
    session_options,
)
from tests.support.models import gpu_stand_ins, tiny_models


def node(provider, kind="float", size=4000, operator="MatMul"):
    arguments = {
        "op_name": operator,
        "provider": provider,
        "output_size": str(size),
        "output_type_shape": [{kind: [1]}],
    }
    return {"cat": "Node", "name": f"{operator}_kernel_time", "args": arguments}


# -- proof


def test_a_run_on_the_device_alone_is_accepted_and_counted():
    seen = placement([node(CUDA), node(CUDA), {"cat": "Session", "args": {}}])
    assert seen == Placement({CUDA: 2}, [])
    assert accept(seen, CUDA) == f"2 nodes on {CUDA}"


def test_shape_arithmetic_may_stay_on_the_cpu():
    cpu = [node(CPU, "int64", 8, "Gather"), node(CPU, "bool", 1, "Equal")]
    assert placement([node(CUDA), *cpu]).on_cpu == []


@pytest.mark.parametrize("event", [node(CPU, "float", 4), node("", "int64", 4096, "NonZero")])
def test_computing_may_not(event):
    with pytest.raises(LoadFailed, match=event["args"]["op_name"]):
        accept(placement([node(CUDA), event]), CUDA)


def test_a_provider_that_took_nothing_is_no_proof():
    with pytest.raises(LoadFailed, match="takes no operator"):
        accept(placement([node("OtherExecutionProvider")]), CUDA)


def test_a_real_profile_is_understood(tmp_path):
    """On the CPU, which must not be there: the model's operators are named."""
    path = tmp_path / "model.onnx"
    path.write_bytes(tiny_models.mlp())
    with pytest.raises(LoadFailed, match="MatMul"):
        profiled(ort, path, LoadSpec())


def test_a_provider_that_does_not_start_is_no_silent_matter(tmp_path):
    if CUDA in ort.get_available_providers():
        pytest.skip("this onnxruntime has CUDA")
    path = tmp_path / "model.onnx"
    path.write_bytes(tiny_models.mlp())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(LoadFailed, match=CUDA):
            opened(ort, path, LoadSpec(device="cuda:0"))
    with pytest.raises(BackendUnavailable, match="onnxruntime-gpu"):
        build(CUDA)


# -- options


def test_the_cpu_is_forbidden_unless_a_profile_is_to_show_it(tmp_path):
    assert session_options(ort, 2, strict=True).get_session_config_entry(NO_FALLBACK) == "1"
    relaxed = session_options(ort, 2, profile=str(tmp_path / "p"))
    with pytest.raises(Exception, match=NO_FALLBACK):
        relaxed.get_session_config_entry(NO_FALLBACK)
    assert relaxed.enable_profiling
    assert relaxed.intra_op_num_threads == 2


def test_the_device_picks_the_provider_and_its_number_reaches_it():
    assert (place("cpu"), place("cuda:3")) == (("cpu", 0), ("cuda", 3))
    assert provider_of("cpu") == (CPU, {})
    name, options = provider_of("cuda:3")
    assert (name, options["device_id"], options["use_tf32"]) == (CUDA, "3", "0")


# -- IO binding


def test_only_so_many_shapes_keep_their_buffers(tmp_path):
    (tmp_path / "model.onnx").write_bytes(tiny_models.mlp())
    bound = gpu_stand_ins.bound(tmp_path / "model.onnx")
    assert (bound.proof, bound.memory_mb) == ("proof", 12.0)
    x = tiny_models.digits(60)[0]
    for n in range(1, 60):
        assert bound.run_single(x[:n])[0].shape == (n, tiny_models.CLASSES)
        assert len(bound._placed) <= 16
    bound.close()

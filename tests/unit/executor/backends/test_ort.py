"""onnxruntime on a GPU as far as a CPU can show: options, proof of placement, IO binding."""

import warnings

import numpy as np
import onnxruntime as ort
import pytest

from services.executor.backends.base import BackendUnavailable, InputRejected, LoadFailed, LoadSpec, RunFailed
from services.executor.backends.ort import (
    CPU,
    CUDA,
    NO_FALLBACK,
    BoundHandle,
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
from tests.support.models import tiny_models


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


# -- IO binding, on the CPU's own memory: the same calls


@pytest.fixture
def bound(tmp_path):
    path = tmp_path / "model.onnx"
    path.write_bytes(tiny_models.mlp())
    session = ort.InferenceSession(str(path), providers=[CPU])
    handle = BoundHandle(ort, session, LoadSpec(max_batch=64), "proof", 12.0)
    yield handle
    handle.close()


def test_bound_batches_of_any_size_get_their_own_answers(bound):
    x, classes = tiny_models.digits(64)
    kept = []
    for n in (1, 64, 3, 1, 17, 64):
        kept.append((bound.run_single(x[:n])[0], n))
        assert np.array_equal(bound.run({"x": x[:n]})["scores"], kept[-1][0])
    assert all(scores.argmax(axis=1).tolist() == classes[:n].tolist() for scores, n in kept)
    assert (bound.proof, bound.memory_mb) == ("proof", 12.0)


def test_only_so_many_shapes_keep_their_buffers(bound):
    x = tiny_models.digits(60)[0]
    for n in range(1, 60):
        assert bound.run_single(x[:n])[0].shape == (n, tiny_models.CLASSES)
        assert len(bound._placed) <= 16
    bound.shrink()
    assert bound.run_single(x[::2])[0].shape == (30, tiny_models.CLASSES)


def test_bound_inputs_are_checked(bound):
    x = tiny_models.digits(2)[0]
    for wrong in ({"x": x[:, :3]}, {"z": x}, {}, {"x": x, "y": x}):
        with pytest.raises(InputRejected):
            bound.run(wrong)
    for wrong in (x.astype("f8"), x[0]):
        with pytest.raises(InputRejected):
            bound.run({"x": wrong})
    assert bound.run({"x": x})["scores"].shape == (2, tiny_models.CLASSES)


def test_a_closed_bound_model_answers_no_more(bound):
    bound.close()
    with pytest.raises(RunFailed, match="no longer loaded"):
        bound.run_single(tiny_models.digits(1)[0])

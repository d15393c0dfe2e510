"""onnxruntime's accelerator providers as far as a CPU can show: options, cache names, proof of placement, IO binding."""

import warnings

import numpy as np
import onnxruntime as ort
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bus.messages.catalog import Signature, TensorSpec
from services.executor.backends import ort_tensorrt
from services.executor.backends.base import BackendUnavailable, InputRejected, LoadFailed, LoadSpec, RunFailed
from services.executor.backends.ort_cuda import (
    NO_FALLBACK,
    BoundHandle,
    Placement,
    accept,
    build,
    cuda_options,
    opened,
    place,
    placement,
    strict_options,
)
from services.executor.backends.ort_tensorrt import engine_key, profile_shapes, tensorrt_options, version_text
from tests.support.models import tiny_models

CUDA = "CUDAExecutionProvider"
IMAGES = Signature(
    inputs=[
        TensorSpec(name="x", datatype="FP32", shape=[3, 224, 224]),
        TensorSpec(name="mask", datatype="BOOL", shape=[]),
    ],
    outputs=[TensorSpec(name="scores", datatype="FP32", shape=[10])],
)


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
    cpu = [node("CPUExecutionProvider", "int64", 8, "Gather"), node("CPUExecutionProvider", "bool", 1, "Equal")]
    assert placement([node(CUDA), *cpu]).on_cpu == []


@pytest.mark.parametrize("event", [node("CPUExecutionProvider", "float", 4), node("", "int64", 4096, "NonZero")])
def test_computing_may_not(event):
    with pytest.raises(LoadFailed, match=event["args"]["op_name"]):
        accept(placement([node(CUDA), event]), CUDA)


def test_a_provider_that_took_nothing_is_no_proof():
    with pytest.raises(LoadFailed, match="takes no operator"):
        accept(placement([node(CUDA)]), "TensorrtExecutionProvider")


def test_a_real_profile_is_understood(tmp_path):
    """On the CPU, which must not be there: the model's operators are named."""
    path = tmp_path / "model.onnx"
    path.write_bytes(tiny_models.mlp())
    with pytest.raises(LoadFailed, match="MatMul"):
        opened(ort, path, LoadSpec(), [("CPUExecutionProvider", {})], must_profile=True)


def test_a_provider_that_does_not_start_is_no_silent_matter(tmp_path):
    if CUDA in ort.get_available_providers():
        pytest.skip("this onnxruntime has CUDA")
    path = tmp_path / "model.onnx"
    path.write_bytes(tiny_models.mlp())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(LoadFailed, match=CUDA):
            opened(ort, path, LoadSpec(), [(CUDA, cuda_options("cuda:0"))])
    with pytest.raises(BackendUnavailable, match="onnxruntime-gpu"):
        build(CUDA)


# -- options


def test_the_cpu_is_forbidden_unless_a_profile_is_to_show_it(tmp_path):
    assert strict_options(ort, 2).get_session_config_entry(NO_FALLBACK) == "1"
    relaxed = strict_options(ort, 2, strict=False, profile=str(tmp_path / "p"))
    with pytest.raises(Exception, match=NO_FALLBACK):
        relaxed.get_session_config_entry(NO_FALLBACK)
    assert relaxed.enable_profiling
    assert relaxed.intra_op_num_threads == 2


def test_the_device_number_reaches_the_provider():
    assert place("cuda:3") == ("cuda", 3)
    assert cuda_options("cuda:3")["device_id"] == "3"
    assert cuda_options("cuda:0")["use_tf32"] == "0"


def test_the_profile_spans_one_to_the_largest_batch():
    assert profile_shapes(IMAGES, 64) == ("x:1x3x224x224,mask:1", "x:64x3x224x224,mask:64")
    options = tensorrt_options("cuda:1", "int8", "here", *profile_shapes(IMAGES, 64))
    assert options["trt_profile_min_shapes"] == "x:1x3x224x224,mask:1"
    assert options["trt_profile_max_shapes"] == options["trt_profile_opt_shapes"] == "x:64x3x224x224,mask:64"
    assert (options["device_id"], options["trt_engine_cache_path"]) == ("1", "here")
    assert all(type(value) is str for value in options.values())


@pytest.mark.parametrize(("precision", "half", "integer"), [("fp32", "0", "0"), ("fp16", "1", "0"), ("int8", "0", "1")])
def test_precision_is_what_the_file_says(precision, half, integer):
    options = tensorrt_options("cuda:0", precision, "e", "x:1", "x:8")
    assert (options["trt_fp16_enable"], options["trt_int8_enable"]) == (half, integer)


def test_open_lengths_have_no_engine():
    open_length = Signature(inputs=[TensorSpec(name="tokens", datatype="INT64", shape=[-1])], outputs=[])
    with pytest.raises(LoadFailed, match="'tokens'"):
        profile_shapes(open_length, 8)
    with pytest.raises(LoadFailed, match="signature"):
        profile_shapes(None, 8)


# -- engine cache

_KEYS = st.tuples(
    st.sampled_from(["a" * 64, "a" * 63 + "b", "c" * 64]),
    st.sampled_from(["NVIDIA H100 80GB HBM3", "NVIDIA H100-80GB-HBM3", "Tesla T4"]),
    st.sampled_from(["10.9.0", "10.9.1"]),
    st.sampled_from(["fp32", "fp16", "int8"]),
    st.sampled_from([1, 8, 64]),
)


@given(_KEYS, _KEYS)
def test_engines_are_shared_only_where_the_same_would_be_built(one, other):
    assert (engine_key(*one) == engine_key(*other)) == (one == other)


def test_an_engine_directory_is_readable_and_a_plain_name():
    key = engine_key("abcdef0123456789" * 4, "NVIDIA H100 80GB HBM3 / ../x", "10.9.0", "fp16", 64)
    assert key.startswith("abcdef012345-nvidia-h100-80gb-hbm3-x-fp16-b64-")
    assert "/" not in key
    assert "." not in key


def test_versions_are_read():
    assert version_text(100900) == "10.9.0"
    assert version_text(100501) == "10.5.1"


def test_a_missing_library_is_named_with_the_remedy():
    try:
        ort_tensorrt.tensorrt_version()
    except BackendUnavailable as error:
        assert "libnvinfer.so.10" in str(error)
        assert "NVIDIA" in str(error)
    else:
        pytest.skip("TensorRT is installed")


def test_a_precision_without_a_recipe_is_refused_before_anything_else(tmp_path):
    with pytest.raises(LoadFailed, match="bf16"):
        ort_tensorrt.OrtTensorrtBackend().load(tmp_path / "x", LoadSpec(device="cuda:0", precision="bf16"))


# -- IO binding, on the CPU's own memory: the same calls


@pytest.fixture
def bound(tmp_path):
    path = tmp_path / "model.onnx"
    path.write_bytes(tiny_models.mlp())
    session = ort.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    handle = BoundHandle(ort, session, LoadSpec(max_batch=64), ("cpu", 0), "proof", 12.0)
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

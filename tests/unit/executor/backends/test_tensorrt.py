"""TensorRT without a GPU: what is built, cached and refused."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bus.messages.catalog import Signature, TensorSpec
from services.executor.backends import tensorrt
from services.executor.backends.base import BackendUnavailable, LoadFailed, LoadSpec
from tests.support.models import tiny_models
from tests.support.models.gpu_stand_ins import LARGEST, SIGNATURE, FakeTensorrt

WIDTH = tiny_models.FEATURES


@pytest.fixture
def trt():
    return FakeTensorrt()


@pytest.fixture
def artifact(tmp_path):
    (tmp_path / "model.onnx").write_bytes(tiny_models.mlp())
    return tmp_path / "model.onnx"


def test_an_engine_is_compiled_once_for_all_its_batches(trt, artifact):
    place = artifact.parent / "key" / "model.engine"
    said = [tensorrt.engine_of(trt, artifact, SIGNATURE, LARGEST, place)[1] for _ in range(3)]
    assert said == ["engine built", "engine from the cache", "engine from the cache"]
    assert (trt.built, trt.cleared) == ([{"x": ((1, WIDTH), (LARGEST, WIDTH), (LARGEST, WIDTH))}], ["tf32"])
    place.write_bytes(b"damaged")
    assert tensorrt.engine_of(trt, artifact, SIGNATURE, LARGEST, place)[1] == "engine built"
    assert [one.name for one in place.parent.iterdir()] == ["model.engine"]


def test_a_file_that_tensorrt_does_not_take_says_why(trt, tmp_path):
    (tmp_path / "other.onnx").write_bytes(b"other")
    with pytest.raises(LoadFailed, match="no importer registered"):
        tensorrt.build(trt, tmp_path / "other.onnx", SIGNATURE, LARGEST)


def test_open_lengths_are_refused_by_name():
    tokens = [TensorSpec(name="tokens", datatype="INT64", shape=[-1])]
    for wrong in (Signature(inputs=tokens, outputs=[]), Signature(inputs=SIGNATURE.inputs, outputs=tokens)):
        with pytest.raises(LoadFailed, match="'tokens'"):
            tensorrt.bounded(wrong)
    with pytest.raises(LoadFailed, match="signature"):
        tensorrt.bounded(None)


def test_a_precision_without_a_recipe_is_refused_before_anything_else(tmp_path):
    with pytest.raises(LoadFailed, match="bf16"):
        tensorrt.TensorrtBackend().load(tmp_path / "x", LoadSpec(device="cuda:0", precision="bf16"))


_KEYS = st.tuples(
    st.sampled_from(["a" * 64, "a" * 63 + "b", "c" * 64]),
    st.sampled_from(["NVIDIA H100 80GB HBM3", "NVIDIA H100-80GB-HBM3", "Tesla T4"]),
    st.sampled_from(["10.9.0", "10.9.1"]),
    st.sampled_from(["fp32", "fp16", "int8"]),
    st.sampled_from([1, 8, 64]),
)


@given(_KEYS, _KEYS)
def test_engines_are_shared_only_where_the_same_would_be_built(one, other):
    assert (tensorrt.engine_key(*one) == tensorrt.engine_key(*other)) == (one == other)


def test_an_engine_directory_is_readable_and_a_plain_name():
    key = tensorrt.engine_key("abcdef0123456789" * 4, "NVIDIA H100 80GB HBM3 / ../x", "10.9.0", "fp16", 64)
    assert key.startswith("abcdef012345-nvidia-h100-80gb-hbm3-x-fp16-b64-")
    assert "/" not in key
    assert "." not in key


def test_without_the_package_the_reason_says_how_to_get_it():
    try:
        tensorrt.library()
    except BackendUnavailable as error:
        assert "pip install tensorrt" in str(error)
    else:
        pytest.skip("the package tensorrt is installed here")

"""What the CUDA backends decide without a GPU: buckets, staging, graphs, addresses, and what they say when there is none."""

import threading
import warnings
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import onnxruntime as ort
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bus.messages.catalog import Signature, TensorSpec
from services.executor.backends import backend, names_for, survey, tensorrt
from services.executor.backends.base import (
    LONGEST_TEXT,
    BackendUnavailable,
    Demotable,
    LoadFailed,
    LoadSpec,
    plain,
)
from services.executor.backends.cuda import Slot, Staging, Weights, bucket_for, buckets, gpu
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
from services.executor.workshop.tasks.profiling import transfer_of
from services.shell.host.accelerators import accelerators
from tests.support.models import gpu_stand_ins, tiny_models
from tests.support.models.gpu_stand_ins import LARGEST, SIGNATURE, CpuStream, FakeTensorrt


@given(st.integers(1, 200), st.data())
def test_the_smallest_bucket_that_holds_a_batch(largest, data):
    sizes = buckets(largest)
    items = data.draw(st.integers(1, largest))
    bucket = bucket_for(items, sizes)
    assert bucket in sizes
    assert bucket >= items
    assert not [size for size in sizes if items <= size < bucket]
    assert bucket < 2 * items or bucket == largest
    assert (sizes[-1], list(sizes)) == (largest, sorted(set(sizes)))


def test_buckets_by_example():
    assert buckets(64) == (1, 2, 4, 8, 16, 32, 64)
    assert buckets(1) == (1,)
    assert buckets(12) == (1, 2, 4, 8, 12)
    with pytest.raises(ValueError, match="13"):
        bucket_for(13, buckets(12))


def test_no_device_no_framework_is_imported_and_the_reason_is_told():
    if any(one.kind == "gpu" for one in accelerators()):
        pytest.skip("this machine has a GPU")
    for name in names_for("gpu"):
        with pytest.raises(BackendUnavailable, match="driver"):
            backend(name).probe("cuda:0")


@pytest.mark.parametrize("device", ["cpu", "cuda", "cuda:x", "tpu:0", ""])
def test_what_is_no_cuda_device_is_refused_by_name(device):
    with pytest.raises(BackendUnavailable, match="CUDA device"):
        gpu(device, "torch")


def test_every_backend_says_where_it_runs_and_whether_it_ever_did():
    assert names_for("cpu") == ("ort", "torch")
    assert names_for("gpu") == ("torch-cuda", "ort-cuda", "tensorrt")
    for name in names_for("gpu"):
        module = __import__(backend(name).__module__, fromlist=["x"])
        assert backend(name).executed is ("never been executed" not in " ".join(module.__doc__.split()))
        assert survey("cpu")[name]


@pytest.fixture(scope="module")
def torch():
    return pytest.importorskip("torch")


@pytest.fixture(scope="module")
def artifact(torch, tmp_path_factory):
    return gpu_stand_ins.program(tmp_path_factory.mktemp("cuda"), torch)


def loaded(torch, artifact, *, refuse=False, signature=SIGNATURE):
    stream = CpuStream(torch, refuse)
    return gpu_stand_ins.graphs(torch, artifact, lambda: stream, signature=signature), stream


@pytest.mark.parametrize("refuse", [False, True])
def test_each_bucket_has_a_graph_where_graphs_can_be_captured(torch, artifact, refuse):
    handle, stream = loaded(torch, artifact, refuse=refuse)
    for n in range(1, LARGEST + 1):
        handle.run_single(tiny_models.digits(n)[0])
    assert (stream.recorded, stream.replayed) == ((0, 0) if refuse else (5, 12))
    assert ("operator by operator" if refuse else "1, 2, 4, 8, 12") in handle.proof
    assert "parameters on cpu" in handle.proof


def test_batches_at_a_time_have_contexts_of_their_own_and_the_same_weights(torch, artifact):
    both = threading.Barrier(2, timeout=10.0)

    class Meeting(CpuStream):
        """Its batches end when two of them have begun."""

        met = False

        def wait(self):
            if self.met:
                both.wait()

    streams = []

    def stream():
        streams.append(Meeting(torch))
        return streams[-1]

    handle = gpu_stand_ins.graphs(torch, artifact, stream, max_batch=4)
    assert not handle.one_at_a_time
    x, classes = tiny_models.digits(8)
    with ThreadPoolExecutor(2) as threads:
        other = handle._taken()  # the first context is busy: another one is made
        handle._free += [handle._taken(), other]
        assert len(streams) == 2
        Meeting.met = True
        for _ in range(3):
            runs = [threads.submit(handle.run_single, x[at : at + 4]) for at in (0, 4)]
            found = [run.result(10.0)[0].argmax(axis=1).tolist() for run in runs]
            assert found == [classes[:4].tolist(), classes[4:].tolist()]
    assert len(streams) == 2


def test_without_a_signature_the_program_says_what_it_takes(torch, artifact):
    handle, _ = loaded(torch, artifact, signature=None)
    x, classes = tiny_models.digits(5)
    assert handle.run_single(x)[0].argmax(axis=1).tolist() == classes.tolist()


def test_closed_models_hold_no_weights_and_none_are_left_behind(torch, artifact) -> None:
    handle, stream = loaded(torch, artifact)
    weights = list(handle._module.parameters())
    there = [sum(one.nbytes for one in weights)]
    stream.trim = lambda: there.append(sum(one.nbytes for one in weights))
    handle.close()
    assert there[0] > 0 == there[1], "memory is given back to the device after the weights are gone"
    stream = CpuStream(torch)
    stream.device = torch.device("meta")
    with pytest.raises(LoadFailed, match="are on cpu"):
        gpu_stand_ins.graphs(torch, artifact, lambda: stream)


@given(rows=st.integers(1, 6), values=st.lists(st.integers(-100, 100), min_size=6, max_size=6))
def test_what_goes_through_staging_comes_back(torch, rows, values):
    staging = Staging(torch, Slot("x", (1,), "<i8"), 6, "cpu", pinned=False)
    array = np.array(values, "i8").reshape(6, 1)[:rows]
    staging.put(array, rows)
    staging.fetch(staging.device * 2, rows)
    assert np.array_equal(staging.taken(rows), array * 2)


@pytest.mark.parametrize("signature", [SIGNATURE, None])
def test_a_model_comes_back_from_host_memory_with_its_answers_and_graphs(torch, artifact, signature):
    handle, stream = loaded(torch, artifact, signature=signature)
    assert isinstance(handle, Demotable)
    handle.memory_mb = 70.0
    x, classes = tiny_models.digits(8)
    parameters = {one.data_ptr(): one for one in handle._module.parameters()}
    assert handle.host_mb >= sum(one.nbytes for one in parameters.values()) / 2**20 > 0
    for copied in (False, True, False):
        replayed = stream.replayed
        parameters = {one.data_ptr(): one.data for one in handle._module.parameters()}
        assert (handle._weights.copy is not None) is copied
        handle.demote()
        assert handle.memory_mb == 0.0
        assert handle._weights.copy is None
        assert not {one.data_ptr() for one in handle._module.parameters()} & parameters.keys(), "they lie elsewhere"
        handle.promote()
        assert handle.memory_mb == 70.0
        assert handle.run_single(x)[0].argmax(axis=1).tolist() == classes.tolist()
        assert stream.replayed == replayed + 1
        if copied:
            handle.drop_copy()
    handle.demote()
    stream.refuse = True  # it comes back all the same, and says how it runs now
    handle.promote()
    assert handle.run_single(x)[0].argmax(axis=1).tolist() == classes.tolist()
    assert "operator by operator" in handle.proof
    handle.close()


def test_weights_that_share_memory_share_it_wherever_they_are(torch):
    module = torch.nn.Linear(4, 4)
    module.register_buffer("whole", torch.arange(6.0))
    module.register_buffer("part", module.whole[2:].view(2, 2))
    tied = torch.nn.ModuleList([module, torch.nn.Linear(4, 4, bias=False)])
    tied[1].weight.data = module.weight.data.T
    weights = Weights(torch, tied)
    mb = weights.mb
    assert mb == pytest.approx((4 * 4 + 4 + 6) * 4 / 2**20)
    weights.move(torch.device("cpu"), pinned=False, wait=lambda: None)
    assert weights.mb == mb
    module.whole[3] = 30.0
    module.weight.data[0, 1] = 7.0
    assert module.part.tolist() == [[2.0, 30.0], [4.0, 5.0]]
    assert tied[1].weight[1, 0] == 7.0


def test_the_transfer_is_measured_where_there_is_one(torch, artifact, tmp_path):
    x, _ = tiny_models.digits(1)
    handle, _ = loaded(torch, artifact)
    transfer_ms, host_mb = transfer_of(handle, {"x": x})
    assert transfer_ms > 0
    assert host_mb == handle.host_mb
    (tmp_path / "m.onnx").write_bytes(tiny_models.mlp())
    plain = backend("ort").load(tmp_path / "m.onnx", LoadSpec(signature=SIGNATURE))
    assert transfer_of(plain, {"x": x}) == (None, None)


# -- TensorRT without a GPU: what is built, cached and refused.
WIDTH = tiny_models.FEATURES


@pytest.fixture
def trt():
    return FakeTensorrt()


@pytest.fixture
def model_file(tmp_path):
    (tmp_path / "model.onnx").write_bytes(tiny_models.mlp())
    return tmp_path / "model.onnx"


def test_an_engine_is_compiled_once_for_all_its_batches(trt, model_file):
    place = model_file.parent / "key" / "model.engine"
    said = [tensorrt.engine_of(trt, model_file, SIGNATURE, LARGEST, place)[1] for _ in range(3)]
    assert said == ["engine built", "engine from the cache", "engine from the cache"]
    assert (trt.built, trt.cleared) == ([{"x": ((1, WIDTH), (LARGEST, WIDTH), (LARGEST, WIDTH))}], ["tf32"])
    place.write_bytes(b"damaged")
    assert tensorrt.engine_of(trt, model_file, SIGNATURE, LARGEST, place)[1] == "engine built"
    assert [one.name for one in place.parent.iterdir()] == ["model.engine"]


def test_what_tensorrt_cannot_build_says_why(trt, tmp_path) -> None:
    (tmp_path / "other.onnx").write_bytes(b"other")
    with pytest.raises(LoadFailed, match="no importer registered"):
        tensorrt.build(trt, tmp_path / "other.onnx", SIGNATURE, LARGEST)
    with pytest.raises(LoadFailed, match="bf16"):
        tensorrt.TensorrtBackend().load(tmp_path / "x", LoadSpec(device="cuda:0", precision="bf16"))


def test_open_lengths_are_refused_and_engines_have_plain_names() -> None:
    tokens = [TensorSpec(name="tokens", datatype="INT64", shape=[-1])]
    for wrong in (Signature(inputs=tokens, outputs=[]), Signature(inputs=SIGNATURE.inputs, outputs=tokens)):
        with pytest.raises(LoadFailed, match="'tokens'"):
            tensorrt.bounded(wrong)
    with pytest.raises(LoadFailed, match="signature"):
        tensorrt.bounded(None)
    key = tensorrt.engine_key("abcdef0123456789" * 4, "NVIDIA H100 80GB HBM3 / ../x", "10.9.0", "fp16", 64)
    assert key.startswith("abcdef012345-nvidia-h100-80gb-hbm3-x-fp16-b64-")
    assert "/" not in key
    assert "." not in key


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


def test_without_the_package_the_reason_says_how_to_get_it():
    try:
        tensorrt.library()
    except BackendUnavailable as error:
        assert "pip install tensorrt" in str(error)
    else:
        pytest.skip("the package tensorrt is installed here")


# -- onnxruntime on a GPU as far as a CPU can show: options, proof of placement, IO binding.


def node(provider, kind="float", size=4000, operator="MatMul"):
    arguments = {
        "op_name": operator,
        "provider": provider,
        "output_size": str(size),
        "output_type_shape": [{kind: [1]}],
    }
    return {"cat": "Node", "name": f"{operator}_kernel_time", "args": arguments}


# -- proof


def test_placement_is_proven_by_nodes_on_the_device() -> None:
    seen = placement([node(CUDA), node(CUDA), {"cat": "Session", "args": {}}])
    assert seen == Placement({CUDA: 2}, [])
    assert accept(seen, CUDA) == f"2 nodes on {CUDA}"
    cpu = [node(CPU, "int64", 8, "Gather"), node(CPU, "bool", 1, "Equal")]
    assert placement([node(CUDA), *cpu]).on_cpu == []
    with pytest.raises(LoadFailed, match="takes no operator"):
        accept(placement([node("OtherExecutionProvider")]), CUDA)


@pytest.mark.parametrize("event", [node(CPU, "float", 4), node("", "int64", 4096, "NonZero")])
def test_computing_may_not(event):
    with pytest.raises(LoadFailed, match=event["args"]["op_name"]):
        accept(placement([node(CUDA), event]), CUDA)


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


def test_the_device_picks_the_provider_and_the_cpu_is_forbidden(tmp_path) -> None:
    assert session_options(ort, 2, strict=True).get_session_config_entry(NO_FALLBACK) == "1"
    relaxed = session_options(ort, 2, profile=str(tmp_path / "p"))
    with pytest.raises(Exception, match=NO_FALLBACK):
        relaxed.get_session_config_entry(NO_FALLBACK)
    assert relaxed.enable_profiling
    assert relaxed.intra_op_num_threads == 2
    assert (place("cpu"), place("cuda:3")) == (("cpu", 0), ("cuda", 3))
    assert provider_of("cpu") == (CPU, {})
    name, options = provider_of("cuda:3")
    assert (name, options["device_id"], options["use_tf32"]) == (CUDA, "3", "0")


# -- IO binding


def test_only_so_many_shapes_keep_their_buffers(tmp_path):
    (tmp_path / "model.onnx").write_bytes(tiny_models.mlp())
    bound = gpu_stand_ins.bound(tmp_path / "model.onnx")
    assert bound.proof == "proof"
    bound.warm({"x": np.zeros((LARGEST, tiny_models.FEATURES), "f4")})
    assert [shape for _, shape, _ in bound._placed] == [(LARGEST, tiny_models.FEATURES)]
    bound.warm({"y": np.zeros((1, 1), "f4")})  # what it cannot do is not the load's failure
    x = tiny_models.digits(60)[0]
    for n in range(1, 60):
        assert bound.run_single(x[:n])[0].shape == (n, tiny_models.CLASSES)
        assert len(bound._placed) <= 16
    bound.close()


# -- Error texts for users, and how a catalogue record is loaded.


@given(st.text(max_size=2000))
def test_a_text_is_one_short_line(text):
    said = plain(RuntimeError(text))
    assert len(said) <= LONGEST_TEXT
    assert "\n" not in said


def test_error_texts_name_no_path_and_keep_the_rest() -> None:
    said = plain("[ONNXRuntimeError] : 1 : FAIL : Load model from /home/me/.cache/x.onnx failed: /src/core/a.cc:12 no")
    assert said == "Load model from … failed: … no"
    assert plain("Got: 3/4 of inputs/outputs") == "Got: 3/4 of inputs/outputs"
    assert plain(MemoryError()) == "MemoryError()"

"""What the CUDA backends decide without a GPU: buckets, staging, graphs, addresses, and what they say when there is none."""

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.executor.backends import backend, names_for, survey
from services.executor.backends.base import (
    BackendUnavailable,
    Demotable,
    LoadFailed,
    LoadSpec,
)
from services.executor.backends.cuda import Slot, Staging, Weights, bucket_for, buckets, gpu
from services.executor.workshop.tasks.profiling import transfer_of
from services.shell.host.accelerators import accelerators
from tests.support.models import gpu_stand_ins, tiny_models
from tests.support.models.gpu_stand_ins import LARGEST, SIGNATURE, CpuStream


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
        assert backend(name).executed is False
        assert "never been executed" in " ".join(module.__doc__.split())
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


def test_a_closed_model_holds_no_weights(torch, artifact):
    handle, stream = loaded(torch, artifact)
    weights = list(handle._module.parameters())
    there = [sum(one.nbytes for one in weights)]
    stream.trim = lambda: there.append(sum(one.nbytes for one in weights))
    handle.close()
    assert there[0] > 0 == there[1], "memory is given back to the device after the weights are gone"


def test_parameters_left_behind_are_no_silent_matter(torch, artifact):
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

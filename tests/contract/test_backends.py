"""What every execution backend keeps: each that works here, on the CPU and on a GPU if there is one, and the stand-ins for GPUs."""

import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from services.executor.backends import NAMES, backend, names_for, survey
from services.executor.backends.base import (
    BackendUnavailable,
    Cancelled,
    Handle,
    InputRejected,
    LoadFailed,
    LoadSpec,
    RunFailed,
)
from services.shell.host.accelerators import why_no_gpu
from tests.support.models import gpu_stand_ins, tiny_models
from tests.support.models.gpu_stand_ins import LARGEST, SIGNATURE

PLACES = dict.fromkeys(names_for("cpu"), "cpu") | {name: "cuda:0" for name in names_for("gpu") if not why_no_gpu()}
REAL = [pytest.param(one, marks=[pytest.mark.gpu] if PLACES[one] != "cpu" else []) for one in PLACES]
STAND_INS = ["bound", "graphs", "refused graphs", "engine"]
BOUNDED = {"graphs", "refused graphs", "engine", "torch-cuda", "tensorrt"}  # their memory is that of the largest batch


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> dict[str, Path]:
    """The same two layers in every format; without torch only as ONNX."""
    directory = tmp_path_factory.mktemp("backends")
    (directory / "model.onnx").write_bytes(tiny_models.mlp())
    found = {"onnx": directory / "model.onnx"}
    if survey("cpu", ("torch",))["torch"] == "":
        found["pt2"] = gpu_stand_ins.program(directory, pytest.importorskip("torch"))
    return found


def load(files, name: str, **options) -> Handle:
    kind = backend(name).formats[0]
    spec = LoadSpec(format=kind, max_batch=LARGEST, signature=SIGNATURE, **{"device": PLACES[name], **options})
    return backend(name).load(files[kind], spec)


@pytest.fixture(scope="module", params=REAL)
def name(request) -> str:
    try:
        backend(request.param).probe(PLACES[request.param])
    except BackendUnavailable as reason:
        pytest.skip(f"{request.param}: {reason}")
    return request.param


@pytest.fixture(params=[*REAL, *STAND_INS])
def kind(request) -> str:
    return request.param


@pytest.fixture
def handle(kind, files, request) -> Iterator[Handle]:
    if kind == "bound":
        loaded = gpu_stand_ins.bound(files["onnx"])
    elif kind == "engine":
        loaded = gpu_stand_ins.engine(pytest.importorskip("torch"), files["onnx"])
    elif kind in STAND_INS:
        torch = pytest.importorskip("torch")
        stream = gpu_stand_ins.CpuStream(torch, refuse=kind != "graphs")
        loaded = gpu_stand_ins.graphs(torch, files["pt2"], lambda: stream)
    else:
        try:
            backend(kind).probe(PLACES[kind])
        except BackendUnavailable as reason:
            pytest.skip(f"{kind}: {reason}")
        loaded = load(files, kind)
    yield loaded
    loaded.close()


def test_n_items_in_n_out_in_order_and_answers_are_the_callers_own(handle):
    x, classes = tiny_models.digits(40)
    kept = []
    for n in [*range(1, LARGEST + 1), 3, 1]:
        scores = handle.run({"x": x[n : 2 * n]})["scores"]
        assert scores.shape == (n, tiny_models.CLASSES)
        assert scores.dtype == np.float32
        assert np.array_equal(handle.run_single(x[n : 2 * n])[0], scores)
        kept.append((scores, classes[n : 2 * n]))
    assert all(scores.argmax(axis=1).tolist() == right.tolist() for scores, right in kept)
    assert (handle.inputs, handle.outputs) == (("x",), ("scores",))


def test_frozen_arrays_are_taken_and_closed_models_answer_no_more(handle) -> None:
    x = tiny_models.digits(4)[0]
    frozen = np.frombuffer(x.tobytes(), np.float32).reshape(x.shape)
    assert np.array_equal(handle.run_single(frozen)[0], handle.run_single(x)[0])
    assert np.array_equal(frozen, x)
    handle.close()
    with pytest.raises(RunFailed, match="no longer loaded"):
        handle.run_single(tiny_models.digits(1)[0])


def test_what_the_model_does_not_take_is_the_callers_fault_and_harms_nobody(kind, handle):
    x = tiny_models.digits(LARGEST + 1)[0]
    for wrong in ({"x": x[:2, :3]}, {"z": x[:2]}, {}, {"x": x[:2], "y": x[:2]}, {"x": x[0]}):
        with pytest.raises(InputRejected) as refused:
            handle.run(wrong)
        assert "/" not in str(refused.value).replace("inputs/outputs", "")
    with pytest.raises(RunFailed if kind == "torch" else InputRejected):
        handle.run({"x": x[:2].astype(np.float64)})
    if kind in BOUNDED:
        with pytest.raises(InputRejected, match=str(LARGEST)):
            handle.run({"x": x})
    assert handle.run({"x": x[:2]})["scores"].shape == (2, tiny_models.CLASSES)


def test_any_one_thread_may_call_it(handle):
    """A thread of its own gets the same answers: nothing is tied to the one that loaded."""
    x, classes = tiny_models.digits(LARGEST)
    answers: list[bool] = []

    def work():
        answers.extend((handle.run_single(x)[0].argmax(axis=1) == classes).all() for _ in range(20))

    worker = threading.Thread(target=work)
    worker.start()
    worker.join(60)
    assert answers == [True] * 20


# -- of what really loads a file


def test_it_says_where_it_runs_and_runs_nowhere_else(name, files) -> None:
    loaded = load(files, name)
    wanted = "cpu, 1 thread" if PLACES[name] == "cpu" else PLACES[name]
    assert wanted in loaded.proof.lower().replace("cpuexecutionprovider", "cpu")
    loaded.close()
    with pytest.raises(BackendUnavailable, match="tpu"):
        backend(name).probe("tpu:0")
    with pytest.raises(BackendUnavailable, match="tpu"):
        load(files, name, device="tpu:0")


def test_threads_are_the_callers_choice(name, files):
    if PLACES[name] != "cpu":
        pytest.skip("a GPU has no threads of ours")
    x, classes = tiny_models.digits(64)
    loaded = load(files, name, threads=2)
    assert "2 threads" in loaded.proof
    assert loaded.run_single(x)[0].argmax(axis=1).tolist() == classes.tolist()
    loaded.close()


def test_what_is_no_model_is_refused(name, tmp_path):
    path = tmp_path / "model"
    spec = {"device": PLACES[name], "signature": SIGNATURE}
    for content in (b"", b"not a model at all", b"\x80\x04\x95 pickled"):
        path.write_bytes(content)
        with pytest.raises(LoadFailed) as refused:
            backend(name).load(path, LoadSpec(format=backend(name).formats[0], **spec))
        assert str(tmp_path) not in str(refused.value)
    with pytest.raises(LoadFailed, match="exe"):
        backend(name).load(path, LoadSpec(format="exe", **spec))


def test_a_run_that_takes_too_long_can_be_ended(tmp_path):
    """With onnxruntime only: torch cannot end a run."""
    path = tmp_path / "endless.onnx"
    path.write_bytes(tiny_models.endless())
    loaded = backend("ort").load(path, LoadSpec())
    x = tiny_models.digits(1)[0]
    ended: list[type] = []

    def work():
        try:
            loaded.run_single(x)
        except Cancelled as error:
            ended.append(type(error))

    worker = threading.Thread(target=work)
    worker.start()
    while worker.is_alive():
        loaded.cancel()
        worker.join(0.01)
    assert ended == [Cancelled]
    with pytest.raises(InputRejected):  # it is as usable as before
        loaded.run_single(x[:, :2])
    loaded.close()


def test_every_name_is_surveyed_and_others_are_unknown():
    assert set(survey("cpu")) == set(NAMES)
    assert survey("cpu")["ort"] == ""
    elsewhere = survey("tpu")
    assert elsewhere.pop("remote") == "", "the address of its device is a list of hosts"
    assert all(elsewhere.values())
    with pytest.raises(BackendUnavailable, match="abacus"):
        backend("abacus")

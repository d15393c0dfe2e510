"""What every execution backend keeps, run on each one that works here; the others skip with their own reason."""

import threading
from pathlib import Path

import numpy as np
import pytest

from bus.messages.catalog import Signature, TensorSpec
from services.executor.backends import NAMES, backend, names_for, pt2, survey
from services.executor.backends.base import (
    BackendUnavailable,
    Cancelled,
    Handle,
    InputRejected,
    LoadFailed,
    LoadSpec,
    RunFailed,
)
from tests.support.models import tiny_models

FORMAT = {"ort": "onnx", "torch": "pt2"}
SIGNATURE = Signature(
    inputs=[TensorSpec(name="x", datatype="FP32", shape=[tiny_models.FEATURES])],
    outputs=[TensorSpec(name="scores", datatype="FP32", shape=[tiny_models.CLASSES])],
)


@pytest.fixture(scope="module", params=names_for("cpu"))
def name(request) -> str:
    try:
        backend(request.param).probe("cpu")
    except BackendUnavailable as reason:
        pytest.skip(str(reason))
    return request.param


@pytest.fixture(scope="module")
def artifact(name, tmp_path_factory) -> Path:
    """The same two layers in the backend's own format."""
    directory = tmp_path_factory.mktemp(name)
    path = directory / f"model.{FORMAT[name]}"
    if name == "ort":
        path.write_bytes(tiny_models.mlp())
    else:
        torch = pytest.importorskip("torch")
        tiny_models.exported(directory / "upload.pt2", torch)
        pt2.reduce(directory / "upload.pt2", path, 2**30)
    return path


@pytest.fixture
def handle(name, artifact) -> Handle:
    loaded = backend(name).load(artifact, LoadSpec(format=FORMAT[name], signature=SIGNATURE))
    yield loaded
    loaded.close()


def test_n_items_in_n_out_in_order(handle):
    x, classes = tiny_models.digits(64)
    for n in (1, 2, 3, 7, 64):
        scores = handle.run({"x": x[:n]})["scores"]
        assert scores.shape == (n, tiny_models.CLASSES)
        assert scores.argmax(axis=1).tolist() == classes[:n].tolist()
        assert np.array_equal(handle.run_single(x[:n])[0], scores)


def test_it_says_where_it_runs(name, handle):
    assert handle.proof.lower().replace("cpuexecutionprovider", "cpu").count("cpu") >= 1
    assert "1 thread" in handle.proof
    assert (handle.inputs, handle.outputs) == (("x",), ("scores",))


def test_arrays_that_may_not_be_written_are_taken_and_not_changed(handle):
    x = tiny_models.digits(4)[0]
    frozen = np.frombuffer(x.tobytes(), np.float32).reshape(x.shape)
    assert np.array_equal(handle.run_single(frozen)[0], handle.run_single(x)[0])
    assert np.array_equal(frozen, x)


def test_wrong_shapes_names_and_datatypes_are_the_callers_fault(handle):
    x = tiny_models.digits(2)[0]
    for wrong in ({"x": x[:, :3]}, {"z": x}, {}):
        with pytest.raises(InputRejected) as refused:
            handle.run(wrong)
        assert "/" not in str(refused.value).replace("inputs/outputs", "")
    with pytest.raises((RunFailed, InputRejected)):
        handle.run({"x": x.astype(np.float64)})
    assert handle.run({"x": x})["scores"].shape == (2, tiny_models.CLASSES)


def test_any_one_thread_may_call_it(name, handle):
    """A thread of its own gets the same answers: nothing is tied to the one that loaded."""
    x, classes = tiny_models.digits(64)
    answers: list[bool] = []

    def work():
        answers.extend((handle.run_single(x)[0].argmax(axis=1) == classes).all() for _ in range(20))

    worker = threading.Thread(target=work)
    worker.start()
    worker.join(60)
    assert answers == [True] * 20


def test_threads_are_the_callers_choice(name, artifact):
    x, classes = tiny_models.digits(64)
    loaded = backend(name).load(artifact, LoadSpec(format=FORMAT[name], threads=2, signature=SIGNATURE))
    assert "2 threads" in loaded.proof
    assert loaded.run_single(x)[0].argmax(axis=1).tolist() == classes.tolist()
    loaded.close()


def test_a_closed_model_answers_no_more(name, artifact):
    loaded = backend(name).load(artifact, LoadSpec(format=FORMAT[name]))
    loaded.close()
    with pytest.raises(RunFailed, match="no longer loaded"):
        loaded.run_single(tiny_models.digits(1)[0])


def test_shrinking_changes_no_answer(handle):
    x = tiny_models.digits(64)[0]
    before = handle.run_single(x)[0]
    handle.shrink()
    assert np.array_equal(handle.run_single(x)[0], before)
    assert np.array_equal(handle.run_single(x)[0], before)


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


def test_what_is_no_model_is_refused(name, tmp_path):
    for content in (b"", b"not a model at all", b"\x80\x04\x95 pickled"):
        path = tmp_path / "model"
        path.write_bytes(content)
        with pytest.raises(LoadFailed) as refused:
            backend(name).load(path, LoadSpec(format=FORMAT[name]))
        assert str(tmp_path) not in str(refused.value)
    with pytest.raises(LoadFailed, match="exe"):
        backend(name).load(path, LoadSpec(format="exe"))


def test_no_backend_runs_silently_elsewhere(name, artifact):
    with pytest.raises(BackendUnavailable, match="tpu"):
        backend(name).probe("tpu:0")
    with pytest.raises(BackendUnavailable, match="tpu"):
        backend(name).load(artifact, LoadSpec(device="tpu:0", format=FORMAT[name]))


def test_every_name_is_surveyed_and_others_are_unknown():
    assert set(survey("cpu")) == set(NAMES)
    assert survey("cpu")["ort"] == ""
    elsewhere = survey("tpu")
    assert elsewhere.pop("remote") == "", "the address of its device is a list of hosts"
    assert all(elsewhere.values())
    with pytest.raises(BackendUnavailable, match="abacus"):
        backend("abacus")

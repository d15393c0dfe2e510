"""ONNX files by their own word: signature, operators, batches; and what is refused before anything runs."""

import numpy as np
import onnx
import onnxruntime
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import helper

from services.executor.workshop.sandbox.protocol import UploadRejected
from services.executor.workshop.tasks import onnx_files
from services.executor.workshop.tasks.build import PartAnswers, choose
from tests.support.models import tiny_models


def read(tmp_path, content: bytes):
    path = tmp_path / "model"
    path.write_bytes(content)
    return onnx_files.read(path, 2**20)


def test_signatures_have_open_lengths_and_operators_those_of_subgraphs(tmp_path) -> None:
    plain = onnx_files.signature(read(tmp_path, tiny_models.mlp()))
    assert [(one.name, one.datatype, one.shape) for one in plain.inputs] == [("x", "FP32", [16])]
    assert [(one.name, one.datatype, one.shape) for one in plain.outputs] == [("scores", "FP32", [4])]
    assert onnx_files.signature(read(tmp_path, tiny_models.sequence())).inputs[0].shape == [-1]
    assert onnx_files.operators(read(tmp_path, tiny_models.endless())) == ["Add", "Identity", "Loop"]


@pytest.mark.parametrize("content", [tiny_models.mlp(1), tiny_models.reshaping(1), tiny_models.conv(1)])
def test_a_fixed_batch_can_be_opened(tmp_path, content):
    model = read(tmp_path, content)
    assert onnx_files.batch_sizes(model) == {1}
    free = onnx_files.free_batch(model)
    assert not onnx_files.batch_sizes(free)
    assert onnx_files.batch_sizes(model) == {1}  # the upload itself is left as it was
    session = onnxruntime.InferenceSession(free.SerializeToString(), providers=["CPUExecutionProvider"])
    shape = [3, *(size for size in session.get_inputs()[0].shape[1:])]
    (scores,) = session.run(None, {"x": np.ones(shape, "f4")})
    assert len(scores) == 3


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "no operators"),
        (b"just a text file, renamed to model.onnx", "cannot be parsed"),
        (tiny_models.mlp()[:-100], "cannot be parsed"),
        (tiny_models.external_data("../../etc/passwd"), "other files"),
        (tiny_models.external_data("/etc/passwd"), "other files"),
        (tiny_models.external_data_in_a_subgraph("weights.bin"), "other files"),
        (tiny_models.custom_operator(), "custom operator evil.example::RunShell"),
    ],
)
def test_hostile_files_are_refused(tmp_path, content, why):
    with pytest.raises(UploadRejected, match=why):
        read(tmp_path, content)


def test_what_calls_python_or_is_too_large_is_refused(tmp_path) -> None:
    python = "(float[n, 1] x) => (float[n, 1] scores) {scores = com.microsoft.PythonOp(x)}"
    inside = tiny_models.made(python, ("com.microsoft",))
    with pytest.raises(UploadRejected, match="PythonOp"):
        read(tmp_path, inside)
    path = tmp_path / "model"
    path.write_bytes(tiny_models.mlp())
    with pytest.raises(UploadRejected, match="larger"):
        onnx_files.read(path, 100)


def test_functions_of_the_model_itself_are_no_custom_operators_but_their_contents_are_seen(tmp_path):
    def with_function(node):
        call = "(float[n, 1] x) => (float[n, 1] scores) {scores = mine.Twice(x)}"
        return tiny_models.made(
            f'{call} <domain: "mine", opset_import: ["": 17]> Twice (a) => (b) {{{node}}}', ("mine",)
        )

    assert "Add" in onnx_files.operators(read(tmp_path, with_function("b = Add(a, a)")))
    with pytest.raises(UploadRejected, match="evil"):
        read(tmp_path, with_function("b = evil.Run(a)"))


def test_models_without_items_or_tensors_are_refused(tmp_path):
    scalar = tiny_models.made("(float x) => (float y) {y = Neg(x)}")
    with pytest.raises(UploadRejected, match="no batch axis"):
        onnx_files.signature(read(tmp_path, scalar))
    model = onnx.load_model_from_string(tiny_models.mlp())
    del model.graph.output[:]
    model.graph.output.append(
        helper.make_value_info("scores", helper.make_sequence_type_proto(helper.make_tensor_type_proto(1, [4])))
    )
    with pytest.raises(UploadRejected, match="zipmap"):
        onnx_files.signature(model)


@given(st.binary(max_size=400))
def test_any_other_bytes_are_refused(tmp_path_factory, content):
    with pytest.raises(UploadRejected):
        read(tmp_path_factory.mktemp("bytes"), content)


@given(st.integers(0, 10_000), st.integers(1, 255))
def test_one_flipped_byte_never_brings_anything_but_a_model_or_a_refusal(tmp_path_factory, at, flip):
    content = bytearray(tiny_models.mlp())
    content[at % len(content)] ^= flip
    try:
        onnx_files.signature(read(tmp_path_factory.mktemp("flip"), bytes(content)))
    except UploadRejected as refusal:
        assert str(refusal)


# -- cascades


@pytest.mark.parametrize(("opset", "normal"), [(17, False), (13, True)])
def test_a_cascade_gives_each_item_the_answer_of_one_part_and_the_unsure_ones_that_of_the_second(
    tmp_path, opset, normal
) -> None:
    files = [tmp_path / "first", tmp_path / "then"]
    for file, content in zip(files, (tiny_models.mlp(seed=0), tiny_models.mlp(seed=1)), strict=True):
        file.write_bytes(content)
    older = onnx.load_model_from_string(files[0].read_bytes())
    older.opset_import[0].version = opset
    files[0].write_bytes(older.SerializeToString())
    signature = onnx_files.signature(onnx.load_model_from_string(files[1].read_bytes()))
    x, _ = tiny_models.digits(64)
    first, then = (answer(file.read_bytes(), x) for file in files)
    likely = np.exp(first - first.max(axis=1, keepdims=True))
    sure = first.max(axis=1) if normal else (likely / likely.sum(axis=1, keepdims=True)).max(axis=1)
    for threshold, count in ((-1e9, 0), (float(np.median(sure)), 32), (1e9, 64)):
        found = answer(onnx_files.cascade(*files, signature, "scores", threshold, normal=normal), x)
        on = sure < np.float32(threshold)
        assert on.sum() == count
        np.testing.assert_allclose(found, np.where(on[:, None], then, first), rtol=1e-4, atol=1e-4)


def answer(content: bytes, x: np.ndarray) -> np.ndarray:
    return onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"]).run(["scores"], {"x": x})[0]


def part(right: object, confidence: object) -> PartAnswers:
    return PartAnswers(np.asarray(right, bool), np.asarray(confidence, "f4"), normal=True)


def test_a_threshold_holds_in_both_halves() -> None:
    sure = np.tile(np.linspace(0.3, 1.0, 100), 2)
    first, then = part(sure > 0.5, sure), part(np.ones(200), sure)
    found = choose(first, then, (1.0, 10.0), 8.0)
    assert found is not None
    assert (round(found.threshold, 2), found.share) == (0.5, 0.29)
    assert found.cost == pytest.approx(1.0 + 10.0 * found.share)
    assert choose(first, then, (1.0, 10.0), 3.0) is None, "it costs more than is allowed"
    late = sure > np.repeat([0.5, 0.7], 100)
    harder = choose(part(late, sure), then, (1.0, 10.0), 8.0)
    assert harder is not None
    assert round(harder.threshold, 2) == 0.7, "the half that is harder decides"
    assert choose(part(sure > np.repeat([0.5, 2.0], 100), sure), then, (1.0, 10.0), 20.0) is None, (
        "one half is never as right"
    )
    assert choose(part(sure < 0.5, sure), then, (1.0, 10.0), 8.0) is None, "it is wrong where it is sure"
    assert choose(part(sure > 0.5, np.ones(200)), then, (1.0, 10.0), 8.0) is None, "its confidence says nothing"

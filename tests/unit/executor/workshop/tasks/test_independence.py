"""Models whose answers depend on the other items of a batch are found out, of each kind; honest ones are not suspected."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from services.executor.backends.base import Handle
from services.executor.backends.container import UserProcess
from services.executor.workshop.tasks.independence import why_alone
from services.executor.workshop.tasks.inspection import RunnableUpload
from services.executor.workshop.tasks.validation import ValidationSet
from tests.support.models import tiny_models

X, Y = tiny_models.digits(60)
DATA = ValidationSet({"x": X}, Y)
TOKENS = ValidationSet({"tokens": np.random.default_rng(0).integers(0, 50, (60, 8))}, Y)
IMAGES = ValidationSet({"x": np.random.default_rng(0).normal(size=(60, 1, 8, 8)).astype("f4")}, Y)

CLASSES = """
import os
import numpy as np

class Honest:
    def predict_batch(self, inputs):
        return {"y": 2 * inputs["x"]}

class Running:
    def predict_batch(self, inputs):
        return {"y": inputs["x"].cumsum(axis=0)}

class Counting:
    calls = 0
    def predict_batch(self, inputs):
        self.calls += 1
        return {"y": inputs["x"] + self.calls}

class Refusing:
    def predict_batch(self, inputs):
        if abs(inputs["x"]).max() > 1000:
            raise ValueError("too large")
        return {"y": inputs["x"]}

class Ending:
    def predict_batch(self, inputs):
        if abs(inputs["x"]).max() > 1000:
            os._exit(3)
        return {"y": inputs["x"]}
"""


def onnx(directory: Path, content: bytes) -> Handle:
    path = directory / "model.onnx"
    path.write_bytes(content)
    return RunnableUpload(framework="ort", path=path, format="onnx", signature=None).load()


def why(handle: Handle, data: ValidationSet = DATA, *, most: int = 16, allow_nan: bool = False) -> str:
    return why_alone(handle, data, most, allow_nan=allow_nan)


@pytest.mark.parametrize(
    ("content", "data"),
    [(tiny_models.mlp(), DATA), (tiny_models.conv(), IMAGES), (tiny_models.sequence(), TOKENS)],
    ids=["mlp", "conv", "tokens"],
)
def test_an_honest_model_takes_batches(tmp_path: Path, content: bytes, data: ValidationSet) -> None:
    assert why(onnx(tmp_path, content), data) == ""


@pytest.mark.parametrize("content", [tiny_models.mixing(), tiny_models.along_the_batch("Softmax"), tiny_models.along_the_batch("CumSum")])  # fmt: skip
def test_a_model_that_mixes_its_batch_is_asked_for_single_items(tmp_path: Path, content: bytes) -> None:
    assert why(onnx(tmp_path, content)) == "an item's answer is another one in a batch"
    assert why(onnx(tmp_path, content), most=1) == ""


@pytest.mark.parametrize("most", [2, 3, 16])
def test_what_only_an_extreme_neighbour_changes_is_found(tmp_path: Path, most: int) -> None:
    assert (
        why(onnx(tmp_path, tiny_models.limiting()), most=most)
        == "an item's answer is another one beside an item of 1e+06"
    )


def test_nan_neighbours_and_scales_from_the_whole_batch_are_found(tmp_path: Path) -> None:
    model = onnx(tmp_path, tiny_models.spreading_nan())
    assert why(model) == ""
    assert why(model, allow_nan=True) == "an item's answer is another one beside an item of nan"
    from onnxruntime.quantization import QuantType, quantize_dynamic

    (tmp_path / "model.onnx").write_bytes(tiny_models.mlp())
    quantize_dynamic(str(tmp_path / "model.onnx"), str(tmp_path / "int8.onnx"), weight_type=QuantType.QInt8)
    assert why(onnx(tmp_path, (tmp_path / "int8.onnx").read_bytes()))


@pytest.fixture
def process(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[UserProcess]:
    (tmp_path / "classes.py").write_text(CLASSES)
    found = UserProcess(f"classes:{request.param}", tmp_path)
    found.open()
    yield found
    found.close()


@pytest.mark.parametrize(
    ("process", "reason"),
    [
        ("Honest", ""),
        ("Running", "an item's answer is another one in a batch"),
        ("Counting", "an item's answer is another one at each call"),
        ("Refusing", ""),  # such a batch fails, and its items are computed one by one
        ("Ending", ""),
    ],
    indirect=["process"],
)
def test_a_users_own_process_is_asked_the_same(process: UserProcess, reason: str) -> None:
    assert why(process) == reason


@pytest.mark.torch
@pytest.mark.parametrize(
    ("layer", "reason"),
    [("BatchNorm2d", "an item's answer is another one"), ("Dropout", "an item's answer is another one at each call")],
)
def test_a_torch_module_in_train_mode_is_found_out(tmp_path: Path, layer: str, reason: str) -> None:
    torch = pytest.importorskip("torch")
    net = torch.nn.Sequential(torch.nn.BatchNorm2d(1) if layer == "BatchNorm2d" else torch.nn.Dropout()).train()
    program = torch.export.export(net, (torch.zeros(2, 1, 8, 8),), dynamic_shapes=({0: torch.export.Dim("n", min=1, max=64)},))  # fmt: skip
    torch.export.save(program, tmp_path / "saved.pt2")
    from services.executor.backends import pt2

    pt2.reduce(tmp_path / "saved.pt2", tmp_path / "model.pt2", 2**24)
    upload = RunnableUpload(framework="torch", path=tmp_path / "model.pt2", format="pt2", signature=None)
    data = ValidationSet({upload.load().inputs[0]: IMAGES.inputs["x"]}, Y)
    assert why(upload.load(), data).startswith(reason)

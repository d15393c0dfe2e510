"""Models as MLflow keeps them: folders as its package writes them, with what conversion reads of them."""

from pathlib import Path

import numpy as np
import pytest

from infaas.conversion import convert
from infaas.errors import BadInput
from infaas.folders import RANDOM_ITEMS, example_of, mlflow_model, repository
from tests.support.models.tiny_models import digits, mlp

MLMODEL = """flavors:
  FLAVOUR:
    FILES
  python_function:
    loader_module: mlflow.FLAVOUR
saved_input_example_info:
  artifact_path: input_example.json
  type: ndarray
signature:
  inputs: '[{"type": "double", "name": "a", "required":
    true}]'
"""
UNSIGNED = MLMODEL.partition("signature:")[0]


def folder(place: Path, flavour: str, files: str, text: str = MLMODEL) -> Path:
    (place / "MLmodel").write_text(text.replace("FLAVOUR", flavour).replace("FILES", files))
    (place / "input_example.json").write_text(str(digits(8)[0].tolist()))
    return place


def test_an_onnx_folder_answers_its_example(tmp_path: Path) -> None:
    (tmp_path / "model.onnx").write_bytes(mlp())
    path = mlflow_model(folder(tmp_path, "onnx", "data: model.onnx", UNSIGNED))
    x = example_of(tmp_path)
    assert np.allclose(x[:8], digits(8)[0])
    assert x.shape == (8 + RANDOM_ITEMS, 16)  # eight are too few to measure on
    assert all(np.isin(x[:, column], x[:8, column]).all() for column in range(16))
    made = convert(str(tmp_path), x, None, tmp_path)
    assert (made.path, made.metric) == (path, "agreement")


def test_a_program_of_torch_takes_the_numbers_of_json(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    batch = ({0: torch.export.Dim("batch", min=1, max=64)},)
    program = torch.export.export(torch.nn.Linear(16, 3), (torch.zeros(2, 16),), dynamic_shapes=batch)
    (tmp_path / "data").mkdir()
    torch.export.save(program, tmp_path / "data" / "model.pt2")
    place = folder(tmp_path, "pytorch", "model_data: data\n    pytorch_version: 2.9.0", UNSIGNED)
    made = convert(str(place), example_of(place), None, tmp_path)
    assert made.path.suffix == ".pt2" and made.trial is not None
    assert (made.trial.failed, made.trial.scores) == ("", 3)
    assert made.trial.inputs[0].datatype == "FP32"


@pytest.mark.parametrize("flavour", ["xgboost", "lightgbm"])
def test_a_booster_becomes_a_classifier(flavour: str, tmp_path: Path) -> None:
    package = pytest.importorskip(flavour)
    pytest.importorskip("onnxmltools")
    x, y = digits(200)
    if flavour == "xgboost":
        model = package.XGBClassifier(n_estimators=4).fit(x, y)
        model.save_model(tmp_path / "model.ubj")
        place = folder(tmp_path, flavour, "data: model.ubj\n    model_class: xgboost.sklearn.XGBClassifier")
    else:
        model = package.LGBMClassifier(n_estimators=4, verbose=-1).fit(x, y)
        model.booster_.save_model(tmp_path / "model.lgb")
        place = folder(tmp_path, flavour, "data: model.lgb")
    opened = mlflow_model(place)
    assert np.array_equal(np.asarray(opened.predict(x)), np.asarray(model.predict(x)))
    assert convert(str(place), x, y, tmp_path).classes == ["0", "1", "2", "3"]


@pytest.mark.parametrize(
    ("flavour", "files", "told"),
    [
        ("sklearn", "pickled_model: model.pkl", "is a pickle"),
        ("pytorch", "model_data: model.pkl", "is a pickle"),
        ("prophet", "data: model.pkl", "none is known"),
        ("onnx", "data: ../model.pkl", "names ../model.pkl, which is not in the folder"),
        ("onnx", "data: .", "which is not in the folder"),
    ],
)
def test_what_is_not_taken_is_refused_with_a_remedy(flavour: str, files: str, told: str, tmp_path: Path) -> None:
    (tmp_path / "model.pkl").write_bytes(b"code")
    with pytest.raises(BadInput, match=told):
        mlflow_model(folder(tmp_path, flavour, files))


@pytest.mark.parametrize(("flavour", "file"), [("xgboost", "model.ubj"), ("lightgbm", "model.txt")])
def test_a_broken_booster_is_told_and_ends_nothing(flavour: str, file: str, tmp_path: Path) -> None:
    """LightGBM ends the process at a text that breaks off."""
    package = pytest.importorskip(flavour)
    pytest.importorskip("onnxmltools")
    x, y = digits(200)
    make = package.XGBClassifier if flavour == "xgboost" else package.LGBMClassifier
    model = make(n_estimators=2).fit(x, y)
    (model if flavour == "xgboost" else model.booster_).save_model(tmp_path / file)
    whole = (tmp_path / file).read_bytes()
    (tmp_path / file).write_bytes(whole[: len(whole) // 2])
    with pytest.raises(BadInput, match=f"{flavour} cannot open it .*: copy it again"):
        mlflow_model(folder(tmp_path, flavour, f"data: {file}"))


@pytest.mark.parametrize(
    ("example", "told"),
    [
        ("{", "is no input example"),
        ("3", "holds no rows"),
        ("[[1, 2], [3]]", "is no input example"),
        ('{"columns": ["a"]}', "is no input example"),
    ],
)
def test_a_broken_example_is_told(example: str, told: str, tmp_path: Path) -> None:
    folder(tmp_path, "onnx", "data: model.onnx")
    (tmp_path / "input_example.json").write_text(example)
    with pytest.raises(BadInput, match=f"{told}.*: give samples with --validation"):
        example_of(tmp_path)


def test_a_signature_names_columns_and_must_fit(tmp_path: Path) -> None:
    pytest.importorskip("pandas")
    folder(tmp_path, "onnx", "data: model.onnx")
    (tmp_path / "input_example.json").write_text("[[1.5], [2.5]]")
    assert list(example_of(tmp_path).columns) == ["a"]
    (tmp_path / "input_example.json").write_text("[[1.5, 2]]")
    with pytest.raises(
        BadInput, match=r"of the samples has the shape \[2\], and of the signature in its MLmodel \[1\]"
    ):
        example_of(tmp_path)


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ('name: "b"', "config.pbtxt is of 'b': give the folder that name"),
        ("input [ {", "brackets without their other halves"),
        ('platform: "tensorflow_savedmodel"', "only ONNX is taken"),
        ('default_model_filename: "../../x.onnx"', "is not in its folder"),
        ('output [ { label_filename: "labels.txt" } ]', "cannot read"),
    ],
)
def test_what_a_repository_has_wrong_is_said_of_each_model(config: str, told: str, tmp_path: Path) -> None:
    (tmp_path / "a" / "1").mkdir(parents=True)
    (tmp_path / "a" / "1" / "model.onnx").write_bytes(mlp())
    assert [(one.name, one.left_out) for one in repository(tmp_path)] == [("a", "")]
    (tmp_path / "a" / "config.pbtxt").write_text(config)
    with pytest.raises(BadInput, match=f"a: .*{told}"):
        repository(tmp_path)

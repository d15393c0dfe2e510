"""Models as Python objects become files that answer as the objects do; what cannot be converted is refused with a remedy."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from infaas.conversion import Converted, check_given, convert, kind_of
from infaas.errors import BadInput, Refused
from infaas.folders import whole_onnx
from infaas.registering import register_model
from infaas.samples import float32_of, labels_of, own_metric
from infaas.trial import understood
from tests.support.models import tiny_models

RNG = np.random.default_rng(3)
X = RNG.normal(size=(200, 4)).astype("f4")
CLASSES = (X[:, 0] > 0).astype(int) + (X[:, 1] > 0.5)
NAMES = np.array(["ash", "birch", "oak"])[CLASSES]
TARGETS = X @ np.array([1.0, -2.0, 0.5, 3.0]) + 7.25


def sklearn() -> Any:
    pytest.importorskip("skl2onnx")
    return pytest.importorskip("sklearn")


def said(found: Converted) -> list[str]:
    return understood(found.note, found.inputs, found.labels, found.classes, found.metric, found.trial)


def answers(path: Path, inputs: dict[str, Any]) -> Any:
    import onnxruntime

    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    assert {one.name for one in session.get_inputs()} == set(inputs)
    return session.run(None, {n: a.astype(object) if a.dtype.kind == "U" else a for n, a in inputs.items()})


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "labels", [NAMES, CLASSES, CLASSES + 5, CLASSES == 1], ids=["texts", "numbers", "from 5", "truth"]
)
def test_a_classifier_gives_one_score_a_class(tmp_path: Path, labels: Any) -> None:
    sklearn()
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    model = make_pipeline(StandardScaler(), LogisticRegression()).fit(X, labels)
    found = convert(model, X.astype("f8"), labels, tmp_path)
    (scores,) = answers(found.path, found.inputs)
    assert scores.shape == (200, len(np.unique(labels)))
    assert np.array_equal(model.classes_[scores.argmax(axis=1)], model.predict(X))
    assert found.classes == [str(one) for one in model.classes_.tolist()]
    assert np.array_equal(model.classes_[found.labels], labels)
    assert found.metric == "top1"
    lines = said(found)
    assert "200 samples answered as by the object" in lines[0]
    assert lines[1] == "input x: FP32[n, 4]"
    assert lines[2] == f"output probabilities: FP32[n, {len(np.unique(labels))}]"
    assert lines[3].startswith("validation: 200 items; labels: ")
    assert lines[3].endswith("task: classification; metric: top1, the share of right answers")
    assert lines[4].startswith(f"first item: answer {model.predict(X[:1])[0]} (")
    assert lines[4].endswith(f"; its label: {labels[0]}")


@pytest.mark.filterwarnings("ignore")
def test_a_regressor_gives_targets(tmp_path: Path) -> None:
    sklearn()
    from sklearn.linear_model import Ridge

    model = Ridge().fit(X, TARGETS)
    found = convert(model, X, TARGETS, tmp_path)
    assert np.allclose(answers(found.path, found.inputs)[0].ravel(), model.predict(X), atol=1e-3)
    assert (found.metric, found.classes) == ("mae", [])
    lines = said(found)
    assert "targets from" in lines[-2]
    assert "task: regression; metric: mae, the mean absolute error" in lines[-2]
    assert lines[-1].startswith("first item: answer ")
    assert "its label: " in lines[-1]


@pytest.mark.filterwarnings("ignore")
def test_columns_of_a_table_become_inputs_of_their_own(tmp_path: Path) -> None:
    sklearn()
    pandas = pytest.importorskip("pandas")
    from sklearn.compose import ColumnTransformer
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import OneHotEncoder, StandardScaler

    table = pandas.DataFrame({"age": X[:, 0], "town": np.array(["a", "b"])[(X[:, 1] > 0).astype(int)]})
    parts = ColumnTransformer([("n", StandardScaler(), ["age"]), ("c", OneHotEncoder(), ["town"])])
    model = make_pipeline(parts, LogisticRegression()).fit(table, NAMES)
    found = convert(model, table, NAMES, tmp_path)
    assert {name: array.shape for name, array in found.inputs.items()} == {"age": (200, 1), "town": (200, 1)}
    assert np.array_equal(model.classes_[answers(found.path, found.inputs)[0].argmax(axis=1)], model.predict(table))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["alone", "scaled", "chosen"])
def test_a_table_of_numbers_is_one_input_with_its_names_whatever_the_estimator(tmp_path: Path, kind: str) -> None:
    """The converter takes columns where some are chosen by name, else one array or either, and renames what is no letter."""
    sklearn()
    pandas = pytest.importorskip("pandas")
    from sklearn.compose import make_column_transformer
    from sklearn.ensemble import RandomForestClassifier
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    table = pandas.DataFrame({"od280/od315": X[:, 0], "x": (10 * X[:, 1]).astype(int), "a b": X[:, 1]})
    parts = make_column_transformer((StandardScaler(), ["x", "od280/od315"]), remainder="passthrough")
    kinds = {
        "alone": RandomForestClassifier(5),
        "scaled": make_pipeline(StandardScaler(), LogisticRegression()),
        "chosen": make_pipeline(parts, LogisticRegression()),
    }
    model = kinds[kind].fit(table, NAMES)
    found = convert(model, table, NAMES, tmp_path)
    assert {name: array.shape for name, array in found.inputs.items()} == {"x": (200, 3)}
    assert found.columns == ["od280/od315", "x", "a b"]
    assert np.array_equal(model.classes_[answers(found.path, found.inputs)[0].argmax(axis=1)], model.predict(table))
    named = convert(model, {name: table[[name]].to_numpy() for name in table}, NAMES, tmp_path, apart=True)
    assert (list(named.inputs), named.columns) == (list(table), [])  # as a function before the model gives them
    assert np.array_equal(model.classes_[answers(named.path, named.inputs)[0].argmax(axis=1)], model.predict(table))


@pytest.mark.filterwarnings("ignore")
def test_texts_are_the_input_of_vectorizers(tmp_path: Path) -> None:
    sklearn()
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline

    texts = np.array(["a good film", "a dull film"] * 20)
    names = np.array(["up", "down"] * 20)
    found = convert(make_pipeline(TfidfVectorizer(), LogisticRegression()).fit(texts, names), texts, names, tmp_path)
    assert found.inputs["x"].shape == (40, 1)
    assert "input x: BYTES[n, 1] (texts)" in said(found)
    assert said(found)[-1].startswith("first item: answer up")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("library", ["xgboost", "lightgbm"])
def test_boosted_trees(tmp_path: Path, library: str) -> None:
    pytest.importorskip("onnxmltools")
    module = pytest.importorskip(library)
    make = module.XGBClassifier if library == "xgboost" else module.LGBMClassifier
    model = make(n_estimators=5).fit(X, CLASSES)
    assert kind_of(model) == library
    found = convert(model, X, CLASSES, tmp_path)
    assert np.array_equal(answers(found.path, found.inputs)[0].argmax(axis=1), model.predict(X))
    ranks = module.XGBRanker if library == "xgboost" else module.LGBMRanker
    ranker = ranks(n_estimators=5).fit(X, CLASSES, group=[20] * 10)
    found = convert(ranker, X, CLASSES, tmp_path)
    assert found.metric == "ndcg"
    assert np.allclose(answers(found.path, found.inputs)[0].ravel(), ranker.predict(X), atol=1e-5)


@pytest.mark.filterwarnings("ignore")
def test_the_owner_names_classes_that_are_numbers(tmp_path: Path) -> None:
    sklearn()
    from sklearn.linear_model import LogisticRegression, Ridge

    model, called = LogisticRegression().fit(X, CLASSES), ["ash", "birch", "oak"]
    for y in (CLASSES, None):
        assert convert(model, X, y, tmp_path, names=called).classes == called
    with pytest.raises(BadInput, match="labels: 2 names for the classes of the model, which has 0, 1, 2"):
        convert(model, X, CLASSES, tmp_path, names=["ash", "oak"])
    with pytest.raises(BadInput, match=r"labels: 3 names .* which has none, since it gives numbers"):
        convert(Ridge().fit(X, TARGETS), X, TARGETS, tmp_path, names=called)
    with pytest.raises(BadInput, match="which has ash, birch, oak"):
        convert(LogisticRegression().fit(X, NAMES), X, NAMES, tmp_path, names=["a", "b", "c"])


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ({"metric": "ndcg"}, "metric: ndcg judges rankings: pass groups=, of each sample the list"),
        ({"metric": "ndcg", "groups": [20] * 10}, r"groups: 10 for 200 samples: .* numpy.repeat"),
    ],
)
def test_only_lists_are_judged_as_rankings(more: dict[str, Any], told: str) -> None:
    sklearn()
    from sklearn.linear_model import Ridge

    with pytest.raises(BadInput, match=told):
        check_given(Ridge().fit(X, TARGETS), X, TARGETS, more.pop("metric"), more)


@pytest.mark.torch
@pytest.mark.filterwarnings("ignore")
def test_a_torch_module_becomes_a_program_for_any_batch(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")

    class Two(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.last = torch.nn.Linear(4, 3)

        def forward(self, left: Any, right: Any) -> Any:
            return self.last(left + right)

    model = Two()
    found = convert(model, {"right": X, "left": X * 2}, CLASSES, tmp_path)
    assert list(found.inputs) == ["left", "right"]
    program = torch.export.load(found.path).module()
    for n in (1, 7):
        tensors = [torch.from_numpy(array[:n]) for array in found.inputs.values()]
        assert torch.allclose(program(*tensors), model(*tensors), atol=1e-5)
    words = torch.nn.Sequential(torch.nn.Embedding(50, 4), torch.nn.AdaptiveAvgPool2d((1, 4)), torch.nn.Flatten())
    ids = RNG.integers(0, 50, (30, 12))
    found = convert(words, ids, None, tmp_path, dynamic_shapes={"input": {1: "length"}})
    program = torch.export.load(found.path).module()
    for length in (3, 12, 40):
        some = torch.from_numpy(RNG.integers(0, 50, (5, length)))
        assert torch.allclose(program(some), words(some), atol=1e-5)
    with pytest.raises(BadInput, match="has no input 'ids', only input"):
        convert(words, ids, None, tmp_path, dynamic_shapes={"ids": {1: "length"}})


def test_an_onnx_model_keeps_the_names_of_its_inputs(tmp_path: Path) -> None:
    model = pytest.importorskip("onnx").load_from_string(tiny_models.mlp())
    x, classes = tiny_models.digits(30)
    found = convert(model, x, classes, tmp_path)
    assert list(found.inputs) == ["x"]
    assert found.path.read_bytes() == model.SerializeToString()
    assert found.metric == "top1"
    assert said(found)[-1].startswith(f"first item: answer {classes[0]} (")
    with pytest.raises(BadInput, match=r"`x` has shape \[1, 3\]: the model takes \[n, 16\]"):
        convert(model, x[:, :3], classes, tmp_path)


def test_names_of_classes_must_be_as_many_as_scores(tmp_path: Path) -> None:
    model = pytest.importorskip("onnx").load_from_string(tiny_models.mlp())
    x, classes = tiny_models.digits(30)
    scores = len(answers_of_first(model, x))
    names = [f"n{number}" for number in range(scores)]
    found = convert(model, x, np.array(names)[classes], tmp_path, names=names)
    assert found.classes == names
    assert (found.labels == classes).all()
    with pytest.raises(BadInput, match=f"gives {scores} scores, and there are {scores - 1} names"):
        convert(model, x, np.array(names)[classes % 2], tmp_path, names=names[:-1])


def answers_of_first(model: Any, x: Any) -> Any:
    import onnxruntime

    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, {"x": x[:1]})[0][0]


def test_weights_in_files_beside_an_onnx_model_come_along(tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx")
    (tmp_path / "given").mkdir()
    path = tmp_path / "given" / "model.onnx"
    model = onnx.load_from_string(tiny_models.mlp())
    onnx.save(model, str(path), save_as_external_data=True, location="model.onnx.data", size_threshold=0)
    assert (tmp_path / "given" / "model.onnx.data").exists()
    whole = whole_onnx(path, tmp_path)
    (tmp_path / "given" / "model.onnx.data").unlink()
    x, classes = tiny_models.digits(30)
    assert (answers(whole, {"x": x})[0].argmax(axis=1) == classes).all()
    with pytest.raises(BadInput, match="files beside it"):
        path.with_name("model.onnx.other").touch()
        whole_onnx(path, tmp_path)


@pytest.mark.parametrize(
    ("y", "metric", "labels", "classes", "scored"),
    [
        ([0, 1, 1], None, [0, 1, 1], [], "top1"),
        ([0.0, 1.0, 2.0], None, [0, 1, 2], [], "top1"),
        (["b", "a", "b"], None, [1, 0, 1], ["a", "b"], "top1"),
        ([[1], [0]], None, [1, 0], [], "top1"),
        ([0.5, 1.0], None, [0.5, 1.0], [], "mae"),
        ([3, 4], "rmse", [3.0, 4.0], [], "rmse"),
        ([3, 4, 9], "one number", [3.0, 4.0, 9.0], [], "mae"),
        ([0, 1, 1], "one number", [0, 1, 1], [], "top1"),
    ],
)
def test_labels_say_what_they_are(y: Any, metric: str | None, labels: Any, classes: list[str], scored: str) -> None:
    one_number = metric == "one number"
    found = labels_of(y, None if one_number else metric, one_number=one_number)
    assert (found[0].tolist(), found[1], found[2]) == (labels, classes, scored)


@pytest.mark.filterwarnings("ignore")
def test_what_cannot_be_converted_is_refused_with_a_remedy(tmp_path: Path) -> None:
    for wrong, says in ((object(), "infaas container"), ({}, "cannot be converted")):
        with pytest.raises(BadInput, match=says):
            convert(wrong, X, CLASSES, tmp_path)
    with pytest.raises(BadInput, match=r"y: metric mae needs numbers"):
        labels_of(["a", "b"], "mae")
    with pytest.raises(BadInput, match=r"y: labels must be numbers or texts"):
        labels_of([object(), 1], None)
    sklearn()
    from sklearn.cluster import KMeans
    from sklearn.linear_model import LogisticRegression

    model = LogisticRegression().fit(X, NAMES)
    bad = X.copy()
    bad[17, 2] = np.nan
    with pytest.raises(BadInput, match=r"NaN or infinite values, first in sample 17"):
        convert(model, bad, NAMES, tmp_path)
    with pytest.raises(BadInput, match=r"y: the model has no class 'elm'"):
        convert(model, X, np.where(NAMES == "oak", "elm", NAMES), tmp_path)
    with pytest.raises(BadInput, match="neither a classifier nor a regressor: leave y out"):
        convert(KMeans(2).fit(X), X, CLASSES, tmp_path)


@pytest.mark.filterwarnings("ignore")
def test_models_without_labels_are_measured_by_agreement_and_own_metrics_by_their_file(tmp_path: Path) -> None:
    sklearn()
    from sklearn.cluster import KMeans
    from sklearn.decomposition import PCA
    from sklearn.ensemble import IsolationForest
    from sklearn.linear_model import LogisticRegression, Ridge

    for model in (
        KMeans(2, n_init=1),
        IsolationForest(n_estimators=5),
        PCA(2),
        Ridge().fit(X, X[:, 0]),
        LogisticRegression().fit(X, NAMES),
    ):
        fitted = model if isinstance(model, (Ridge, LogisticRegression)) else model.fit(X)
        found = convert(fitted, X, None, tmp_path)
        assert (found.metric, len(found.labels)) == ("agreement", 0)
        assert "labels: none" in said(found)[-2]
    assert found.classes == sorted(set(NAMES.tolist()))
    (tmp_path / "score.py").write_text("def map50(y, outputs):\n    return 0.5\n")
    name, _ = own_metric(f"{tmp_path}/score.py:map50")
    assert name == "map50"
    labels, _, metric = labels_of([{"boxes": np.zeros((2, 4))}, {"boxes": []}], name)
    assert (metric, [json.loads(one) for one in labels]) == (name, [{"boxes": [[0.0] * 4] * 2}, {"boxes": []}])
    assert (labels_of(labels, name)[0] == labels).all(), "once is enough"
    for wrong, says in (
        ("f1", "did you mean f1_macro"),
        (f"{tmp_path}/score.py:map", "has no function map, only map50"),
    ):
        with pytest.raises(BadInput, match=says):
            own_metric(wrong)
    with pytest.raises(BadInput, match="metric mae needs labels"):
        labels_of(None, "mae")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("options", [{}, {"max_features": 2, "contamination": 0.2}, {"max_samples": 20}])
def test_an_isolation_forest_is_one_ensemble_of_trees(tmp_path: Path, options: dict[str, Any]) -> None:
    """One that is thirty nodes a tree takes seconds wherever it is loaded."""
    sklearn()
    import onnx
    from onnxruntime import InferenceSession
    from sklearn.ensemble import IsolationForest
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    model = make_pipeline(StandardScaler(), IsolationForest(n_estimators=40, random_state=0, **options)).fit(X)
    found = convert(model, X, None, tmp_path)
    kinds = [node.op_type for node in onnx.load(found.path).graph.node]
    assert (kinds.count("TreeEnsembleRegressor"), len(kinds) < 20) == (1, True)
    labels, scores = InferenceSession(str(found.path)).run(None, found.inputs)
    assert (labels.ravel() == model.predict(X)).all()
    assert scores.ravel() == pytest.approx(model.decision_function(X), abs=1e-5)


class Known:
    """Something with a name that errors show."""


@pytest.mark.parametrize(
    ("model", "x", "y", "says"),
    [
        ("nothing.onnx", X, NAMES, "model: there is no file nothing.onnx"),
        (Known, X, NAMES, "model: Known is a class: make one"),
        (Known(), "rows.csv", NAMES, "x: 'rows.csv' is a text: give the samples themselves"),
        (Known(), X[:0], NAMES[:0], "x: there are no samples"),
        (Known(), X, NAMES[:5], "y: 5 labels for 200 samples"),
        (Known(), X, NAMES, "Known cannot be converted; pass a scikit-learn"),
    ],
)
async def test_a_mistake_is_told_before_anything_is_sent(model: Any, x: Any, y: Any, says: str) -> None:
    async def never(*_: Any, **__: Any) -> Any:
        raise AssertionError

    with pytest.raises(BadInput, match=says):
        await register_model(never, never, model, x, y, app="a")
    with pytest.raises(TypeError, match="no option latncy_ms; did you mean latency_ms"):
        await register_model(never, never, model, x, y, app="a", latncy_ms=5)
    with pytest.raises(BadInput, match="model: is for files; with x and y, name the model by name="):
        await register_model(never, never, model, x, y, app="a", model="forest")


def test_samples_that_are_no_numbers_are_refused() -> None:
    with pytest.raises(BadInput, match=r"x: the model takes numbers: .*: give numbers"):
        float32_of(np.array([[object()]]))


@pytest.mark.parametrize(
    ("name", "y", "metric", "says"),
    [
        (
            "LogisticRegression",
            NAMES,
            "mae",
            "mae is not for this LogisticRegression, which gives classes: use one of top1",
        ),
        ("LogisticRegression", NAMES, "top5", "top5 needs more than five classes, and this model has"),
        ("Ridge", X[:, 0], "roc_auc", "roc_auc is not for this Ridge, which gives a number: use one of mae, rmse, r2"),
    ],
)
def test_a_metric_of_another_kind_of_model_is_refused_before_anything_is_sent(
    name: str, y: Any, metric: str, says: str
) -> None:
    model = getattr(pytest.importorskip("sklearn.linear_model"), name)().fit(X, y)
    with pytest.raises(BadInput, match=f"metric: {says}"):
        check_given(model, X, y, metric, {})


def test_a_refusal_names_calls_of_python() -> None:
    refused = Refused("unknown_app", "no app 'a': see infaas.list.apps, or infaas.admin.add-app")
    assert str(refused) == "unknown_app: no app 'a': see apps(), or admin('add-app')"
    assert refused.told == "unknown_app: no app 'a': see infaas.list.apps, or infaas.admin.add-app"

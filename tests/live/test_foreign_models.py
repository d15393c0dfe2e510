"""Ten models as other people have them: each serves and answers as the original does, or is refused with the remedy.

Estimators are scikit-learn's on its own data, networks are architectures of torch and of the onnx package.
"""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

import infaas
from infaas.errors import BadInput, Refused
from tests.support.models import tiny_models
from tests.support.servers.processes import fetched
from tests.support.servers.system import Whole

pytestmark = [pytest.mark.timeout(900), pytest.mark.filterwarnings("ignore")]

RNG = np.random.default_rng(5)
LIMIT_S = 540.0  # for one registration, on a busy machine


class Foreign(NamedTuple):
    """x, y: samples and labels. asked: inputs of a query; expected: the original's outputs for it, or the names of its classes.

    said: what is shown before anything is sent.
    """

    model: Any
    x: Any
    y: Any
    asked: Any
    expected: Any
    said: tuple[str, ...]
    options: dict[str, Any] = {}


def sklearn(*parts: str) -> list[Any]:
    pytest.importorskip("skl2onnx")
    return [pytest.importorskip(f"sklearn.{part}") for part in parts]


def forest(_: Path) -> Foreign:
    """scikit-learn, with labels that are texts."""
    datasets, ensemble = sklearn("datasets", "ensemble")
    wine = datasets.load_wine()
    names = wine.target_names[wine.target]
    model = ensemble.RandomForestClassifier(10, random_state=0).fit(wine.data, names)
    said = ("input x: FP32[n, 13]", "3 classes (class_0, class_1, class_2)", "metric: top1")
    asked = wine.data[::20].astype("f4")
    return Foreign(model, wine.data, names, asked, model.predict(asked).tolist(), said)


def regression(_: Path) -> Foreign:
    """Targets that are whole numbers: the metric follows from the outputs."""
    datasets, linear = sklearn("datasets", "linear_model")
    x, y = datasets.load_diabetes(return_X_y=True)
    model = linear.Ridge().fit(x, y)
    asked = x[:5].astype("f4")
    said = ("targets from 25 to 346", "task: regression; metric: mae, the mean absolute error")
    return Foreign(model, x, y, asked, model.predict(asked), said)


def table(_: Path) -> Foreign:
    """Columns of a DataFrame, texts among them, are inputs of their own."""
    compose, linear, pipeline, preprocessing = sklearn("compose", "linear_model", "pipeline", "preprocessing")
    pandas = pytest.importorskip("pandas")
    age = RNG.normal(40, 10, 60)
    x = pandas.DataFrame({"age": age, "town": np.where(RNG.random(60) > 0.5, "here", "there")})
    y = np.where((age > 40) & (x["town"] == "here"), "yes", "no")
    parts = compose.ColumnTransformer(
        [("n", preprocessing.StandardScaler(), ["age"]), ("c", preprocessing.OneHotEncoder(), ["town"])]
    )
    model = pipeline.make_pipeline(parts, linear.LogisticRegression()).fit(x, y)
    asked = {name: x[name].to_numpy()[:4].reshape(-1, 1) for name in x.columns}
    asked["age"] = asked["age"].astype("f4")
    asked["town"] = asked["town"].astype(str)
    return Foreign(model, x, y, asked, model.predict(x[:4]).tolist(), ("input town: BYTES[n, 1] (texts)",))


def text(_: Path) -> Foreign:
    """Texts of any length."""
    linear, pipeline, words = sklearn("linear_model", "pipeline", "feature_extraction.text")
    x = np.array([f"a {word} film {number}" for number in range(20) for word in ("good", "dull")])
    y = np.array(["up", "down"] * 20)
    model = pipeline.make_pipeline(words.TfidfVectorizer(), linear.LogisticRegression()).fit(x, y)
    return Foreign(model, x, y, np.array([["good"], ["a very dull one"]]), ["up", "down"], ("(texts)", "2 classes"))


def fixed_batch(directory: Path) -> Foreign:
    """A network of the onnx package whose batch is fixed: pictures, channels first."""
    onnx = pytest.importorskip("onnx")
    from onnx.backend.test.data import __path__ as where  # type: ignore[import-untyped]

    path = Path(where[0]) / "light" / "light_squeezenet.onnx"
    if not path.exists():
        pytest.skip("this onnx package has no test models")
    assert onnx.load(str(path)).graph.input
    x = RNG.random((20, 3, 224, 224)).astype("f4")
    expected = scores_of(path, x)
    said = ("each run takes 1 item: a fixed batch", "pictures, channels first")
    return Foreign(path, x, expected.reshape(20, -1).argmax(axis=1), x[:2], expected[:2], said)


def torch() -> Any:
    return pytest.importorskip("torch")


def network(_: Path) -> Foreign:
    """A torch module that names what it returns."""
    nn = torch().nn

    class Named(nn.Sequential):  # type: ignore[misc,name-defined]
        def forward(self, input: Any) -> Any:
            return {"kind": super().forward(input)}

    model = Named(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), nn.Flatten(), nn.Linear(48, 4)).eval()
    x = RNG.normal(size=(30, 6, 8)).astype("f4")
    expected = model(torch().from_numpy(x))["kind"].detach().numpy()
    said = ("exported by torch.export", "input input: FP32[n, 6, 8]")
    return Foreign(model, x, expected.argmax(axis=1), x[:3], expected[:3], said)


def two_inputs(directory: Path) -> Foreign:
    """As torch.onnx.export writes them today: the weights in a file beside the model."""
    nn = torch().nn

    class Pair(nn.Module):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right = nn.Linear(4, 3), nn.Linear(5, 3)

        def forward(self, left: Any, right: Any) -> Any:
            return self.left(left) * self.right(right)

    path, x, expected = exported(Pair(), {"left": (30, 4), "right": (30, 5)}, directory)
    onnx = pytest.importorskip("onnx")
    model = onnx.load(str(path))
    path.unlink()
    onnx.save(model, str(path), save_as_external_data=True, location="net.onnx.data", size_threshold=0)
    assert (directory / "net.onnx.data").exists()
    asked = {name: array[:3] for name, array in x.items()}
    return Foreign(path, x, expected.argmax(axis=1), asked, expected[:3], ("input right: FP32[n, 5]",))


def variable_length(directory: Path) -> Foreign:
    """Word numbers, and as many of them as there are."""
    nn = torch().nn

    class Bag(nn.Module):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.words, self.last = nn.Embedding(50, 8), nn.Linear(8, 3)

        def forward(self, words: Any) -> Any:
            return self.last(self.words(words).mean(1))

    model, path = Bag().eval(), directory / "bag.onnx"
    x = RNG.integers(0, 50, (30, 7))
    dynamic = {"words": {0: "n", 1: "length"}, "scores": {0: "n"}}
    given = {"input_names": ["words"], "output_names": ["scores"], "dynamic_axes": dynamic, "dynamo": False}
    torch().onnx.export(model, (torch().from_numpy(x),), str(path), **given)
    longer = RNG.integers(0, 50, (2, 11))
    expected = model(torch().from_numpy(longer)).detach().numpy()
    labels = model(torch().from_numpy(x)).detach().numpy().argmax(axis=1)
    return Foreign(path, x, labels, longer, expected, ("INT64[n, any]", "an axis of variable length"))


def pictures(directory: Path) -> Foreign:
    """Bytes of pictures, channels last."""
    nn = torch().nn

    class Nhwc(nn.Module):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(
                nn.Conv2d(3, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 5)
            )

        def forward(self, picture: Any) -> Any:
            return self.net(picture.permute(0, 3, 1, 2).float() / 255)

    model, path = Nhwc().eval(), directory / "nhwc.onnx"
    x = RNG.integers(0, 256, (30, 12, 16, 3)).astype("u1")
    given = {"input_names": ["picture"], "dynamic_axes": {"picture": {0: "n"}}, "dynamo": False}
    torch().onnx.export(model, (torch().from_numpy(x),), str(path), **given)
    expected = model(torch().from_numpy(x)).detach().numpy()
    said = ("UINT8[n, 12, 16, 3]", "whole numbers 0 to 255", "pictures, channels last")
    return Foreign(path, x, expected.argmax(axis=1), x[:3], expected[:3], said)


def missing_values(_: Path) -> Foreign:
    """NaN, where it is allowed: a pipeline that fills it."""
    datasets, linear, pipeline, preprocessing = sklearn("datasets", "linear_model", "pipeline", "preprocessing")
    (impute,) = sklearn("impute")
    x, y = datasets.load_breast_cancer(return_X_y=True)
    x = x.astype("f4")
    x[::7, 3] = np.nan
    steps = impute.SimpleImputer(), preprocessing.StandardScaler(), linear.LogisticRegression()
    model = pipeline.make_pipeline(*steps).fit(x, y)
    names = [str(one) for one in model.predict(x[:4])]
    return Foreign(model, x, y, x[:4], names, ("input x: FP32[n, 30]",), {"allow_nan": True})


def exported(model: Any, shapes: dict[str, tuple[int, ...]], directory: Path) -> tuple[Path, dict[str, Any], Any]:
    """The file, random inputs, and the model's outputs."""
    x = {name: RNG.normal(size=shape).astype("f4") for name, shape in shapes.items()}
    tensors = tuple(torch().from_numpy(array) for array in x.values())
    path = directory / "net.onnx"
    given = {"input_names": list(x), "dynamic_axes": {name: {0: "n"} for name in x}, "dynamo": False}
    torch().onnx.export(model.eval(), tensors, str(path), **given)
    return path, x, model(*tensors).detach().numpy()


def scores_of(path: Path, x: Any) -> Any:
    import onnxruntime

    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    name = session.get_inputs()[0].name
    return np.concatenate([session.run(None, {name: x[at : at + 1]})[0] for at in range(len(x))])


@pytest.fixture(scope="module")
def client(system: Whole) -> Iterator[infaas.Infaas]:
    with infaas.connect_blocking(data_dir=system.directory) as connected:
        yield connected


MODELS = (forest, regression, table, text, fixed_batch, network, two_inputs, variable_length, pictures, missing_values)


@pytest.mark.parametrize("make", MODELS, ids=lambda make: make.__name__)
def test_it_serves_and_answers_as_the_original(
    make: Callable[[Path], Foreign], client: infaas.Infaas, tmp_path: Path
) -> None:
    foreign, lines = make(tmp_path), []
    name = f"foreign-{make.__name__}".replace("_", "-")
    document = client.register(
        foreign.model, foreign.x, foreign.y, app=name, name=name, say=lines.append, timeout=LIMIT_S, **foreign.options
    )
    shown = "\n".join(lines)
    assert all(part in shown for part in foreign.said), shown
    assert "first item: answer " in shown
    assert document["variants"], document
    variant = next(one["variant"] for one in document["variants"] if "fp32" in one["variant"])
    answer = client.query(name, foreign.asked, variant=variant, timeout=60.0)
    assert make is not network or list(answer.outputs) == ["kind"]
    if isinstance(foreign.expected, list):
        names = answer.labels if answer.labels is not None else [str(one) for one in answer.output.argmax(axis=1)]
        assert names == foreign.expected
    else:
        assert np.allclose(answer.output.reshape(foreign.expected.shape), foreign.expected, rtol=1e-3, atol=1e-3)


def test_wrong_inputs_are_refused_with_the_remedy(client: infaas.Infaas, tmp_path: Path) -> None:
    foreign = pictures(tmp_path)
    with pytest.raises(BadInput, match="transpose it by"):
        client.register(foreign.model, foreign.x.transpose(0, 3, 1, 2), foreign.y, app="p", name="p")
    with pytest.raises(BadInput, match="multiply by 255 and convert to uint8"):
        client.register(foreign.model, foreign.x / 255, foreign.y, app="p", name="p")
    client.register(foreign.model, foreign.x, foreign.y, app="remedies", name="remedies", timeout=LIMIT_S)
    for asked, remedy in (
        (foreign.x[0], r"lacks the axis of items: one item has shape"),
        (foreign.x.transpose(0, 3, 1, 2)[:1], "transpose it by"),
        ((foreign.x[:1] / 255).astype("f4"), "multiply by 255 and convert to uint8"),
        (foreign.x[:1].astype("i8") + 300, "do not fit UINT8"),
    ):
        with pytest.raises(Refused, match=remedy) as refused:
            client.query("remedies", asked, timeout=60.0)
        assert refused.value.code == "bad_request"


def test_nan_is_refused_where_nobody_allowed_it(client: infaas.Infaas, tmp_path: Path) -> None:
    foreign = missing_values(tmp_path)
    with pytest.raises(BadInput, match="first in sample 0: fill or drop them, or register with allow_nan=True"):
        client.register(foreign.model, foreign.x, foreign.y, app="n", name="n")
    x = np.nan_to_num(foreign.x)
    client.register(foreign.model, x, foreign.y, app="finite", name="finite", timeout=LIMIT_S)
    with pytest.raises(Refused, match=r"`inputs` holds NaN at index \[0, 3\]") as refused:
        client.query("finite", foreign.x[:2], timeout=60.0)
    assert refused.value.code == "bad_request"
    assert client.query("finite", x[:2], timeout=60.0).output.shape[0] == 2


def posted(url: str, body: Any) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(fetched(url, body)[1])
    return found


def test_every_door_takes_rows_and_speaks_the_owners_words(
    client: infaas.Infaas, system: Whole, tmp_path: Path
) -> None:
    foreign, frame = table(tmp_path), pytest.importorskip("pandas").DataFrame
    options: dict[str, Any] = {"app": "words", "timeout": LIMIT_S, "say": lambda _: None}
    client.register(foreign.model, foreign.x.to_dict("records"), foreign.y, name="words", **options)
    rows = foreign.x[:4].to_dict("records")

    def heard(app: str) -> None:
        for asked in (foreign.x[:4], rows, foreign.x[:4].to_dict("list")):
            assert client.query(app, asked, timeout=60.0).labels == foreign.expected
        told = posted(f"{system.gateway}/v2/models/{app}/infer", {"rows": rows})["parameters"]
        assert (told["labels"], told["classes"]) == (",".join(foreign.expected), "no,yes")
        told = json.loads(fetched(f"{system.gateway}/v2/models/{app}")[1])
        assert told["properties"]["labels"] == "no,yes"

    heard("words")
    with pytest.raises(BadInput, match="column 'town' is missing: the app takes age, town; is it 'twon'"):
        client.query("words", [{"age": 1, "twon": "here"}])
    graph = {"name": "whole", "latency_ms": 20_000}
    output = client.apps(app="words")[0]["outputs"][0]["name"]
    vertex = {"name": "first", "app": "words", "inputs": {"age": "$.age", "town": "$.town"}}
    client.admin("set-pipeline", pipeline=graph, vertex=[vertex], output={"scores": f"first.{output}"})
    heard("whole")
    client.register(foreign.model, foreign.x, foreign.y, name="words-too", **options)
    client.admin("set-selection", app="words", policy="majority", cache_mb=1.0)
    heard("words")
    priced = regression(tmp_path)
    x = frame(priced.x, columns=[f"c{number}" for number in range(priced.x.shape[1])])
    done = client.register(
        priced.model, priced.x, priced.y, app="prices", target="price", unit="EUR", timeout=LIMIT_S, say=lambda _: None
    )
    assert {one["unit"] for one in done["variants"]} == {"EUR"}
    answer = client.query("prices", x[:1], timeout=60.0)
    assert (answer.target, answer.unit) == ("price", "EUR")
    assert repr(answer).startswith("Answer: price ")
    assert " EUR\nby prices-" in repr(answer)
    told = posted(f"{system.gateway}/v2/models/prices/infer", {"rows": priced.x[:1].tolist()})["parameters"]
    assert (told["target"], told["unit"]) == ("price", "EUR")
    told = posted(f"{system.gateway}/prices/predict", {"input": priced.x[0].tolist()})
    assert (told["target"], told["unit"]) == ("price", "EUR")
    with pytest.raises(BadInput, match="unit: is of a regressor's number"):
        client.register(foreign.model, foreign.x, foreign.y, app="no", unit="EUR")
    with pytest.raises(BadInput, match="y: 3 labels for 60 samples"):
        client.register(foreign.model, foreign.x, foreign.y[:3], app="no")
    with pytest.raises(BadInput, match="this Ridge is not fitted"):
        client.register(type(priced.model)(), priced.x, priced.y, app="no")
    with pytest.raises(Refused, match="field `app` is 'a b'"):
        client.register(priced.model, priced.x, priced.y, app="a b")
    with pytest.raises(TypeError, match="register has no option laten_ms; did you mean latency_ms"):
        client.register(priced.model, priced.x, priced.y, app="no", laten_ms=3)
    assert client.apps(app="no") == []


SCORE = """
def counted(y, outputs):
    return sum(len(boxes) == one["boxes"] for boxes, one in zip(outputs["boxes"], y)) / len(y)
"""


def test_models_without_labels_and_measures_of_ones_own_are_asked_for_by_name(
    client: infaas.Infaas, tmp_path: Path
) -> None:
    """KMeans is compared with itself; a detector, which gives as many boxes as there are, is judged by its owner's function."""
    (cluster,) = sklearn("cluster")
    x = RNG.normal(size=(80, 16)).astype("f4")
    model = cluster.KMeans(3, n_init=1, random_state=0).fit(x)
    document = client.register(model, x, app="clusters", timeout=LIMIT_S)
    assert {one["metric"] for one in document["variants"]} == {"agreement"}
    answer = client.query("clusters", x[:5], agreement=0.999, timeout=60.0)
    assert answer.outputs["label"].ravel().tolist() == model.predict(x[:5]).tolist()
    with pytest.raises(Refused, match="mae: the metric of app 'clusters' is agreement"):
        client.query("clusters", x[:5], mae=3)
    (tmp_path / "net.onnx").write_bytes(tiny_models.detecting())
    (tmp_path / "score.py").write_text(SCORE)
    labels = [{"boxes": int((one > 0).sum())} for one in x]
    metric = f"{tmp_path}/score.py:counted"
    document = client.register(tmp_path / "net.onnx", x, labels, app="boxes", metric=metric, timeout=LIMIT_S)
    assert [(one["metric"], one["accuracy"], one["max_batch"]) for one in document["variants"]][:1] == [
        ("counted", 1.0, 1)
    ]
    for item in x[:3]:
        boxes = client.query("boxes", item[None], counted=0.9, timeout=60.0).output
        assert boxes.shape == (1, int((item > 0).sum()), 2)
    with pytest.raises(Refused, match="accuracy: the metric of app 'boxes' is counted"):
        client.explain("boxes", accuracy=0.9)

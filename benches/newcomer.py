"""What a newcomer brings, on a fresh system: `python benches/newcomer.py [--only NAME,...]`.

Registers each model as its owner would, asks from the first moment on, and compares with the model itself what the system answers. Wanted: an
answer within 5 s of `register` for all but the one of 200 MB, and every one as by the model, or refused with a remedy that works. Needs the
extras torch, sklearn and boosting.
"""

import asyncio
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import rig

import infaas
from infaas.demo.program import command

ITEMS = 8  # of a query whose answer is compared
rng = np.random.default_rng(0)


class Brought(NamedTuple):
    """A model with what its owner has. ask: items of a query. expected: the answers that the model itself gives to them: classes, or arrays by output
    (`None`: the only one). options: of `register`.
    """

    model: Any
    x: Any
    y: Any
    ask: Any
    expected: Any
    options: dict[str, Any] = {}


def table() -> Brought:
    import pandas as pd
    from sklearn.compose import ColumnTransformer
    from sklearn.ensemble import RandomForestClassifier
    from sklearn.impute import SimpleImputer
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import OneHotEncoder, StandardScaler

    x = pd.DataFrame({
        "age": rng.uniform(18, 80, 600), "pay": rng.normal(3000, 900, 600), "town": rng.choice(["Ulm", "Bonn", "Kiel"], 600),
    })  # fmt: skip
    y = np.where((x.age > 50) ^ (x.town == "Ulm"), "stays", "goes")
    x.loc[rng.choice(600, 60), "pay"] = np.nan
    numbers = make_pipeline(SimpleImputer(), StandardScaler())
    parts = ColumnTransformer([("n", numbers, ["age", "pay"]), ("t", OneHotEncoder(handle_unknown="ignore"), ["town"])])
    model = make_pipeline(parts, RandomForestClassifier(30, random_state=0)).fit(x, y)
    return Brought(model, x, y, x[:ITEMS], model.predict(x[:ITEMS]), {"allow_nan": True})


def _numbers(classes: bool) -> tuple[Any, Any]:
    x = rng.normal(size=(600, 10)).astype(np.float32)
    y = x[:, 0] * 3 + x[:, 1] ** 2
    return x, (np.digitize(y, [-1.0, 2.0]) if classes else y)


def _boosted(name: str) -> Callable[[], Brought]:
    def make() -> Brought:
        import lightgbm
        import xgboost

        kind = getattr(xgboost, name, None) or getattr(lightgbm, name)
        x, y = _numbers("Classifier" in name)
        quiet = {"verbose": -1} if name.startswith("LGBM") else {}
        model, options = kind(n_estimators=40, **quiet), dict[str, Any]()
        if "Ranker" in name:
            y, groups = np.digitize(y, [-1.0, 1.0, 3.0]), np.repeat(np.arange(30), 20)
            model.fit(x, y, group=np.full(30, 20))
            options["groups"] = groups
        else:
            model.fit(x, y)
        return Brought(model, x, y, x[:ITEMS], model.predict(x[:ITEMS]), options)

    return make


def cnn() -> Brought:
    import torch
    from torch import nn

    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.5), nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(128, 5)
    )  # fmt: skip
    x = rng.normal(size=(200, 3, 32, 32)).astype(np.float32)
    model.train()(torch.from_numpy(x))  # and it stays so
    y = np.arange(200) % 5
    return Brought(model, x, y, x[:ITEMS], {None: _of(model, x[:ITEMS])})


def _of(model: Any, *arrays: Any) -> Any:
    import torch

    was = model.training
    with torch.no_grad():
        found = model.eval()(*map(torch.from_numpy, arrays))
    model.train(was)
    return found.numpy() if hasattr(found, "numpy") else {name: one.numpy() for name, one in found.items()}


def embedding() -> Brought:
    import torch
    from torch import nn

    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.out = nn.Embedding(1000, 16), nn.Linear(16, 8)

        def forward(self, ids: Any) -> Any:
            return self.out(self.table(ids).mean(dim=1))

    torch.manual_seed(0)
    model, ids = Words(), rng.integers(0, 1000, size=(200, 12))
    short = ids[:ITEMS, :5]
    return Brought(model, ids, None, short, {None: _of(model, short)}, {"dynamic_shapes": {"ids": {1: "length"}}})


def two_outputs() -> Brought:
    import torch
    from torch import nn

    class House(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.kind, self.price = nn.Linear(10, 32), nn.Linear(32, 3), nn.Linear(32, 1)

        def forward(self, x: Any) -> Any:
            inside = torch.relu(self.body(x))
            return {"kind": self.kind(inside), "price": self.price(inside)}

    torch.manual_seed(0)
    model, (x, _) = House(), _numbers(classes=False)
    return Brought(model, x, None, x[:ITEMS], _of(model, x[:ITEMS]))


def detector() -> Brought:
    import onnx
    import onnxruntime
    from onnx import TensorProto, helper, numpy_helper

    given = [
        helper.make_tensor_value_info("boxes", TensorProto.FLOAT, [1, 20, 4]),
        helper.make_tensor_value_info("scores", TensorProto.FLOAT, [1, 2, 20]),
    ]
    least = {
        "most": np.array([10], np.int64),
        "overlap": np.array([0.5], np.float32),
        "sure": np.array([0.6], np.float32),
    }
    node = helper.make_node("NonMaxSuppression", ["boxes", "scores", *least], ["selected"])
    found = helper.make_tensor_value_info("selected", TensorProto.INT64, [None, 3])
    constants = [numpy_helper.from_array(one, name) for name, one in least.items()]
    graph = helper.make_graph([node], "nms", given, [found], constants)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    onnx.checker.check_model(model)
    corner = rng.uniform(0, 50, size=(60, 20, 2)).astype(np.float32)
    x = {"boxes": np.concatenate([corner, corner + 20], axis=2), "scores": rng.random((60, 2, 20), dtype=np.float32)}
    one = {name: array[:1] for name, array in x.items()}
    (expected,) = onnxruntime.InferenceSession(model.SerializeToString()).run(None, one)
    return Brought(model, x, None, one, {"selected": expected[None]})


def _unlabelled(name: str) -> Callable[[], Brought]:
    def make() -> Brought:
        from sklearn.cluster import KMeans
        from sklearn.ensemble import IsolationForest

        x, _ = _numbers(classes=False)
        made = {"IsolationForest": IsolationForest(random_state=0), "KMeans": KMeans(5, random_state=0, n_init=2)}
        model = made[name].fit(x)
        return Brought(model, x, None, x[:ITEMS], {"label": model.predict(x[:ITEMS])})

    return make


def texts() -> Brought:
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline

    words = {"sport": ["goal", "match", "team", "score"], "money": ["bank", "rate", "share", "loan"]}
    y = rng.choice(list(words), 400).tolist()
    x = [" ".join(rng.choice([*words[one], "the", "a", "of"], 6)) for one in y]
    model = make_pipeline(TfidfVectorizer(), LogisticRegression()).fit(x, y)
    return Brought(model, x, y, x[:ITEMS], model.predict(x[:ITEMS]))


def half_and_whole() -> Brought:
    import torch
    from torch import nn

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.out = nn.Embedding(50, 8), nn.Linear(12, 4)

        def forward(self, numbers: Any, place: Any) -> Any:
            return self.out(torch.cat([numbers.float(), self.table(place)], dim=1)).half()

    torch.manual_seed(0)
    model = Mixed()
    x = {"numbers": rng.normal(size=(200, 4)).astype(np.float16), "place": rng.integers(0, 50, 200)}
    some = {name: array[:ITEMS] for name, array in x.items()}
    return Brought(model, x, None, some, {None: _of(model, *some.values())})


def large() -> Brought:
    import torch
    from torch import nn

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 7000), nn.ReLU(), nn.Linear(7000, 7000), nn.ReLU(), nn.Linear(7000, 10))
    x = rng.normal(size=(200, 64)).astype(np.float32)
    return Brought(model, x, np.arange(200) % 10, x[:ITEMS], {None: _of(model, x[:ITEMS])})


def function() -> Brought:
    x, _ = _numbers(classes=False)
    return Brought(lambda x: x.sum(axis=1), x, None, x[:ITEMS], {"y": x[:ITEMS].sum(axis=1)})


MODELS: dict[str, Callable[[], Brought]] = {
    "table": table,
    **{name: _boosted(name) for name in ("XGBRegressor", "LGBMRegressor", "XGBClassifier", "LGBMClassifier", "XGBRanker", "LGBMRanker")},
    "cnn": cnn,
    "embedding": embedding,
    "two-outputs": two_outputs,
    "detector": detector,
    "IsolationForest": _unlabelled("IsolationForest"),
    "KMeans": _unlabelled("KMeans"),
    "tf-idf": texts,
    "fp16-int64": half_and_whole,
    "200MB": large,
    "function": function,
}  # fmt: skip
# What a refusal of the plain function says to do.
REMEDY = "import numpy as np\n\n\ndef total(inputs):\n    return {'y': inputs['x'].sum(axis=1)}\n"


def differs(answer: infaas.Answer, expected: Any) -> str:
    """What the answer has otherwise than the model; empty: nothing."""
    if not isinstance(expected, dict):
        if answer.labels is not None:
            return "" if answer.labels == [str(one) for one in expected.tolist()] else f"classes {answer.labels}"
        expected = {None: expected}
    for name, array in expected.items():
        outputs = answer.outputs
        if name is not None and name not in outputs:
            return f"outputs {', '.join(outputs)}"
        got = answer.output if name is None else outputs[name]
        coarse = array.dtype == np.float16
        if got.size != array.size or not np.allclose(
            got.reshape(array.shape), array, rtol=0.01, atol=0.02 if coarse else 0.01
        ):
            return f"{name or 'output'} {got.shape} against {array.shape}"
    return ""


async def first_answer(client: infaas.Client, app: str, ask: Any, began: float) -> tuple[float, infaas.Answer]:
    """Seconds to the first answer of someone who asks all the time, and the answer."""
    found = await rig.until_answered(client, app, ask, accuracy=0.0, latency_ms=2000)
    return time.monotonic() - began, found


async def brought(own: rig.DemoSystem, name: str, one: Brought) -> tuple[str, str]:
    """Seconds to the first answer, as text, and how the model fared."""
    app = name.lower()
    async with infaas.connect(data_dir=own.data_dir) as client:
        began = time.monotonic()
        registering = asyncio.create_task(client.register(one.model, one.x, one.y, app=app, **one.options))
        asking = asyncio.create_task(first_answer(client, app, one.ask, began))
        await asyncio.wait({registering, asking}, return_when=asyncio.FIRST_EXCEPTION)
        if registering.done() and (error := registering.exception()) is not None:
            asking.cancel()
            return "", f"refused: {error}"
        await registering
        took, early = await asking
        whole = time.monotonic() - began
        wrong = differs(early, one.expected)
        for each in await client.variants(app=app) if not wrong else ():
            exact = each["precision"] == "fp32" or (one.y is None and each["accuracy"] == 1.0)  # else it may differ
            answer = await client.query(app, one.ask, variant=each["variant"], latency_ms=20000)
            if exact and (wrong := differs(answer, one.expected)):
                wrong = f"{each['variant']}: {wrong}"
                break
        return f"{took:.1f}", wrong or f"right; whole after {whole:.0f} s"


async def remedied(own: rig.DemoSystem, one: Brought, directory: Path) -> str:
    """What the refusal of a function names: it serves as a container."""
    (directory / "mine.py").write_text(REMEDY)
    np.savez(directory / "validation.npz", x=one.x, y=one.expected["y"][:1].repeat(len(one.x)))
    arguments = [
        "container",
        "mine:total",
        "--app",
        "function",
        "--model",
        "total",
        "--validation",
        "validation.npz",
        "--metric",
        "mae",
    ]
    words = command(*arguments, "--data-dir", str(own.data_dir.absolute()))
    process = await asyncio.create_subprocess_exec(*words, cwd=directory, stderr=asyncio.subprocess.DEVNULL)
    try:
        async with infaas.connect(data_dir=own.data_dir) as client:
            took, answer = await first_answer(client, "function", one.ask, time.monotonic())
        return f"; as a container: {differs(answer, one.expected) or 'right'} after {took:.1f} s"
    finally:
        process.terminate()
        await process.wait()


async def run(own: rig.DemoSystem, names: list[str], directory: Path) -> None:
    print(f"{'model':16} {'first answer, s':>15}  how it fared")
    for name in names:
        one = await asyncio.to_thread(MODELS[name])
        took, fared = await brought(own, name, one)
        if name == "function":
            fared += await remedied(own, one, directory)
        print(f"{name:16} {took:>15}  {fared}", flush=True)


def main() -> None:
    parser = rig.parser(__doc__)
    parser.add_argument("--only", help=f"names with commas between them, of {', '.join(MODELS)}")
    chosen = parser.parse_args().only
    names = chosen.split(",") if chosen else list(MODELS)
    if unknown := set(names) - set(MODELS):
        sys.exit(f"there is no {min(unknown)}: use {', '.join(MODELS)}")
    with tempfile.TemporaryDirectory() as directory, rig.system() as own:
        asyncio.run(run(own, names, Path(directory)))


if __name__ == "__main__":
    main()

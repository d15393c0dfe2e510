"""A detector and a classifier of what it finds: a pipeline whose edge hands items on. Needs `infaas up` and `pip install 'infaas[sklearn]'`."""

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from sklearn.datasets import load_digits
from sklearn.neural_network import MLPClassifier

import infaas

PLACES = 6  # of a form, each with a digit of 8x8 pixels or nothing
random = np.random.default_rng(0)
pixels, classes = load_digits(return_X_y=True)
pixels = pixels.astype("float32")


def form() -> tuple[np.ndarray, np.ndarray]:
    """A form [1, 6, 64] that is filled in here and there, and the digits on it."""
    which, filled = random.integers(1500, len(pixels), PLACES), random.random(PLACES) < 0.5
    return (pixels[which] * filled[:, None])[None], classes[which][filled]


def detector() -> onnx.ModelProto:
    """An ONNX model that gives of a form the places [k, 64] that are not empty."""
    steps = [
        helper.make_node("Squeeze", ["form", "first"], ["places"]),
        helper.make_node("ReduceMax", ["places"], ["ink"], axes=[1], keepdims=0),
        helper.make_node("Greater", ["ink", "nothing"], ["written"]),
        helper.make_node("Compress", ["places", "written"], ["found"], axis=0),
    ]
    given = helper.make_tensor_value_info("form", TensorProto.FLOAT, [1, PLACES, 64])
    found = helper.make_tensor_value_info("found", TensorProto.FLOAT, ["k", 64])
    constants = [numpy_helper.from_array(np.array([0]), "first"), numpy_helper.from_array(np.float32(0), "nothing")]
    graph = helper.make_graph(steps, "detector", [given], [found], constants)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


forms = np.concatenate([form()[0] for _ in range(50)])
infaas.register(detector(), forms, app="find", name="detector", metric="agreement")
reader = MLPClassifier((64,), random_state=0).fit(pixels[:1000], classes[:1000])
infaas.register(reader, pixels[1000:1500], classes[1000:1500], app="read")

with infaas.connect_blocking() as system:
    system.admin(
        "set-pipeline",
        pipeline={"name": "forms", "latency_ms": 2000},
        vertex=[
            {"name": "find", "app": "find", "inputs": {"form": "$.form"}},
            {"name": "read", "app": "read", "inputs": {"x": "find.found"}},
        ],
        edge=[{"from": "find", "to": "read", "items": "found", "items_mean": 3, "items_max": PLACES}],
        output={"digits": "read.probabilities"},
    )
    asked = [form() for _ in range(20)]
    found = [system.query("forms", one, latency_ms=10_000).output.argmax(axis=1) for one, _ in asked]
right = sum(int((a == b).sum()) for a, (_, b) in zip(found, asked, strict=True))
sizes = sorted(map(len, found))
print(f"{right} of {sum(len(b) for _, b in asked)} digits right, {sizes[0]} to {sizes[-1]} a form")

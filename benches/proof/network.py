"""A network that takes tens of milliseconds an item on one CPU thread and reads the demo's digits well, made without training tools.

Fixed filters (patches of training digits, then random ones) turn a digit into features; a linear readout is fitted to the training
part by least squares. The exported network reads a digit in `views` x `views` places, shifted by a pixel each, and averages: so it
costs as much more as there are views, fitting does not.
"""

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from infaas.demo import digits
from infaas.demo.load import Labelled

PATCHES, FILTERS, GRID = 64, 1024, 9  # of the two layers; regions that features are averaged over
SIDE = 5  # pixels of a patch
VIEWS = 3  # places in each direction
RIDGE = 1e-2
SHARP = 8.0  # what least-squares scores are scaled by before the softmax
CLASSES = 10
CHUNK = 25
HELD_OUT = 250  # digits that registration measures accuracy on

Array = NDArray[np.float32]


def make(directory: Path, *, views: int = VIEWS, seed: int = 3) -> tuple[Path, Path]:
    """Write network and validation set; returns both paths. Input x: FP32 [n, 784], brightness 0..1; output scores: FP32 [n, 10]."""
    rng = np.random.default_rng(seed)
    train, held = digits.load(digits.TRAIN), digits.load(digits.VALIDATION)
    filters = _filters(train.x, rng)
    model = directory / "views.onnx"
    onnx.save(_graph(filters, _readout(filters, train), views), model)
    chosen = rng.permutation(len(held))[:HELD_OUT]
    validation = directory / "views.npz"
    np.savez_compressed(validation, x=held.x[chosen], y=held.y[chosen])
    return model, validation


def _filters(x: Array, rng: np.random.Generator) -> tuple[Array, Array]:
    """[PATCHES, 1, SIDE, SIDE] of unit length, cut from pictures; [FILTERS, PATCHES, 3, 3] drawn at random."""
    pictures = x.reshape(-1, 28, 28)
    patches: list[Array] = []
    while len(patches) < PATCHES:
        row, column = rng.integers(2, 28 - SIDE - 2, 2)
        patch = pictures[rng.integers(len(pictures)), row : row + SIDE, column : column + SIDE]
        if patch.std() > 0.15:
            patch = patch - patch.mean()
            patches.append(patch / np.linalg.norm(patch))
    second = rng.normal(0, 1 / np.sqrt(9 * PATCHES), (FILTERS, PATCHES, 3, 3))
    return np.array(patches, np.float32)[:, None], second.astype(np.float32)


def _readout(filters: tuple[Array, Array], train: Labelled) -> tuple[Array, Array]:
    """Weights [features, CLASSES] and offsets [CLASSES] of ridge regression on standardised features."""
    session = onnxruntime.InferenceSession(
        _graph(filters, None, 1).SerializeToString(), providers=["CPUExecutionProvider"]
    )
    parts = [session.run(None, {"x": train.x[i : i + CHUNK]})[0] for i in range(0, len(train), CHUNK)]
    features = np.concatenate(parts).astype(np.float64)
    middle, spread = features.mean(0), features.std(0) + 1e-3 * features.std()
    scaled = (features - middle) / spread
    products = scaled @ scaled.T
    np.fill_diagonal(products, products.diagonal() + RIDGE * products.diagonal().mean())
    targets = np.eye(CLASSES)[train.y] - 1 / CLASSES
    weights = (scaled.T @ np.linalg.solve(products, targets)) / spread[:, None]
    offsets = 1 / CLASSES - middle @ weights
    return (SHARP * weights).astype(np.float32), (SHARP * offsets).astype(np.float32)


def _graph(filters: tuple[Array, Array], readout: tuple[Array, Array] | None, views: int) -> onnx.ModelProto:
    """The network; without a readout it gives the features of one view."""
    node = helper.make_node
    shifts = np.eye(views * views, dtype=np.float32).reshape(views * views, 1, views, views)
    constants = {
        "picture": np.array([-1, 1, 28, 28]),
        "shifts": shifts,
        "patches": filters[0],
        "below_patch": np.full(PATCHES, -0.3, np.float32),
        "filters": filters[1],
        "below_filter": np.full(FILTERS, -0.05, np.float32),
    }
    nodes = [
        node("Reshape", ["x", "picture"], ["whole"]),
        node("Conv", ["whole", "shifts"], ["views"], kernel_shape=[views, views], pads=[views // 2] * 4),
        node("Reshape", ["views", "picture"], ["apart"]),
        node("Conv", ["apart", "patches", "below_patch"], ["c1"], kernel_shape=[SIDE, SIDE]),
        node("Relu", ["c1"], ["r1"]),
        node("MaxPool", ["r1"], ["p1"], kernel_shape=[2, 2], strides=[1, 1]),
        node("Conv", ["p1", "filters", "below_filter"], ["c2"], kernel_shape=[3, 3]),
        node("Relu", ["c2"], ["r2"]),
        node("AveragePool", ["r2"], ["p2"], kernel_shape=[7, 7], strides=[7, 7]),
        node("Flatten", ["p2"], ["features"]),
    ]
    output = helper.make_tensor_value_info("features", TensorProto.FLOAT, ["n", GRID * FILTERS])
    if readout is not None:
        constants |= {"weights": readout[0], "offsets": readout[1], "places": np.array([-1, len(shifts), CLASSES])}
        nodes += [
            node("Gemm", ["features", "weights", "offsets"], ["each"]),
            node("Reshape", ["each", "places"], ["together"]),
            node("ReduceMean", ["together"], ["mean"], axes=[1], keepdims=0),
            node("Softmax", ["mean"], ["scores"], axis=1),
        ]
        output = helper.make_tensor_value_info("scores", TensorProto.FLOAT, ["n", CLASSES])
    graph = helper.make_graph(
        nodes,
        "views",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 784])],
        [output],
        [numpy_helper.from_array(value, name) for name, value in constants.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.checker.check_model(model)
    return model

"""Train the demo's model family again: `python tools/train_digits.py` (needs the extra `train`; a few minutes on two cores).

Seven architectures of different cost and accuracy, from logistic regression to a convolutional network, on the training part of
digits.npz. Every file takes one input `x` (FP32 [n, 784], brightness 0..1) and gives one output `scores` (FP32 [n, 10],
probabilities that add up to 1), so that all of them can serve one app.
"""

import argparse
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import onnx
import torch
from numpy.typing import NDArray
from torch import nn

from infaas.demo.digits import MODELS, TRAIN, UNSEEN, VALIDATION, load
from infaas.demo.load import Labelled

SEED = 7


class Probabilities(nn.Module):  # type: ignore[misc]  # torch is optional and unchecked
    """A classifier as it is exported: pixels in, probabilities out."""

    def __init__(self, body: nn.Module, *, image: bool) -> None:
        super().__init__()
        self.body = body
        self.image = image

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.image:
            x = x.reshape(-1, 1, 28, 28)
        return torch.softmax(self.body(x), dim=1)


def perceptron(*hidden: int) -> nn.Module:
    sizes = (784, *hidden, 10)
    layers: list[nn.Module] = []
    for before, after in pairwise(sizes):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def convolutional(*channels: int, convs: int, hidden: int) -> nn.Module:
    """Blocks of `convs` 3x3 convolutions and a 2x2 pool, then one hidden layer (0: none)."""
    layers: list[nn.Module] = []
    before = 1
    for width in channels:
        for _ in range(convs):
            layers += [nn.Conv2d(before, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
            before = width
        layers.append(nn.MaxPool2d(2))
    side = 28 // 2 ** len(channels)
    layers.append(nn.Flatten())
    features = before * side * side
    if hidden:
        layers += [nn.Dropout(0.3), nn.Linear(features, hidden), nn.ReLU()]
        features = hidden
    layers += [nn.Dropout(0.3), nn.Linear(features, 10)]
    return nn.Sequential(*layers)


# name: how to make it, epochs, whether training pictures are shifted and turned a little
FAMILY: dict[str, tuple[Callable[[], nn.Module], int, bool]] = {
    "logreg": (perceptron, 40, False),
    "mlp-s": (lambda: perceptron(32), 40, False),
    "mlp-l": (lambda: perceptron(256, 256), 40, False),
    "cnn-s": (lambda: convolutional(8, 8, convs=1, hidden=0), 25, False),
    "cnn-m": (lambda: convolutional(16, 16, convs=2, hidden=64), 25, True),
    "cnn-l": (lambda: convolutional(24, 40, 56, convs=2, hidden=96), 45, True),
}


def disturb(x: torch.Tensor) -> torch.Tensor:
    """Turn, scale and shift each picture a little (up to 10 degrees, 8 %, 2 pixels)."""
    n = len(x)
    angle = (torch.rand(n) * 2 - 1) * 0.17
    scale = 1 + (torch.rand(n) * 2 - 1) * 0.08
    shift = (torch.rand(n, 2) * 2 - 1) * (2 / 14)
    theta = torch.zeros(n, 2, 3)
    theta[:, 0, 0] = theta[:, 1, 1] = angle.cos() * scale
    theta[:, 0, 1] = -angle.sin() * scale
    theta[:, 1, 0] = angle.sin() * scale
    theta[:, :, 2] = shift
    pictures = x.reshape(n, 1, 28, 28)
    grid = nn.functional.affine_grid(theta, [n, 1, 28, 28], align_corners=False)
    return nn.functional.grid_sample(pictures, grid, align_corners=False).reshape(n, 784)


def fit(model: Probabilities, data: Labelled, epochs: int, *, augment: bool) -> None:
    x, y = torch.from_numpy(data.x), torch.from_numpy(data.y)
    batch = 64
    optimiser = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=1e-2)
    steps = epochs * (len(y) // batch)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, max_lr=4e-3, total_steps=steps)
    model.train()
    for _ in range(epochs):
        order = torch.randperm(len(y))
        for start in range(0, len(y) - batch + 1, batch):
            rows = order[start : start + batch]
            pictures = disturb(x[rows]) if augment else x[rows]
            if model.image:
                pictures = pictures.reshape(-1, 1, 28, 28)
            loss = nn.functional.cross_entropy(model.body(pictures), y[rows], label_smoothing=0.02)
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            schedule.step()
    model.eval()


def export(model: Probabilities, path: Path, width: int = 784) -> None:
    """Write the model with a dynamic batch axis. The example has two rows: one row would make a fixed batch of one."""
    program = torch.onnx.export(
        model,
        (torch.zeros(2, width),),
        input_names=["x"],
        output_names=["scores"],
        dynamic_shapes=({0: torch.export.Dim("n", min=1, max=4096)},),
        dynamo=True,
        external_data=False,
        verbose=False,
    )
    assert program is not None
    save(program.model_proto, path)


def save(proto: onnx.ModelProto, path: Path) -> None:
    """Write a lean file: without the exporter's notes on where each node came from in this source."""
    for node in proto.graph.node:
        del node.metadata_props[:]
        node.doc_string = ""
    for value in [*proto.graph.value_info, *proto.graph.input, *proto.graph.output, *proto.graph.initializer]:
        del value.metadata_props[:]
    del proto.graph.value_info[:], proto.graph.metadata_props[:], proto.metadata_props[:]
    proto.doc_string = proto.graph.doc_string = ""
    proto.ir_version = min(proto.ir_version, 10)
    onnx.checker.check_model(proto, full_check=True)
    path.write_bytes(proto.SerializeToString())


def forest(data: Labelled, path: Path) -> None:
    """Twenty decision trees; a model without any matrix product, as users bring them too."""
    from skl2onnx import to_onnx  # noqa: PLC0415  (only here: it takes seconds to import)
    from sklearn.ensemble import RandomForestClassifier  # noqa: PLC0415

    model = RandomForestClassifier(20, max_leaf_nodes=130, random_state=SEED, n_jobs=2).fit(data.x, data.y)
    proto = to_onnx(model, data.x[:2], options={"zipmap": False}, target_opset={"": 17, "ai.onnx.ml": 3})
    graph = proto.graph
    for node in graph.node:
        node.output[:] = ["scores" if name == "probabilities" else name for name in node.output]
        node.input[:] = ["x" if name == "X" else name for name in node.input]
    del graph.output[:]
    graph.output.append(onnx.helper.make_tensor_value_info("scores", onnx.TensorProto.FLOAT, ["n", 10]))
    graph.input[0].CopyFrom(onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, ["n", 784]))
    keep = needed(graph)
    nodes = [node for node in graph.node if set(node.output) & keep]
    del graph.node[:]
    graph.node.extend(nodes)
    save(proto, path)


def needed(graph: onnx.GraphProto) -> set[str]:
    """Names of the values that the graph's outputs depend on."""
    names = {value.name for value in graph.output}
    for node in reversed(graph.node):
        if names & set(node.output):
            names |= set(node.input)
    return names


def scores(path: Path, x: NDArray[np.float32]) -> NDArray[np.float32]:
    import onnxruntime  # noqa: PLC0415  (only to check the result)

    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    (result,) = session.run(["scores"], {"x": x})
    return np.asarray(result, np.float32)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("names", nargs="*", help=f"only these: {', '.join([*FAMILY, 'forest'])}")
    options = parser.parse_args()
    torch.set_num_threads(2)
    train, validation, unseen = load(TRAIN), load(VALIDATION), load(UNSEEN)
    MODELS.mkdir(exist_ok=True)
    for name in options.names or [*FAMILY, "forest"]:
        began = time.monotonic()
        path = MODELS / f"{name}.onnx"
        if name == "forest":
            forest(train, path)
        else:
            make, epochs, augment = FAMILY[name]
            torch.manual_seed(SEED)
            model = Probabilities(make(), image=name.startswith("cnn"))
            fit(model, train, epochs, augment=augment)
            export(model, path)
        right = [float((scores(path, part.x).argmax(1) == part.y).mean()) for part in (validation, unseen)]
        print(
            f"{name:8s} {path.stat().st_size / 1000:7.0f} kB  validation {right[0]:.3f}  unseen {right[1]:.3f}"
            f"  {time.monotonic() - began:.0f} s"
        )


if __name__ == "__main__":
    main()

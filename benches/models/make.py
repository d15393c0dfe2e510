"""Make the benches' model again: `python benches/models/make.py` (needs the extra `train`).

mlp64.onnx: 64 -> 256 -> 256 -> 10 on scikit-learn's 8x8 digits, input x (FP32 [n, 64], brightness 0..1), output scores.
mlp64.npz: 450 digits that it was not trained on, as validation set (keys x, y).
"""

from pathlib import Path

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn

from infaas.demo.load import Labelled
from tools.train_digits import Probabilities, export, fit, scores

HERE = Path(__file__).parent


def main() -> None:
    torch.manual_seed(1)
    digits = load_digits()
    x, y = (digits.data / 16).astype(np.float32), digits.target.astype(np.int64)
    order = np.random.default_rng(1).permutation(len(y))
    held, train = order[:450], order[450:]
    body = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
    model = Probabilities(body, image=False)
    fit(model, Labelled(x[train], y[train]), epochs=30, augment=False)
    export(model, HERE / "mlp64.onnx", width=64)
    np.savez_compressed(HERE / "mlp64.npz", x=x[held], y=y[held])
    print(f"held-out accuracy {(scores(HERE / 'mlp64.onnx', x[held]).argmax(1) == y[held]).mean():.3f}")


if __name__ == "__main__":
    main()

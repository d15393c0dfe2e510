"""The networks, where their packages are installed; what was made of them, where it was made. Nothing is fetched."""

from pathlib import Path

import numpy as np
import onnxruntime
import pytest

from examples.photos import files, stamps
from infaas.errors import InfaasError


def scores(path: Path, x: np.ndarray) -> np.ndarray:
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    assert [(one.name, one.type, one.shape[1:]) for one in session.get_inputs()] == [
        ("x", "tensor(uint8)", [stamps.SIDE, stamps.SIDE, 3])
    ]
    assert [one.name for one in session.get_outputs()] == ["scores"]
    (found,) = session.run(["scores"], {"x": x})
    return found


@pytest.fixture
def made() -> Path:
    """Where the family was made, if it was."""
    where = files.directory()
    if not files.ready(where):
        pytest.skip("the photograph family was not made here: python -m examples.photos")
    return where


@pytest.mark.torch
def test_the_file_computes_what_the_network_does(made: Path) -> None:
    try:
        files.require_packages()
    except InfaasError as error:
        pytest.skip(str(error))
    import torch

    from examples.photos import networks

    x = np.random.default_rng(0).integers(0, 256, (3, stamps.SIDE, stamps.SIDE, 3)).astype(np.uint8)
    with torch.inference_mode():
        expected = networks.classifier("effnet-lite0")(torch.from_numpy(x)).numpy()
    assert np.abs(scores(made / "effnet-lite0.onnx", x) - expected).max() < 1e-4
    assert np.allclose(expected.sum(axis=1), 1.0, atol=1e-4)


@pytest.mark.parametrize("model", files.MODELS)
def test_networks_know_unseen_photographs(made: Path, model: str) -> None:
    unseen = files.load(made, stamps.UNSEEN)
    x, y = unseen.x[:: len(stamps.VIEWS)], unseen.y[:: len(stamps.VIEWS)]
    found = np.concatenate(
        [scores(made / f"{model}.onnx", x[at : at + 8]).argmax(axis=1) for at in range(0, len(x), 8)]
    )
    assert (found == y).mean() > 0.65  # measured: 0.8 to 0.9 of 38

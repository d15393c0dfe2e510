"""The files that README's commands are tried with."""

from pathlib import Path

import numpy as np

from infaas.demo import data
from infaas.demo.__main__ import write


def test_a_model_its_validation_set_and_unseen_pictures(tmp_path: Path) -> None:
    model, validation, pictures = write(tmp_path / "new")
    assert model.read_bytes() == data.models()["cnn-m"].read_bytes()
    with np.load(validation) as stored:
        assert stored["x"].shape == (750, 784)
        assert stored["y"].shape == (750,)
    x = np.load(pictures)
    assert (x.shape, x.dtype) == ((8, 784), np.float32)
    unseen = data.load(data.UNSEEN)
    assert len({int(unseen.y[(unseen.x == picture).all(1).argmax()]) for picture in x}) > 4

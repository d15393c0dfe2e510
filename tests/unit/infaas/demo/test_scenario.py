"""Pictures are handed out fairly."""

import numpy as np

from infaas.demo.digits import Digits
from infaas.demo.scenario import PictureSource


def test_every_picture_once_before_any_twice() -> None:
    digits = Digits(np.zeros((20, 784), np.float32), np.zeros(20, np.int64))
    source = PictureSource(digits, np.random.default_rng(3))
    drawn = np.concatenate([source.draw(items) for items in (1, 7, 8, 3, 1)])
    assert sorted(drawn.tolist()) == list(range(20))
    assert len(source.draw(8)) == 8

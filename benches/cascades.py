"""What a cascade saves: `python benches/cascades.py`. Five data sets, each with a small and a large classifier of scikit-learn.

Both are registered with a system of its own. The figure is items a second of a core of the cascade that it finds, over those of the cheapest variant
of one model that is as accurate, within 0.001; where none is, over those of the most accurate one.
"""

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import rig
from skl2onnx import to_onnx
from sklearn import datasets
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LogisticRegression
from sklearn.neural_network import MLPClassifier
from sklearn.preprocessing import StandardScaler

SETTINGS = "[registrar]\nthreads = [1]\nmax_batches = [64]\n"
VALIDATION = 2000  # samples, at most half of the set's
NEAR = 0.001


def sets() -> Iterator[tuple[str, Any, Any]]:
    """Name, samples and a small classifier."""
    linear = LogisticRegression(max_iter=300)
    yield "digits", datasets.load_digits(return_X_y=True), linear
    yield "moons", datasets.make_moons(6000, noise=0.2, random_state=2), linear
    yield "circles", datasets.make_circles(6000, noise=0.12, factor=0.6, random_state=6), _network(8)
    clusters = {"n_informative": 10, "n_classes": 3, "n_clusters_per_class": 2, "class_sep": 1.8}
    yield "clusters", datasets.make_classification(9000, 20, **clusters, random_state=1), _network(12)
    quantiles = {"n_features": 3, "n_classes": 3, "random_state": 4}
    yield "quantiles", datasets.make_gaussian_quantiles(n_samples=9000, **quantiles), _network(10)


def _network(*sizes: int, rounds: int = 80) -> MLPClassifier:
    return MLPClassifier(sizes, max_iter=rounds, random_state=0)


def main() -> None:
    warnings.simplefilter("ignore", ConvergenceWarning)
    print("| data set | small | large | cascade | times cheaper | goes on |\n|---|---|---|---|---|---|")
    with rig.system(SETTINGS) as own:
        for name, (x, y), small in sets():
            data = StandardScaler().fit_transform(x).astype("f4")
            mixed = np.random.default_rng(0).permutation(len(data))
            kept, rest = np.split(mixed, [min(VALIDATION, len(data) // 2)])
            place = Path(own.data_dir).parent
            np.savez(place / f"{name}.npz", x=data[kept], y=y[kept])
            for model, made in (("small", small), ("large", _network(512, 512, rounds=20))):
                made.fit(data[rest], y[rest])
                path = place / f"{name}-{model}.onnx"
                path.write_bytes(to_onnx(made, data[:1], options={"zipmap": False}).SerializeToString())
                about = ("--app", name, "--model", f"{name}-{model}", "--validation", str(place / f"{name}.npz"))
                rig.cli(own.data_dir, "register", str(path), *about)
            _row(name, rig.cli(own.data_dir, "variants", "--app", name))


def _row(name: str, variants: list[dict[str, Any]]) -> None:
    singles = {one["model"].rpartition("-")[2]: f"{one['accuracy']:.4f}" for one in variants if not one["cascade"]}
    joined = max((one for one in variants if one["cascade"]), key=lambda one: one["saturation_qps"], default=None)
    if joined is None:
        print(f"| {name} | {singles['small']} | {singles['large']} | - | - | - |", flush=True)
        return
    single = [one for one in variants if not one["cascade"]]
    least = min(joined["accuracy"], max(one["accuracy"] for one in single)) - NEAR
    alike = [one for one in single if one["accuracy"] >= least]
    times = joined["saturation_qps"] / max(one["saturation_qps"] for one in alike)
    goes = joined["cascade"].rpartition(" for ")[2]
    print(
        f"| {name} | {singles['small']} | {singles['large']} | {joined['accuracy']:.4f} | {times:.2f} | {goes} |",
        flush=True,
    )


if __name__ == "__main__":
    main()

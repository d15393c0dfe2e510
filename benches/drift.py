"""Queries until a drift of the inputs is found, and false alarms without one: scikit-learn's data sets, seeds, shifts.

    python benches/drift.py [--days 300] [--seeds 5] [--share 0.5]

A quarter of a data set trains a model, half is the validation set, shifted items of the last quarter are the queries. For false alarms both the
validation set and the queries are independent draws from the whole, as the promise supposes. Nothing is served; the counts go through what the leader does with them (services/core/drift.py).
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import rig
from numpy.typing import NDArray

from bus.messages.catalog import Signature, TensorSpec
from services.core.drift import CELLS, EDGES, Array, CountedWindow, Distribution, Windows, evidence, measure, words_of

Numbers = NDArray[np.float64]
BLOCK = 64  # items that executors send together
SPENT = [20_000 >> size for size in range(7)]  # tests before the shift: two weeks at a sample a second


class Case(NamedTuple):
    """A data set's model. x: its items; y: their classes, or numbers."""

    name: str
    signature: Signature
    x: Numbers
    y: Numbers
    trained: int
    validated: int
    answers: Callable[[Numbers], dict[str, Array]]

    def distribution(self, x: Numbers) -> Distribution:
        inputs = {"x": x}
        half = {"x": x[: len(x) // 2]}
        words = words_of(self.signature, half)
        return Distribution.of(self.signature, measure(self.signature, inputs, self.answers(x), words), words)

    def tally(self, known: Distribution, x: Numbers) -> CountedWindow:
        return known.tally({"x": x}, self.answers(x), 0.0, 0.0)


def cases(seed: int) -> Iterator[Case]:
    """Needs scikit-learn."""
    from sklearn import datasets
    from sklearn.ensemble import RandomForestClassifier, RandomForestRegressor

    for load in (datasets.load_digits, datasets.load_breast_cancer, datasets.load_wine, datasets.load_diabetes):
        data: Any = load()
        order = np.random.default_rng(seed).permutation(len(data.data))
        x, y = data.data[order].astype(np.float64), data.target[order]
        trained, validated = len(x) // 4, len(x) // 2
        kind = RandomForestRegressor if load is datasets.load_diabetes else RandomForestClassifier
        model = kind(20, random_state=0).fit(x[:trained], y[:trained])
        number = kind is RandomForestRegressor
        outputs = [TensorSpec(name="y", datatype="FP32", shape=[1])]
        if not number:
            outputs = [TensorSpec(name="scores", datatype="FP32", shape=[len(model.classes_)])]
        shape = [8, 8] if load is datasets.load_digits else [x.shape[1]]
        signature = Signature(inputs=[TensorSpec(name="x", datatype="FP64", shape=shape)], outputs=outputs)

        def answers(some: Numbers, model: Any = model, number: bool = number) -> dict[str, Array]:
            flat = some.reshape(len(some), -1)
            found = model.predict(flat)[:, None] if number else model.predict_proba(flat)
            return {"y" if number else "scores": found.astype(np.float32)}

        yield Case(
            load.__name__.removeprefix("load_"), signature, x.reshape(-1, *shape), y, trained, validated, answers
        )


def shifts(case: Case, live: Numbers, labels: Numbers) -> dict[str, Callable[[Any, int], Numbers]]:
    """By name, how to draw so many shifted items."""
    flat = live.reshape(len(live), -1)
    spread = flat.std(axis=0).reshape(live.shape[1:])
    busiest = int(np.argmax(spread))
    weights = np.where(labels == labels.min(), 8.0, 1.0)
    weights /= weights.sum()

    def draw(random: Any, n: int) -> Numbers:
        return np.array(live[random.integers(0, len(live), n)])

    def unit(random: Any, n: int) -> Numbers:
        some = draw(random, n)
        some.reshape(n, -1)[:, busiest] *= 100.0
        return some

    found: dict[str, Callable[[Any, int], Numbers]] = {
        "a column's unit x 100": unit,
        "noise of one deviation": lambda random, n: (
            draw(random, n) + random.normal(size=(n, *spread.shape)) * np.maximum(spread, spread.mean() / 10)
        ),
        "brightness x 1.2": lambda random, n: draw(random, n) * 1.2,
    }
    if case.name != "diabetes":
        found["another mix of classes"] = lambda random, n: live[random.choice(len(live), n, p=weights)]
    if case.name == "digits":
        found["a pixel to the right"] = lambda random, n: np.roll(draw(random, n), 1, axis=2)
    return found


def queries_until(
    case: Case, draw: Callable[[Any, int], Numbers], known: Distribution, share: float, random: Any
) -> int:
    """Queries until a drift is found; 100,000: none was."""
    windows = Windows(SPENT)
    for block in range(1, int(100_000 * share / BLOCK)):
        for size, window in windows.add(case.tally(known, draw(random, BLOCK))):
            if (evidence(known.seen, known.independent(window)) > windows.bound(size, len(known.columns))).any():
                return int(block * BLOCK / share)
    return 100_000


def false_alarms(case: Case, days: int, daily: int, random: Any) -> int:
    """Days on which a drift was found where there is none."""
    known = case.distribution(case.x[random.integers(0, len(case.x), case.validated)])
    edges = np.frombuffer(known.edges).reshape(-1, EDGES)
    values = measure(case.signature, {"x": case.x}, case.answers(case.x), b"")
    cells = (values[:, :, None] > edges).sum(axis=2) + CELLS * np.arange(len(edges))
    windows, alarms = Windows(), 0
    for _ in range(days):
        alarmed = False
        for _ in range(daily // BLOCK):
            drawn = cells[random.integers(0, len(cells), BLOCK)]
            counts = np.bincount(drawn.reshape(-1), minlength=len(edges) * CELLS).reshape(-1, CELLS)
            for size, window in windows.add(CountedWindow(0.0, 0.0, counts)):
                alarmed |= bool((evidence(known.seen, window.counts) > windows.bound(size, len(edges))).any())
        alarms += alarmed
    return alarms


def main() -> None:
    options = rig.parser(__doc__)
    options.add_argument("--days", type=int, default=300)
    options.add_argument("--daily", type=int, default=5000, help="sampled queries a day")
    options.add_argument("--seeds", type=int, default=5)
    options.add_argument("--share", type=float, default=0.5)
    asked = options.parse_args()
    print(f"queries until found, of {asked.seeds} seeds: median, most (share {asked.share:g})")
    found: dict[tuple[str, str], list[int]] = {}
    for seed in range(asked.seeds):
        random = np.random.default_rng(seed)
        for case in cases(seed):
            rest = case.trained + case.validated
            known = case.distribution(case.x[case.trained : rest])
            for name, draw in shifts(case, case.x[rest:], case.y[rest:]).items():
                row = found.setdefault((f"{case.name} ({case.validated} validated)", name), [])
                row.append(queries_until(case, draw, known, asked.share, random))
    for (data, name), row in found.items():
        print(f"{data:32} {name:26} {int(np.median(row)):7} {max(row):7}")
    for case in cases(0):
        alarms = [
            false_alarms(case, asked.days, asked.daily, np.random.default_rng(seed)) for seed in range(asked.seeds)
        ]
        print(f"{case.name:20} days of {asked.days} with a false alarm, by seed: {alarms}")


if __name__ == "__main__":
    main()

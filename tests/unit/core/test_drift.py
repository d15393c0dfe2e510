"""Distributions, exact tests of them, and windows: what drifted is found, and what did not is left alone."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from bus.codec import BadMessage, encode
from bus.messages.catalog import Signature, TensorSpec
from services.core import drift
from services.core.drift import (
    BACK,
    CELLS,
    LEAST,
    CountedWindow,
    Distribution,
    Windows,
    distance,
    evidence,
    measure,
    words_of,
)

Array = NDArray[Any]


def spec(name: str, datatype: str, *shape: int, **more: Any) -> TensorSpec:
    return TensorSpec(name=name, datatype=datatype, shape=list(shape), **more)


SCORES = spec("scores", "FP32", 3)
TABLE = Signature(inputs=[spec("x", "FP64", 2, columns=["age", "income"])], outputs=[SCORES])
TEXTS = Signature(inputs=[spec("text", "BYTES")], outputs=[spec("label", "BYTES")])


def scores(x: Array) -> dict[str, Array]:
    """More of the first column, more of the last class."""
    last = 1 / (1 + np.exp(-np.clip(x.reshape(len(x), -1)[:, 0].astype(float), -9, 9)))
    return {"scores": np.stack([(1 - last) / 2, (1 - last) / 2.1, last], axis=1).astype(np.float32)}


def known(signature: Signature, inputs: dict[str, Array], outputs: dict[str, Array]) -> Distribution:
    half = {name: one[: len(one) // 2] for name, one in inputs.items()}
    words = words_of(signature, half)
    return Distribution.read(encode(Distribution.of(signature, measure(signature, inputs, outputs, words), words)))


def drifted(found: Distribution, counts: Array, level: float = 20.0) -> set[str]:
    shown = evidence(found.seen, counts)
    return {name for name, one in zip(found.columns, shown, strict=True) if one > level}


def test_the_evidence_is_a_bound_on_fishers_test_and_close_to_it() -> None:
    stats = pytest.importorskip("scipy.stats")
    random, close = np.random.default_rng(0), 0
    for _ in range(200):
        n, m = random.integers(20, 400, 2)
        seen, found = (random.multinomial(k, random.dirichlet(np.full(CELLS, 0.5))) for k in (n, m))
        a, b = (np.concatenate([one, one[: CELLS - 1].cumsum()[1:-1]]) for one in (seen, found))
        tails = stats.hypergeom.logcdf(b, n + m, a + b, m), stats.hypergeom.logsf(b - 1, n + m, a + b, m)
        exact = max(0.0, -np.minimum(*tails).min() - np.log(2 * len(a)))
        got = evidence(seen[None], found[None])[0]
        assert got <= exact + 1e-6, "it never claims more"
        close += got > exact - 1.5
    assert close > 190


@pytest.mark.parametrize(
    ("samples", "kind"),
    [
        (30, "smooth"),
        (400, "few values"),
        pytest.param(30, "few values", marks=pytest.mark.slow),
        pytest.param(400, "smooth", marks=pytest.mark.slow),
    ],
)
def test_a_validation_set_of_any_size_makes_no_false_alarm(
    samples: int, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At a level of 0.2 for all columns and windows of a run together; edges are of the same items that are counted."""
    monkeypatch.setattr(drift, "LEVEL", 0.2)
    random, alarms, runs = np.random.default_rng(1), 0, 60

    def draw(n: int) -> Array:
        x = random.normal(size=(n, 2))
        return x if kind == "smooth" else np.round(x)

    for _ in range(runs):
        x = draw(samples)
        found, windows = known(TABLE, {"x": x}, scores(x)), Windows()
        for _ in range(150):
            y = draw(LEAST)
            tests = windows.add(CountedWindow(0.0, 0.0, found.count({"x": y}, scores(y))))
            if any(
                (evidence(found.seen, w.counts) > windows.bound(size, len(found.columns))).any() for size, w in tests
            ):
                alarms += 1
                break
    assert alarms <= 0.2 * runs


def shifted() -> Iterator[tuple[str, Any, set[str]]]:
    yield "a unit", lambda x: x * [1.0, 100.0], {"income"}
    yield "missing", lambda x: np.where(np.arange(len(x))[:, None] % 3 == [0, 3], np.nan, x), {"age"}
    yield "out of range", lambda x: np.where(np.arange(len(x))[:, None] % 3 == [3, 0], 9.0, x), {"income"}
    yield "classes", lambda x: x + np.array([1.5, 0.0]), {"age", "outputs.scores class"}
    yield "nothing", lambda x: x, set()


@pytest.mark.parametrize(("shift", "columns"), [one[1:] for one in shifted()], ids=[one[0] for one in shifted()])
def test_the_columns_that_differ_are_named(shift: Any, columns: set[str]) -> None:
    random = np.random.default_rng(2)
    x, y = random.normal(size=(500, 2)), shift(random.normal(size=(400, 2)))
    found = known(TABLE, {"x": x}, scores(x))
    answers = scores(np.nan_to_num(y))
    counts = found.count({"x": y}, answers)
    assert drifted(found, counts) - {"outputs.scores confidence"} == columns - {"outputs.scores confidence"}
    far = dict(zip(found.columns, distance(found.seen, counts), strict=True))
    assert all(far[name] > 0.15 for name in columns)
    assert columns or max(far.values()) < 0.15


def test_the_same_few_items_again_and_again_say_no_more_than_once() -> None:
    """A test set that is replayed is another population than the validation set, and no drift; where items are alike anyway, all of them count."""
    random = np.random.default_rng(8)
    x, few = random.normal(size=(400, 2)), random.normal(size=(40, 2))
    found = known(TABLE, {"x": x}, scores(x))
    drawn = [
        found.tally({"x": some}, scores(some), 0.0, 1.0)
        for some in (few[random.integers(0, 40, 64)] for _ in range(64))
    ]
    whole = drawn[0]
    for one in drawn[1:]:
        whole = whole.with_(one)
    assert whole.counts[0].sum() == 4096
    assert 30 <= found.independent(whole)[0].sum() <= 40
    assert evidence(found.seen, whole.counts).max() > 30.0
    assert evidence(found.seen, found.independent(whole)).max() < 10.0
    other = found.tally({"x": few + 9.0}, scores(few + 9.0), 0.0, 1.0)
    assert evidence(found.seen, found.independent(other.with_(other))).max() > 30.0
    alike = known(TABLE, {"x": x.round()}, scores(x.round()))
    assert alike.independent(whole) is whole.counts


def test_counts_of_several_processes_add_up() -> None:
    x = np.random.default_rng(3).normal(size=(100, 2))
    found = known(TABLE, {"x": x}, scores(x))
    whole = found.count({"x": x}, scores(x))
    parts = [found.count({"x": part}, scores(part)) for part in (x[:30], x[30:])]
    assert (parts[0] + parts[1] == whole).all()
    assert (whole == found.seen).all()


PICTURES = Signature(inputs=[spec("x", "FP32", 8, 8)], outputs=[SCORES])
LARGE = Signature(inputs=[spec("x", "UINT8", 40, 40, 3)], outputs=[SCORES])


@pytest.mark.parametrize("signature", [PICTURES, LARGE], ids=["small", "large"])
def test_pictures_are_told_by_elements_and_as_a_whole(signature: Signature) -> None:
    random, shape = np.random.default_rng(4), signature.inputs[0].shape
    shade = np.linspace(40, 90, shape[1]).reshape(1, 1, -1, *[1] * (len(shape) - 2))

    def draw(n: int) -> Array:
        return np.clip(random.normal(shade, 10, size=(n, *shape)), 0, 255).astype(np.uint8)

    x = draw(300)
    found = known(signature, {"x": x}, scores(x))
    assert drifted(found, found.count({"x": (y := draw(200))}, scores(y))) == set()
    brighter = found.count({"x": (y := np.minimum(draw(200), 200) + 20)}, scores(y))
    assert "x mean" in drifted(found, brighter)
    assert "x spread" not in drifted(found, brighter, 30.0)
    assert ("x channel 1 mean" in drifted(found, brighter)) == (signature is LARGE)
    noisy = draw(200) + random.integers(0, 30, (200, *shape))
    assert "x roughness" in drifted(found, found.count({"x": noisy}, scores(noisy)))
    moved = np.roll(draw(200), 2, axis=2)
    assert any(name.startswith("x[") for name in drifted(found, found.count({"x": moved}, scores(moved))))


def test_texts_are_told_by_length_unknown_words_and_groups() -> None:
    random = np.random.default_rng(5)
    words = np.array([f"word{i}" for i in range(50)])

    def draw(n: int, words: Array, length: int = 6) -> dict[str, Array]:
        return {"text": np.array([" ".join(random.choice(words, length)) for _ in range(n)], dtype=object)}

    def labels(n: int, share: float) -> dict[str, Array]:
        return {"label": np.where(random.random(n) < share, "good", "bad").astype(object)}

    found = known(TEXTS, draw(400, words), labels(400, 0.5))
    assert drifted(found, found.count(draw(300, words), labels(300, 0.5))) == set()
    other = np.array([f"mot{i}x" for i in range(50)])
    assert "text unknown words" in drifted(found, found.count(draw(300, other), labels(300, 0.5)))
    assert "text words" in drifted(found, found.count(draw(300, words, 12), labels(300, 0.5)))
    assert drifted(found, found.count(draw(300, words), labels(300, 0.95))) == {"outputs.label group"}
    assert b"word1" not in encode(found)


def test_lengths_are_told_where_they_vary_and_other_outputs_as_a_whole() -> None:
    signature = Signature(inputs=[spec("x", "FP32", -1)], outputs=[spec("boxes", "FP32", -1, 4), spec("n", "INT64", 1)])
    assert drift.columns_of(signature) == [
        "x mean", "x spread", "x roughness", "x elements", "outputs.boxes mean", "outputs.boxes spread", "outputs.n group",
    ]  # fmt: skip
    x = np.ones((50, 5), np.float32)
    outputs: dict[str, Array] = {"boxes": np.zeros((50, 0, 4), np.float32), "n": np.zeros((50, 1), np.int64)}
    found = known(signature, {"x": x}, outputs)
    assert drifted(found, found.count({"x": np.ones((50, 6), np.float32)}, outputs)) == {"x elements"}


@pytest.mark.parametrize(
    "change",
    [{"edges": b""}, {"counts": b"12345678"}, {"columns": ["age"]}, {"words": b"x"}],
    ids=["edges", "counts", "columns", "words"],
)
def test_what_is_no_distribution_is_not_read(change: dict[str, Any]) -> None:
    x = np.zeros((30, 2))
    good = known(TABLE, {"x": x}, scores(x))
    with pytest.raises(BadMessage):
        Distribution.read(encode({name: getattr(good, name) for name in good.__struct_fields__} | change))
    with pytest.raises(BadMessage):
        Distribution.read(b"nothing")


def test_windows_double_and_each_is_tested_once() -> None:
    one = np.zeros((1, CELLS), np.int64)
    one[0, 0] = LEAST // 2
    windows = Windows()
    sizes = [[(size, int(w.counts.sum())) for size, w in windows.add(CountedWindow(i, i + 1, one))] for i in range(8)]
    assert sizes == [
        [], [(0, 64)], [], [(0, 64), (1, 128)], [], [(0, 64)], [], [(0, 64), (1, 128), (2, 256)],
    ]  # fmt: skip
    assert windows.tests[:3] == [4, 2, 1]
    assert windows.bound(0, 10) > windows.bound(2, 10) > BACK, "what was tested more often needs more"
    windows.forget()
    assert [*windows.add(CountedWindow(9, 10, one))] == []
    assert Windows([100]).bound(0, 10) > windows.bound(0, 10)


def test_all_that_is_ever_spent_is_the_level() -> None:
    windows, spent = Windows(), 0.0
    for size in range(drift.SIZES):
        for t in (*range(1, 2000),):
            windows.tests[size] = t
            spent += 7 * np.exp(-windows.bound(size, 7))
    rest = drift.SIZES * drift.LEVEL / (drift.SIZES * 2.12 * np.log(2001))  # the integral of 1 / (t log(t)^2)
    assert spent + rest <= drift.LEVEL

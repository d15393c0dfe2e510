"""A client that sends extreme numbers in every fifth query changes nobody's answer, whatever variant computes them."""

import asyncio
from pathlib import Path

import numpy as np
import pytest

import infaas
from tests.support.models import tiny_models
from tests.support.servers.system import Whole

MODELS = Path(__file__).parents[2] / "benches" / "models"
ITEMS = 80
EXTREME = 1e6


def registered(system: Whole, model: Path, validation: Path, app: str) -> list[dict]:
    """The variants of a model that is registered for an app of its own."""
    about = ("--app", app, "--validation", str(validation))
    return system.told("register", str(model), *about)["variants"]


async def answers(client: infaas.Client, app: str, x: np.ndarray, variant: str) -> tuple[np.ndarray, np.ndarray, int]:
    """The items' outputs one after the other, those all at once between extreme items, and the largest batch of these."""
    one_by_one = [await client.query(app, x[i : i + 1], variant=variant, timeout=60.0) for i in range(len(x))]
    extreme = np.full_like(x[:1], EXTREME)
    beside = await asyncio.gather(
        *(
            client.query(app, extreme if n % 5 == 4 else x[n - n // 5 : n - n // 5 + 1], variant=variant, timeout=60.0)
            for n in range(len(x) * 5 // 4)
        )
    )
    others = [answer for n, answer in enumerate(beside) if n % 5 != 4]
    assert {answer.variant for answer in (*one_by_one, *beside)} == {variant}
    found = [np.concatenate([answer.output for answer in some]) for some in (one_by_one, others)]
    return found[0], found[1], max(answer.batch for answer in others)


async def test_no_client_changes_the_answers_of_others_whatever_variant_computes_them(system: Whole) -> None:
    validation = MODELS / "mlp64.npz"
    variants = registered(system, MODELS / "mlp64.onnx", validation, "neighbours")
    assert {variant["precision"] for variant in variants} == {"fp32", "int8"}
    x = np.load(validation)["x"][:ITEMS].astype("f4")

    batches = []
    async with infaas.connect(data_dir=system.directory) as client:
        for variant in variants:
            alone, beside, batch = await answers(client, "neighbours", x, variant["variant"])
            assert (alone.argmax(1) == beside.argmax(1)).all(), variant
            assert beside == pytest.approx(alone, abs=1e-4), variant
            batches.append(batch)
    assert max(batches) > 1  # they had neighbours


async def test_a_model_that_would_mix_its_batch_computes_each_item_alone(system: Whole, tmp_path: Path) -> None:
    x, y = tiny_models.digits(100)
    (tmp_path / "limiting.onnx").write_bytes(tiny_models.limiting())
    (tmp_path / "validation.npz").write_bytes(tiny_models.npz(x=x, y=y))
    variants = registered(system, tmp_path / "limiting.onnx", tmp_path / "validation.npz", "limiting")
    assert {variant["max_batch"] for variant in variants} == {1}
    assert {variant["alone"] for variant in variants} == {"an item's answer is another one beside an item of 1e+06"}
    listed = system.done("variants", "--app", "limiting")
    assert f"one item at a time: {variants[0]['variant']}: an item's answer" in listed

    async with infaas.connect(data_dir=system.directory) as client:
        for variant in variants:
            _, beside, _ = await answers(client, "limiting", x[:ITEMS], variant["variant"])
            assert beside == pytest.approx(x[:ITEMS] / 100, abs=1e-6)
            own = np.concatenate([x[:3], np.full_like(x[:1], EXTREME), x[3:6]])
            many = await client.query("limiting", own, variant=variant["variant"], timeout=60.0)
            assert np.delete(many.output, 3, axis=0) == pytest.approx(x[:6] / 100, abs=1e-6)

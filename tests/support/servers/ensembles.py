"""A system whose apps have several models: tiny ones with errors of their own, that tests link as they need them."""

import asyncio
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import infaas
from tests.support.clients.responders import until
from tests.support.models import tiny_models
from tests.support.models.tiny_models import FEATURES, weights
from tests.support.servers.nats import run
from tests.support.servers.system import Whole

MEMBERS = ("n0", "n1", "n2", "n3", "n4")
NOISE = 0.4  # of the members' weights: each is wrong on about a fifth of the inputs, and on others than the rest
NOISE_OF_FLOATS = 1e-4  # of the largest score; members have variants of their own precision only
STEP = 16  # feedbacks at once


def second_weights(model: str) -> np.ndarray:
    """Of the last layer, FP32 [32, 4]. `sound` is always right, `sound` 2 always wrong."""
    right = weights(0)[1]
    if model == "sound@2":
        return -right
    if model in MEMBERS:
        return right + NOISE * np.random.default_rng(100 + MEMBERS.index(model)).normal(size=right.shape).astype("f4")
    return right


def scores_of(model: str, x: np.ndarray) -> np.ndarray:
    """FP32 [n, 4]"""
    found: np.ndarray = np.maximum(x @ weights(0)[0], 0) @ second_weights(model)
    return found


def inputs(count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Inputs that no model has been measured with, and their true classes."""
    x = np.random.default_rng(1000 + seed).normal(size=(count, FEATURES)).astype("f4")
    return x, scores_of("sound", x).argmax(axis=1)


def file_of(model: str) -> bytes:
    return tiny_models.exact(tiny_models.two_layers(weights(0)[0], second_weights(model)))


class Ensembles(Whole):
    """A system with two dispatchers and two workers, and the models of `second_weights`, which no app links yet."""

    @property
    def validation(self) -> Path:
        return self.directory.parent / "tiny.npz"

    async def prepare(self) -> None:
        x, y = tiny_models.digits()
        self.validation.write_bytes(tiny_models.npz(x=x, y=y))
        async with infaas.connect(self.nats) as client:
            for name in (*MEMBERS, "sound", "sound@2"):
                model, _, version = name.partition("@")
                path = self.directory.parent / f"{name}.onnx"
                path.write_bytes(file_of(name))
                await client.register(
                    path, app="shelf", model=model, version=version or "1", validation=self.validation
                )

    async def app(self, client: Any, name: str, models: tuple[str, ...], fields: dict[str, Any], **more: Any) -> None:
        """An app that links these models and asks them by these rules; returns once both dispatchers do so and all answer."""
        await client.admin("add-app", app=name, **more)
        for model in models:
            await client.admin("link-model", app=name, model=model, version="1")
        await client.admin("set-selection", app=name, **fields)
        x, _ = inputs(1, 0)
        row: deque[bool] = deque(maxlen=20)

        async def settled() -> bool:
            answer = await client.query(name, x, timeout=60.0, raise_refused=False)
            row.append(
                isinstance(answer, infaas.Answer) and (answer.missing == 0 if fields.get("policy") else answer.cached)
            )
            return len(row) == 20 and all(row)

        await until(settled)

    def weights(self, app: str, context: str | None = None) -> dict[str, float]:
        """By member, as the command tells them."""
        options = () if context is None else ("--context", context)
        return {row["member"]: row["weight"] for row in self.told("selection", "--app", app, *options)}


@pytest.fixture(scope="session")
def ensembles(doubled: Whole) -> Ensembles:
    found = Ensembles(*doubled)
    run(found.prepare())
    return found


async def taught(client: Any, app: str, x: np.ndarray, y: np.ndarray, **context: Any) -> list[infaas.Answer]:
    """Ask each item as a query, tell its true class; STEP at a time."""

    async def one(index: int) -> infaas.Answer:
        answer: infaas.Answer = await client.query(app, x[index : index + 1], timeout=60.0, **context)
        await client.feedback(app, int(y[index]), query=answer.query, **context)
        return answer

    found = []
    for start in range(0, len(x), STEP):
        found += await asyncio.gather(*(one(index) for index in range(start, min(start + STEP, len(x)))))
    return found


def near(given: np.ndarray, wanted: np.ndarray) -> bool:
    return bool(np.abs(given - wanted).max() < NOISE_OF_FLOATS * np.abs(wanted).max())

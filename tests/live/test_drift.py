"""Inputs that no longer look like the validation set, without a label: found, shown, and over when they do again; also of a user's own process."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from infaas.demo import digits
from tests.live.test_metrics import get
from tests.support.clients.responders import until
from tests.support.servers.processes import container, eventually
from tests.support.servers.system import APP, MODELS, Whole, talk, with_digits

MOVED = "SELECT column_name, distance, ended IS NULL FROM infaas.drift_events WHERE app = %s"
CENTRES = """
import numpy as np

class Model:
    def __init__(self):
        with np.load({validation!r}) as file:
            x, y = file["x"], file["y"]
        self.centres = np.stack([x[y == label].mean(axis=0) for label in range(10)])

    def predict_batch(self, inputs):
        x = inputs["x"]
        return {{"scores": -((x[:, None, :] - self.centres) ** 2).sum(axis=2).astype("f4")}}
"""


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Whole]:
    directory = tmp_path_factory.mktemp("drift") / "data"
    with with_digits(directory, "--no-dashboard", models=MODELS[:1], INFAAS_QUALITY_SAMPLE_SHARE="1") as whole:
        yield whole


def ask(system: Whole, app: str, moved: int, condition: Any) -> None:
    """Ask pictures of the validation set, moved to the right by so many pixels, until the condition holds."""
    pictures = np.roll(system.x.reshape(-1, 28, 28), moved, axis=2).reshape(-1, 784)
    random = np.random.default_rng(moved)

    async def main(client: Any) -> None:
        async def held() -> bool:
            for i in random.integers(0, len(pictures), 64):
                await client.query(app, pictures[i : i + 1], latency_ms=60_000)
            return bool(condition())

        await until(held)

    talk(system, main)


def test_a_drift_is_found_without_labels_shown_and_ends(system: Whole) -> None:
    ask(system, APP, 0, lambda: f'infaas_drifted_columns{{app="{APP}"' in get(system.metrics))
    assert system.rows(MOVED, APP) == []
    ask(system, APP, 2, lambda: system.rows(MOVED, APP))
    rows = system.rows(MOVED, APP)
    assert all(distance > 0 and goes_on for _, distance, goes_on in rows)
    assert any(name.startswith("x[") for name, *_ in rows)
    assert f"{APP}: its queries differ from the validation set since " in system.done("status")

    def listed() -> bool:  # what was asked before is counted a moment later
        (app,) = (one for one in system.told("status")["apps"] if one["app"] == APP)
        return len(app["drift"]) == len(system.rows(MOVED, APP))

    assert eventually(listed)
    checks = json.loads(system.command("doctor", "--json").stdout)["checks"]
    assert [one["state"] for one in checks if one["check"] == "drift"] == ["failed"]
    system.done("restart", "registrar")  # with the leader: the next one goes on
    assert all(goes_on for *_, goes_on in system.rows(MOVED, APP))
    ask(system, APP, 0, lambda: not any(goes_on for *_, goes_on in system.rows(MOVED, APP)))
    assert len(system.rows(MOVED, APP)) >= len(rows)


def test_a_process_of_a_users_own_is_compared_with_its_validation_set_too(system: Whole, tmp_path: Path) -> None:
    validation = digits.save_validation(tmp_path / "validation.npz")
    (tmp_path / "mine.py").write_text(CENTRES.format(validation=str(validation)))
    about = ("--app", "mine", "--model", "centres", "--validation", str(validation))
    with container(tmp_path, "mine:Model", *about, *system.where, INFAAS_QUALITY_SAMPLE_SHARE="1"):
        ask(system, "mine", 2, lambda: system.rows(MOVED, "mine"))

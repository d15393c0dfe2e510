"""Queries that are kept with their answers, on a whole system, by the commands (with --json): exported with labels, measured anew on, deleted."""

import os
import signal
from pathlib import Path
from typing import Any

import numpy as np

from tests.support.models import tiny_models
from tests.support.servers.processes import eventually
from tests.support.servers.system import QUICK, Whole, running, talk

APP, ITEMS = "kept", 300


def test_what_is_kept_is_exported_measured_anew_on_and_deleted(tmp_path: Path) -> None:
    (tmp_path / "quick.toml").write_text(QUICK)
    with running(
        tmp_path / "data", "--no-dashboard", "--no-gateway", "--config", str(tmp_path / "quick.toml")
    ) as system:
        system.register(APP, tiny_models.exact(tiny_models.mlp()))
        x, y = tiny_models.digits(ITEMS)
        file = tmp_path / "kept.npz"
        ask(system, x[:4], y[:4])
        none = system.command("payloads", "export", APP, str(file))
        assert none.returncode == 1
        assert "--payloads 0.1" in none.stderr
        assert system.command("payloads", "export", "nobody", str(file)).stderr.startswith("infaas: unknown_app")

        system.done("admin", "set-app", APP, "--payloads", "1")
        [listed] = [one for one in system.told("apps") if one["app"] == APP]
        assert listed["payloads"] == 1
        labels = np.where(
            np.arange(ITEMS) % 3 == 0, (y + 1) % tiny_models.CLASSES, y
        )  # another world: a third is another class
        ask(system, x, labels)

        def exported(*options: str) -> dict[str, Any]:
            system.done("payloads", "export", APP, str(file), *options)
            with np.load(file) as arrays:
                return dict(arrays)

        def labelled(items: int) -> bool:
            found = system.command("payloads", "export", APP, str(file), "--labelled", "--json")
            return found.returncode == 0 and f'"items": {items}' in found.stdout

        assert eventually(lambda: labelled(ITEMS)), system.command("payloads", "export", APP, str(file), "--json")
        found = exported()
        place = np.argsort([2 * int(name[1:]) for name in found["id"]] + found["item"])
        assert np.array_equal(found["x"][place], x)
        assert np.array_equal(found["labels"][place], labels)
        assert found["outputs.scores"].shape == (ITEMS, tiny_models.CLASSES)
        assert {"query", "time", "variant"} < found.keys()

        [before] = {one["registered"] for one in system.told("variants", APP)}
        document = system.told("remeasure", APP)
        assert document["labels"] == ITEMS
        assert [one["version"] for one in document["models"]] == ["2"]
        variants = system.told("variants", APP)
        right = float((found["outputs.scores"].argmax(axis=1) == found["labels"]).mean())
        assert {one["version"] for one in variants} == {"2"}
        assert {round(one["accuracy"], 6) for one in variants} == {round(right, 6)}
        assert right < before
        assert min(one["accuracy_at"] for one in variants) > found["time"].max()
        assert all((one["accuracy_source"], one["live"]) == ("registered", None) for one in variants), "it begins anew"

        system.done("payloads", "delete", APP, "--id", "q7")
        system.done("payloads", "delete", APP, "--id", str(found["query"][place][0]))
        assert set(found["id"]) - set(exported()["id"]) == {"q7", "q0"}
        unknown = system.command("payloads", "delete", APP, "--id", "q7")
        assert unknown.returncode == 1
        assert "q7" in unknown.stderr
        left = exported()
        assert len(left["item"]) == ITEMS - 4
        assert system.told("payloads", "delete", APP)["deleted"] == ITEMS / 2 - 2
        ask(system, x[:10], labels[:10])
        assert eventually(lambda: "100 are needed" in system.command("remeasure", APP).stderr)
        system.done("payloads", "delete", APP)

        late = ask(system, x, labels, labelled=False)
        assert eventually(
            lambda: f'"items": {ITEMS}' in system.command("payloads", "export", APP, str(file), "--json").stdout
        )
        [dispatcher] = system.pids("dispatcher")
        os.kill(dispatcher, signal.SIGKILL)  # the next one knows nothing of what was asked
        rows = [f"{query},{label}\n" for query, label in zip(late, labels[::2], strict=True)]
        (tmp_path / "labels.csv").write_text("query,label\n" + "".join(rows))
        assert eventually(lambda: not system.command("feedback", APP, str(tmp_path / "labels.csv")).returncode)
        assert eventually(lambda: labelled(len(late))), "rows come after their receipts"
        found = exported("--labelled")
        right = float((found["outputs.scores"].argmax(axis=1) == found["labels"]).sum())
        count = "SELECT count(score), sum(score), count(variant) FROM infaas.feedback WHERE query = ANY (%s::uuid[])"
        assert system.rows(count, late) == [(len(late), right, len(late))]

        system.done("admin", "delete-app", APP)
        assert system.told("payloads", "delete", APP)["deleted"] == 0


def ask(system: Whole, x: Any, y: Any, *, labelled: bool = True) -> list[str]:
    """Queries of two items, q0, q1, ..., and the label of each item behind. Their names."""

    async def work(client: Any) -> list[str]:
        told = []
        for n in range(len(x) // 2):
            answer = await client.query(APP, x[2 * n : 2 * n + 2], id=f"q{n}")
            told += [{"query": answer.query, "label": int(y[2 * n + i]), "item": i} for i in (0, 1)]
        assert not labelled or not await client.feedbacks(APP, told)
        return [one["query"] for one in told[::2]]

    names: list[str] = talk(system, work)
    return names

"""A release on a whole system, by the commands: held, begun, shown to be worse by labels, taken back, and in SQL."""

from collections import Counter
from pathlib import Path
from typing import Any

from tests.support.models import tiny_models
from tests.support.servers.processes import eventually
from tests.support.servers.system import QUICK, Whole, running, talk

APP = "shown"
LONG = 240.0  # s; only ends a failing test


def test_a_held_version_is_released_and_goes_back_when_labels_show_it_to_be_worse(tmp_path: Path) -> None:
    (tmp_path / "quick.toml").write_text(QUICK)
    with running(
        tmp_path / "data", "--no-dashboard", "--no-gateway", "--config", str(tmp_path / "quick.toml")
    ) as system:
        assert system.register(APP, tiny_models.mlp())["version"] == "1"
        x, y = tiny_models.digits()
        other = tmp_path / "other.onnx"
        other.write_bytes(tiny_models.mlp(seed=1))
        places = ("--app", APP, "--model", APP, "--validation", str(tmp_path / f"{APP}.npz"))
        assert system.told("register", str(other), *places, "--release", "hold")["version"] == "2"
        assert ask(system, x, y, 20) == {"1": 20}
        assert "no releases yet" in system.done("release", "list")
        mirror = ("--mirror", "1", "--hold", "--least", "600")
        system.done("release", "start", APP, "--model", APP, *mirror)
        seen: Counter[str] = Counter()

        def ended() -> bool:
            seen.update(ask(system, x, y, 50))
            return bool(system.told("release", "show", APP)["state"] == "rolled-back")

        assert eventually(ended, LONG), system.done("release", "show", APP)
        assert "in the mirror of a share of 1" in system.done("release", "show", APP)
        assert set(seen) == {"1"}, "nobody gets an answer to a copy"
        assert system.rows("SELECT DISTINCT policy FROM infaas.query_outcomes WHERE policy = 'offline'") == []
        system.done("release", "start", APP, "--model", APP, "--steps", "0.5", "--least", "600")
        refused = system.command("admin", "set-version", APP, "--model", APP, "--version", "2")
        assert refused.returncode == 1
        assert "infaas admin abort-release" in refused.stderr
        assert eventually(ended, LONG), system.done("release", "show", APP)
        assert seen["2"]
        assert "shown to be worse: accuracy" in system.done("release", "show", APP)
        assert ask(system, x, y, 20) == {"1": 20}
        query = (
            f"SELECT state, share, version, old_version FROM infaas.release_events WHERE app = '{APP}' ORDER BY time"
        )
        states = [("mirror", 0.0), ("rolled-back", 0.0), ("step", 0.5), ("rolled-back", 0.0)]
        rows = [(*one, "2", "1") for one in states]
        assert eventually(lambda: system.rows(query) == rows, LONG), system.rows(query)
        [item] = system.told("release", "list")
        assert (item["app"], item["state"], item["share"]) == (APP, "rolled-back", 0.0)


def ask(system: Whole, x: Any, y: Any, count: int) -> dict[str, int]:
    """So many queries, each with its label behind it; how often which version answered."""
    versions: Counter[str] = Counter()

    async def work(client: Any) -> None:
        for n in range(count):
            answer = await client.query(APP, x[n % len(x)][None])
            versions[answer.version] += 1
            await client.feedback(APP, query=answer.query, label=int(y[n % len(y)]))

    talk(system, work)
    return dict(versions)

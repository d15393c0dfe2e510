"""`infaas shadow`: what is refused and how, what runs, and what people see."""

import json
from pathlib import Path
from typing import Any

import pytest

from infaas.cli import build
from infaas.cli.shadow import _change, _options, print_shadow
from services.simulation.replay.build import ReplayOptions
from tests.support.clients.commands import refused


@pytest.fixture
def system(tmp_path: Path) -> Path:
    """The data directory of a system whose NATS does not answer."""
    settings = {"autoscaler": {"hold_s": 7.0}, "machines": {"provider": "off"}}
    places = {"nats": "nats://127.0.0.1:1", "sql": "postgresql://127.0.0.1:1/x", "running": True, "settings": settings}
    (tmp_path / "endpoints.json").write_text(json.dumps(places))
    return tmp_path


@pytest.mark.parametrize("settings", [{"autoscaler": {"hold_s": "soon"}}, {"nonsense": 3}])
def test_a_systems_damaged_settings_are_named(
    settings: dict[str, Any], system: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    places = json.loads((system / "endpoints.json").read_text())
    (system / "endpoints.json").write_text(json.dumps({**places, "settings": settings}))
    assert next(iter(settings)) in refused(capsys, ["shadow", "infaas", "--data-dir", str(system)])


def test_each_option_is_in_what_runs(system: Path, tmp_path: Path) -> None:
    (tmp_path / "own.toml").write_text("[autoscaler]\nhold_s = 11\n[machines.kinds.cpu]\nmaximum = 3\n")

    def specified(words: str) -> ReplayOptions:
        _, bound, _ = build().parse_args(["shadow", "infaas", "--data-dir", str(system), *words.split()])
        bound.apply_defaults()
        given = dict(bound.arguments)
        changes = dict(_change(one) for one in given["set_"] or ())
        return _options(
            given["policy"], changes, *(given[name] for name in ("slo_target", "boot", "config", "data_dir"))
        )

    plain = specified("")
    assert (plain.settings["autoscaler"]["hold_s"], plain.slo_targets, plain.boot_s, plain.kinds) == (7.0, (), 5.0, {})
    changed = specified("--set autoscaler.hold_s=3").own
    assert changed is not None
    assert (changed.name, changed.settings["autoscaler"]) == ("infaas autoscaler.hold_s=3", {"hold_s": 3})
    assert specified("--slo-target 0.9").slo_targets == (0.9,)
    assert specified("--boot 9").boot_s == 9.0
    own = f"--config {tmp_path / 'own.toml'}"
    assert specified(own).settings["autoscaler"]["hold_s"] == 11.0
    assert {one.boot_s for one in (specified(f"{own} --boot 9").kinds or {}).values()} == {9.0}


def side(**fields: Any) -> dict[str, Any]:
    plain = {
        "queries": 1234, "in_time": 0.9876, "cost_rate": 0.2, "actions": {}, "machines": {"cpu": 2},
        "instances": 3,
    }  # fmt: skip
    return plain | fields


def test_people_see_both_sides(capsys: pytest.CaptureFixture[str]) -> None:
    print_shadow(
        {
            "policy": "static", "seconds": 60.0, "notes": ["too slow"],
            "shadow": side(actions={"load": 2}),
            "real": side(in_time=None, queries=0, actions={"load": 1, "add_worker": 3}, machines={}),
        }
    )  # fmt: skip
    printed = capsys.readouterr().out.splitlines()
    ours = next(line for line in printed if line.startswith("static (simulated)"))
    assert ours.split()[2:] == ["1,234", "98.76", "%", "0.2", "2", "cpu", "3"]
    assert next(line for line in printed if line.startswith("the system")).split()[2:5] == ["0", "-", "0.2"]
    assert [line.split() for line in printed if line.startswith(("load", "add_worker"))] == [
        ["add_worker", "0", "3"],
        ["load", "2", "1"],
    ]
    assert "note: too slow" in printed


def test_wide_shows_what_the_terminal_has_no_room_for(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    document = {
        "policy": "static",
        "seconds": 60.0,
        "notes": [],
        "shadow": side(machines={"large": 17}),
        "real": side(),
    }
    for wide in (False, True):  # --wide
        print_shadow(document, wide=wide)
        assert ("17 large" in capsys.readouterr().out) is wide


def test_nothing_done_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    real = side(cost_rate=0.25, in_time=0.95)
    print_shadow({"policy": "infaas", "seconds": 60.0, "notes": [], "shadow": side(), "real": real})
    told = capsys.readouterr().out
    assert told.startswith(
        "infaas would have cost 20.0 % less than was paid and missed 1.24 % of the queries instead of 5.00 %.\n"
    )
    assert "neither took any action" in told

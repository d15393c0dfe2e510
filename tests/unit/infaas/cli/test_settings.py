"""`infaas settings`: what is printed is complete, and what is printed as a file changes nothing."""

import json
import tomllib
from pathlib import Path

import msgspec
import pytest

from bus.login import SystemAddress
from infaas.cli import main
from services.core.settings import Settings, described
from services.shell.host.endpoints import write_endpoints
from services.shell.settings import given, load
from tests.support.clients.commands import ran


def test_the_table_shows_key_default_bounds_and_meaning(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    lines = ran(capsys, ["settings"]).out.splitlines()
    [at] = [n for n, line in enumerate(lines) if line.startswith("monitor.heartbeat_s ")]
    assert lines[at].split(maxsplit=2) == ["monitor.heartbeat_s", "0.5", "above 0 and at most 60"]
    assert lines[at + 1].strip() == "Seconds between two heartbeats of a worker."
    assert {line.split()[0] for line in lines[1:] if not line.startswith(" ")} == {
        one.key for one in described(Settings)
    }


def test_the_file_is_one_that_config_takes_and_changes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["settings", "--toml"]) == 0
    file = tmp_path / "infaas.toml"
    file.write_text(capsys.readouterr().out)
    assert load(file, {}) == Settings()
    tree = tomllib.loads(file.read_text())
    for one in described(Settings):
        if "NAME" not in one.key and one.key != "bus.url":  # `up` would take the URL for that of a server to use
            at = tree
            for name in one.key.split("."):
                at = at[name]


def test_maps_can_be_uncommented_and_named_variables_set_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = ran(capsys, ["settings", "machines.kinds", "--toml"]).out.splitlines()
    file = tmp_path / "infaas.toml"
    file.write_text("\n".join(line.removeprefix("# ") for line in lines if line.startswith("# [") or " = " in line))
    assert set(load(file, {}).machines.kinds) == {"NAME"}
    assert load(None, {"INFAAS_MACHINES__KINDS__NAME__MAXIMUM": "3"}).machines.kinds["name"].maximum == 3
    assert msgspec.structs.replace(Settings(), prefix="a") == load(None, {"INFAAS_PREFIX": "a"})


def test_json_has_the_variables_and_one_section_may_be_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["settings", "store", "--json"]) == 0
    found = {one["key"]: one for one in json.loads(capsys.readouterr().out)}
    assert found["store.timescale"] == {
        "key": "store.timescale",
        "kind": "auto or apache or off",
        "default": "auto",
        "bounds": "auto or apache or off",
        "meaning": found["store.timescale"]["meaning"],
        "variable": "INFAAS_STORE__TIMESCALE",
    }
    assert {key.partition(".")[0] for key in found} == {"store"}


def test_the_table_fits_80_columns(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    lines = ran(capsys, ["settings"]).out.splitlines()
    assert [line for line in lines if len(line) > 80] == []
    at = lines.index("monitor.heartbeat_s  0.5")
    assert lines[at + 1].startswith("    (above 0 and at most 60) ")


def test_what_runs_is_told_with_its_origin_and_what_a_restart_would_change(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "infaas.toml"
    file.write_text("log_level = 'DEBUG'\n[monitor]\nsample_s = 3\n[machines.kinds.big]\nmaximum = 2\n")
    environ = {"INFAAS_DISPATCHER__COUNT": "2", "INFAAS_STORE__DSN": "postgresql://me:secret@here/db"}
    there = SystemAddress(nats="nats://x", sql="", writer="", given=given(file, environ), config=str(file))
    write_endpoints(tmp_path, there, {})
    file.write_text("[monitor]\nsample_s = 4\n[machines.kinds.big]\nmaximum = 2\n[jobs]\nchunk_kb = 64\n")
    command = ["settings", "--running", "--data-dir", str(tmp_path), "--json"]
    out = ran(capsys, command).out
    assert "secret" not in out
    found = {one.pop("setting"): one for one in json.loads(out)}
    assert found["monitor.sample_s"] == {"value": 3, "default": 2.0, "from": str(file), "after_restart": 4}
    assert found["log_level"]["after_restart"] == found["log_level"]["default"] == "INFO"
    assert found["machines.kinds.big.maximum"] == {"value": 2, "default": 0, "from": str(file)}
    assert found["jobs.chunk_kb"]["after_restart"] == 64
    assert found["dispatcher.count"] == {"value": "2", "default": 1, "from": "INFAAS_DISPATCHER__COUNT"}
    assert found["monitor.heartbeat_s"] == {"value": 0.5, "default": 0.5, "from": "default"}
    assert len(ran(capsys, command[:-1]).out.splitlines()) == 1 + 6  # only those that were given

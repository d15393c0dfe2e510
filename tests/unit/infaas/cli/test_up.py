"""The options of `infaas up`, in what it starts: a stack's specification, from which services/shell/host/stack starts processes."""

from pathlib import Path

import pytest

from infaas.cli import build
from infaas.cli.up import _plan
from services.shell.host.stack import StackSpec


def planned(words: str, place: Path) -> StackSpec:
    """What `infaas up` with these options starts."""
    _, bound, _ = build().parse_args(["up", "--data-dir", str(place), *words.split()], exit_on_error=False)
    bound.apply_defaults()
    given = dict(bound.arguments)
    del given["json"]  # of what is printed
    return _plan(**given)


def test_each_option_is_in_what_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("INFAAS_WORKER__SIMULATE", "INFAAS_DISPATCHER__COUNT"):
        monkeypatch.delenv(name, raising=False)
    plain = planned("", tmp_path)
    assert (plain.data_dir, plain.workers, plain.dashboard, plain.gateway) == (tmp_path, 1, True, True)
    assert planned("--workers 3", tmp_path).workers == 3
    assert planned("--dispatchers 4", tmp_path).dispatchers == 4 != plain.dispatchers
    (tmp_path / "own.toml").write_text("[dispatcher]\nmax_queue = 7\n")
    assert planned(f"--config {tmp_path / 'own.toml'}", tmp_path).settings.dispatcher.max_queue == 7
    assert planned("--no-dashboard", tmp_path).dashboard is False  # --dashboard
    assert planned("--no-gateway", tmp_path).gateway is False  # --gateway


def test_more_workers_under_load_are_machines_of_the_plain_kind(tmp_path: Path) -> None:
    spec = planned("--workers 2 --max-workers 5", tmp_path)
    assert [(one.minimum, one.maximum) for one in spec.settings.machines.kinds.values()] == [(2, 5)]
    assert spec.environ["INFAAS_MACHINES__KINDS__CPU__MAXIMUM"] == "5"  # for the services

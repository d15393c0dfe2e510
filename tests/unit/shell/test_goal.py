"""One setting says what queries are served with; dispatchers and model-autoscalers read the same."""

from pathlib import Path

import pytest

from services.autoscaler.models.__main__ import knobs_of
from services.dispatcher.edge import load_policy
from services.shell.settings import SettingsError, load


def test_the_goal_comes_from_a_file_or_a_variable_and_reaches_both(tmp_path: Path) -> None:
    (tmp_path / "infaas.toml").write_text('goal = "accuracy"\n')
    assert load(environ={}).goal == "cost"
    for settings in (load(tmp_path / "infaas.toml", {}), load(environ={"INFAAS_GOAL": "accuracy"})):
        assert settings.goal == knobs_of(settings).goal == "accuracy"
        policy = load_policy(settings.dispatcher, goal=settings.goal)
        assert getattr(policy, "goal") == "accuracy"  # noqa: B009  (not every policy has one)


def test_another_goal_is_refused() -> None:
    with pytest.raises(SettingsError, match=r"INFAAS_GOAL.*goal"):
        load(environ={"INFAAS_GOAL": "speed"})

"""Policies by their names in the settings: a user's own class, and what is wrong with one."""

import pytest

from services.core.policy import GuardedPolicy
from services.core.selection import Decision
from services.core.selection.policy import InfaasPolicy
from services.core.settings import AutoscalerSettings, DispatcherSettings, Settings
from services.shell.policies import load_policy, load_scaling
from services.shell.settings import SettingsError


class Selects:
    name = "mine"

    def select(self, ask: object, now: float, view: object) -> Decision:
        raise AssertionError("it is only loaded here")


class Scales:
    name = "mine"

    def scale(self, problem: object, now: float) -> dict[str, int]:
        raise AssertionError("it is only loaded here")


class Both(Selects, Scales):
    goal = "accuracy"

    def observe(self, outcome: object) -> None: ...


class Nameless:
    def select(self, ask: object, now: float, view: object) -> None: ...
    def scale(self, problem: object, now: float) -> None: ...


class Aimless(Both):
    goal = "fame"


class Needy(Both):
    def __init__(self, what: str) -> None: ...


class Failing(Both):
    def __init__(self) -> None:
        raise OSError("no such file")


def settings(path: str) -> Settings:
    return Settings(dispatcher=DispatcherSettings(policy=path), autoscaler=AutoscalerSettings(policy=path))


def test_one_class_may_decide_on_queries_and_on_instances() -> None:
    both = settings(f"{__name__}:Both")
    selection, scaling = load_policy(both), load_scaling(both)
    assert isinstance(selection, GuardedPolicy)
    assert isinstance(scaling, GuardedPolicy)
    assert selection.observe is not None
    assert selection.goal == "accuracy"
    assert isinstance(selection.builtin, InfaasPolicy)
    assert selection.builtin.goal == "accuracy"
    assert selection.failures == dict.fromkeys(("select", "scale", "observe"), 0)


def test_what_a_class_lacks_it_need_not_have_where_it_is_not_asked() -> None:
    assert load_policy(settings(f"{__name__}:Selects")).name == "mine"
    scaling = load_scaling(settings(f"{__name__}:Scales"))
    assert scaling is not None
    assert scaling.name == "mine"
    assert load_scaling(Settings()) is None


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("no.such.module:Mine", r"cannot be loaded: No module named 'no'"),
        (
            "no_such_module:Mine",
            r"cannot be loaded: No module named 'no_such_module'; put the folder of no_such_module.py on PYTHONPATH",
        ),
        (f"{__name__}:Nobody", "cannot be loaded: module .* has no attribute 'Nobody'"),
        (f"{__name__}:Needy", "cannot be loaded: TypeError: .* missing 1 required positional argument: 'what'"),
        (f"{__name__}:Failing", "cannot be loaded: OSError: no such file"),
        (f"{__name__}:Nameless", "lacks a `name`, a text"),
        (f"{__name__}:Aimless", "its `goal` must be cost or accuracy, not 'fame'"),
    ],
)
def test_what_is_wrong_with_a_class_is_said(name: str, fault: str) -> None:
    with pytest.raises(SettingsError, match=f"^dispatcher.policy '{name}'.* {fault}"):
        load_policy(settings(name))
    with pytest.raises(SettingsError, match=f"^autoscaler.policy '{name}'.* {fault}"):
        load_scaling(settings(name))


def test_a_method_that_is_needed_and_not_there_is_named() -> None:
    with pytest.raises(SettingsError, match=r"^dispatcher.policy '.*:Scales' lacks the method select: docs/scaling.md"):
        load_policy(settings(f"{__name__}:Scales"))
    with pytest.raises(SettingsError, match=r"^autoscaler.policy '.*:Selects' lacks the method scale: docs/scaling.md"):
        load_scaling(settings(f"{__name__}:Selects"))

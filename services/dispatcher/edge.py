"""Impure helpers of the dispatcher's wiring: new ids, and policies by import path. The actor itself has no edge."""

import importlib
import itertools
import os
from collections.abc import Callable
from typing import Any

from services.core.selection.policy import SelectionPolicy
from services.core.settings import POLICIES, Settings
from services.shell.settings import SettingsError


def uid_maker() -> Callable[[], bytes]:
    """16-byte ids: 8 random bytes for this process, then an 8-byte count."""
    prefix = os.urandom(8)
    numbers = itertools.count()
    return lambda: prefix + next(numbers).to_bytes(8, "big")


def dispatcher_name() -> str:
    return f"d-{os.urandom(4).hex()}"


def load_policy(settings: Settings) -> SelectionPolicy:
    """The policy that `dispatcher.policy` names: a built-in one, or a user's class by "module:Class", which gets no arguments.

    Raises SettingsError that says what is wrong.
    """
    name = settings.dispatcher.policy
    module, _, attribute = POLICIES.get(name, name).partition(":")
    if not attribute:
        raise SettingsError(f"dispatcher.policy {name!r} is none of {', '.join(POLICIES)} and no module:Class")
    options = _options(settings) if name in POLICIES else {}
    try:
        policy = getattr(importlib.import_module(module), attribute)(**options)
    except (ImportError, AttributeError, TypeError) as error:
        raise SettingsError(f"dispatcher.policy {name!r} cannot be loaded: {error}") from error
    if not callable(getattr(policy, "select", None)) or not isinstance(getattr(policy, "name", None), str):
        raise SettingsError(
            f"dispatcher.policy {name!r} needs a `name` and a method select(ask, now, view) -> Decision"
        )
    found: SelectionPolicy = policy
    return found


def _options(settings: Settings) -> dict[str, Any]:
    """What a built-in policy is made with.

    dispatch: "auto" becomes "pack" where machines may come and go, so that some become empty, else "spread". on_demand: whether the
    policy may load a variant that no instance can serve; a static system has chosen its variants beforehand.
    """
    ours, machines = settings.dispatcher, settings.machines
    dispatch = ours.dispatch
    if dispatch == "auto":
        kinds = machines.kinds.values() if machines.provider != "off" else ()
        dispatch = "pack" if any(kind.maximum > kind.minimum for kind in kinds) else "spread"
    return {
        "dispatch": dispatch,
        "probe_share": ours.probe_share,
        "on_demand": settings.autoscaler.policy in ("infaas", "off"),
        "goal": settings.goal,
    }

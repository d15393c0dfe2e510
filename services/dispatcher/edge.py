"""Impure helpers of the dispatcher's wiring: fresh ids, and policies by import path. The actor itself has no edge."""

import importlib
import itertools
import os
from collections.abc import Callable

from services.core.cost import Goal
from services.core.selection.policy import BruteForce, InfaasPolicy, RoundRobin, SelectionPolicy
from services.core.settings import DispatcherSettings, MachineSettings
from services.shell.settings import SettingsError


def uid_maker() -> Callable[[], bytes]:
    """16-byte ids: 8 random bytes for this process, 8 that count."""
    prefix = os.urandom(8)
    numbers = itertools.count()
    return lambda: prefix + next(numbers).to_bytes(8, "big")


def dispatcher_name() -> str:
    return f"d-{os.urandom(4).hex()}"


def load_policy(
    settings: DispatcherSettings,
    machines: MachineSettings | None = None,
    *,
    on_demand: bool = True,
    goal: Goal = "cost",
) -> SelectionPolicy:
    """A built-in policy by name, or a user's class by "module:Class"; raises SettingsError that says what is wrong.

    machines: what the dispatch "auto" goes by: "pack" where machines may come and go, so that some empty; else "spread".
    on_demand: whether a built-in policy may load what no instance can serve; static systems have chosen beforehand. goal: by what
    built-in policies order variants; a user's class may have a `goal` of its own.
    """
    name = settings.policy
    if settings.dispatch not in ("auto", "spread", "pack"):
        raise SettingsError(f"dispatcher.dispatch {settings.dispatch!r} is none of auto, spread, pack")
    if name == "infaas":
        dispatch = settings.dispatch
        if dispatch == "auto":
            kinds = machines.kinds.values() if machines is not None and machines.provider != "off" else ()
            dispatch = "pack" if any(kind.maximum > kind.minimum for kind in kinds) else "spread"
        return InfaasPolicy(dispatch=dispatch, probe_share=settings.probe_share, on_demand=on_demand, goal=goal)
    if name == "round-robin":
        return RoundRobin(on_demand=on_demand)
    if name == "brute-force":
        return BruteForce(on_demand=on_demand, goal=goal)
    module, _, attribute = name.partition(":")
    if not attribute:
        raise SettingsError(
            f"dispatcher.policy {name!r} is none of infaas, round-robin, brute-force and no module:Class"
        )
    try:
        policy = getattr(importlib.import_module(module), attribute)()
    except (ImportError, AttributeError, TypeError) as error:
        raise SettingsError(f"dispatcher.policy {name!r} cannot be loaded: {error}") from error
    if not callable(getattr(policy, "select", None)) or not isinstance(getattr(policy, "name", None), str):
        raise SettingsError(
            f"dispatcher.policy {name!r} needs a `name` and a method select(ask, now, view) -> Decision"
        )
    found: SelectionPolicy = policy
    return found

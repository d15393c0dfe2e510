"""Policies by their names in the settings: built-in ones, and users' own classes by import path."""

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Collection
from typing import Any

import msgspec

from services.core.cost import Goal
from services.core.policy import METHODS, GuardedPolicy, goal_of
from services.core.selection.policy import SelectionPolicy
from services.core.settings import POLICIES, SCALERS, Settings
from services.shell.child import NoSuchCode, how_ended, kept_environment, kill_group, named, read_frame
from services.shell.host.process import dies_with_parent
from services.shell.settings import SettingsError

log = logging.getLogger(__name__)

# -- selection policies of several models (set-selection): users' classes, each in a process of its own

POLICY_PROCESS = "services.dispatcher.edge_policy_process"
TRIED_S = 20.0  # that the import of a class may take
LARGEST = 2**20  # bytes of what its process says of it
_ONE_THREAD = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


def policy_command(name: str) -> list[str]:
    """The command of the process of a user's class "module:Class"."""
    return dies_with_parent([sys.executable, "-P", "-m", POLICY_PROCESS, name], signal.SIGKILL)


def policy_environment() -> dict[str, str]:
    """What Python needs to find the same modules as we do, and no more."""
    path = os.pathsep.join(one for one in sys.path if one)
    return kept_environment(("HOME", "TMPDIR")) | dict.fromkeys(_ONE_THREAD, "1") | {"PYTHONPATH": path}


async def try_policy(name: str) -> str:
    """Why the class cannot be loaded here, as its process says; "": it can."""
    process = await asyncio.create_subprocess_exec(
        *policy_command(name),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
        env=policy_environment(),
        start_new_session=True,
    )
    assert process.stdout is not None, "it is a pipe"
    try:
        async with asyncio.timeout(TRIED_S):
            told = msgspec.msgpack.decode(await read_frame(process.stdout, LARGEST))
            return str(told.get("error", ""))
    except TimeoutError:
        return f"its import took longer than {TRIED_S:g} s"
    except asyncio.IncompleteReadError:
        return f"its process {how_ended(await process.wait())} in its import"
    finally:
        kill_group(process.pid)
        await process.communicate()  # to the end of its output: only then is the pipe closed


# -- policies of the settings


def own_object(setting: str, path: str, methods: Collection[str]) -> Any:
    """An object of the user's class "module:Class", made without arguments.

    Raises SettingsError, which names the setting and the remedy, if the class cannot be loaded or lacks one of these methods.
    """
    try:
        made = named(path)()
    except (NoSuchCode, ModuleNotFoundError, AttributeError) as error:
        raise SettingsError(f"{setting} {path!r} cannot be loaded: {error}") from error
    except (Exception, SystemExit) as error:  # whatever a user's module does when it is imported
        raise SettingsError(f"{setting} {path!r} cannot be loaded: {type(error).__name__}: {error}") from error
    absent = [method for method in methods if not callable(getattr(made, method, None))]
    if absent:
        what = "method" if len(absent) == 1 else "methods"
        raise SettingsError(f"{setting} {path!r} lacks the {what} {', '.join(absent)}: docs/scaling.md has an example")
    return made


def own_policy(setting: str, path: str, methods: Collection[str], *, strict: bool = False) -> GuardedPolicy:
    """The user's class at this path, as a policy that has these methods. strict: its errors are raised. Raises SettingsError."""
    made = own_object(setting, path, methods)
    if not isinstance(getattr(made, "name", None), str) or not made.name:
        raise SettingsError(f"{setting} {path!r} lacks a `name`, a text: it is recorded with what the policy decides")
    if goal_of(made) not in ("cost", "accuracy"):
        raise SettingsError(f"{setting} {path!r}: its `goal` must be cost or accuracy, not {made.goal!r}")
    return GuardedPolicy(made, path, log.warning, strict=strict)


def own_methods(setting: str, path: str) -> frozenset[str]:
    """Which decisions the user's class at this path makes: `select`, `scale`, or both. Raises SettingsError if it makes none."""
    made = own_policy(setting, path, ())
    found = frozenset(made.failures) & {"select", "scale"}
    if not found:
        raise SettingsError(
            f"{setting} {path!r} has none of the methods {', '.join(METHODS)} that decide: give it select or scale"
        )
    return found


def load_policy(settings: Settings, *, strict: bool = False) -> SelectionPolicy:
    """The policy that `dispatcher.policy` names: a built-in one, or a user's class. Raises SettingsError that says what is wrong.

    strict: errors of a user's class are raised; otherwise the built-in policy decides then.
    """
    name = settings.dispatcher.policy
    if name in POLICIES:
        return _builtin(name, settings)
    if ":" not in name:
        raise SettingsError(f"dispatcher.policy {name!r} is none of {', '.join(POLICIES)} and no module:Class")
    own = own_policy("dispatcher.policy", name, ("select",), strict=strict)
    own.builtin = _builtin("infaas", settings, own.goal)
    return own


def _builtin(name: str, settings: Settings, goal: Goal | None = None) -> SelectionPolicy:
    """A built-in policy with its options.

    dispatch: "auto" becomes "pack" where machines may come and go, so that some become empty, else "spread". on_demand: whether the
    policy may load a variant that no instance can serve; a static system has chosen its variants beforehand. goal: if not the settings'.
    """
    ours, machines = settings.dispatcher, settings.machines
    dispatch = ours.dispatch
    if dispatch == "auto":
        kinds = machines.kinds.values() if machines.provider != "off" else ()
        dispatch = "pack" if any(kind.maximum > kind.minimum for kind in kinds) else "spread"
    policy: SelectionPolicy = named(POLICIES[name])(
        dispatch=dispatch,
        probe_share=ours.probe_share,
        on_demand=settings.autoscaler.policy not in ("static", "replicate"),
        goal=goal or ("accuracy" if settings.autoscaler.accuracy_mean or settings.autoscaler.worth else settings.goal),
    )
    return policy


def load_scaling(settings: Settings, *, strict: bool = False) -> GuardedPolicy | None:
    """The same of `autoscaler.policy`. None: it names a built-in policy."""
    name = settings.autoscaler.policy
    return None if name in SCALERS else own_policy("autoscaler.policy", name, ("scale",), strict=strict)

"""[settings]: those of the services, by section, for all policies or for one; a scenario's own defaults beneath them."""

from collections.abc import Mapping
from typing import Any

import msgspec

from services.core.placement import OVERCOMMIT
from services.shell.checks import faults
from services.shell.origins import Origins
from services.shell.settings import Settings
from services.simulation.scenario.place import Place, ScenarioError
from services.simulation.scenario.table import Table, table_at

# What a scenario says of a device's memory is for instances: nothing else runs there.
DEFAULTS: Mapping[str, Any] = {"monitor": {"memory_share": 1.0, "cores_overcommit": OVERCOMMIT}}
SECTIONS = ("goal", "dispatcher", "executor", "monitor", "autoscaler", "machines", "jobs", "prices")
_NOT_HERE = "has no meaning in a scenario: leave it out"
_ELSEWHERE = {
    **dict.fromkeys(("prefix", "data_dir", "log_level", "bus", "store", "registrar"), _NOT_HERE),
    "worker": "is said in [[worker]] blocks: leave it out",
}
_SAID = {
    ("machines", "kinds"): "is said in [[worker]] blocks: leave it out",
    ("machines", "provider"): "has no meaning in a scenario, whose machines are simulated: leave it out",
    ("autoscaler", "choice"): "is said in [baseline], or in a [[policy]]'s choice: leave it out",
}


def tree_at(value: Any, place: Place, *, of_one: bool = False) -> dict[str, Any]:
    """Settings as they stand in the file, checked by themselves; raises ScenarioError. of_one: of one policy, not of all."""
    tree = Table(value, place, SECTIONS, _ELSEWHERE).content
    for section in (key for key in tree if key != "goal"):
        for key in table_at(tree[section], place.at(section)):
            if (section, key) in _SAID:
                place.at(section).at(key).refuse(_SAID[section, key])
    if "goal" in tree and not of_one:
        place.at("goal").refuse("is said in [scenario], as objective; or in the settings of a single [[policy]]")
    settings_of(place, DEFAULTS, tree)
    return tree


def settings_of(place: Place, *trees: Mapping[str, Any]) -> Settings:
    """Trees over each other, later ones win. place: that refusals name."""
    tree: dict[str, Any] = {}
    for one in trees:
        tree = _over(tree, one)
    try:
        settings = msgspec.convert(tree, Settings)
    except msgspec.ValidationError as error:
        raise _refusal(place, _told(tree, error)) from error
    except (OverflowError, ValueError, TypeError, RecursionError) as error:
        place.refuse(f"cannot be read: {error}")
    for fault in faults(settings):
        raise _refusal(place, f"{fault.key}: {fault.reason}")
    return settings


def _refusal(place: Place, told: str) -> ScenarioError:
    """Without what the services take where nothing is said: in a scenario that may be something else."""
    return ScenarioError(f"{place.file}: {place.key}.{told.partition('; left out, it is ')[0]}")


def _told(tree: dict[str, Any], error: msgspec.ValidationError) -> str:
    try:
        return Origins("").of_invalid(Settings, tree, error)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError):  # a place that has no such path
        reason, _, at = str(error).partition(" - at ")
        return f"{at.strip('`$.')}: {reason[:1].lower()}{reason[1:]}"


def _over(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    found = dict(below)
    for key, value in above.items():
        under = found.get(key)
        found[key] = _over(under, value) if isinstance(under, Mapping) and isinstance(value, Mapping) else value
    return found

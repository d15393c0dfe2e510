"""Which policies run, with their machines, hardware, choices and settings: `policies` of [scenario], [[policy]] blocks, [settings].

`start` of a [[policy]] names all machines that run at time 0; kinds that it leaves out have none. `max` and `min` change the kinds
that they name. A policy limited to some hardware has no machines without it, unless its `start` names them. Static systems add no
machines: they keep those of time 0.
"""

import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, cast, get_args

import msgspec
from msgspec.structs import replace

from bus.fields import faults
from services.core.pipelines.planners import POLICIES as PLANNERS
from services.core.placement import OVERCOMMIT
from services.core.settings import POLICIES, Settings
from services.core.settings import StaticVariant as ChoiceSetting
from services.shell.policies import own_methods
from services.shell.settings import Origins, SettingsError
from services.simulation.scenario.baseline import Peaks, choose
from services.simulation.scenario.catalogue import Catalogue
from services.simulation.scenario.machines import MOST, MachineBlock, devices_of
from services.simulation.scenario.model import (
    MachineSpec,
    Objective,
    PolicySpec,
    StaticChoice,
)
from services.simulation.scenario.toml import (
    Location,
    ScenarioError,
    TomlTable,
    list_at,
    meant,
    one_of,
    shown,
    table_at,
    text_at,
    whole_at,
)

BASES = {
    **{name: name for name in POLICIES},
    "infaas-ilp": "infaas",  # an older name
    "static": "static",
    "clipper+": "static",
    "replicate": "replicate",
    "sm+": "replicate",
}
PLANNED = {name: name for name in PLANNERS}  # they plan the pipelines of a scenario
_CHOSEN = ("static", "replicate")
KEYS = ("name", "base", "hardware", "start", "min", "max", "choice", "settings")


class Policies:
    """A scenario's policies. folder: the file's, in which users' own modules are found too."""

    def __init__(
        self,
        scenario: TomlTable,
        machines: list[MachineBlock],
        catalogue: Catalogue,
        prices: Mapping[str, float],
        peaks: Peaks,
        folder: Path,
        objective: Objective,
    ) -> None:
        self._machines, self._things, self._prices, self._peaks = machines, catalogue, prices, peaks
        self._folder, self._objective = folder, objective
        self._common = tree_at(scenario.content.get("settings", {}), scenario.at("settings"))
        self._baseline = self._choices(scenario.table("baseline"), scenario.at("baseline"), None)
        self._blocks: dict[str, TomlTable] = {}
        for block in scenario.blocks("policy", KEYS):
            name = block.text("name")
            if name in self._blocks:
                block.at("name").refuse(f"{name} occurs twice: results are named by it")
            self._blocks[name] = block
        self._own = {name: self._of_block(name, block) for name, block in self._blocks.items()}

    def listed(self, names: Any, location: Location) -> tuple[PolicySpec, ...]:
        """The policies that the file names, then its [[policy]] blocks. names: None if it names none."""
        wanted = [
            text_at(one, location.at(i)) for i, one in enumerate(list_at([] if names is None else names, location))
        ]
        if not wanted and not self._own:
            if names is not None:
                location.refuse("must name at least one policy, or be left out")
            wanted = ["infaas"]
        wanted += [name for name in self._own if name not in wanted]
        return self.named(wanted, location)

    def named(self, names: Sequence[str], location: Location) -> tuple[PolicySpec, ...]:
        """Exactly these policies. Raises ScenarioError, which names the location."""
        for i, name in enumerate(names):
            if name in names[:i]:
                location.at(i).refuse(f"{name} occurs twice: results are named by it")
        return tuple(self._own.get(name) or self._of_base(name, name, location.at(i)) for i, name in enumerate(names))

    def started(self) -> dict[str, int]:
        """By kind of machine, the most that run at time 0 under any policy of the file."""
        starts = {one.spec.kind: one.spec.start for one in self._machines}
        for machine in (machine for policy in self._own.values() for machine in policy.machines):
            starts[machine.kind] = max(starts[machine.kind], machine.start)
        return starts

    def _of_base(self, name: str, base: str, location: Location) -> PolicySpec:
        """A built-in policy or a user's own class, without a block."""
        return self._spec(name, self._base(base, location), None, None, {}, location)

    def _of_block(self, name: str, block: TomlTable) -> PolicySpec:
        known = BASES.keys() | PLANNED
        base = self._base(block.text("base", name if name in known else None), block.at("base"))
        hardware: frozenset[str] | None = None
        if "hardware" in block:
            kinds = devices_of(self._machines)
            location = block.at("hardware")
            hardware = frozenset(
                one_of(one, location.at(i), kinds, "kind of device") for i, one in enumerate(block.items("hardware"))
            )
            if not hardware:
                location.refuse("must name at least one kind of device, or be left out")
        tree = tree_at(block.content.get("settings", {}), block.at("settings"), of_one=True)
        return self._spec(name, base, hardware, block, tree, block.at("settings"))

    def _spec(
        self,
        name: str,
        base: str,
        hardware: frozenset[str] | None,
        block: TomlTable | None,
        tree: Mapping[str, Any],
        location: Location,
    ) -> PolicySpec:
        settings = settings_of(location, DEFAULTS, {"goal": self._objective}, self._common, base_tree(base), tree)
        machines = self._started(block, hardware, fixed=settings.autoscaler.policy == "static")
        spec = PolicySpec(name=name, base=base, hardware=hardware, machines=machines, choice={}, settings=settings)
        chosen_by = settings.autoscaler.policy
        own = self._choices(block.table("choice"), block.at("choice"), hardware) if block is not None else {}
        if chosen_by not in _CHOSEN:
            if own and block is not None:
                block.at("choice").refuse(f"means nothing with base {base!r}, which chooses by itself: leave it out")
            return spec
        variants = {one.variant: one for one in self._things.variants}
        given = {
            app: one for app, one in self._baseline.items()
            if hardware is None or variants[one.variant].hardware in hardware
        } | own  # fmt: skip
        choice = choose(
            replace(spec, base=chosen_by), given, self._things.serving, self._things.needs, self._prices, self._peaks
        )
        if chosen_by == "replicate":
            choice = {app: own.get(app) or StaticChoice(one.variant, 1) for app, one in choice.items()}
        kept = {app: ChoiceSetting(variant=one.variant, instances=one.instances) for app, one in choice.items()}
        settings = replace(settings, autoscaler=replace(settings.autoscaler, choice=kept))
        return replace(spec, choice=choice, settings=settings)

    def _base(self, base: str, location: Location) -> str:
        return PLANNED.get(base) or base_of(base, (*PLANNED, *self._blocks), self._folder, location)

    def _choices(
        self, table: Mapping[str, Any], location: Location, hardware: frozenset[str] | None
    ) -> dict[str, StaticChoice]:
        found: dict[str, StaticChoice] = {}
        for app, value in table.items():
            at = location.at(app)
            one_of(app, at, self._things.serving, "app")
            block = TomlTable(value, at, ("variant", "instances"))
            serving = {one.variant: one for one in self._things.serving[app]}
            variant = one_of(block.get("variant"), block.at("variant"), serving, f"variant of {app}")
            kind = serving[variant].hardware
            if hardware is not None and kind not in hardware:
                block.at("variant").refuse(f"{variant} runs on {kind}, which this policy's hardware leaves out")
            found[app] = StaticChoice(variant, block.whole("instances", 1, 1, 10**6))
        return found

    def _started(
        self, block: TomlTable | None, hardware: frozenset[str] | None, *, fixed: bool
    ) -> tuple[MachineSpec, ...]:
        """The policy's machines."""
        start, least, most = (self._counts(block, key) for key in ("start", "min", "max"))
        found = []
        for one in (machine.spec for machine in self._machines):
            useless = hardware is not None and not any(device.kind in hardware for device in one.devices)
            given = start if start is not None else {} if useless else {one.kind: one.start}
            first = given.get(one.kind, 0)
            upper = (most or {}).get(one.kind, 0 if useless and start is None else max(first, one.maximum))
            if upper < first:
                assert block is not None  # a block's max alone is below
                block.at("max").at(one.kind).refuse(f"must be at least what runs at time 0 ({first}), not {upper}")
            lower = (least or {}).get(one.kind, min(one.minimum, first))
            if lower > first:
                assert block is not None  # a block's min alone is above
                block.at("min").at(one.kind).refuse(f"must be at most what runs at time 0 ({first}), not {lower}")
            if fixed:
                lower = upper = first
            found.append(replace(one, start=first, minimum=lower, maximum=upper))
        return tuple(found)

    def _counts(self, block: TomlTable | None, key: str) -> dict[str, int] | None:
        if block is None or key not in block:
            return None
        kinds = [one.spec.kind for one in self._machines]
        location = block.at(key)
        return {
            one_of(kind, location.at(kind), kinds, "kind of [[worker]]"): whole_at(count, location.at(kind), 0, MOST)
            for kind, count in block.table(key).items()
        }


def base_of(name: str, blocks: Collection[str], folder: Path, location: Location) -> str:
    """The base that a name stands for: a built-in one, or a user's class, which is imported, also from `folder`.

    blocks: other names that may have been meant. Raises ScenarioError, which names the location.
    """
    if name in BASES:
        return BASES[name]
    if ":" not in name:
        known = [*BASES, *blocks]
        location.refuse(f"there is no policy {shown(name)}{meant(name, known)}; a class of your own is module:Class")
    path = str(folder.resolve())
    added = path not in sys.path
    if added:
        sys.path.append(path)
    try:
        own_methods("policy", name)
    except SettingsError as error:
        location.refuse(str(error).removeprefix("policy "))
    finally:
        if added and path in sys.path:
            sys.path.remove(path)
    return name


def base_tree(base: str) -> dict[str, Any]:
    """The settings that a base stands for. Everything else is the services' default."""
    decides = own_methods("policy", base) if ":" in base else ()
    scaling: dict[str, Any] = {"policy": base if base in _CHOSEN or "scale" in decides else "infaas"}
    selection = base if base in POLICIES or "select" in decides else "infaas"
    return {"dispatcher": {"policy": selection}, "autoscaler": scaling}


# -- settings: those of the services, for all policies or for one, over a scenario's own defaults

# A scenario states the memory that instances may use. Nothing else runs on the device.
DEFAULTS: Mapping[str, Any] = {"monitor": {"memory_share": 1.0, "cores_overcommit": OVERCOMMIT}}
SECTIONS = ("goal", "dispatcher", "selection", "executor", "monitor", "autoscaler", "machines", "jobs", "prices")
_NOT_HERE = "has no meaning in a scenario: leave it out"
_ELSEWHERE = {
    **dict.fromkeys(("prefix", "data_dir", "log_level", "bus", "store", "registrar"), _NOT_HERE),
    "worker": "belongs in [[worker]] blocks: leave it out",
}
_SAID = {
    ("machines", "kinds"): "belongs in [[worker]] blocks: leave it out",
    ("machines", "provider"): "has no meaning in a scenario, whose machines are simulated: leave it out",
    ("autoscaler", "choice"): "belongs in [baseline], or in a [[policy]]'s choice: leave it out",
}


def tree_at(value: Any, location: Location, *, of_one: bool = False) -> dict[str, Any]:
    """A [settings] table, checked. Raises ScenarioError. of_one: of one policy, not of all."""
    tree = TomlTable(value, location, SECTIONS, _ELSEWHERE).content
    for section in (key for key in tree if key != "goal"):
        for key in table_at(tree[section], location.at(section)):
            if (section, key) in _SAID:
                location.at(section).at(key).refuse(_SAID[section, key])
    if "goal" in tree and not of_one:
        location.at("goal").refuse("belongs in [scenario], as objective, or in the settings of a single [[policy]]")
    settings_of(location, DEFAULTS, tree)
    return tree


def settings_of(location: Location, *trees: Mapping[str, Any]) -> Settings:
    """Settings from trees; later ones win. location: named in refusals."""
    tree: dict[str, Any] = {}
    for one in trees:
        tree = _over(tree, one)
    try:
        settings = msgspec.convert(tree, Settings)
    except msgspec.ValidationError as error:
        raise _refusal(location, _explained(tree, error)) from error
    except (OverflowError, ValueError, TypeError, RecursionError) as error:
        location.refuse(f"cannot be read: {error}")
    for fault in faults(settings):
        raise _refusal(location, f"{fault.key}: {fault.reason}")
    return settings


def _refusal(location: Location, text: str) -> ScenarioError:
    """A refusal without the services' default, which may be another one in a scenario."""
    said = text.partition("; left out, it is ")[0]
    return ScenarioError(f"{location.file}: {location.key}.{said}" if location.key else f"{location.file}: {said}")


def _explained(tree: dict[str, Any], error: msgspec.ValidationError) -> str:
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


def objective_of(header: TomlTable) -> Objective:
    """Of the [scenario] table; raises ScenarioError."""
    known = get_args(Objective)
    return cast(Objective, one_of(header.content.get("objective", "cost"), header.at("objective"), known, "objective"))

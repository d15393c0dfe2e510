"""Which policies run, with their machines, hardware, choices and settings: `policies` of [scenario], [[policy]] blocks, [settings].

`start` of a [[policy]] names all machines that run at time 0; kinds that it leaves out have none. `max` and `min` change the kinds
that they name. A policy limited to some hardware has no machines without it, unless its `start` names them. Static systems add no
machines: they keep those of time 0.
"""

import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from services.core.pipelines.planners import POLICIES as PLANNERS
from services.core.placement import OVERCOMMIT
from services.core.settings import POLICIES, Settings, StaticVariant
from services.core.toml import Location, checked_at, meant_or_all, one_of, shown, table_at
from services.shell.policies import own_methods
from services.shell.settings import SettingsError
from services.simulation.scenario.baseline import Peaks, StaticChoice
from services.simulation.scenario.catalogue import Catalogue
from services.simulation.scenario.machines import Count, MachineBlock, devices_of
from services.simulation.scenario.model import MachineSpec, Objective, PolicySpec

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
Counts = dict[str, Count]


class PolicyBlock(Struct, frozen=True, kw_only=True, rename={"minimum": "min", "maximum": "max"}):
    """A [[policy]] block."""

    name: str
    base: str | None = None
    hardware: list[str] | None = None
    start: Counts | None = None
    minimum: Counts = {}
    maximum: Counts = {}
    choice: dict[str, StaticVariant] = {}
    settings: dict[str, Any] = {}


class PolicyFile(Struct, frozen=True, kw_only=True):
    """The tables of a file that say which policies run."""

    policy: list[PolicyBlock] = []
    baseline: dict[str, StaticVariant] = {}
    settings: dict[str, Any] = {}


class Policies:
    """A scenario's policies. folder: the file's, in which users' own modules are found too."""

    def __init__(
        self,
        file: PolicyFile,
        location: Location,
        machines: list[MachineBlock],
        catalogue: Catalogue,
        prices: Mapping[str, float],
        peaks: Peaks,
        folder: Path,
        objective: Objective,
    ) -> None:
        self._machines, self._things, self._prices, self._peaks = machines, catalogue, prices, peaks
        self._folder, self._objective = folder, objective
        self._common = tree_at(file.settings, location.at("settings"))
        self._baseline = file.baseline
        self._check_choices(file.baseline, location.at("baseline"), None)
        self._blocks = {block.name: block for block in file.policy}
        self._own: dict[str, PolicySpec] = {}
        for i, block in enumerate(file.policy):
            at = location.at("policy").at(i)
            if block.name in self._own:
                at.at("name").refuse(f"{block.name} occurs twice: results are named by it")
            self._own[block.name] = self._of_block(block, at)

    def listed(self, names: Sequence[str] | None, location: Location) -> tuple[PolicySpec, ...]:
        """The policies that the file names, then its [[policy]] blocks. names: None if it names none."""
        wanted = list(names or ())
        if not wanted and not self._own:
            if names is not None:
                location.refuse("must name at least one policy, or be left out")
            wanted = ["infaas"]
        wanted += [name for name in self._own if name not in wanted]
        return self.named(wanted, location)

    def named(self, names: Sequence[str], location: Location) -> tuple[PolicySpec, ...]:
        """Exactly these policies. Raises TomlError, which names the location."""
        for i, name in enumerate(names):
            if name in names[:i]:
                location.at(i).refuse(f"{name} occurs twice: results are named by it")
        return tuple(
            self._own.get(name) or self._spec(PolicyBlock(name=name), self._base(name, at), None, at)
            for name, at in ((name, location.at(i)) for i, name in enumerate(names))
        )

    def started(self) -> dict[str, int]:
        """By kind of machine, the most that run at time 0 under any policy of the file."""
        starts = {one.spec.kind: one.spec.start for one in self._machines}
        for machine in (machine for policy in self._own.values() for machine in policy.machines):
            starts[machine.kind] = max(starts[machine.kind], machine.start)
        return starts

    def _of_block(self, block: PolicyBlock, at: Location) -> PolicySpec:
        base = block.base or (block.name if block.name in BASES.keys() | PLANNED else None)
        if base is None:
            at.at("base").refuse("is missing")
        base = self._base(base, at.at("base"))
        kinds = devices_of(self._machines)
        for i, one in enumerate(block.hardware or ()):
            one_of(one, at.at("hardware").at(i), kinds, "kind of device")
        if block.hardware == []:
            at.at("hardware").refuse("must name at least one kind of device, or be left out")
        workers = {one.spec.kind for one in self._machines}
        for key, counts in (("start", block.start or {}), ("min", block.minimum), ("max", block.maximum)):
            for kind in counts:
                one_of(kind, at.at(key).at(kind), workers, "kind of [[worker]]")
        tree_at(block.settings, at.at("settings"), of_one=True)
        return self._spec(block, base, at, at.at("settings"))

    def _spec(self, block: PolicyBlock, base: str, at: Location | None, location: Location) -> PolicySpec:
        """at: of the block; None: there is none. location: of its settings."""
        hardware, tree = None if block.hardware is None else frozenset(block.hardware), block.settings
        settings = settings_of(location, DEFAULTS, {"goal": self._objective}, self._common, base_tree(base), tree)
        machines = self._started(block, at, hardware, fixed=settings.autoscaler.policy == "static")
        spec = PolicySpec(name=block.name, base=base, hardware=hardware, machines=machines, settings=settings)
        chosen_by, own = settings.autoscaler.policy, block.choice
        if at is not None:
            self._check_choices(own, at.at("choice"), hardware)
            if own and chosen_by not in _CHOSEN:
                at.at("choice").refuse(f"means nothing with base {base!r}, which chooses by itself: leave it out")
        if chosen_by not in _CHOSEN:
            return spec
        variants = {one.variant: one for one in self._things.variants}
        given = {
            app: one for app, one in self._baseline.items()
            if hardware is None or variants[one.variant].hardware in hardware
        } | own  # fmt: skip
        static = StaticChoice(replace(spec, base=chosen_by), self._prices, self._peaks)
        choice = static.of(given, self._things.serving, self._things.needs)
        if chosen_by == "replicate":
            choice = {app: own.get(app) or StaticVariant(variant=one.variant) for app, one in choice.items()}
        settings = replace(settings, autoscaler=replace(settings.autoscaler, choice=choice))
        return replace(spec, settings=settings)

    def _base(self, base: str, location: Location) -> str:
        return PLANNED.get(base) or base_of(base, (*PLANNED, *self._blocks), self._folder, location)

    def _check_choices(
        self, choices: Mapping[str, StaticVariant], location: Location, hardware: frozenset[str] | None
    ) -> None:
        for app, one in choices.items():
            at = location.at(app)
            one_of(app, at, self._things.serving, "app")
            kinds = {record.variant: record.hardware for record in self._things.serving[app]}
            kind = kinds[one_of(one.variant, at.at("variant"), kinds, f"variant of {app}")]
            if hardware is not None and kind not in hardware:
                at.at("variant").refuse(f"{one.variant} runs on {kind}, which this policy's hardware leaves out")

    def _started(
        self, block: PolicyBlock, at: Location | None, hardware: frozenset[str] | None, *, fixed: bool
    ) -> tuple[MachineSpec, ...]:
        """The policy's machines."""
        found = []
        for one in (machine.spec for machine in self._machines):
            useless = hardware is not None and not any(device.kind in hardware for device in one.devices)
            given = block.start if block.start is not None else {} if useless else {one.kind: one.start}
            first = given.get(one.kind, 0)
            upper = block.maximum.get(one.kind, 0 if useless and block.start is None else max(first, one.maximum))
            lower = block.minimum.get(one.kind, min(one.minimum, first))
            if at is not None and upper < first:
                at.at("max").at(one.kind).refuse(f"must be at least what runs at time 0 ({first}), not {upper}")
            if at is not None and lower > first:
                at.at("min").at(one.kind).refuse(f"must be at most what runs at time 0 ({first}), not {lower}")
            if fixed:
                lower = upper = first
            found.append(replace(one, start=first, minimum=lower, maximum=upper))
        return tuple(found)


def base_of(name: str, blocks: Collection[str], folder: Path, location: Location) -> str:
    """The base that a name stands for: a built-in one, or a user's class, which is imported, also from `folder`.

    blocks: other names that may have been meant_or_all. Raises TomlError, which names the location.
    """
    if name in BASES:
        return BASES[name]
    if ":" not in name:
        known = [*BASES, *blocks]
        location.refuse(
            f"there is no policy {shown(name)}{meant_or_all(name, known)}; a class of your own is module:Class"
        )
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


def tree_at(tree: dict[str, Any], location: Location, *, of_one: bool = False) -> dict[str, Any]:
    """A [settings] table, checked. Raises TomlError. of_one: of one policy, not of all."""
    for section, value in tree.items():
        if section not in SECTIONS:
            location.at(section).refuse(
                _ELSEWHERE.get(section) or f"there is no such key{meant_or_all(section, SECTIONS)}"
            )
        for key in () if section == "goal" else table_at(value, location.at(section)):
            if (section, key) in _SAID:
                location.at(section).at(key).refuse(_SAID[section, key])
    if not of_one:
        if "goal" in tree:
            location.at("goal").refuse("belongs in [scenario], as objective, or in the settings of a single [[policy]]")
        for section in ("dispatcher", "autoscaler"):
            if "policy" in tree.get(section, {}):  # the base of each policy says it
                location.at(section).at("policy").refuse("belongs in the settings of a single [[policy]]: leave it out")
    settings_of(location, DEFAULTS, tree)
    return tree


def common_of(tree: Mapping[str, Any]) -> dict[str, Any]:
    """What of a system's settings holds for all policies of a scenario: the rest is each policy's, or a scenario says it itself."""
    own = {*_SAID, ("dispatcher", "policy"), ("autoscaler", "policy")}
    return {
        section: {key: value for key, value in tree[section].items() if (section, key) not in own}
        for section in SECTIONS
        if section != "goal" and section in tree
    }


def settings_of(location: Location, *trees: Mapping[str, Any]) -> Settings:
    """Settings from trees; later ones win. location: named in refusals."""
    tree: dict[str, Any] = {}
    for one in trees:
        tree = _over(tree, one)
    return checked_at(tree, location, Settings)


def _over(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    found = dict(below)
    for key, value in above.items():
        under = found.get(key)
        found[key] = _over(under, value) if isinstance(under, Mapping) and isinstance(value, Mapping) else value
    return found

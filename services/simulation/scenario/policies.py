"""Which policies run, each with its machines, hardware, choices and settings: `policies` of [scenario], and [[policy]] blocks.

start of a [[policy]] names all machines that run at time 0: kinds that it leaves out have none. max and min change the kinds
that they name. A policy limited to some hardware has no machines without any of it, unless its start says so. Static systems
add no machines: their machines are those at time 0.
"""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from services.dispatcher.edge import load_policy
from services.shell.settings import Choice as ChoiceSetting
from services.shell.settings import DispatcherSettings, SettingsError
from services.simulation.scenario.catalogue import Catalogue
from services.simulation.scenario.choices import Peaks, choose
from services.simulation.scenario.extras import devices_of
from services.simulation.scenario.knobs import DEFAULTS, settings_of, tree_at
from services.simulation.scenario.machines import MOST, Machine
from services.simulation.scenario.model import Choice, MachineSpec, Objective, PolicySpec
from services.simulation.scenario.place import Place, meant, shown
from services.simulation.scenario.table import Table, list_at, one_of, text_at, whole_at

BASES = {
    "infaas": "infaas",
    "infaas-ilp": "infaas-ilp",
    "static": "static",
    "clipper+": "static",
    "replicate": "replicate",
    "sm+": "replicate",
    "round-robin": "round-robin",
    "brute-force": "brute-force",
}
_CHOSEN = ("static", "replicate")
KEYS = ("name", "base", "hardware", "start", "min", "max", "choice", "settings")


class Policies:
    """folder: where the file stands, in which user's own modules are found too. The others: of the scenario."""

    def __init__(
        self,
        scenario: Table,
        machines: list[Machine],
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
        self._blocks: dict[str, Table] = {}
        for block in scenario.blocks("policy", KEYS):
            name = block.text("name")
            if name in self._blocks:
                block.at("name").refuse(f"{name} is there twice: results are named by it")
            self._blocks[name] = block
        self._own = {name: self._of_block(name, block) for name, block in self._blocks.items()}

    def listed(self, names: Any, place: Place) -> tuple[PolicySpec, ...]:
        """Those that the file names, then its [[policy]] blocks. names: None where it names none."""
        wanted = [text_at(one, place.at(i)) for i, one in enumerate(list_at([] if names is None else names, place))]
        if not wanted and not self._own:
            if names is not None:
                place.refuse("must name at least one policy, or be left out")
            wanted = ["infaas"]
        wanted += [name for name in self._own if name not in wanted]
        return self.named(wanted, place)

    def named(self, names: Sequence[str], place: Place) -> tuple[PolicySpec, ...]:
        """Exactly these; raises ScenarioError that names the place."""
        for i, name in enumerate(names):
            if name in names[:i]:
                place.at(i).refuse(f"{name} is there twice: results are named by it")
        return tuple(self._own.get(name) or self._of_base(name, name, place.at(i)) for i, name in enumerate(names))

    def started(self) -> dict[str, int]:
        """By kind of machine, how many run at time 0 under any policy that comes with the file or may be asked for."""
        starts = {one.spec.kind: one.spec.start for one in self._machines}
        for machine in (machine for policy in self._own.values() for machine in policy.machines):
            starts[machine.kind] = max(starts[machine.kind], machine.start)
        return starts

    def _of_base(self, name: str, base: str, place: Place) -> PolicySpec:
        """A policy as it comes."""
        return self._spec(name, self._base(base, place), None, None, {}, place)

    def _of_block(self, name: str, block: Table) -> PolicySpec:
        base = self._base(block.text("base", name if name in BASES else None), block.at("base"))
        hardware: frozenset[str] | None = None
        if "hardware" in block:
            kinds = devices_of(self._machines)
            place = block.at("hardware")
            hardware = frozenset(
                one_of(one, place.at(i), kinds, "kind of device") for i, one in enumerate(block.items("hardware"))
            )
            if not hardware:
                place.refuse("must name at least one kind of device, or be left out")
        tree = tree_at(block.content.get("settings", {}), block.at("settings"), of_one=True)
        return self._spec(name, base, hardware, block, tree, block.at("settings"))

    def _spec(
        self,
        name: str,
        base: str,
        hardware: frozenset[str] | None,
        block: Table | None,
        tree: Mapping[str, Any],
        place: Place,
    ) -> PolicySpec:
        settings = settings_of(place, DEFAULTS, {"goal": self._objective}, self._common, _base_tree(base), tree)
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
            choice = {app: own.get(app) or Choice(one.variant, 1) for app, one in choice.items()}
        kept = {app: ChoiceSetting(variant=one.variant, instances=one.instances) for app, one in choice.items()}
        settings = replace(settings, autoscaler=replace(settings.autoscaler, choice=kept))
        return replace(spec, choice=choice, settings=settings)

    def _base(self, base: str, place: Place) -> str:
        if base in BASES:
            return BASES[base]
        if ":" not in base:
            known = [*BASES, *self._blocks]
            place.refuse(f"there is no policy {shown(base)}{meant(base, known)}; a class of your own is module:Class")
        folder = str(self._folder.resolve())
        added = folder not in sys.path
        if added:
            sys.path.append(folder)
        try:
            load_policy(DispatcherSettings(policy=base))
        except SettingsError as error:
            place.refuse(str(error).removeprefix("dispatcher.policy "))
        except (Exception, SystemExit) as error:  # whatever a user's module does when it is imported
            place.refuse(f"{shown(base)} cannot be loaded: {type(error).__name__}: {error}")
        finally:
            if added and folder in sys.path:
                sys.path.remove(folder)
        return base

    def _choices(self, table: Mapping[str, Any], place: Place, hardware: frozenset[str] | None) -> dict[str, Choice]:
        found: dict[str, Choice] = {}
        for app, value in table.items():
            at = place.at(app)
            one_of(app, at, self._things.needs, "app")
            block = Table(value, at, ("variant", "instances"))
            serving = {one.variant: one for one in self._things.serving[app]}
            variant = one_of(block.get("variant"), block.at("variant"), serving, f"variant of {app}")
            kind = serving[variant].hardware
            if hardware is not None and kind not in hardware:
                block.at("variant").refuse(f"{variant} runs on {kind}, which this policy's hardware leaves out")
            found[app] = Choice(variant, block.whole("instances", 1, 1, 10**6))
        return found

    def _started(self, block: Table | None, hardware: frozenset[str] | None, *, fixed: bool) -> tuple[MachineSpec, ...]:
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

    def _counts(self, block: Table | None, key: str) -> dict[str, int] | None:
        if block is None or key not in block:
            return None
        kinds = [one.spec.kind for one in self._machines]
        place = block.at(key)
        return {
            one_of(kind, place.at(kind), kinds, "kind of [[worker]]"): whole_at(count, place.at(kind), 0, MOST)
            for kind, count in block.table(key).items()
        }


def _base_tree(base: str) -> dict[str, Any]:
    """What a base means in settings."""
    scaling = base if base in _CHOSEN else "infaas"
    selection = base if base not in {*_CHOSEN, "infaas-ilp"} else "infaas"
    solver = "ilp" if base == "infaas-ilp" else "greedy"
    return {"dispatcher": {"policy": selection}, "autoscaler": {"policy": scaling, "solver": solver}}

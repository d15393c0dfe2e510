"""[[worker]] blocks and [cost]: kinds of machine, what they have, how many there are, and what they cost.

devices counts devices by kind. `cpu = 8` is one device of 8 cores; `inferentia = 1` is one chip of 4 cores, each of which holds
one instance; each device of another kind runs one batch at a time. resources says what they have:

    <kind>_memory_gb   memory of each device of that kind; default: unlimited. `memory_gb` is that of the CPU, or of the only kind
    cpu_cores          cores beside accelerators: a device `cpu`, unless devices names one
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from msgspec.structs import replace

from services.core.cost import PER_CORE, price_per_hour
from services.core.emulation import KINDS
from services.core.placement import Device
from services.simulation.scenario.model import CostSpec, MachineSpec
from services.simulation.scenario.toml import TomlTable, name_at, number_at, one_of, whole_at

KEYS = ("kind", "devices", "resources", "price_per_hour", "boot_s", "start", "min", "max")
UNLIMITED_MB = 1e7  # 10 TB: more than any device has, and small enough for sums over many devices
MB = 1024.0  # of a GB
LONGEST_KIND = 40  # letters; the names of workers are made from it
MOST = 10_000  # machines of one kind
_MOST_CORES = 4096
_MOST_DEVICES = 64
_CHIP_CORES = {kind: spec.cores for kind, spec in KINDS.items() if spec.cores > 1}


class MachineBlock(NamedTuple):
    """A [[worker]] block. price: US$ per hour; None: the price list's."""

    spec: MachineSpec
    price: float | None
    block: TomlTable


def machines_of(scenario: TomlTable) -> list[MachineBlock]:
    """The kinds of machine. Raises ScenarioError."""
    blocks = scenario.blocks("worker", KEYS)
    if not blocks:
        scenario.at("worker").refuse("there must be at least one [[worker]]: queries need a machine")
    found: list[MachineBlock] = []
    for block in blocks:
        one = _machine(block)
        if any(one.spec.kind == other.spec.kind for other in found):
            block.at("kind").refuse(f"{one.spec.kind} occurs twice: write one block, with start and max")
        found.append(one)
    return found


def _machine(block: TomlTable) -> MachineBlock:
    kind = block.name("kind")
    if len(kind) > LONGEST_KIND:
        block.at("kind").refuse(f"must be at most {LONGEST_KIND} letters long: the names of workers are made from it")
    price = block.maybe("price_per_hour", most=1e9)
    start = block.whole("start", 0, 0, MOST)
    most = block.whole("max", max(start, block.whole("min", 0, 0, MOST)), 0, MOST)
    if most < start:
        block.at("max").refuse(f"must be at least start ({start}), not {most}")
    least = block.whole("min", min(1, start), 0, MOST)
    if least > most:
        block.at("min").refuse(f"must be at most max ({most}), not {least}")
    if start < least:
        block.at("start").refuse(f"must be at least min ({least}), not {start}")
    spec = MachineSpec(
        kind=kind,
        devices=_devices(block),
        price_per_hour=price or 0.0,
        boot_s=block.number("boot_s", 0.0, most=1e7),
        start=start,
        minimum=least,
        maximum=most,
    )
    return MachineBlock(spec, price, block)


def _devices(block: TomlTable) -> tuple[Device, ...]:
    counts = {name_at(kind, block.at("devices").at(kind)): count for kind, count in block.table("devices").items()}
    if not counts:
        block.at("devices").refuse("must name at least one device, as { cpu = 8 } or { gpu = 1 }")
    resources = block.table("resources")
    cores = resources.get("cpu_cores")
    kinds: dict[str, int] = {}
    if cores is not None:
        kinds["cpu"] = whole_at(cores, block.at("resources").at("cpu_cores"), 0, _MOST_CORES)
    for kind, count in counts.items():
        kinds[kind] = whole_at(count, block.at("devices").at(kind), 1, _MOST_CORES if kind == "cpu" else _MOST_DEVICES)
    if cores is not None and "cpu" in counts and cores != kinds["cpu"]:
        block.at("resources").at("cpu_cores").refuse("says another number than devices.cpu: leave it out")
    kinds = {kind: count for kind, count in kinds.items() if count}
    memory = _memory(block, resources, kinds)
    return tuple(device for kind, count in kinds.items() for device in _of_kind(kind, count, memory.get(kind)))


def _memory(block: TomlTable, resources: dict[str, Any], kinds: dict[str, int]) -> dict[str, float]:
    """MB of each device, by kind."""
    location = block.at("resources")
    known = {f"{kind}_memory_gb": kind for kind in kinds}
    if len(kinds) == 1 or "cpu" in kinds:
        known["memory_gb"] = "cpu" if "cpu" in kinds else next(iter(kinds))
    TomlTable(resources, location, {"cpu_cores", *known})
    found: dict[str, float] = {}
    for key, kind in known.items():
        if key in resources:
            if kind in found:
                location.at(key).refuse(f"says the same as {kind}_memory_gb: leave one of them out")
            found[kind] = MB * number_at(resources[key], location.at(key), most=UNLIMITED_MB / MB, above=True)
    return found


def _of_kind(kind: str, count: int, memory_mb: float | None) -> list[Device]:
    room = UNLIMITED_MB if memory_mb is None else memory_mb
    if kind == "cpu":
        return [Device(name=kind, kind=kind, cores=count, memory_mb=room, simulated=True)]
    return [
        Device(
            name=kind if i == 0 else f"{kind}{i}",
            kind=kind,
            cores=_CHIP_CORES.get(kind, 1),
            memory_mb=room,
            simulated=True,
        )
        for i in range(count)
    ]


def largest_of(machines: list[MachineBlock], hardware: str) -> Device | None:
    """The device of this kind with the most memory; None if no machine has one."""
    devices = [device for one in machines for device in one.spec.devices if device.kind == hardware]
    return max(devices, key=lambda device: (device.memory_mb, device.cores), default=None)


# -- prices of machines and of their devices
#
# The services price devices: one number for each kind (services/core/cost.py). A kind of device that is alone on a machine costs what
# the machine costs (cpu and inferentia: per core; if such machines differ, their mean). On a machine with several kinds, the CPU has
# the price that is known for it, else the price list's (services/core/prices.toml), and the accelerators have the rest. The prices of
# a machine's devices thus add up to its own. If the CPU would take everything, the accelerators get half.

_LEAST = 0.5  # part of a machine's price that its accelerators get if nothing else is left


def priced(machines: list[MachineBlock], listed: Mapping[str, float], *, needed: bool) -> list[MachineBlock]:
    """The same machines, each with a price: its own, else that of its devices on the price list.

    needed: a device without any price is refused; otherwise it costs nothing.
    """
    found = []
    for one in machines:
        price = one.price
        if price is None:
            unknown = sorted({device.kind for device in one.spec.devices} - listed.keys())
            if unknown and needed:
                one.block.at("price_per_hour").refuse(
                    f"is missing, and no price is known for {', '.join(unknown)}: state it, in US$ per hour"
                )
            known = [device for device in one.spec.devices if device.kind in listed]
            price = sum(price_per_hour(device.kind, listed, device.cores) for device in known)
        found.append(one._replace(spec=replace(one.spec, price_per_hour=price)))
    return found


def device_prices(
    machines: list[MachineBlock], listed: Mapping[str, float], stated: Mapping[str, float]
) -> dict[str, float]:
    """US$ per hour by kind of device. stated: prices in the settings, which stay."""
    prices = dict(stated)
    units = [(one.spec.price_per_hour, _units(one)) for one in machines]
    _fix(prices, [one for one in units if len(one[1]) == 1], listed)
    if any(len(of) > 1 and "cpu" in of for _, of in units):
        prices.setdefault("cpu", listed.get("cpu", 0.0))
    while open_ones := [(total, of) for total, of in units if of.keys() - prices.keys()]:
        fewest = min(len(of.keys() - prices.keys()) for _, of in open_ones)
        _fix(prices, [one for one in open_ones if len(one[1].keys() - prices.keys()) == fewest], listed)
    return prices


def _fix(prices: dict[str, float], machines: list[tuple[float, dict[str, int]]], listed: Mapping[str, float]) -> None:
    """Price the unpriced kinds on these machines (US$ per hour, units by kind): the mean of what each machine leaves."""
    shares: dict[str, list[float]] = {}
    for total, of in machines:
        known = sum(prices[kind] * count for kind, count in of.items() if kind in prices)
        rest = total - known if total > known else _LEAST * total
        # Several kinds share the rest in proportion to their prices on the list.
        weights = {kind: listed.get(kind, 1.0) * count for kind, count in of.items() if kind not in prices}
        for kind, weight in weights.items():
            shares.setdefault(kind, []).append(rest * weight / sum(weights.values()) / of[kind])
    prices.update({kind: sum(found) / len(found) for kind, found in shares.items()})


def _units(one: MachineBlock) -> dict[str, int]:
    """A machine's units of each kind: cores where these are priced, else devices."""
    found: dict[str, int] = {}
    for device in one.spec.devices:
        found[device.kind] = found.get(device.kind, 0) + (device.cores if device.kind in PER_CORE else 1)
    return found


def cost_of(scenario: TomlTable, machines: list[MachineBlock]) -> CostSpec:
    """[cost]: what counts as cost. Raises ScenarioError."""
    table = TomlTable(scenario.content.get("cost", {}), scenario.at("cost"), ("meter", "per_gb_s"))
    meter = one_of(table.content.get("meter", "worker"), table.at("meter"), ("worker", "memory"), "meter")
    location = table.at("per_gb_s")
    prices = {
        one_of(kind, location.at(kind), devices_of(machines), "kind of device"): number_at(
            value, location.at(kind), most=1e9
        )
        for kind, value in table.table("per_gb_s").items()
    }
    if meter == "worker":
        if prices:
            location.refuse('means nothing with meter "worker": leave it out, or set meter = "memory"')
        return CostSpec()
    missing = sorted(devices_of(machines) - prices.keys())
    if missing:
        location.refuse(f"has no price for {', '.join(missing)}: state it, in US$ per GB and second")
    return CostSpec(meter="memory", per_gb_s=prices)


def devices_of(machines: list[MachineBlock]) -> set[str]:
    """The kinds of device on any machine."""
    return {device.kind for one in machines for device in one.spec.devices}

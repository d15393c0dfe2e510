"""[[worker]] blocks and [cost]: kinds of machine, what they have, how many there are, and what they cost.

devices counts devices by kind. `cpu = 8` is one device of 8 cores; `inferentia = 1` is one chip of 4 cores, each of which holds
one instance; each device of another kind runs one batch at a time. resources says what they have:

    <kind>_memory_gb   memory of each device of that kind; default: unlimited. `memory_gb` is that of the CPU, or of the only kind
    cpu_cores          cores beside accelerators: a device `cpu`, unless devices names one
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, NamedTuple, TypeVar

from msgspec import Struct
from msgspec.structs import replace

from bus.fields import Named, Number
from services.core.cost import PER_CORE, price_per_hour
from services.core.emulation import KINDS
from services.core.placement import Device
from services.core.toml import Location, meant_or_all, one_of, within
from services.simulation.scenario.model import CostSpec, MachineSpec

UNLIMITED_MB = 1e7  # 10 TB: more than any device has, and small enough for sums over many devices
MB = 1024.0  # of a GB
LONGEST_KIND = 40  # letters; the names of workers are made from it
MOST = 10_000  # machines of one kind
_MOST_CORES = 4096
_MOST_DEVICES = 64
ALIKE_MB = 64.0  # by which the memory of machines of one kind may differ
Count = Annotated[int, Number(0, MOST)]
T = TypeVar("T")
_CHIP_CORES = {kind: spec.cores for kind, spec in KINDS.items() if spec.cores > 1}


class WorkerBlock(Struct, frozen=True, kw_only=True, rename={"minimum": "min", "maximum": "max"}):
    """A [[worker]] block."""

    kind: Named
    devices: dict[Named, Annotated[int, Number(1, _MOST_CORES)]] = {}
    resources: dict[str, Annotated[float, Number(most=UNLIMITED_MB / MB)]] = {}
    price_per_hour: Annotated[float | None, Number(most=1e9)] = None
    boot_s: Annotated[float, Number(most=1e7)] = 0.0
    start: Count = 0
    minimum: Count | None = None
    maximum: Count | None = None


class MachineBlock(NamedTuple):
    """A kind of machine. price: US$ per hour; None: the price list's. location: of its block."""

    spec: MachineSpec
    price: float | None
    location: Location


def machines_of(blocks: Sequence[WorkerBlock], location: Location) -> list[MachineBlock]:
    """The kinds of machine. location: of the blocks. Raises TomlError."""
    if not blocks:
        location.refuse("there must be at least one [[worker]]: queries need a machine")
    found: list[MachineBlock] = []
    for i, block in enumerate(blocks):
        if any(block.kind == other.spec.kind for other in found):
            location.at(i).at("kind").refuse(f"{block.kind} occurs twice: write one block, with start and max")
        found.append(MachineBlock(_machine(block, location.at(i)), block.price_per_hour, location.at(i)))
    return found


def _machine(block: WorkerBlock, at: Location) -> MachineSpec:
    if len(block.kind) > LONGEST_KIND:
        at.at("kind").refuse(f"must be at most {LONGEST_KIND} letters long: the names of workers are made from it")
    start, least = block.start, min(1, block.start) if block.minimum is None else block.minimum
    most = max(start, block.minimum or 0) if block.maximum is None else block.maximum
    if most < start:
        at.at("max").refuse(f"must be at least start ({start}), not {most}")
    if least > most:
        at.at("min").refuse(f"must be at most max ({most}), not {least}")
    if start < least:
        at.at("start").refuse(f"must be at least min ({least}), not {start}")
    return MachineSpec(
        kind=block.kind,
        devices=_devices(block, at),
        price_per_hour=block.price_per_hour or 0.0,
        boot_s=block.boot_s,
        start=start,
        minimum=least,
        maximum=most,
    )


def _devices(block: WorkerBlock, at: Location) -> tuple[Device, ...]:
    if not block.devices:
        at.at("devices").refuse("must name at least one device, as { cpu = 8 } or { gpu = 1 }")
    for kind, count in block.devices.items():
        if kind != "cpu":
            within(count, at.at("devices").at(kind), Number(1, _MOST_DEVICES))
    cores, kinds = block.resources.get("cpu_cores"), dict(block.devices)
    if cores is not None:
        within(cores, at.at("resources").at("cpu_cores"), Number(0, _MOST_CORES))
        if cores != int(cores):
            at.at("resources").at("cpu_cores").refuse(f"must be a whole number, not {cores:g}")
        if cores != kinds.get("cpu", cores):
            at.at("resources").at("cpu_cores").refuse("says another number than devices.cpu: leave it out")
        kinds = {"cpu": int(cores), **kinds} if cores else kinds
    memory = _memory(block.resources, at.at("resources"), kinds)
    return tuple(device for kind, count in kinds.items() for device in _of_kind(kind, count, memory.get(kind)))


def _memory(resources: Mapping[str, float], at: Location, kinds: dict[str, int]) -> dict[str, float]:
    """MB of each device, by kind."""
    known = {f"{kind}_memory_gb": kind for kind in kinds}
    if len(kinds) == 1 or "cpu" in kinds:
        known["memory_gb"] = "cpu" if "cpu" in kinds else next(iter(kinds))
    found: dict[str, float] = {}
    for key in resources:
        if key not in known and key != "cpu_cores":
            at.at(key).refuse(f"there is no such key{meant_or_all(key, {'cpu_cores', *known})}")
    for key, kind in known.items():
        if key in resources:
            if kind in found:
                at.at(key).refuse(f"says the same as {kind}_memory_gb: leave one of them out")
            within(resources[key], at.at(key), Number(above=0, most=UNLIMITED_MB / MB))
            found[kind] = MB * resources[key]
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


def labelled(groups: Iterable[tuple[str, list[T]]]) -> dict[str, list[T]]:
    """Machines that are alike under a name of their kind; further ones of the same name are NAME-2, NAME-3 and so on."""
    found: dict[str, list[T]] = {}
    for kind, machines in groups:
        name = base = kind[: LONGEST_KIND - 4]
        number = 2
        while name in found:
            name, number = f"{base}-{number}", number + 1
        found[name] = machines
    return found


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
                one.location.at("price_per_hour").refuse(
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


def cost_of(stated: CostSpec, location: Location, machines: list[MachineBlock]) -> CostSpec:
    """[cost], checked: what counts as cost. Raises TomlError."""
    location, kinds = location.at("per_gb_s"), devices_of(machines)
    for kind in stated.per_gb_s:
        one_of(kind, location.at(kind), kinds, "kind of device")
    if stated.meter == "worker" and stated.per_gb_s:
        location.refuse('means nothing with meter "worker": leave it out, or set meter = "memory"')
    missing = sorted(kinds - stated.per_gb_s.keys())
    if stated.meter == "memory" and missing:
        location.refuse(f"has no price for {', '.join(missing)}: state it, in US$ per GB and second")
    return stated


def devices_of(machines: list[MachineBlock]) -> set[str]:
    """The kinds of device on any machine."""
    return {device.kind for one in machines for device in one.spec.devices}

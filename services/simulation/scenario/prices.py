"""Prices of machines, and of the devices they are made of, as services/core/cost.py wants them: one number for each kind.

A kind of device that is alone on a machine costs what such machines cost (cpu and inferentia: per core; where machines
differ, their mean). What is left of a machine with several kinds is its accelerators' price, and the CPU's beside them is the
price list's (services/core/prices.toml) unless some machine fixed it. So the devices of a machine add up to its price; only
where the cores beside an accelerator would eat it up, the accelerator counts as half of it.
"""

from collections.abc import Mapping

from msgspec.structs import replace

from services.core.cost import PER_CORE, price_per_hour
from services.simulation.scenario.machines import Machine

_LEAST = 0.5  # of a machine's price: what its accelerators are worth where nothing else is left


def priced(machines: list[Machine], listed: Mapping[str, float], *, needed: bool) -> list[Machine]:
    """The same, each with a price: its own, else what its devices cost by the price list.

    needed: a kind that no list knows and that no price is stated for is refused; else it costs nothing.
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
    machines: list[Machine], listed: Mapping[str, float], stated: Mapping[str, float]
) -> dict[str, float]:
    """US$ per hour by kind of device. stated: what settings say, which stays."""
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
    """Prices of the kinds that these machines (US$ per hour, units by kind) have and that have none: the mean of what each leaves."""
    shares: dict[str, list[float]] = {}
    for total, of in machines:
        known = sum(prices[kind] * count for kind, count in of.items() if kind in prices)
        rest = total - known if total > known else _LEAST * total
        # Several kinds share it as their prices on the list are to each other.
        weights = {kind: listed.get(kind, 1.0) * count for kind, count in of.items() if kind not in prices}
        for kind, weight in weights.items():
            shares.setdefault(kind, []).append(rest * weight / sum(weights.values()) / of[kind])
    prices.update({kind: sum(found) / len(found) for kind, found in shares.items()})


def _units(one: Machine) -> dict[str, int]:
    """How much of each kind a machine has, in what it is sold by: cores, or devices."""
    found: dict[str, int] = {}
    for device in one.spec.devices:
        found[device.kind] = found.get(device.kind, 0) + (device.cores if device.kind in PER_CORE else 1)
    return found

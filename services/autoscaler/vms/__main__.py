"""Wires one VM-autoscaler: a candidate for the lead of the cluster."""

import secrets

from msgspec.structs import replace

from bus.port import Bus
from bus.subjects import Subjects, valid_name
from services.autoscaler.vms import actor
from services.autoscaler.vms.actor import Controller, changes_machines, make_controller
from services.autoscaler.vms.commands import ProviderTraits
from services.autoscaler.vms.edge import ControllerEdge, load_forecaster
from services.autoscaler.vms.providers import PROVIDERS
from services.autoscaler.vms.providers.base import ProviderError
from services.autoscaler.vms.rules import PricedKind
from services.core.cost import UnknownPrice, price_per_hour
from services.core.emulation import simulated_devices
from services.core.placement import Device
from services.core.settings import ELSEWHERE, Settings
from services.shell.host.machine import devices_of, worker_of
from services.shell.policies import load_scaling
from services.shell.prices import load_prices
from services.shell.runtime.runtime import Runtime
from services.shell.settings import SettingsError

LONGEST_KIND = 40  # letters; the names of workers are made from it


async def wire(settings: Settings, bus: Bus) -> list[Runtime]:
    """One candidate with a name of its own. Raises SettingsError, which names the setting."""
    load_forecaster(settings.autoscaler)
    subjects = Subjects(settings.prefix)
    ours = settings.machines
    if ours.provider != "off" and ours.provider not in PROVIDERS:
        raise SettingsError(f"machines.provider {ours.provider!r} is none of {', '.join(PROVIDERS)}, off")
    try:
        provider = PROVIDERS[ours.provider](bus, subjects, ours) if ours.provider != "off" else None
    except ProviderError as error:
        raise SettingsError(str(error)) from error
    kinds = kinds_of(settings) if provider is not None and changes_machines(settings) else {}
    policy = load_scaling(settings)
    traits = provider.traits if provider is not None else ProviderTraits()

    def make() -> Controller:
        return make_controller(settings, subjects, f"vm-{secrets.token_hex(4)}", kinds, traits, policy)

    edge = ControllerEdge(bus, subjects, provider)
    return [Runtime("vm-autoscaler", make, bus, subjects, edge, insight=actor)]


def kinds_of(settings: Settings) -> dict[str, PricedKind]:
    """The kinds of machine in the settings, with their devices and prices. Raises SettingsError."""
    prices = load_prices(settings.prices)
    found: dict[str, PricedKind] = {}
    for name, spec in settings.machines.kinds.items():
        where = f"machines.kinds.{name}"
        if not valid_name(name) or len(name) > LONGEST_KIND:
            raise SettingsError(
                f"{where}: a kind's name must be 1 to {LONGEST_KIND} letters, digits, - or _, a letter or digit first"
            )
        try:
            devices = _devices(settings, name)
            price = sum(price_per_hour(device.kind, prices, device.cores) for device in devices)
        except (ValueError, UnknownPrice) as error:
            raise SettingsError(f"{where}: {error}") from error
        found[name] = PricedKind(
            name=name,
            devices=tuple(devices),
            price_per_hour=price,
            minimum=spec.minimum,
            maximum=spec.maximum,
            boot_s=spec.boot_s if settings.machines.provider != "local" else 0.0,
        )
    return found


def _devices(settings: Settings, kind: str) -> list[Device]:
    """The devices of a machine of this kind: of this machine as its drivers show, of another one as the settings say."""
    spec = settings.machines.kinds[kind]
    worker = worker_of(kind, settings.machines.kinds, settings.worker)
    if settings.machines.provider not in ELSEWHERE:
        return devices_of(worker)
    there = [
        replace(device, simulated=False, memory_mb=float(spec.accelerator_mb or device.memory_mb))
        for device in simulated_devices(spec.accelerators)
    ]
    return [*devices_of(replace(worker, gpus=0), ()), *there]

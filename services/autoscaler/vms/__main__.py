"""Wires one VM-autoscaler: a candidate for the lead of the cluster."""

import secrets
from math import inf

from msgspec.structs import replace

from bus.port import Bus
from bus.subjects import Subjects, valid_name
from services.autoscaler.vms import metrics
from services.autoscaler.vms.actor import Controller
from services.autoscaler.vms.edge import ControllerEdge
from services.autoscaler.vms.policy import FleetLimits, PricedKind
from services.autoscaler.vms.providers import PROVIDERS
from services.autoscaler.vms.providers.base import ProviderError
from services.core.cost import UnknownPrice, price_per_hour
from services.core.emulation import simulated_devices
from services.core.placement import Device
from services.core.settings import ELSEWHERE, Settings
from services.shell.host.machine import devices_of, worker_of
from services.shell.prices import load_prices
from services.shell.runtime.runtime import Runtime
from services.shell.settings import SettingsError

LONGEST_KIND = 40  # letters; the names of workers are made from it
SETTLE_PERIODS = 5


async def wire(settings: Settings, bus: Bus) -> list[Runtime]:
    """One candidate with a name of its own; raises SettingsError that names the setting."""
    subjects = Subjects(settings.prefix)
    ours = settings.machines
    if ours.provider != "off" and ours.provider not in PROVIDERS:
        raise SettingsError(f"machines.provider {ours.provider!r} is none of {', '.join(PROVIDERS)}, off")
    try:
        provider = PROVIDERS[ours.provider](bus, subjects, ours) if ours.provider != "off" else None
    except ProviderError as error:
        raise SettingsError(str(error)) from error
    fixed = provider is None or settings.autoscaler.policy == "static"  # nobody adds or removes machines
    limits = FleetLimits(
        kinds={} if fixed else kinds_of(settings),
        utilisation_above=ours.utilisation_above,
        overloaded_share=ours.overloaded_share,
        idle_s=ours.idle_s,
        settle_s=SETTLE_PERIODS * ours.period_s,
        budget_per_hour=settings.autoscaler.budget_per_hour or inf,
    )

    def make() -> Controller:
        return Controller(
            f"vm-{secrets.token_hex(4)}",
            subjects,
            limits,
            period_s=ours.period_s,
            lease_s=ours.lease_s,
            memory_share=settings.monitor.memory_share,
            cores_overcommit=settings.monitor.cores_overcommit,
            simulated=provider is not None and provider.simulated,
            shared_machine=provider is not None and provider.shared_machine,
            inventory=provider is not None and provider.inventory,
            insists=provider is not None and provider.insists,
            dry_run=provider is not None and provider.dry_run,
        )

    edge = ControllerEdge(bus, subjects, provider)
    return [Runtime("vm-autoscaler", make, bus, subjects, edge, insight=metrics)]


def kinds_of(settings: Settings) -> dict[str, PricedKind]:
    """The kinds of machine in settings, with what one has and costs; raises SettingsError."""
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
    """What a machine of this kind has: where it is this one, as its drivers show; where it is another, as is said."""
    spec = settings.machines.kinds[kind]
    worker = worker_of(kind, settings.machines.kinds, settings.worker)
    if settings.machines.provider not in ELSEWHERE:
        return devices_of(worker)
    there = [
        replace(device, simulated=False, memory_mb=float(spec.accelerator_mb or device.memory_mb))
        for device in simulated_devices(spec.accelerators)
    ]
    return [*devices_of(replace(worker, gpus=0), ()), *there]

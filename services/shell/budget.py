"""Whether the budget pays for the workers that must run."""

from collections.abc import Mapping
from pathlib import Path

from services.core.cost import UnknownPrice, price_per_hour
from services.core.settings import Settings
from services.shell.machine import devices_of
from services.shell.machinekinds import initial, worker_of
from services.shell.prices import load_prices
from services.shell.settings import SettingsError

KEY = "autoscaler.budget_per_hour"
VARIABLE = "INFAAS_AUTOSCALER__BUDGET_PER_HOUR"


def place_of(config: Path | None, environ: Mapping[str, str]) -> str:
    """Where the budget stands: a variable or the settings file, and its key."""
    variable = next((name for name in (VARIABLE, f"{VARIABLE}_FILE") if environ.get(name)), None)
    if variable is not None:
        return f"{variable} ({KEY})"
    return f"{config}: {KEY}" if config is not None else KEY


def least_per_hour(settings: Settings, workers: int) -> float:
    """US$ per hour of the workers that a system starts with: `workers` plain ones and the minimum of every kind.

    Raises SettingsError when a device of theirs has no price or is not there.
    """
    prices = load_prices(settings.prices)
    total = 0.0
    for kind in initial(workers, settings.machines).values():
        worker = worker_of(kind, settings.machines.kinds, settings.worker)
        try:
            total += sum(price_per_hour(device.kind, prices, device.cores) for device in devices_of(worker))
        except UnknownPrice as error:
            raise SettingsError(str(error)) from error
    return total


def check_budget(settings: Settings, workers: int, place: str = KEY) -> None:
    """Refuse a budget below the price of these workers: nothing could be added, and nothing may be removed. No budget: fine.

    place: where the budget was given, as `place_of` says it.
    """
    budget = settings.autoscaler.budget_per_hour
    if not budget:
        return
    least = least_per_hour(settings, workers)
    if least > budget * (1 + 1e-9):
        raise SettingsError(
            f"{place}: {budget:g} US$/h does not pay for the workers that must run: they cost "
            f"{least:.4g}; raise it, or start fewer workers"
        )

"""What hardware costs: the price list, and whether the budget pays for the workers that must run."""

import logging
import tomllib
from collections.abc import Mapping
from pathlib import Path

from bus.fields import similar
from services.core.cost import UnknownPrice, price_per_hour
from services.core.settings import PriceSettings, Settings
from services.shell.host.machine import devices_of, initial, worker_of
from services.shell.settings import SettingsError

_FILE = Path(__file__).parent.parent / "core" / "prices.toml"


def load_prices(settings: PriceSettings) -> dict[str, float]:
    """The prices of services/core/prices.toml and the settings, which win. Raises SettingsError for a price below zero.

    A price is in US$ per hour by kind of device; for cpu and inferentia it is that of one core. A kind that the list does not have is
    allowed, since hardware is open. If its name looks like a typo, that is logged.
    """
    listed = {kind: float(price) for kind, price in tomllib.loads(_FILE.read_text()).items()}
    for kind, price in settings.per_hour.items():
        if not price >= 0:
            raise SettingsError(f"prices.per_hour.{kind} must be a price in US$ of at least 0, not {price}")
        near = similar(kind, listed, 0.75) if kind not in listed else ""
        if near:
            logging.getLogger(__name__).warning(
                "prices.per_hour.%s: no known device kind has this name; did you mean %s? (known: %s)",
                kind,
                near,
                ", ".join(listed),
            )
    return listed | settings.per_hour


# ---- the budget

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

    Raises SettingsError if one of their devices has no price or is missing.
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
    """Raise SettingsError if the budget is below the price of these workers, which may not be removed. Without a budget nothing is wrong.

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

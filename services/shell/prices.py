"""The price list: services/core/prices.toml under the settings."""

import tomllib
from pathlib import Path

from services.shell.settings import PriceSettings, SettingsError

_FILE = Path(__file__).parent.parent / "core" / "prices.toml"


def load_prices(settings: PriceSettings) -> dict[str, float]:
    """US$ per hour by device kind (per core for cpu and inferentia); raises SettingsError for a price below zero."""
    prices = {kind: float(price) for kind, price in tomllib.loads(_FILE.read_text()).items()} | settings.per_hour
    for kind, price in prices.items():
        if not price >= 0:
            raise SettingsError(f"prices.per_hour.{kind} must be a price in US$ of at least 0, not {price}")
    return prices

"""The price list: services/core/prices.toml under the settings."""

import logging
import tomllib
from difflib import get_close_matches
from pathlib import Path

from services.core.settings import PriceSettings
from services.shell.settings import SettingsError

_FILE = Path(__file__).parent.parent / "core" / "prices.toml"


def load_prices(settings: PriceSettings) -> dict[str, float]:
    """US$ per hour by device kind (per core for cpu and inferentia); raises SettingsError for a price below zero.

    A kind that the list does not have is legal, since hardware is open; where it looks like a typo, that is logged.
    """
    listed = {kind: float(price) for kind, price in tomllib.loads(_FILE.read_text()).items()}
    for kind, price in settings.per_hour.items():
        if not price >= 0:
            raise SettingsError(f"prices.per_hour.{kind} must be a price in US$ of at least 0, not {price}")
        near = get_close_matches(kind, listed, n=1, cutoff=0.75) if kind not in listed else []
        if near:
            logging.getLogger(__name__).warning(
                "prices.per_hour.%s: no known device kind has this name; did you mean %s? (known: %s)",
                kind,
                near[0],
                ", ".join(listed),
            )
    return listed | settings.per_hour

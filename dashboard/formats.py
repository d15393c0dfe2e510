"""How things are written: amounts, times, names. Pure."""

import math

MONEY, MONEY_RATE = "US$", "US$/h"
NOBODY = "(idle)"  # the part of machines that is paid for and that nobody uses
UNKNOWN = "–"


def number(value: float | None) -> str:
    """Three digits that matter, thousands with commas."""
    if value is None or math.isnan(value):
        return UNKNOWN
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}" if abs(value) >= 1e-4 or value == 0 else f"{value:.1e}"


def money(value: float | None) -> str:
    return UNKNOWN if value is None or math.isnan(value) else f"US$ {number(value)}"


def percent(share: float | None) -> str:
    """Never 100 % where something is missing."""
    if share is None or math.isnan(share):
        return UNKNOWN
    if share in (0.0, 1.0):
        return f"{share:.0%}"
    digits = 1 if share < 0.999 else 2
    return f"{min(100 * share, 99.99):.{digits}f} %"


def seconds(value: float | None) -> str:
    """A duration in the unit that fits."""
    if value is None or math.isnan(value):
        return UNKNOWN
    for size, unit in ((86400.0, "d"), (3600.0, "h"), (60.0, "min")):
        if value >= 1.5 * size:
            return f"{value / size:.0f} {unit}"
    return f"{value:.0f} s" if value >= 1 else f"{1000 * value:.0f} ms"


def simulated(name: str, is_so: bool) -> str:
    """The name of something; simulated things say so."""
    return f"{name} (simulated)" if is_so else name


def count(number: int, one: str, several: str) -> str:
    """So many of something."""
    return f"{number:,} {one if number == 1 else several}"

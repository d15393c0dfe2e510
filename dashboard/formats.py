"""Numbers, money, durations and names as text. Pure."""

import math
from collections.abc import Iterable

from bus.messages.catalog import called, in_metric, is_error, value_of

COMPUTED, CHARGED = "computed US$/1,000", "charged US$/1,000"  # per 1,000 queries: from prices, by the meter
IDLE = "(idle)"  # the cost of machines, or parts of them, that no app uses
BY_MODEL = "(by model)"  # instead of an app: queries that name a model and no app
UNKNOWN = "–"


def number(value: float | None) -> str:
    """Three significant digits; thousands with commas."""
    if value is None or math.isnan(value):
        return UNKNOWN
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}" if abs(value) >= 1e-4 or value == 0 else f"{value:.1e}"


def money(value: float | None) -> str:
    return UNKNOWN if value is None or math.isnan(value) else f"US$ {number(value)}"


def percent(share: float | None) -> str:
    """A share as a percentage. Less than 1 never becomes 100 %."""
    if share is None or math.isnan(share):
        return UNKNOWN
    if share in (0.0, 1.0):
        return f"{100 * share:.0f} %"
    digits = 1 if share < 0.999 else 2
    return f"{min(100 * share, 99.99):.{digits}f} %"


def spare(ratio: float | None) -> str:
    """How much more than is expected can be carried. ratio: what can be carried, over what is expected."""
    if ratio is None or math.isnan(ratio):
        return UNKNOWN
    return f"{100 * (ratio - 1):+.0f} %" if ratio < 10 else "10 times or more"


def quality(accuracy: float | None, metric: str, unit: str = "") -> str:
    """An accuracy in its metric, which is named unless it is the share of right answers: "0.97", "mae 43.2 EUR"."""
    return UNKNOWN if accuracy is None else in_metric(accuracy, metric, unit).removeprefix("accuracy ")


def measure(metric: str, unit: str = "") -> tuple[str, str]:
    """What values of this metric are called, with their unit, and how they are written."""
    if is_error(metric):
        return f"{metric}, {unit}" if unit else metric, "%.4g"
    return called(metric), "%.4f"


def heading(measure: str) -> str:
    """What a value is called, at the start of a line: metrics are spelt as queries spell them."""
    return measure.capitalize() if measure == "accuracy" else measure


def interval(low: float | None, high: float | None, metric: str | None = None) -> str:
    """A confidence interval of an accuracy, in its metric."""
    if low is None or high is None or math.isnan(low) or math.isnan(high):
        return UNKNOWN
    if metric is None or not (metric == "r2" or is_error(metric)):
        return f"{low:.3f}..{high:.3f}"
    return "..".join(f"{one:.4g}" for one in sorted((value_of(low, metric), value_of(high, metric))))


def seconds(value: float | None) -> str:
    """A duration in a suitable unit."""
    if value is None or math.isnan(value):
        return UNKNOWN
    for size, unit in ((86400.0, "d"), (3600.0, "h"), (60.0, "min")):
        if value >= 1.5 * size:
            return f"{value / size:.0f} {unit}"
    return f"{value:.0f} s" if value >= 1 else f"{1000 * value:.0f} ms"


def mark_simulated(name: str, is_simulated: bool) -> str:
    """The name, marked if the thing is simulated."""
    return f"{name} (simulated)" if is_simulated else name


def marked(names: Iterable[str], simulated: Iterable[bool]) -> list[str]:
    """The same of several."""
    return [mark_simulated(*each) for each in zip(names, simulated, strict=True)]


def count(number: int, one: str, several: str) -> str:
    """A number with its noun, as "3 workers"."""
    return f"{number:,} {one if number == 1 else several}"

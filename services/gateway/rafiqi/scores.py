"""From a model's scores to the classes that it finds most likely. Pure."""

import math
from typing import Any

TOP = 5


def top(scores: list[float], labels: list[str], most: int = TOP) -> list[dict[str, Any]]:
    """The most likely classes of one item, the first first: `confidence` 0..1 and `label`, the class's number where it has no name."""
    shares = _shares(scores)
    order = sorted(range(len(shares)), key=lambda at: (-shares[at], at))[:most]
    return [{"confidence": shares[at], "label": label_of(at, labels)} for at in order]


def label_of(number: int, labels: list[str]) -> str:
    """A class's name."""
    return labels[number] if 0 <= number < len(labels) else str(number)


def _shares(scores: list[float]) -> list[float]:
    """Probabilities as they are; other scores through a softmax."""
    numbers = [score if math.isfinite(score) else -1e30 for score in scores]
    if all(0.0 <= number <= 1.0 for number in numbers) and abs(sum(numbers) - 1.0) < 0.02:
        return numbers
    peak = max(numbers)
    powers = [math.exp(max(number - peak, -700.0)) for number in numbers]
    whole = sum(powers)
    return [power / whole for power in powers]

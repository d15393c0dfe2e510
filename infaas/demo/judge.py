"""Was a query answered rightly, or refused with a reason? Pure: what was asked, what came back, what was promised."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from infaas.answers import Answer
from infaas.demo.asks import Ask
from infaas.errors import Refused

TOLERANCE = 1e-9  # of rounding in a cost
SIGMAS = 4.0  # beyond so many standard errors an accuracy is not the one that was promised
WAITING = frozenset({"deadline", "overloaded"})  # honest refusals of what is possible, but not just now
OFFER = ("model", "variant", "latency_ms", "cost")  # what a closest offer must name


def wrong_answer(
    ask: Ask, items: int, id: str, answer: Answer, variants: Mapping[str, Mapping[str, Any]], classes: int
) -> str:
    """What is wrong with this answer, in words; empty when all is right. variants: the catalogue by variant name."""
    if not ask.possible:
        return f"answered by {answer.variant}, although nobody can meet it"
    if answer.id != id:
        return f"carries the id {answer.id!r} instead of {id!r}"
    known = variants.get(answer.variant)
    if known is None:
        return f"names the variant {answer.variant!r}, which is not in the catalogue"
    scores = answer.outputs.get("scores")
    if scores is None or scores.shape != (items, classes) or not np.isfinite(scores).all():
        return f"does not hold {classes} finite scores for each of {items} items"
    return _missed(ask, items, answer, known)


def _missed(ask: Ask, items: int, answer: Answer, known: Mapping[str, Any]) -> str:
    if answer.accuracy is None or answer.accuracy != known["accuracy"]:
        return f"promises accuracy {answer.accuracy}, the catalogue says {known['accuracy']} of {answer.variant}"
    needs = ask.needs
    if answer.accuracy < (needs.get("accuracy") or 0.0):
        return f"comes from {answer.variant} with accuracy {answer.accuracy:.4f}"
    limit = needs.get("latency_ms") or math.inf
    if answer.latency_ms > limit and "latency" not in answer.missed:
        return f"took {answer.latency_ms:.3g} ms without saying that this is late"
    ceiling = needs.get("cost")
    if ceiling is not None and "cost" not in answer.missed:
        cost = 1000 * answer.cost / items
        if cost > ceiling * (1 + TOLERANCE):
            return f"cost ${cost:.3g} per 1,000 without saying that this is too much"
    return ""


def wrong_refusal(ask: Ask, refused: Refused) -> str:
    """What is wrong with this refusal, in words; empty when it is right."""
    if not refused.message:
        return f"refused as {refused.code} without a reason"
    if ask.possible:
        return "" if refused.code in WAITING else f"refused although it can be met: {refused}"
    if refused.code != "unsatisfiable":
        return f"refused as {refused.code} instead of unsatisfiable: {refused.message}"
    if refused.closest is None or any(refused.closest.get(field) is None for field in OFFER):
        return f"refused without naming the closest offer: {refused.closest}"
    return ""


def wrong_accuracy(promised: float, measured: float, items: int, pictures: int, validated: int) -> str:
    """Whether a measured accuracy contradicts the promised one; empty when chance explains the difference.

    items: answers that were checked; pictures: how many different pictures these were; validated: the size of the
    validation set behind the promise. Both are estimates of the same probability from independent samples; the
    larger of the two variances is used for both, and half an answer allows for rounding.
    """
    if items == 0:
        return ""
    n = min(items, pictures)
    spread = max(promised * (1 - promised), measured * (1 - measured), 1 / validated)
    allowed = SIGMAS * math.sqrt(spread / n + spread / validated) + 0.5 / n
    if abs(promised - measured) <= allowed:
        return ""
    return f"accuracy {measured:.4f} on {items} answers, but {promised:.4f} was promised (±{allowed:.4f})"

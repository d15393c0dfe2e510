"""Whether each query of a demo was answered correctly or refused with a reason, and the figures of each kind of query. Pure."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from infaas.answers import Answer
from infaas.demo.family import QueryKind
from infaas.demo.load import DemoReply
from infaas.errors import Refused

TOLERANCE = 1e-9  # relative rounding error of a cost
SIGMAS = 4.0  # standard errors by which a measured accuracy may differ from the promised one
TEMPORARY = frozenset({"deadline", "overloaded"})  # refusals that are right for a query that is possible at other times
CLOSEST_FIELDS = ("model", "variant", "latency_ms", "cost")  # what `closest` of a refusal must name


def malformed(answer: Answer, id: str, items: int, classes: Mapping[str, int]) -> str:
    """What is wrong with the form of an answer; empty if nothing is. classes: by output, the finite numbers that each item has."""
    if answer.id != id:
        return f"carries the id {answer.id!r} instead of {id!r}"
    outputs = answer.outputs
    for name, count in classes.items():
        found = outputs.get(name)
        if found is None or found.shape != (items, count) or not np.isfinite(found).all():
            return f"does not hold {count} finite {name} for each of {items} items"
    return "is said to be simulated" if answer.simulated else ""


def wrong_answer(
    kind: QueryKind, items: int, id: str, answer: Answer, variants: Mapping[str, Mapping[str, Any]], classes: int
) -> str:
    """What is wrong with this answer; empty if nothing is. variants: the rows of the list of variants, by name."""
    if not kind.possible:
        return f"answered by {answer.variant}, although no variant can meet it"
    known = variants.get(answer.variant)
    if known is None:
        return f"names the variant {answer.variant!r}, which is not in the catalogue"
    return malformed(answer, id, items, {"scores": classes}) or _unmet_needs(kind, answer, known)


def _unmet_needs(kind: QueryKind, answer: Answer, known: Mapping[str, Any]) -> str:
    if answer.accuracy is None or answer.accuracy != known["accuracy"]:
        return f"promises accuracy {answer.accuracy}, the catalogue says {known['accuracy']} of {answer.variant}"
    needs = kind.needs
    if answer.accuracy < (needs.get("accuracy") or 0.0):
        return f"comes from {answer.variant} with accuracy {answer.accuracy:.4f}"
    limit = needs.get("latency_ms") or math.inf
    if answer.latency_ms > limit and "latency" not in answer.missed:
        return f"took {answer.latency_ms:.3g} ms without `latency` in `missed`"
    ceiling = needs.get("cost")
    if ceiling is not None and "cost" not in answer.missed:
        cost = 1000 * answer.cost
        if cost > ceiling * (1 + TOLERANCE):
            return f"charged US$ {1000 * cost:.3g} per million without `cost` in `missed`"
    return ""


def wrong_refusal(kind: QueryKind, refused: Refused) -> str:
    """What is wrong with this refusal; empty if nothing is."""
    if not refused.message:
        return f"refused as {refused.code} without a reason"
    if kind.possible:
        return "" if refused.code in TEMPORARY else f"refused although it can be met: {refused}"
    if refused.code != "unsatisfiable":
        return f"refused as {refused.code} instead of unsatisfiable: {refused.message}"
    if refused.closest is None or any(refused.closest.get(field) is None for field in CLOSEST_FIELDS):
        return f"refused without naming the closest offer: {refused.closest}"
    return ""


def wrong_accuracy(promised: float, measured: float, items: int, pictures: int, validated: int) -> str:
    """Whether a measured accuracy contradicts the promised one; empty if chance explains the difference.

    items: answers that were checked. pictures: different pictures among them. validated: size of the validation set that the
    promise comes from. Both accuracies estimate one probability from independent samples. The larger of the two variances stands
    for both, and half an answer is allowed for rounding.
    """
    if items == 0:
        return ""
    n = min(items, pictures)
    spread = max(promised * (1 - promised), measured * (1 - measured), 1 / validated)
    allowed = SIGMAS * math.sqrt(spread / n + spread / validated) + 0.5 / n
    if abs(promised - measured) <= allowed:
        return ""
    return f"accuracy {measured:.4f} on {items} answers, but {promised:.4f} was promised (±{allowed:.4f})"


def refusals(replies: Sequence[DemoReply]) -> dict[str, int]:
    """By code, the most frequent first."""
    return dict(Counter(one.said.code for one in replies if isinstance(one.said, Refused)).most_common())


def percentiles(replies: Iterable[DemoReply]) -> dict[str, float | None]:
    """Of the answers' latencies, as the client saw them."""
    took = [one.took_ms for one in replies if one.answer is not None]
    p50, p99 = np.percentile(took, [50, 99]).tolist() if took else (None, None)
    return {"p50_ms": p50, "p99_ms": p99}


def row_of(kind: QueryKind, sent: int, wrong: int, replies: Sequence[DemoReply]) -> dict[str, Any]:
    """What became of the queries of one kind: a row of the demo's table and of its JSON. wrong: of them, how many have no reply here."""
    answered = [(one, one.answer) for one in replies if one.answer is not None]
    items = sum(len(one.labels) for one, _ in answered)
    right = sum(int((answer.outputs["scores"].argmax(axis=1) == one.labels).sum()) for one, answer in answered)
    promised = sum(len(one.labels) * (answer.accuracy or 0.0) for one, answer in answered)
    limit = kind.needs.get("latency_ms") or math.inf
    met = sum(one.took_ms <= limit and not answer.missed for one, answer in answered)
    reasons: dict[str, str] = {}
    for one in replies:
        if isinstance(one.said, Refused):
            reasons.setdefault(one.said.code, _reason(one.said))
    return {
        "asked": kind.name,
        "needs": dict(kind.needs),
        "possible": kind.possible,
        "sent": sent,
        "answered": len(answered),
        "variants": dict(Counter(answer.variant for _, answer in answered).most_common()),
        "refused": refusals(replies),
        "reasons": reasons,
        "missed": dict(Counter(what for _, answer in answered for what in answer.missed).most_common()),
        "wrong": wrong,
        "accuracy": right / items if answered else None,
        "promised_accuracy": promised / items if answered else None,
        **percentiles(replies),
        "slo_attainment": met / sent if kind.possible and sent else None,
        "cost_per_1000": 1000 * sum(answer.cost for _, answer in answered) / items if answered else None,
    }


def problems_of(row: Mapping[str, Any], replies: Sequence[DemoReply], validated: int, views: int = 1) -> list[str]:
    """What is wrong with the queries of one kind in all; empty if nothing is. row: of `row_of`. validated, views: as in ModelFamily."""
    if row["possible"] and row["answered"] == 0:
        return [f"{row['asked']}: none of {row['sent']} queries was answered: {row['refused']}"]
    if row["answered"] == 0:
        return []
    shown = np.concatenate([one.pictures for one in replies if one.answer is not None])
    different = len(np.unique(shown // views))
    wrong = wrong_accuracy(row["promised_accuracy"], row["accuracy"], len(shown), different, validated)
    return [f"{row['asked']}: {wrong}"] if wrong else []


def _reason(refusal: Refused) -> str:
    closest = refusal.closest
    if closest is None:
        return refusal.message
    accuracy = closest.get("accuracy")
    return (
        f"{refusal.message}; closest: {closest.get('variant')}"
        f" (accuracy {'?' if accuracy is None else format(accuracy, '.3f')},"
        f" {closest.get('latency_ms', 0):.3g} ms, US$ {1000 * closest.get('cost', 0):.2g} per million)"
    )

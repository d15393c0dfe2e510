"""Whether each query of the demo was answered correctly or refused with a reason, and the counts for each kind of query. Pure."""

import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from infaas.answers import Answer
from infaas.demo.family import QueryKind
from infaas.errors import Refused

TOLERANCE = 1e-9  # relative rounding error of a cost
SIGMAS = 4.0  # standard errors by which a measured accuracy may differ from the promised one
TEMPORARY = frozenset({"deadline", "overloaded"})  # refusals that are right for a query that is possible at other times
MAX_PROBLEMS = 5  # shown for one kind of query
CLOSEST_FIELDS = ("model", "variant", "latency_ms", "cost")  # what `closest` of a refusal must name


def wrong_answer(
    kind: QueryKind, items: int, id: str, answer: Answer, variants: Mapping[str, Mapping[str, Any]], classes: int
) -> str:
    """What is wrong with this answer; empty if nothing is. variants: the rows of the list of variants, by name."""
    if not kind.possible:
        return f"answered by {answer.variant}, although no variant can meet it"
    if answer.id != id:
        return f"carries the id {answer.id!r} instead of {id!r}"
    known = variants.get(answer.variant)
    if known is None:
        return f"names the variant {answer.variant!r}, which is not in the catalogue"
    scores = answer.outputs.get("scores")
    if scores is None or scores.shape != (items, classes) or not np.isfinite(scores).all():
        return f"does not hold {classes} finite scores for each of {items} items"
    return _unmet_needs(kind, answer, known)


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


class KindCounts:
    """What became of the queries of one kind. Times in ms. validated, views: as in ModelFamily."""

    def __init__(self, kind: QueryKind, *, validated: int, views: int = 1) -> None:
        self.kind = kind
        self._validated = validated
        self._views = views
        self.variants: Counter[str] = Counter()
        self.refusals: Counter[str] = Counter()
        self.reasons: dict[str, str] = {}
        self.problems: list[str] = []
        self.wrong = 0
        self.sent = 0
        self.items = 0
        self.met = 0
        self.missed: Counter[str] = Counter()
        self._right = 0
        self._promised = 0.0
        self._cost = 0.0
        self._pictures: set[int] = set()
        self._latencies: list[float] = []

    def answered(self, answer: Answer, labels: NDArray[np.int64], pictures: NDArray[np.int64], took_ms: float) -> None:
        """Count a correct answer. took_ms: at the client, from the time at which the query was due."""
        items = len(labels)
        self.variants[answer.variant] += 1
        self.items += items
        self._right += int((answer.outputs["scores"].argmax(axis=1) == labels).sum())
        self._promised += items * (answer.accuracy or 0.0)
        self._cost += answer.cost
        self._pictures.update((pictures // self._views).tolist())
        self._latencies.append(took_ms)
        self.met += took_ms <= (self.kind.needs.get("latency_ms") or float("inf")) and not answer.missed
        self.missed.update(answer.missed)

    def refused(self, refusal: Refused) -> None:
        """Count a refusal with its reason."""
        self.refusals[refusal.code] += 1
        self.reasons.setdefault(refusal.code, _reason(refusal))

    def failed(self, problem: str) -> None:
        """Count a query that went wrong; the first few problems are kept as text."""
        self.wrong += 1
        if len(self.problems) < MAX_PROBLEMS:
            self.problems.append(problem)

    def problems_found(self) -> list[str]:
        """Everything that went wrong with these queries; empty if nothing did."""
        found = [f"{self.kind.name}: {problem}" for problem in self.problems]
        if self.wrong > len(self.problems):
            found.append(f"{self.kind.name}: {self.wrong - len(self.problems)} more queries went wrong")
        answers = self.variants.total()
        if self.kind.possible and answers == 0:
            found.append(f"{self.kind.name}: none of {self.sent} queries was answered: {dict(self.refusals)}")
        if answers + self.refusals.total() + self.wrong != self.sent:
            found.append(
                f"{self.kind.name}: {self.sent} sent, {answers + self.refusals.total() + self.wrong} came back"
            )
        if answers:
            contradiction = wrong_accuracy(
                self._promised / self.items,
                self._right / self.items,
                self.items,
                len(self._pictures),
                self._validated,
            )
            found += [f"{self.kind.name}: {contradiction}"] if contradiction else []
        return found

    def summary(self) -> dict[str, Any]:
        """One row of the demo's table and of its JSON."""
        answers = self.variants.total()
        p50, p99 = (map(float, np.percentile(self._latencies, [50, 99]))) if answers else (None, None)
        return {
            "asked": self.kind.name,
            "needs": dict(self.kind.needs),
            "possible": self.kind.possible,
            "sent": self.sent,
            "answered": answers,
            "variants": dict(self.variants.most_common()),
            "refused": dict(self.refusals.most_common()),
            "reasons": self.reasons,
            "missed": dict(self.missed.most_common()),
            "wrong": self.wrong,
            "accuracy": self._right / self.items if answers else None,
            "promised_accuracy": self._promised / self.items if answers else None,
            "p50_ms": p50,
            "p99_ms": p99,
            "slo_attainment": self.met / self.sent if self.kind.possible and self.sent else None,
            "cost_per_1000": 1000 * self._cost / self.items if answers else None,
        }


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

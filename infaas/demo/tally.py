"""What became of the queries with one set of requirements."""

from collections import Counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from infaas.answers import Answer
from infaas.demo.asks import Ask
from infaas.demo.judge import wrong_accuracy
from infaas.errors import Refused

MOST_PROBLEMS = 5  # shown of one kind of query


class Tally:
    """Counts for one `Ask`; times in ms. validated, views: as the family says."""

    def __init__(self, ask: Ask, *, validated: int, views: int = 1) -> None:
        self.ask = ask
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
        """Count a right answer. took_ms: at the client, from the moment when the query should have been sent."""
        items = len(labels)
        self.variants[answer.variant] += 1
        self.items += items
        self._right += int((answer.outputs["scores"].argmax(axis=1) == labels).sum())
        self._promised += items * (answer.accuracy or 0.0)
        self._cost += answer.cost
        self._pictures.update((pictures // self._views).tolist())
        self._latencies.append(took_ms)
        self.met += took_ms <= (self.ask.needs.get("latency_ms") or float("inf")) and not answer.missed
        self.missed.update(answer.missed)

    def refused(self, refusal: Refused) -> None:
        """Count a refusal with its reason."""
        self.refusals[refusal.code] += 1
        self.reasons.setdefault(refusal.code, _reason(refusal))

    def failed(self, problem: str) -> None:
        """Count a query that went wrong, and remember the first few in words."""
        self.wrong += 1
        if len(self.problems) < MOST_PROBLEMS:
            self.problems.append(problem)

    def conclude(self) -> list[str]:
        """Everything that was wrong with these queries, in words; empty when all is right."""
        found = [f"{self.ask.name}: {problem}" for problem in self.problems]
        if self.wrong > len(self.problems):
            found.append(f"{self.ask.name}: {self.wrong - len(self.problems)} more went wrong")
        answers = self.variants.total()
        if self.ask.possible and answers == 0:
            found.append(f"{self.ask.name}: not one of {self.sent} queries was answered: {dict(self.refusals)}")
        if answers + self.refusals.total() + self.wrong != self.sent:
            found.append(f"{self.ask.name}: {self.sent} sent, {answers + self.refusals.total() + self.wrong} came back")
        if answers:
            doubt = wrong_accuracy(
                self._promised / self.items,
                self._right / self.items,
                self.items,
                len(self._pictures),
                self._validated,
            )
            found += [f"{self.ask.name}: {doubt}"] if doubt else []
        return found

    def summary(self) -> dict[str, Any]:
        """The row of the demo's table, for people and as JSON."""
        answers = self.variants.total()
        p50, p99 = (map(float, np.percentile(self._latencies, [50, 99]))) if answers else (None, None)
        return {
            "asked": self.ask.name,
            "needs": dict(self.ask.needs),
            "possible": self.ask.possible,
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
            "slo_attainment": self.met / self.sent if self.ask.possible and self.sent else None,
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
        f" {closest.get('latency_ms', 0):.3g} ms, ${closest.get('cost', 0):.2g} per 1,000)"
    )

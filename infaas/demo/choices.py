"""`infaas demo`: models of one family serve an app, and each query gets the variant that meets what it asks for."""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from infaas.answers import Answer
from infaas.client import Client
from infaas.demo.load import DemoLoad, DemoReply, ModelFamily, Progress, QueryKind, arrivals
from infaas.demo.program import Demo, DemoSystem, DemoTable, counted, register, text
from infaas.errors import InfaasError, Refused

FIRST_ANSWER_S = 20.0  # within which each possible kind of query must be answered once, loading included
MAX_VARIANTS = 3  # named in a cell of a table; the others are counted

IN_SQL = {
    "infaas sql: outcomes by variant": """
SELECT coalesce(variant, '-') AS variant, outcome, count(*) AS queries, sum(items) AS items,
       round((percentile_cont(0.5) WITHIN GROUP (ORDER BY latency_ms))::numeric, 2)::float8 AS p50_ms
FROM infaas.query_outcomes WHERE app = '{app}' GROUP BY 1, 2 ORDER BY queries DESC LIMIT 12
""",
    "infaas sql: states of instances": """
SELECT variant, from_state || ' -> ' || to_state AS change, count(*) AS times, min(reason) AS reason
FROM infaas.state_events WHERE app = '{app}' GROUP BY 1, 2 ORDER BY min(time) LIMIT 12
""",
    "infaas sql: cost by app": """
SELECT coalesce(app, 'nobody (idle)') AS app, round(sum(busy_seconds)::numeric, 2)::float8 AS busy_s, sum(cost) AS usd
FROM infaas.cost_events GROUP BY 1 ORDER BY usd DESC
""",
}


class ChoicesDemo(Demo):
    """Queries with several requirements, to the models of a family."""

    def __init__(self, family: ModelFamily) -> None:
        self.app = family.app
        self.settings = family.settings
        self._family = family

    async def play(self, client: Client, directory: Path, seconds: float, progress: Progress) -> DemoLoad:
        """Send each kind of query until it is answered once, then all kinds at the changing rate."""
        family = self._family
        validation = family.save_validation(directory / "validation.npz")
        files = [(family.app, model, path, validation) for model, path in family.models.items()]
        failures = await register(client, files, progress)
        variants = {row["variant"]: row for row in await client.variants(app=family.app)}
        self._registered = [
            {**summary, "failures": failures[summary["model"]]} for summary in summaries(family.models, variants)
        ]
        self._kinds = family.query_kinds(variants.values())

        def judge(kind: QueryKind, items: int, id: str, said: Answer | Refused) -> str:
            if isinstance(said, Refused):
                return wrong_refusal(kind, said)
            return wrong_answer(kind, items, id, said, variants, family.classes)

        load = DemoLoad(client, family.app, family.unseen, judge, largest=family.max_items)
        self._first_ms: dict[str, float] = {}
        possible = [kind for kind in self._kinds if kind.possible]
        for done, kind in enumerate(possible):
            progress("first queries: loading what they need", done / len(possible))
            self._first_ms[kind.name] = await load.first(kind, FIRST_ANSWER_S)
        rates = [(seconds / len(family.rates), rate) for rate in family.rates]
        await load.run(arrivals(rates, self._kinds), seconds, lambda due: progress("sending queries", due / seconds))
        return load

    async def figures(self, system: DemoSystem, load: DemoLoad) -> dict[str, Any]:
        asks, problems = [], []
        for kind in self._kinds:
            replies = load.replies[kind.name]
            row = row_of(kind, load.sent[kind.name], len(load.wrong[kind.name]), replies)
            asks.append(row)
            problems += problems_of(row, replies, self._family.validated, self._family.views)
        return {
            "things": self._family.things,
            "registered": self._registered,
            "asks": asks,
            "first_answer_ms": self._first_ms,
            "sql": {title: await system.sql(query.format(app=self.app)) for title, query in IN_SQL.items()},
            "problems": problems,
        }

    def shown(self, result: Mapping[str, Any]) -> Iterator[str | DemoTable]:
        yield DemoTable("What was registered", [_model_cells(row) for row in result["registered"]])
        title = f"What was asked, and what became of it ({result['things']} that the system has not seen)"
        yield DemoTable(title, [_kind_cells(row) for row in result["asks"]], left=("answered by", "refused"))
        yield "Why queries were refused (one example of each kind):"
        for row in result["asks"]:
            yield from (f"  {row['asked']}: {code}: {reason}" for code, reason in row["reasons"].items())
        for title, rows in result["sql"].items():
            words = [name for name, value in (rows[0] if rows else {}).items() if isinstance(value, str)]
            yield DemoTable(title, [{name: _cell(value) for name, value in row.items()} for row in rows], words)


def summaries(models: Mapping[str, Path], variants: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Of each model the smallest and the largest of each figure of its variants. Raises InfaasError if a model has none."""
    by_model: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for row in variants.values():
        by_model[row["model"]].append(row)
    missing = models.keys() - by_model.keys()
    if missing:
        raise InfaasError(f"registered, but not listed: {', '.join(sorted(missing))}")
    return [
        {
            "model": model,
            "variants": len(by_model[model]),
            **{name: _ends(by_model[model], name) for name in ("accuracy", "latency_ms", "cost_per_1000", "memory_mb")},
        }
        for model in models
    ]


def _ends(rows: Sequence[Mapping[str, Any]], name: str) -> list[float]:
    values = [float(row[name]) for row in rows if row[name] is not None]
    return [min(values), max(values)] if values else [0.0, 0.0]


def _model_cells(row: Mapping[str, Any]) -> dict[str, str]:
    return {
        "model": row["model"],
        "variants": str(row["variants"]) + (f" ({len(row['failures'])} failed)" if row["failures"] else ""),
        "accuracy": _span(row["accuracy"], ".3f"),
        "fastest": f"{row['latency_ms'][0]:.3g} ms",
        "computed\nUS$/1,000": _span(row["cost_per_1000"], ".2g"),
        "MB": _span(row["memory_mb"], ".0f"),
    }


def _kind_cells(row: Mapping[str, Any]) -> dict[str, str]:
    """Which variants answered a kind of query, and how well."""
    counts = list(row["variants"].items())
    answered = counted(dict(counts[:MAX_VARIANTS]), "\n")
    if rest := [count for _, count in counts[MAX_VARIANTS:]]:
        answered += f"\n{sum(rest)} × {len(rest)} others"
    missed = counted(row["missed"], "\n")
    cost = row["cost_per_1000"]
    return {
        "asked for": row["asked"],
        "sent": str(row["sent"]),
        "answered by": answered,
        "refused": counted(row["refused"], "\n"),
        "accuracy": text(row["accuracy"], "{:.3f}") + text(row["promised_accuracy"], "\npromised {:.3f}"),
        "p50": text(row["p50_ms"], "{:.1f} ms"),
        "p99": text(row["p99_ms"], "{:.1f} ms"),
        "in time": text(row["slo_attainment"], "{:.1%}") + (f"\n{missed}" if missed else ""),
        "charged\nUS$/1,000": text(cost, "{:.2g}"),
    }


def _cell(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _span(ends: Sequence[float], form: str) -> str:
    low, high = (format(end, form) for end in ends)
    return low if low == high else f"{low} .. {high}"


# -- whether each query was answered correctly or refused with a reason, and the figures of each kind of query. Pure

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
            return f"charged US$ {cost:.3g} per 1,000 without `cost` in `missed`"
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
        f" {closest.get('latency_ms', 0):.3g} ms, US$ {closest.get('cost', 0):.2g} per 1,000)"
    )

"""`infaas demo`: models of one family serve an app, and each query gets the variant that meets what it asks for."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from infaas.answers import Answer
from infaas.cli.output import refusal_line
from infaas.cli.output import text as cell_text
from infaas.demo.load import DemoLoad, DemoReply, ModelFamily, QueryKind, arrivals, became, counted, text
from infaas.demo.program import Demo, DemoRun, DemoTable
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


def choices(family: ModelFamily) -> Demo:
    """Queries with several requirements, to the models of a family."""
    return Demo(family.app, partial(play, family), shown, settings=family.settings)


async def play(family: ModelFamily, run: DemoRun) -> dict[str, Any]:
    """Send each kind of query until it is answered once, then all kinds at the changing rate."""
    validation = family.save_validation(run.directory / "validation.npz")
    failures = await run.register([(run.app, model, path, validation) for model, path in family.models.items()])
    variants = {row["variant"]: row for row in await run.client.variants(app=run.app)}
    kinds = family.query_kinds(variants.values())

    def judge(kind: QueryKind, items: int, id: str, said: Answer | Refused) -> str:
        if isinstance(said, Refused):
            return wrong_refusal(kind, said)
        return wrong_answer(kind, items, id, said, variants, family.classes)

    load = DemoLoad(run.client, run.app, family.unseen, judge, largest=family.max_items)
    possible = [kind for kind in kinds if kind.possible]
    for done, kind in enumerate(possible):
        run.progress("first queries: loading what they need", done / len(possible))
        await load.first(kind, FIRST_ANSWER_S)
    due = arrivals([(run.seconds / len(family.rates), rate) for rate in family.rates], kinds)
    replies = await load.run(due, run.seconds, lambda at: run.progress("sending queries", at / run.seconds))
    await run.recorded(load)
    asks = []
    for kind in kinds:
        mine = [one for one in replies if one.kind == kind.name]
        asks.append(row_of(kind, mine, len(load.wrong[kind.name])))
        run.problems.extend(problems_of(asks[-1], mine, family.validated, family.views))
    return {
        "queries": load.queries,
        "things": family.things,
        "registered": [registered(model, variants.values(), failures[model]) for model in family.models],
        "asks": asks,
        "sql": {title: await run.system.sql(query.format(app=run.app)) for title, query in IN_SQL.items()},
    }


def shown(result: Mapping[str, Any]) -> Iterator[str | DemoTable]:
    yield DemoTable("What was registered", [_model_cells(row) for row in result["registered"]])
    title = f"What was asked, and what became of it ({result['things']} that the system has not seen)"
    yield DemoTable(title, [_kind_cells(row) for row in result["asks"]], left=("answered by", "refused"))
    yield "Why queries were refused (one example of each kind):"
    for row in result["asks"]:
        yield from (f"  {row['asked']}: {reason}" for reason in row["reasons"].values())
    for title, rows in result["sql"].items():
        words = [name for name, value in (rows[0] if rows else {}).items() if isinstance(value, str)]
        yield DemoTable(title, [{name: cell_text(value) for name, value in row.items()} for row in rows], words)


def registered(model: str, variants: Iterable[Mapping[str, Any]], failures: Mapping[str, str]) -> dict[str, Any]:
    """The smallest and the largest of each figure of a model's variants. Raises InfaasError if it has none."""
    rows = [row for row in variants if row["model"] == model]
    if not rows:
        raise InfaasError(f"registered, but not listed: {model}")
    figures: dict[str, Any] = {"model": model, "variants": len(rows), "failures": failures}
    for name in ("accuracy", "latency_ms", "cost_per_1000", "memory_mb"):
        values = [float(row[name]) for row in rows if row[name] is not None] or [0.0]
        figures[name] = [min(values), max(values)]
    return figures


def _model_cells(row: Mapping[str, Any]) -> dict[str, str]:
    def span(name: str, form: str) -> str:
        return " .. ".join(dict.fromkeys(format(end, form) for end in row[name]))

    return {
        "model": row["model"],
        "variants": str(row["variants"]) + (f" ({len(row['failures'])} failed)" if row["failures"] else ""),
        "accuracy": span("accuracy", ".3f"),
        "fastest": f"{row['latency_ms'][0]:.3g} ms",
        "computed\nUS$/1,000": span("cost_per_1000", ".2g"),
        "MB": span("memory_mb", ".0f"),
    }


def _kind_cells(row: Mapping[str, Any]) -> dict[str, str]:
    """Which variants answered a kind of query, and how well."""
    counts = list(row["variants"].items())
    answered = counted(dict(counts[:MAX_VARIANTS]), "\n")
    if rest := [count for _, count in counts[MAX_VARIANTS:]]:
        answered += f"\n{sum(rest)} × {len(rest)} others"
    missed = counted(row["missed"], "\n")
    return {
        "asked for": row["asked"],
        "sent": str(row["sent"]),
        "answered by": answered,
        "refused": counted(row["refused"], "\n"),
        "accuracy": text(row["accuracy"], "{:.3f}") + text(row["promised_accuracy"], "\npromised {:.3f}"),
        "p50": text(row["p50_ms"], "{:.1f} ms"),
        "p99": text(row["p99_ms"], "{:.1f} ms"),
        "in time": text(row["slo_attainment"], "{:.1%}") + (f"\n{missed}" if missed else ""),
        "charged\nUS$/1,000": text(row["cost_per_1000"], "{:.2g}"),
    }


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


def row_of(kind: QueryKind, replies: Sequence[DemoReply], wrong: int = 0) -> dict[str, Any]:
    """What became of the queries of one kind: a row of the table and of the JSON. wrong: of those sent, how many have no reply."""
    found = became(replies, kind.needs.get("latency_ms") or math.inf, wrong)
    if not kind.possible:
        found["slo_attainment"] = None
    reasons = {one.said.code: refusal_line(one.said) for one in reversed(replies) if isinstance(one.said, Refused)}
    asked = {"asked": kind.name, "needs": dict(kind.needs), "possible": kind.possible, "wrong": wrong}
    return {**asked, **found, "reasons": reasons}


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

"""`infaas demo`: models of one family serve an app, and each query gets the variant that meets what it asks for."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from infaas.answers import Answer
from infaas.client import Client
from infaas.demo.family import ModelFamily, Progress, QueryKind
from infaas.demo.load import DemoLoad, arrivals
from infaas.demo.program import Demo, DemoTable, counted, register, text
from infaas.demo.results import problems_of, row_of, wrong_answer, wrong_refusal
from infaas.demo.system import DemoSystem
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
        "computed\nUS$/million": _span([1000 * one for one in row["cost_per_1000"]], ".2g"),
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
        "charged\nUS$/million": text(None if cost is None else 1000 * cost, "{:.2g}"),
    }


def _cell(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _span(ends: Sequence[float], form: str) -> str:
    low, high = (format(end, form) for end in ends)
    return low if low == high else f"{low} .. {high}"

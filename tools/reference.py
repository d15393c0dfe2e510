"""Parts of the reference that the code states: metrics with their help, alerts, relations of SQL with their comments, pages of the dashboard.

`python -m tools.reference metrics`, `sql` or `dashboard` prints one. `make docs` ends docs/metrics.md, docs/sql.md and docs/dashboard.md with them.
"""

import ast
import re
import sys
from collections.abc import Iterator
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

from prometheus_client import ProcessCollector

ROOT = Path(__file__).parents[1]
COMMENTS = ROOT / "services" / "recorder" / "schema" / "comments.sql"
RULES = ROOT / "ops" / "prometheus" / "infaas.rules.yml"
VIEWS = ROOT / "dashboard" / "views"
_NAME = re.compile(r"infaas_\w+")
_COMMENT = re.compile(r"^ +\('(?P<relation>[^']*)', '(?P<column>[^']*)', '(?P<meaning>(?:[^']|'')*)'\)", re.MULTILINE)
_ALERT = re.compile(
    r"- alert: (?P<name>\w+)\n +expr: (?P<when>.*?)^ +(?:for: (?P<span>\w+)$.*?)?labels:.*?^ +summary: \"(?P<summary>[^\n]*)\"\n(?: +description: \"(?P<description>[^\n]*)\"\n)?",
    re.DOTALL | re.MULTILINE,
)
# Titles of the tables, by the folder of `services` that has the metrics, in the order in which they are shown.
SERVICES = {
    "dispatcher": "Dispatchers",
    "executor": "Executors",
    "monitor": "Monitors",
    "autoscaler": "Autoscalers",
    "gateway": "The gateway",
    "registrar": "The registrar",
    "recorder": "The recorder",
    "jobs": "Offline jobs",
    "engine": "The engine proxy",
    "core": "Policies of users",
    "dashboard": "The dashboard",
    "shell": "Each process: what its events add up to, and itself",
}


class Metric(NamedTuple):
    """service: the folder of `services` that has it, or the dashboard. kind: counter, gauge or histogram. help: as on the page."""

    service: str
    name: str
    kind: str
    help: str


class Comment(NamedTuple):
    """relation '*': of a column that means the same everywhere. column '': of the relation itself."""

    relation: str
    column: str
    meaning: str


@cache
def metrics() -> list[Metric]:
    """Each metric that the services offer, in the order of the tables."""
    found = {}
    for one in ProcessCollector(namespace="infaas", registry=None).collect():
        name = f"{one.name}_total" if one.type == "counter" else one.name
        found[name] = Metric("dashboard", name, one.type, one.documentation)
    paths = (*sorted((ROOT / "services").rglob("*.py")), ROOT / "dashboard" / "serve.py")
    found |= {one.name: one for path in paths for one in _metrics_of(path)}
    order = list(SERVICES)
    return sorted(found.values(), key=lambda one: (order.index(one.service), one.name))


def alerts() -> list[tuple[str, str, str, str]]:
    """Each alert: its name, when it fires, what it says, and what to do, empty where that is said. N, APP and the like stand for values."""
    found = []
    for one in _ALERT.finditer(RULES.read_text()):
        when = " ".join(one["when"].strip(" |\n").split()) + (f" for {one['span']}" if one["span"] else "")
        texts = (re.sub(r"\{\{ \$value.*?\}\}", "N", one["summary"]), one["description"] or "")
        says, remedy = (re.sub(r"\{\{ \$labels\.(\w+) \}\}", lambda name: name[1].upper(), text) for text in texts)
        found.append((one["name"], when, says, remedy))
    return found


def views() -> list[str]:
    """What each page of the dashboard shows: the first paragraph of its module, "Title: ..."."""
    texts = (ast.get_docstring(ast.parse(path.read_text())) for path in sorted(VIEWS.glob("*.py")))
    return [" ".join(text.partition("\n\n")[0].split()) for text in texts if text]


def comments() -> list[Comment]:
    """What the database says of its relations and columns."""
    found = _COMMENT.finditer(COMMENTS.read_text())
    return [Comment(one["relation"], one["column"], one["meaning"].replace("''", "'")) for one in found]


def metrics_page() -> str:
    """The tables of metrics, as Markdown."""
    lines = ["", "## All metrics", "", "`curl -s localhost:9100/metrics` shows them with their labels.", ""]
    for service, members in groupby(metrics(), key=lambda one: one.service):
        lines += [f"### {SERVICES[service]}", "", "| metric | kind | meaning |", "|---|---|---|"]
        lines += [f"| `{one.name}` | {one.kind} | {plain(one.help)} |" for one in members]
        lines.append("")
    lines += ["## All alerts", "", "| alert | when | says | what to do |", "|---|---|---|---|"]
    lines += [
        f"| `{name}` | {plain(when)} | {plain(says)} | {plain(remedy)} |" for name, when, says, remedy in alerts()
    ]
    return "\n".join([*lines, ""])


def dashboard_page() -> str:
    """The pages of the dashboard, as Markdown."""
    rows = [one.partition(": ") for one in views()]
    lines = ["", "## All pages", "", "| page | shows |", "|---|---|"]
    return "\n".join([*lines, *(f"| {title} | {plain(shows)} |" for title, _, shows in rows if shows), ""])


def sql_page() -> str:
    """The tables of relations, as Markdown."""
    lines = ["", "## All relations", ""]
    for relation, members in groupby(sorted(comments(), key=lambda one: one.relation), key=lambda one: one.relation):
        said = list(members)
        own = next((one.meaning for one in said if not one.column), "Columns that mean the same in each relation")
        title = "Every relation" if relation == "*" else f"`{relation}`"
        lines += [f"### {title}", "", f"{plain(own)}.", ""]
        rows = [f"| `{one.column}` | {plain(one.meaning)} |" for one in said if one.column]
        if rows:
            lines += ["| column | meaning |", "|---|---|", *rows, ""]
    return "\n".join(lines)


def plain(text: str) -> str:
    """Text that Markdown shows as it is, but for what stands between backquotes."""
    return "`".join(
        part if i % 2 else re.sub(r"([\\|_*<\[])", r"\\\1", part)
        for i, part in enumerate(text.replace("\n", " ").split("`"))
    )


def _metrics_of(path: Path) -> Iterator[Metric]:
    """A metric is a call or a row of a table that begins with its name; its help is the first text with a space."""
    service = next(one for one in path.relative_to(ROOT).parts if one != "services")
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, (ast.Call, ast.Tuple)):
            continue
        given = node.args if isinstance(node, ast.Call) else node.elts
        texts = [one.value for one in given if isinstance(one, ast.Constant) and isinstance(one.value, str)]
        about = next((one for one in texts if " " in one), "")
        if about and _NAME.fullmatch(texts[0]):
            usual = "counter" if texts[0].endswith("_total") else "gauge"
            kind = next((one for one in texts if one in ("counter", "gauge", "histogram")), usual)
            yield Metric(service, texts[0], kind, about)


if __name__ == "__main__":
    print({"metrics": metrics_page, "sql": sql_page, "dashboard": dashboard_page}[sys.argv[1]]())

"""Parts of the reference that the code states: the metrics with their help, the relations of SQL with their comments.

`python -m tools.reference metrics` or `sql` prints one. `make docs` ends docs/metrics.md and docs/sql.md with them.
"""

import ast
import re
import sys
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
COMMENTS = ROOT / "services" / "recorder" / "schema" / "comments.sql"
_NAME = re.compile(r"infaas_\w+")
_COMMENT = re.compile(r"^ +\('(?P<relation>[^']*)', '(?P<column>[^']*)', '(?P<meaning>(?:[^']|'')*)'\)", re.MULTILINE)
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
    "shell": "Each process: what its events add up to, and itself",
}


class Metric(NamedTuple):
    """service: the folder of `services` that has it. kind: counter, gauge or histogram. help: as on the page."""

    service: str
    name: str
    kind: str
    help: str


class Comment(NamedTuple):
    """relation '*': of a column that means the same everywhere. column '': of the relation itself."""

    relation: str
    column: str
    meaning: str


def metrics() -> list[Metric]:
    """Each metric that the services offer, in the order of the tables."""
    found = {one.name: one for path in sorted((ROOT / "services").rglob("*.py")) for one in _metrics_of(path)}
    order = list(SERVICES)
    return sorted(found.values(), key=lambda one: (order.index(one.service), one.name))


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
    return "\n".join(lines)


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
    service = path.relative_to(ROOT / "services").parts[0]
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, (ast.Call, ast.Tuple)):
            continue
        given = node.args if isinstance(node, ast.Call) else node.elts
        texts = [one.value for one in given if isinstance(one, ast.Constant) and isinstance(one.value, str)]
        about = next((one for one in texts if " " in one), "")
        if about and _NAME.fullmatch(texts[0]):
            kind = next((one for one in texts if one in ("counter", "gauge", "histogram")), "counter")
            yield Metric(service, texts[0], kind, about)


if __name__ == "__main__":
    print({"metrics": metrics_page, "sql": sql_page}[sys.argv[1]]())

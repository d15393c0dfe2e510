"""What a stock client got and what SQL says of it, query by query."""

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import psycopg

import infaas
from tests.support.clients.constant_load import LibraryLoad, StockLoad

PRICE = 1e-9  # US$: the noise of floats


class Row(NamedTuple):
    """A query's row. what: as of `meaning`; outcome: as SQL names it."""

    what: str
    outcome: str
    cost: float


@dataclass
class Told:
    """Ids of queries, by what became of them; `refused` by code.

    in_time, late: answered, by the client's clock. same, other: had further replies of the meaning of the first, or of another one. silent: no reply.
    unserved: none, since nobody took it, as the NATS server said. unrecorded: a reply and no row. recorded_alone: a row and no reply. differs: rows that do not say what came first, or several. charged: rows whose
    cost is not that of the reply. late_as_ok: the row says `ok` of an answer that was more than `NOTED` s late.
    """

    in_time: set[str] = field(default_factory=set)
    late: set[str] = field(default_factory=set)
    refused: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    same: set[str] = field(default_factory=set)
    other: set[str] = field(default_factory=set)
    silent: set[str] = field(default_factory=set)
    unserved: set[str] = field(default_factory=set)
    unrecorded: set[str] = field(default_factory=set)
    recorded_alone: set[str] = field(default_factory=set)
    differs: set[str] = field(default_factory=set)
    charged: set[str] = field(default_factory=set)
    late_as_ok: set[str] = field(default_factory=set)


NOTED = 0.1  # s beyond the deadline, by the client's clock


def meaning(reply: dict[str, Any]) -> str:
    """What a reply says: `answer`, `default`, or a refusal's code."""
    return reply["error"]["code"] if "error" in reply else "default" if reply.get("default") else "answer"


def rows_of(sql: str, tag: str) -> dict[str, list[Row]]:
    """By query id."""
    query = "SELECT id, outcome, code, cost FROM infaas.query_outcomes WHERE id LIKE %s AND parent IS NULL"
    found: dict[str, list[Row]] = defaultdict(list)
    with psycopg.connect(sql) as connection:
        for name, outcome, code, cost in connection.execute(query, (f"{tag}-%",)):
            what = {"ok": "answer", "late": "answer", "default": "default"}.get(outcome, code)
            found[name].append(Row(what, outcome, cost))
    return found


def compared(load: StockLoad, rows: dict[str, list[Row]]) -> Told:
    """The first reply of each query beside its row."""
    told = Told()
    for name, query in load.queries.items():
        replies, said = load.replies.get(name, []), rows.get(name, [])
        if not replies:
            (told.unserved if name in load.unserved else told.silent).add(name)
            if said:
                told.recorded_alone.add(name)
            continue
        at, first = replies[0]
        what, cost = meaning(first), first.get("cost", 0.0)
        if "error" in first:
            told.refused[what].add(name)
        else:
            (told.in_time if at <= query.deadline else told.late).add(name)
        further = {meaning(reply) for _, reply in replies[1:]}
        if further:
            (told.same if further == {what} else told.other).add(name)
        if not said:
            told.unrecorded.add(name)
            continue
        if len(said) > 1 or said[0].what != what:
            told.differs.add(name)
        if abs(sum(row.cost for row in said) - cost) > PRICE:
            told.charged.add(name)
        if said[0].outcome == "ok" and at > query.deadline + NOTED:
            told.late_as_ok.add(name)
    return told


def astray(load: LibraryLoad, rows: dict[str, list[Row]]) -> dict[str, tuple[str, list[str]]]:
    """Queries of the library that have no reply, or not exactly the row that says it, with its cost: what each got, and what its rows say."""
    found = {}
    for name in load.queries:
        end, said = load.ends.get(name), rows.get(name, [])
        cost = 0.0
        if isinstance(end, infaas.Answer):
            what, cost = "default" if end.default else "answer", end.cost
        else:
            what = end.code if isinstance(end, infaas.Refused) else f"nothing: {end}"
        if [row.what for row in said] != [what] or abs(said[0].cost - cost) > PRICE:
            found[name] = what, [f"{row.what}, US$ {row.cost:g} for {cost:g}" for row in said]
    return found

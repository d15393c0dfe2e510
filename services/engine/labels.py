"""The one change that is let through: of a node's labels, those whose names begin with `infaas.`, but for the operator's. Pure."""

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from services.engine.routes import Denied

OURS = re.compile(r"infaas\.[A-Za-z0-9._-]{1,120}")
OPERATORS = frozenset(
    {"infaas.pool", "infaas.nats", "infaas.db", "infaas.gateway"}
)  # what a machine is for, where data lies
MOST_VALUE = 256


class Change(NamedTuple):
    """set: labels that are new or other than before. removed: names. spec: what the engine gets: the present one with new labels."""

    set: dict[str, str]
    removed: list[str]
    spec: dict[str, Any]


def change(present: Mapping[str, Any], asked: Any) -> Change:
    """What the wanted spec of a node changes. present: its spec as the engine has it. Raises Denied.

    What goes to the engine is made from the present spec, never from the wanted one: only labels are taken from that.
    """
    if not isinstance(asked, dict):
        raise Denied("the spec of a node is an object")
    wanted, had = _rest(asked), _rest(present)
    if wanted != had:
        names = sorted(key for key in wanted.keys() | had.keys() if wanted.get(key) != had.get(key))
        raise Denied(f"only labels of a node may change through the engine proxy, not {', '.join(names)[:200]}")
    before, after = _labels(present.get("Labels")), _labels(asked.get("Labels"))
    put = {name: value for name, value in after.items() if before.get(name) != value}
    removed = sorted(before.keys() - after.keys())
    for name in [*put, *removed]:
        if not OURS.fullmatch(name):
            raise Denied(f"only labels infaas.* may change through the engine proxy, not {name[:100]!r}")
        if name in OPERATORS:
            raise Denied(f"the engine proxy leaves the label {name!r} to the operator")
    for name, value in put.items():
        if len(value) > MOST_VALUE or not value.isprintable():
            raise Denied(f"the label {name!r} may have {MOST_VALUE} printable characters")
    return Change(put, removed, {**present, "Labels": after})


def _rest(spec: Mapping[str, Any]) -> dict[str, Any]:
    """All but the labels; a field that is empty is one that is not there."""
    return {key: value for key, value in spec.items() if key != "Labels" and value not in ("", None)}


def _labels(found: Any) -> dict[str, str]:
    if found is None:
        return {}
    if not isinstance(found, dict) or not all(isinstance(value, str) for value in found.values()):
        raise Denied("the labels of a node are an object of texts")
    return found

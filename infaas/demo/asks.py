"""What the demo's queries demand: sets of requirements, some of which nobody can meet."""

from collections.abc import Iterable, Mapping
from typing import Any

from msgspec import Struct

from infaas.queries import Needs

HEADROOM = 6.0  # cost ceiling over the cheapest variant that would do


class Ask(Struct, frozen=True, kw_only=True):
    """One set of requirements. possible: whether some variant can meet it; else every query with it must be refused.

    weight: its share of the queries.
    """

    name: str
    needs: Needs
    possible: bool = True
    weight: float = 1.0


def asks(variants: Iterable[Mapping[str, Any]]) -> list[Ask]:
    """The demo's requirements; the cost ceiling is set by what the variants of the catalogue cost here."""
    cheapest = min(row["cost_per_1000"] for row in variants if (row["accuracy"] or 0.0) >= 0.95)
    # A batch on a busy machine may take, and cost, a multiple of what it takes alone; dear variants stay excluded.
    ceiling = float(f"{cheapest * HEADROOM:.1g}")
    return [
        Ask(name="nothing", needs={}, weight=3),
        Ask(name="within 5 ms", needs={"latency_ms": 5.0}, weight=3),
        Ask(name="accuracy ≥ 0.97", needs={"accuracy": 0.97}, weight=3),
        Ask(name="accuracy ≥ 0.985, within 50 ms", needs={"accuracy": 0.985, "latency_ms": 50.0}, weight=3),
        Ask(
            name=f"accuracy ≥ 0.95, at most ${ceiling:g} per 1,000",
            needs={"accuracy": 0.95, "cost": ceiling},
            weight=3,
        ),
        Ask(name="accuracy ≥ 0.999", needs={"accuracy": 0.999}, possible=False, weight=0.4),
        Ask(name="within 0.001 ms", needs={"latency_ms": 0.001}, possible=False, weight=0.4),
        Ask(
            name="accuracy ≥ 0.97, at most $1e-12 per 1,000",
            needs={"accuracy": 0.97, "cost": 1e-12},
            possible=False,
            weight=0.4,
        ),
    ]

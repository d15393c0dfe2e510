"""From single queries and records to what a run was like: a time line in steps, and its figures. Pure."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from proof.load import Sent
from proof.records import Action, Charge, Move, Records
from services.core.lifecycle import COUNTED

Row = NDArray[np.float64]


class Figures(Struct, frozen=True, kw_only=True):
    """One policy's run. in_time: answered within the objective; accuracy: their mean. cost: of the instances; bill: of everything."""

    queries: int
    in_time: int
    late: int
    refused: int
    failed: int
    violation_ratio: float
    accuracy: float | None
    p50_ms: float | None
    p99_ms: float | None
    real: int  # answers that no simulated device gave
    right: float | None  # share of the answers whose class was computed that name the label
    cost: float
    bill: float
    actions: dict[str, int]
    most: dict[str, int]
    late_send_p99_ms: float


class Line(Struct, frozen=True, kw_only=True):
    """Series over steps of `step` seconds; times: their middles. Rates per second, US$ per hour. instances[variant][state]: at each middle."""

    step: float
    times: list[float]
    offered: list[float]
    in_time: list[float]
    late: list[float]
    refused: list[float]
    cost_rate: list[float]
    bill_rate: list[float]
    instances: dict[str, dict[str, list[int]]]


def figures(sent: Sequence[Sent], records: Records, seconds: float, slo_s: float) -> Figures:
    """Of a load of so many seconds."""
    answers = [one for one in sent if not one.code]
    in_time = [one for one in answers if one.took <= slo_s]
    judged = [one.right for one in answers if one.right is not None]
    took = np.array([one.took for one in answers]) * 1000.0
    used, total = money(records.charges, seconds)
    return Figures(
        queries=len(sent),
        in_time=len(in_time),
        late=len(answers) - len(in_time),
        refused=sum(one.code not in ("", "failed") for one in sent),
        failed=sum(one.code == "failed" for one in sent),
        violation_ratio=1.0 - len(in_time) / len(sent) if sent else 0.0,
        accuracy=float(np.mean([one.accuracy for one in in_time])) if in_time else None,
        p50_ms=float(np.percentile(took, 50)) if answers else None,
        p99_ms=float(np.percentile(took, 99)) if answers else None,
        real=sum(not one.simulated for one in answers),
        right=float(np.mean(judged)) if judged else None,
        cost=used,
        bill=total,
        actions=by_kind(records.actions, seconds),
        most=most(records.moves, seconds),
        late_send_p99_ms=1000.0 * float(np.percentile([one.late_send for one in sent], 99)) if sent else 0.0,
    )


def money(charges: Iterable[Charge], seconds: float) -> tuple[float, float]:
    """US$ of instances and of everything between 0 and `seconds`; of periods that reach beyond, the part within."""
    used = total = 0.0
    for one in charges:
        within = min(one.at, seconds) - max(one.at - one.seconds, 0.0)
        if within > 0 and one.seconds > 0:
            part = one.cost * within / one.seconds
            total += part
            used += part if one.variant else 0.0
    return used, total


def by_kind(actions: Iterable[Action], seconds: float) -> dict[str, int]:
    """How many actions of each kind between 0 and `seconds`."""
    return dict(sorted(Counter(one.action for one in actions if 0 <= one.at <= seconds).items()))


def counts(moves: Sequence[Move], times: Row) -> dict[str, dict[str, list[int]]]:
    """By variant and state: how many instances are in it at each of these times. States that no instance ever is in are left out."""
    found: dict[str, dict[str, list[int]]] = {}
    by_instance: dict[str, list[Move]] = {}
    for move in sorted(moves, key=lambda move: move.at):
        by_instance.setdefault(move.instance, []).append(move)
    for steps in by_instance.values():
        for move, following in zip(steps, [*(step.at for step in steps[1:]), np.inf], strict=True):
            if move.state == "Inactive":
                continue
            during = (times >= move.at) & (times < following)
            states = found.setdefault(move.variant, {})
            row = states.setdefault(move.state, [0] * len(times))
            states[move.state] = [n + int(there) for n, there in zip(row, during, strict=True)]
    return found


def most(moves: Sequence[Move], seconds: float) -> dict[str, int]:
    """The highest number of instances of each variant, loading ones counted, at any time between 0 and `seconds`."""
    moments = np.array(sorted({0.0, *(move.at for move in moves if 0 <= move.at <= seconds)}))
    highest = {}
    for variant, states in sorted(counts(moves, moments).items()):
        together = np.sum([row for state, row in states.items() if state in COUNTED] or [[0]], axis=0)
        if together.max() > 0:
            highest[variant] = int(together.max())
    return highest


def line(sent: Sequence[Sent], records: Records, seconds: float, slo_s: float, step: float) -> Line:
    """The time line; a query counts in the step in which it should have been sent."""
    edges = np.linspace(0, seconds, round(seconds / step) + 1)
    middles = (edges[1:] + edges[:-1]) / 2

    def rates(chosen: Iterable[Sent]) -> list[float]:
        number, _ = np.histogram([one.at for one in chosen], edges)
        return (number / np.diff(edges)).tolist()

    used, total = cost_rates(records.charges, middles)
    return Line(
        step=float(edges[1]),
        times=middles.tolist(),
        offered=rates(sent),
        in_time=rates(one for one in sent if not one.code and one.took <= slo_s),
        late=rates(one for one in sent if not one.code and one.took > slo_s),
        refused=rates(one for one in sent if one.code),
        cost_rate=used,
        bill_rate=total,
        instances=counts(records.moves, middles),
    )


def cost_rates(charges: Iterable[Charge], times: Row) -> tuple[list[float], list[float]]:
    """US$ per hour of instances and of everything at these times."""
    used, total = np.zeros(len(times)), np.zeros(len(times))
    for one in charges:
        if one.seconds > 0:
            during = (times > one.at - one.seconds) & (times <= one.at)
            rate = 3600.0 * one.cost / one.seconds
            total += during * rate
            used += during * rate * bool(one.variant)
    return used.tolist(), total.tolist()


def ratios(of: Mapping[str, Figures], base: str = "infaas") -> dict[str, dict[str, Any]]:
    """What each other policy has over the base: cost, bill, and SLO violations; None where the base has none."""
    ours = of.get(base)
    if ours is None:
        return {}
    return {
        name: {
            "cost": _over(each.cost, ours.cost),
            "violations": _over(each.violation_ratio, ours.violation_ratio),
            "in_time": _over(each.in_time, ours.in_time),
        }
        for name, each in of.items()
        if name != base
    }


def _over(one: float, other: float) -> float | None:
    return one / other if other > 0 else None

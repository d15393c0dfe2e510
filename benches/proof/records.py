"""What became of a run, by its queries and by SQL, told as the simulator tells of its runs: `services.simulation.plot` draws it.

Times: seconds from the start of the load.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from msgspec.structs import asdict

from benches.scoreboard.table import aligned
from proof.load import Sent
from services.core.lifecycle import COUNTED

STEPS = 120  # of the time line
# The period of a charge is told by its device's row without a variant: all rows of one period carry the same time.
_CHARGES = """
SELECT extract(epoch FROM c.time)::float8 - %(start)s AS at, p.seconds, coalesce(c.variant, '') AS variant, c.cost
FROM infaas.cost_events c
JOIN (
  SELECT time, worker, hardware, max(seconds) AS seconds FROM infaas.cost_events WHERE variant IS NULL GROUP BY 1, 2, 3
) p ON p.time = c.time AND p.worker = c.worker AND p.hardware = c.hardware
WHERE c.time > to_timestamp(%(start)s) AND c.time <= to_timestamp(%(until)s) AND p.seconds > 0
ORDER BY c.time
"""
_MOVES = """
SELECT extract(epoch FROM time)::float8 - %(start)s AS at, instance, variant, to_state AS state
FROM infaas.state_events WHERE time > to_timestamp(%(since)s) AND time <= to_timestamp(%(until)s) ORDER BY time
"""
_ACTIONS = """
SELECT extract(epoch FROM time)::float8 - %(start)s AS at, scaler, action, coalesce(variant, '') AS variant, count, reason
FROM infaas.scaling_events WHERE time > to_timestamp(%(since)s) AND time <= to_timestamp(%(until)s) ORDER BY time
"""
_OUTCOMES = """
SELECT CASE WHEN outcome = 'refused' THEN outcome || ': ' || coalesce(code, '') ELSE outcome END, count(*)
FROM infaas.query_outcomes WHERE time >= to_timestamp(%(start)s) AND time <= to_timestamp(%(until)s) AND parent IS NULL GROUP BY 1 ORDER BY 1
"""
_HARDWARE = "SELECT variant, CASE WHEN simulated THEN 'simulated ' ELSE '' END || hardware FROM infaas.variants"


class Records(NamedTuple):
    """moves: (at, instance, variant, state). charges: what a period that ended at `at` cost, US$; variant: "" for the part that nobody used.

    hardware: of each variant, with "simulated" before it where it is. outcomes: count by what SQL calls a query's end.
    """

    moves: pd.DataFrame
    charges: pd.DataFrame
    actions: pd.DataFrame
    hardware: dict[str, str]
    outcomes: dict[str, int]


def read(dsn: str, *, since: float, start: float, until: float) -> Records:
    """By SQL. since: when the system started; start, until: of the load. All Unix seconds."""
    import psycopg

    times = {"since": since, "start": start, "until": until}
    with psycopg.connect(dsn) as connection:

        def frame(query: str) -> pd.DataFrame:
            cursor = connection.execute(query.encode(), times)
            return pd.DataFrame(cursor.fetchall(), columns=[one.name for one in cursor.description or ()])

        hardware, outcomes = (dict(connection.execute(one.encode(), times)) for one in (_HARDWARE, _OUTCOMES))  # type: ignore[arg-type]
        return Records(frame(_MOVES), frame(_CHARGES), frame(_ACTIONS), hardware, outcomes)


def result(policy: str, queries: Sequence[Sent], records: Records, seconds: float, slo_s: float) -> dict[str, Any]:
    """One policy's run of so many seconds. cost: of the instances; bill: of everything; of periods that reach beyond the run, the part within.

    right: share of the answers whose class was computed that name the label. real: answers that no simulated device gave. A query counts in the step of the
    time line in which it should have been sent.
    """
    sent = pd.DataFrame([asdict(one) for one in queries])
    answers = sent[sent.code == ""]
    in_time = answers[answers.took <= slo_s]
    moves, charges = records.moves, records.charges
    edges = np.linspace(0, seconds, STEPS + 1)
    middles, step = (edges[1:] + edges[:-1])[:, None] / 2, seconds / STEPS

    def rate(of: pd.DataFrame) -> list[float]:
        found: list[float] = (np.histogram(of["at"], edges)[0] / step).tolist()
        return found

    begins, used = charges["at"] - charges.seconds, charges.variant != ""
    part = charges.cost * (charges["at"].clip(upper=seconds) - begins.clip(lower=0)).clip(lower=0) / charges.seconds
    paid = (middles > begins.to_numpy()) & (middles <= charges["at"].to_numpy())
    moves = moves.assign(until=moves.groupby("instance")["at"].shift(-1).fillna(np.inf))
    instances = {
        name: ((middles >= of["at"].to_numpy()) & (middles < of.until.to_numpy())).sum(axis=1).tolist()
        for name, of in moves[moves.state.isin(COUNTED)].groupby("variant")
    }
    kinds = records.actions.action[records.actions["at"].between(0, seconds)]
    return {
        "policy": policy,
        "duration_s": seconds,
        "queries": len(sent),
        "in_time": len(in_time),
        "late": len(answers) - len(in_time),
        "refused": int((~sent.code.isin(["", "failed"])).sum()),
        "failed": int((sent.code == "failed").sum()),
        "slo_violation_ratio": 1.0 - len(in_time) / len(sent),
        "effective_accuracy": float(in_time.accuracy.mean()),
        "p50_ms": 1000.0 * float(answers.took.quantile(0.5)),
        "p99_ms": 1000.0 * float(answers.took.quantile(0.99)),
        "real": int((~answers.simulated).sum()),
        "right": float(answers.right.dropna().astype(float).mean()),
        "cost": float(part[used].sum()),
        "bill": float(part.sum()),
        "scale_actions": dict(sorted(Counter(kinds).items())),
        "most": {name: max(row) for name, row in instances.items() if max(row)},
        "late_send_p99_ms": 1000.0 * float(sent.late_send.quantile(0.99)),
        "outcomes": records.outcomes,
        "hardware": records.hardware,
        "series": {
            "time": edges[:-1].tolist(),
            "offered_qps": rate(sent),
            "answered_qps": rate(answers),
            "violations": [step * each for each in rate(sent.drop(in_time.index))],
            "effective_accuracy": [None] * STEPS,
            "instances": instances,
            "workers": {"worker": [1] * STEPS},
            "cost_rate": (paid @ (charges.cost / charges.seconds * used).to_numpy(float)).tolist(),
        },
    }


def short(variant: str, hardware: str) -> str:
    """`views-v1-ort-fp32-t1-b8` on a CPU -> `cpu fp32 t1 b8`; what is simulated says so."""
    return " ".join([hardware, *variant.split("-")[-3:]])


def table(runs: Sequence[Mapping[str, Any]]) -> str:
    """One column a policy, one line a figure."""

    def listed(values: Mapping[str, int]) -> str:
        return ", ".join(f"{count} × {name}" for name, count in values.items()) or "—"

    lines = {
        "queries": lambda f: f"{f['queries']:,}",
        "answered in time": lambda f: f"{f['in_time']:,}",
        "answered late": lambda f: f"{f['late']:,}",
        "refused": lambda f: f"{f['refused']:,}",
        "failed": lambda f: f"{f['failed']:,}",
        "SLO violations": lambda f: f"{f['slo_violation_ratio']:.1%}",
        "mean accuracy of answers in time": lambda f: f"{f['effective_accuracy']:.4f}",
        "latency p50 / p99, ms": lambda f: f"{f['p50_ms']:.0f} / {f['p99_ms']:.0f}",
        "answers by the real CPU": lambda f: f"{f['real']:,}",
        "… right, of those that were computed": lambda f: f"{f['right']:.1%}",
        "cost of the instances, US$ × 10⁻³": lambda f: f"{1e3 * f['cost']:.3f}",
        "bill of all devices, US$ × 10⁻³": lambda f: f"{1e3 * f['bill']:.1f}",
        "scaling actions": lambda f: listed(f["scale_actions"]),
        "most instances at a time": lambda f: listed(
            {short(v, f["hardware"].get(v, "")): n for v, n in f["most"].items()}
        ),
        "CPUs that other programs used": lambda f: f"{f['others_cpus']:.2f}",
    }
    return aligned([["", *(f["policy"] for f in runs)], *([title, *map(show, runs)] for title, show in lines.items())])


def compared(runs: Sequence[Mapping[str, Any]]) -> str:
    """What infaas costs and misses beside each other policy, and how many it answers in time; "" without infaas or others."""
    of = {one["policy"]: one for one in runs}
    if "infaas" not in of or len(of) < 2:
        return ""

    def over(ours: float, theirs: float) -> str:
        return f"{ours / theirs:.2f}" if theirs else "—"

    keys = ("cost", "slo_violation_ratio", "in_time")
    rows = [
        [name, *(over(of["infaas"][key], one[key]) for key in keys)] for name, one in of.items() if name != "infaas"
    ]
    return aligned([["infaas over", "cost", "SLO violations", "answers in time"], *rows])

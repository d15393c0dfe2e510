"""INFaaS, Table 7: how long it takes to decide for a query, by the policy in use and by brute force, over 175 and 10,000 variants.

python benches/paper/table7.py             five times 2,000 decisions of each kind
python benches/paper/table7.py --short     500 decisions

The dispatcher's own selection (services/core/selection/policy.py) on a view of twelve workers in which
every fifth variant has an instance. State (a): none that the query may be given has one, so a load is ordered; (b): one of them is
Active. Needs asked before are what clients mostly send; for needs never seen nothing is kept from earlier queries, and after a change
nothing that depends on what is Active. The 10,000 variants are copies of the 175 as other models of the same app. Times are measured on the
wall's clock.
"""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import count, cycle

import compare
from msgspec.structs import replace

from bus.messages.catalog import VariantRecord
from bus.messages.fleet import WorkerHeartbeat
from services.core.selection.cluster import ClusterView
from services.core.selection.eligibility import Ask
from services.core.selection.policy import BruteForce, Decision, InfaasPolicy, SelectionPolicy, note
from services.simulation.scenario.model import Scenario
from services.simulation.scenario.read import read_scenario
from tests.support.data.events import beat, device, instance

APP = "classify"
PINNED = "resnet50-trt-gpu-b8"
ACCURACY, LATENCY_S = 0.72, 0.02
PAPER_MS = {"pinned": (1.0, 0.9), "needs": (3.5, 2.2)}  # state (a), state (b)
TIMES = (27.0, 44.0)  # as fast as brute force
MANY, MANY_MS = 10_000, 5.0  # variants, and our own bar for them
EVERY = 5  # one variant in so many has an instance
NOW = 1000.0


def copies(records: Sequence[VariantRecord], number: int) -> list[VariantRecord]:
    """So many variants: these, and the same again as other models."""
    found = list(records)
    while len(found) < number:
        copy = len(found) // len(records)
        found += [replace(one, variant=f"{one.variant}-{copy}", model=f"{one.model}-{copy}") for one in records]
    return found[:number]


def view_of(
    scenario: Scenario, records: Sequence[VariantRecord], *, active: bool
) -> tuple[ClusterView, Callable[[], None]]:
    """One app over all architectures, and what makes one of its instances come or go. active: whether something that the queries may be given is."""
    beats: list[WorkerHeartbeat] = []
    view = ClusterView(scenario.prices)
    links = {one.model: one.version for one in records}
    view.set_app(replace(scenario.apps[0], app=APP, links=links, latency_ms=None), records)
    there = [one for number, one in enumerate(records) if number % EVERY == 0 and not _wanted(one)]
    if active:
        there += [one for one in records if _wanted(one)][::EVERY] + [one for one in records if one.variant == PINNED]
    for machine in next(one for one in scenario.policies if one.name == "infaas").machines:
        mine = [one for one in there if one.hardware == machine.kind]
        for number in range(machine.start):
            devices = [
                device(
                    one.name,
                    kind=one.kind,
                    cores=one.cores,
                    memory_mb=one.memory_mb,
                    price_per_hour=machine.price_per_hour,
                )
                for one in machine.devices
            ]
            instances = [
                instance(f"{machine.kind}{number}-{i}", one.variant, device=machine.kind)
                for i, one in enumerate(mine[number :: machine.start])
            ]
            told = beat(*instances, devices=devices, worker=f"{machine.kind}-{number}", hardware=machine.kind, at=NOW)
            view.heartbeat(told, NOW)
            beats.append(told)
    told = max(beats, key=lambda one: len(one.instances))
    turns = cycle((replace(told, instances=told.instances[1:]), told))
    return view, lambda: _heard(view, next(turns))


def _heard(view: ClusterView, told: WorkerHeartbeat) -> None:
    assert view.heartbeat(told, NOW), "a state has changed"


def _wanted(one: VariantRecord) -> bool:
    """Whether one of the two queries may be given it."""
    return one.variant == PINNED or _meets(one)


def _meets(one: VariantRecord) -> bool:
    return (one.accuracy or 0.0) >= ACCURACY and one.profile.rows[0].p50_ms <= 1000 * LATENCY_S


def asks(kind: str, first: int | None) -> Iterator[Ask]:
    """Queries. first: None: all with the same needs; else all with different ones, counted from here."""
    for number in count(first or 0):
        more = 0.0 if first is None else 1e-9 * (number + 1)
        if kind == "pinned":
            yield Ask(app=APP, items=1, deadline=NOW + 1.0 + more, latency_s=1.0 + more, variant=PINNED)
        else:
            latency = LATENCY_S + more
            yield Ask(app=APP, items=1, deadline=NOW + latency, latency_s=latency, accuracy=ACCURACY)


def _nothing(*_: object) -> None:
    """Nothing changes."""


def median_us(
    policy: SelectionPolicy,
    view: ClusterView,
    queries: Iterator[Ask],
    number: int,
    change: Callable[[], None] = _nothing,
) -> tuple[float, Decision]:
    """Of so many decisions, and the last of them. change: what happens before each; its time does not count."""
    taken = []
    clock = time.perf_counter_ns
    for _ in range(number):
        ask = next(queries)
        change()
        began = clock()
        decision = policy.select(ask, NOW, view)
        note(ask, decision, NOW, view)
        taken.append((clock() - began) / 1000)
    return statistics.median(taken), decision


def build(seeds: Sequence[int], short: bool) -> compare.Figure:
    """seeds: nothing is drawn; as many measurements."""
    rounds = len(seeds) if short else max(5, len(seeds))
    return measured(500 if short else 2000, rounds)


def measured(number: int, times: int, most: int = MANY) -> compare.Figure:
    """The table of so many decisions of each kind, so many times. most: variants of its last rows."""
    scenario = read_scenario(compare.HERE / "fig5.toml")
    rounds = range(times)
    rows = []
    options = sum(_meets(one) for one in scenario.variants)
    rows.append(compare.stated("variants that meet accuracy >= 72 % within 20 ms", [options], paper="5", form=".0f"))
    for state, active, of in (("(a) not Active", False, 0), ("(b) Active", True, 1)):
        view, _ = view_of(scenario, scenario.variants, active=active)
        for kind, words in (("pinned", "a variant by name"), ("needs", "app, > 72 %, 20 ms")):
            for seen in (True, False):
                ours = [
                    median_us(InfaasPolicy(), view, asks(kind, None if seen else i * number), number) for i in rounds
                ]
                assert all((decision.instance is not None) == active for _, decision in ours)
                what = f"{words}, {state}, needs {'asked before' if seen else 'never seen'}"
                micros = [median for median, _ in ours]
                rows.append(compare.at_most(f"{what}: median", 1000 * PAPER_MS[kind][of], micros, " µs", form=".4g"))
                if kind == "needs":
                    brute = [median_us(BruteForce(), view, asks(kind, 0), max(50, number // 20))[0] for _ in rounds]
                    rows.append(
                        compare.at_least(
                            f"{what}: times as fast as brute force", TIMES[of], compare.ratios(brute, micros), " x"
                        )
                    )
            if kind == "needs":
                rows.append(compare.stated(f"{words}, {state}, by brute force: median", brute, " µs", form=".0f"))
    rows += many(scenario, most, number, times)
    return compare.Figure(
        "table7", "Table 7: decision latency, 22 architectures, 175 variants; and 10,000 variants", rows
    )


def many(scenario: Scenario, variants: int, number: int, times: int) -> list[compare.Row]:
    """The decision of the last rows above with so many variants, against our own bar; the paper has none."""
    view, change = view_of(scenario, copies(scenario.variants, variants), active=True)
    rows = []
    for what, seen, before in (
        ("needs asked before", True, _nothing),
        ("needs never seen", False, _nothing),
        ("after a change", True, change),
    ):
        ours = [
            median_us(InfaasPolicy(), view, asks("needs", None if seen else i * number), number, before)
            for i in range(times)
        ]
        assert all(decision.instance is not None for _, decision in ours)
        what = f"{variants:,} variants: app, > 72 %, 20 ms, (b) Active, {what}: median"
        row = compare.at_most(what, 1000 * MANY_MS, [median for median, _ in ours], " µs", form=".4g")
        rows.append(row._replace(paper=f"not stated; our bar is {row.paper}"))
    return rows


if __name__ == "__main__":
    compare.main(build, __doc__)

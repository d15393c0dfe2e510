"""The work of a decision: bytecodes that it executes, which are the same on every machine. benches/selection.py has times."""

import gc
import random
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
from msgspec.structs import replace

from bus.codec import encode
from services.core.actor import Changed
from services.core.catalog import key_of
from services.core.selection.cluster import ClusterView
from services.core.selection.eligibility import Ask
from services.core.selection.policy import InfaasPolicy
from services.dispatcher.apps import Apps
from tests.support.data.events import beat, device, instance
from tests.support.simulated.fleet import PRICES, catalogue, variant

NOW = 1000.0


RUNNING = 8  # of the first app's variants


def catalogued(apps: int, variants: int) -> Apps:
    """So many apps with so many variants each, from a catalogue's bucket; the first few have an Active instance."""
    found = Apps(ClusterView(PRICES))
    for a in range(apps):
        rng = random.Random(f"{variants}")
        records = [
            variant(
                f"a{a}-v{i}", base_ms=rng.uniform(1.0, 80.0), model=f"m{a}-{i // 5}", accuracy=rng.uniform(0.6, 0.9)
            )
            for i in range(variants)
        ]
        for record in catalogue(*records, app=f"app{a}"):
            found.change(Changed("catalog", key_of(record), encode(record)))
    found.complete()
    beat_of(found, RUNNING)
    return found


def beat_of(apps: Apps, running: int) -> None:
    """So many of the first app's variants have an Active instance."""
    instances = [instance(f"i{i}", f"a0-v{i}") for i in range(running)]
    apps.view.heartbeat(beat(*instances, at=NOW, devices=[device(cores=64, memory_mb=9e6, price_per_hour=0.4)]), NOW)


def work(of: Callable[[], object]) -> int:
    """The bytecodes that this executes."""
    count = 0

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal count
        frame.f_trace_opcodes = True
        count += event == "opcode"
        return trace

    before = sys.gettrace()
    gc.disable()  # others have callbacks at a collection
    sys.settrace(trace)
    try:
        of()
    finally:
        sys.settrace(before)
        gc.enable()
    return count


def decisions(apps: Apps) -> dict[str, int]:
    """The work of deciding for needs never seen, for needs asked before, and for the first query after a state has changed."""
    policy, wish = InfaasPolicy(probe_share=0.0), Ask("app0", 1, NOW + 0.2, 0.2, 0.7)

    def decide(wish: Ask) -> int:
        before = work(lambda: None)
        taken = work(lambda: policy.select(wish, NOW, apps.view)) - before
        assert policy.select(wish, NOW, apps.view).instance
        return taken

    decide(replace(wish, accuracy=0.65))  # the latencies of one item have been looked up for all variants
    new, known = decide(wish), decide(wish)
    beat_of(apps, RUNNING - 1)
    return {"new": new, "known": known, "changed": decide(wish)}


def test_a_decision_does_as_much_work_beside_ten_thousand_variants_of_other_apps() -> None:
    alone, among = catalogued(1, 10), catalogued(1000, 10)
    assert sum(len(app.records) for app in among.view.apps.values()) == 10_000
    assert decisions(among) == decisions(alone)


@pytest.mark.slow
def test_an_apps_own_ten_thousand_variants_are_passed_over_without_looking_at_each() -> None:
    """Needs never seen cost numpy's comparisons of columns, and no step of the program for each variant."""
    few, many = decisions(catalogued(1, 100)), decisions(catalogued(1, 10_000))
    assert few.keys() == many.keys()
    assert all(many[kind] <= 1.5 * few[kind] for kind in few), (few, many)


@pytest.mark.slow
def test_one_more_variant_is_as_much_work_beside_ten_thousand_of_other_apps() -> None:
    alone, among = catalogued(1, 10), catalogued(1000, 10)
    more = variant("a0-v10", model="m0-0")
    change = Changed("catalog", key_of(more), encode(more))
    held = catalogued(1, 10)
    held.change(change)  # a process reads a record once, and both find it read
    assert work(lambda: among.change(change)) == work(lambda: alone.change(change))
    assert len(among.variants("app0")) == 11

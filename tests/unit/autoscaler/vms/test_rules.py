"""The rules for machines: tables of the paper's three, removal, and what limits them all."""

from math import inf
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.autoscaler.vms.rules import (
    Add,
    Additions,
    Blocked,
    FleetLimits,
    HardwareNeed,
    PricedKind,
    WorkerSummary,
    hardware_needs,
    removal,
    total_price,
)
from services.core.placement import Device
from services.core.settings import MachineSettings
from tests.support.simulated.fleet import variant

CPU, GPU, SIMGPU = ("cpu", False), ("gpu", False), ("gpu", True)


def kind(name: str = "cpu", price: float = 0.1, **more: Any) -> PricedKind:
    devices = [Device(name="cpu", kind="cpu", cores=2, memory_mb=4000.0)]
    if more.pop("gpu", False):
        devices.append(Device(name="gpu-0", kind="gpu", cores=1, memory_mb=16000.0, simulated=True))
    return PricedKind(name=name, devices=tuple(devices), price_per_hour=price, **({"minimum": 1, "maximum": 5} | more))


def limits(*kinds: PricedKind, **more: Any) -> FleetLimits:
    budget = more.pop("budget_per_hour", inf)
    every = {each.name: each for each in kinds or (kind(),)}
    return FleetLimits(kinds=every, settings=MachineSettings(**more), budget_per_hour=budget)


def worker(name: str, busy: float = 0.1, **more: Any) -> WorkerSummary:
    fields = {
        "kind": "cpu", "state": "Ready", "price_per_hour": 0.1, "hardware": frozenset({CPU}),
        "utilisation": {CPU: busy},
    }  # fmt: skip
    return WorkerSummary(name=name, **(fields | more))


def wanted(*workers: WorkerSummary, **more: Any) -> list[tuple[str, bool]]:
    return [want.hardware for want in hardware_needs(workers, limits(**more))]


def machine_for(
    hardware: tuple[str, bool], workers: list[WorkerSummary], some: FleetLimits, *rest: Any, **more: Any
) -> Any:
    return Additions(workers, some, *rest).for_need(HardwareNeed(hardware=hardware, reason="r", **more), 0.8)


# -- the three rules (seed rows 33 to 35)


def test_rule_1_all_workers_of_a_kind_must_be_busy() -> None:
    assert wanted(worker("a", 0.85), worker("b", 0.85)) == [CPU]
    assert wanted(worker("a", 0.85), worker("b", 0.1)) == []
    assert wanted(worker("a", 0.80)) == []
    assert wanted(worker("a", 0.80), utilisation_above=0.7) == [CPU]
    both = frozenset({CPU, SIMGPU})
    first = worker("a", hardware=both, utilisation={CPU: 0.1, SIMGPU: 0.9})
    assert wanted(first, worker("b", 0.1)) == [SIMGPU]
    assert wanted(first, worker("b", hardware=both, utilisation={CPU: 0.9, SIMGPU: 0.1})) == []


def test_rules_2_and_3_interfered_everywhere_or_overloaded_on_more_than_the_share() -> None:
    hit = {"interfered": frozenset({CPU})}
    assert wanted(worker("a", **hit), worker("b", **hit)) == [CPU]
    assert wanted(worker("a", **hit), worker("b")) == []
    hit = {"overloaded": {CPU: 1}}
    assert wanted(*(worker(f"w{n}", **hit) for n in range(5))) == [CPU]
    assert wanted(worker("w4"), *(worker(f"w{n}", **hit) for n in range(4))) == []  # 80 % is not more than 80 %
    assert wanted(worker("w4"), *(worker(f"w{n}", **hit) for n in range(4)), overloaded_share=0.7) == [CPU]
    assert wanted(worker("a", overloaded={CPU: 1, SIMGPU: 3})) == [SIMGPU]


def test_only_workers_that_serve_count_and_reasons_say_what_was_seen() -> None:
    assert wanted(worker("a", 0.9), worker("b", 0.1, state="Draining"), worker("c", 0.1, state="Silent")) == [CPU]
    assert wanted() == []
    [want] = hardware_needs([worker("a", 0.85), worker("b", 0.9)], limits())
    assert want.reason == "cpu is used above 80% on all 2 workers that have it; least on a, 85%"


# -- which machine


def test_the_cheapest_kind_that_has_the_hardware_carries_it_and_does_not_rest() -> None:
    some = limits(kind("big", 1.0), kind("small", 0.2), kind("gpu", 3.0, gpu=True))
    assert [machine_for(hardware, [worker("a")], some).kind for hardware in (CPU, SIMGPU)] == ["small", "gpu"]
    assert machine_for(GPU, [worker("a")], some) == Blocked()
    some = limits(kind("big", 1.0), kind("small", 0.2))
    assert machine_for(CPU, [worker("a")], some, lambda name: name == "small").kind == "big"
    large = variant(threads=4)
    assert machine_for(CPU, [], limits(), record=large) == Blocked()
    boots = worker("b", state="Booting", utilisation={})
    assert machine_for(CPU, [worker("a"), boots], limits()) == Blocked()


def test_minimum_and_budget_are_kept_and_said() -> None:
    tight = limits(budget_per_hour=0.25)
    assert machine_for(CPU, [worker("a")], tight) == Add(
        kind="cpu", reason="r; all workers then cost 0.2 of 0.25 US$/h"
    )
    blocked = machine_for(CPU, [worker("a"), worker("b")], tight)
    assert blocked == Blocked(reason="r; a cpu would bring all workers to 0.3 US$/h, the budget is 0.25", kind="cpu")
    two = limits(kind(minimum=2))
    assert isinstance(Additions([worker("a")], two).below_minimum(), Add)
    assert Additions([worker("a"), worker("b", state="Booting")], two).below_minimum() == []
    assert Additions([worker("a")], two, lambda _: True).below_minimum() == []


# -- removal


def idle(name: str, **more: Any) -> WorkerSummary:
    return worker(name, 0.0, idle_s=31.0, **more)


def test_idle_workers_go_emptiest_first_while_the_minimum_stays() -> None:
    chosen = removal([worker("a"), idle("b")], limits())
    assert (chosen.worker, chosen.reason) == ("b", "served nothing for 31 s; 1 cpu stay, at least 1")
    assert removal([worker("a"), idle("b")], limits(idle_s=32.0)) is None
    assert removal([idle("b")], limits()) is None
    assert removal([worker("a"), idle("b")], limits(kind(minimum=2))) is None
    assert removal([worker("a"), idle("b", used=0.5), idle("c", used=0.2)], limits()).worker == "c"
    assert removal([worker("a"), idle("b"), idle("c", state="Draining")], limits()) is None
    assert removal([worker("a", 0.95), idle("b")], limits()) is None
    assert removal([worker("a", overloaded={CPU: 1}), idle("b")], limits()) is None
    assert removal([worker("a"), idle("b", kind="somebody's")], limits()) is None


# -- whatever the fleet looks like

states = st.sampled_from(["Ready", "Booting", "Draining", "Silent"])
seen = st.builds(
    WorkerSummary,
    name=st.uuids().map(str),
    kind=st.sampled_from(["cpu", "gpu", "other"]),
    state=states,
    price_per_hour=st.floats(0, 4),
    hardware=st.just(frozenset({CPU})) | st.just(frozenset({CPU, SIMGPU})),
    utilisation=st.fixed_dictionaries({CPU: st.floats(0, 1)}, optional={SIMGPU: st.floats(0, 1)}),
    interfered=st.just(frozenset()) | st.just(frozenset({CPU})),
    overloaded=st.just({}) | st.just({CPU: 2}),
    idle_s=st.floats(0, 100),
    used=st.floats(0, 1),
)
some_limits = st.builds(
    lambda low, high, more, budget: limits(
        kind("cpu", 0.1, minimum=low, maximum=low + high),
        kind("gpu", 3.0, minimum=0, maximum=more, gpu=True),
        budget_per_hour=budget,
    ),
    st.integers(0, 3),
    st.integers(0, 4),
    st.integers(0, 4),
    st.floats(0, 20) | st.just(inf),
)


@given(st.lists(seen, max_size=8, unique_by=lambda each: each.name), some_limits)
def test_never_above_maximum_or_budget(workers: list[WorkerSummary], some: FleetLimits) -> None:
    answers = [Additions(workers, some).for_need(want, 0.8) for want in hardware_needs(workers, some)]
    for add in [*answers, Additions(workers, some).below_minimum()]:
        if isinstance(add, Add):
            chosen = some.kinds[add.kind]
            assert sum(each.kind == add.kind for each in workers) < chosen.maximum
            assert total_price(workers) + chosen.price_per_hour <= some.budget_per_hour * (1 + 1e-6)


@given(st.lists(seen, max_size=8, unique_by=lambda each: each.name), some_limits)
def test_never_below_minimum_and_never_what_is_busy(workers: list[WorkerSummary], some: FleetLimits) -> None:
    chosen = removal(workers, some)
    if chosen is None:
        return
    gone = next(each for each in workers if each.name == chosen.worker)
    assert gone.state == "Ready"
    assert gone.idle_s >= some.settings.idle_s
    stay = [each for each in workers if each is not gone and each.kind == gone.kind and each.state == "Ready"]
    assert len(stay) >= some.kinds[gone.kind].minimum
    assert not any(
        want.hardware in gone.hardware for want in hardware_needs([w for w in workers if w is not gone], some)
    )


@pytest.mark.parametrize("state", ["Booting", "Draining", "Silent"])
def test_what_is_paid_for_counts(state: str) -> None:
    assert total_price([worker("a"), worker("b", state=state)]) == pytest.approx(0.2)

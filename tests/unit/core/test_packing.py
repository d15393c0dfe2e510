"""Dispatch by `pack` and by `auto`: low load goes to one worker, so that others empty; what it cannot carry goes on."""

import pytest

from bus.messages.catalog import AppRecord
from bus.messages.fleet import DeviceStatus, InstanceStatus, WorkerHeartbeat
from services.core.ask import Ask
from services.core.cluster import ClusterView
from services.core.selection import InfaasPolicy
from services.core.settings import DispatcherSettings, MachineKind, MachineSettings
from services.dispatcher.edge import load_policy
from services.shell.settings import SettingsError
from tests.support.simulated.fleet import PRICES, SIGNATURE, variant

NAME = "m-v1-ort-fp32-t1-b8"


def view_of(*loads: float, utilisation: float = 0.5) -> ClusterView:
    """Workers w0, w1, ... each with one instance that serves so many items/s, 2.5 ms each."""
    view = ClusterView(PRICES)
    view.set_app(AppRecord(app="app", links={"m": "1"}, signature=SIGNATURE), [variant(NAME)])
    for number, load in enumerate(loads):
        device = DeviceStatus(
            device="cpu", kind="cpu", cores=1, memory_mb=4000.0, memory_used_mb=50.0, cores_used=1.0,
            utilisation=utilisation, price_per_hour=0.1,
        )  # fmt: skip
        status = InstanceStatus(
            instance=f"{NAME}.w{number}-1", variant=NAME, device="cpu", state="Active", since=0.0, load=load,
            latency_ms=2.5, mean_batch=1.0 if load else 0.0,
        )  # fmt: skip
        beat = WorkerHeartbeat(
            worker=f"w{number}", hardware="cpu", incarnation=1, at=0.0, devices=[device], instances=[status]
        )
        view.heartbeat(beat, 0.0)
    return view


def chosen(view: ClusterView, dispatch: str = "pack", latency: float = 1.0) -> str:
    decision = InfaasPolicy(dispatch=dispatch, probe_share=0.0).select(Ask("app", 1, latency, latency), 0.0, view)
    return view.instances[decision.assignments[0]].worker.name


def test_the_fullest_worker_goes_on_being_filled() -> None:
    assert chosen(view_of(10.0, 200.0, 100.0)) == "w1"
    assert chosen(view_of(0.0, 0.0, 1.0)) == "w2"


def test_among_equals_it_is_always_the_same_one() -> None:
    assert {chosen(view_of(*[0.0] * 3)) for _ in range(5)} == {"w0"}


def test_a_full_one_is_left_alone() -> None:
    assert chosen(view_of(10.0, 330.0)) == "w0"  # 82 % busy


def test_how_busy_the_machine_is_otherwise_does_not_matter() -> None:
    assert chosen(view_of(10.0, 200.0, utilisation=0.99)) == "w1"


def test_what_has_just_been_sent_there_counts() -> None:
    view = view_of(10.0, 200.0)
    view.instances[f"{NAME}.w1-1"].own = 1000
    assert chosen(view, latency=30.0) == "w0"


def test_spread_takes_the_least_loaded() -> None:
    view = view_of(10.0, 200.0)
    view.instances[f"{NAME}.w0-1"].own = 5
    assert chosen(view, "spread") == "w1"


@pytest.mark.parametrize(
    ("dispatch", "kind", "provider", "packs"),
    [
        ("auto", None, "local", False),
        ("auto", MachineKind(minimum=1, maximum=1), "local", False),
        ("auto", MachineKind(minimum=1, maximum=2), "local", True),
        ("auto", MachineKind(minimum=1, maximum=2), "off", False),
        ("spread", MachineKind(minimum=1, maximum=2), "local", False),
        ("pack", None, "local", True),
    ],
)
def test_auto_packs_where_machines_may_come_and_go(
    dispatch: str, kind: MachineKind | None, provider: str, packs: bool
) -> None:
    machines = MachineSettings(provider=provider, kinds={} if kind is None else {"cpu": kind})
    policy = load_policy(DispatcherSettings(dispatch=dispatch), machines)
    assert isinstance(policy, InfaasPolicy)
    assert policy._pack is packs


def test_another_dispatch_is_refused_by_name() -> None:
    with pytest.raises(SettingsError, match=r"dispatcher\.dispatch 'heap' is none of auto, spread, pack"):
        load_policy(DispatcherSettings(dispatch="heap"))

"""Many instances of one variant: few are looked at, and still the load is even and nothing in time is missed."""

from hypothesis import given, settings
from hypothesis import strategies as st

from bus.messages.catalog import AppRecord
from bus.messages.fleet import DeviceStatus, InstanceStatus, WorkerHeartbeat
from services.core.selection.cluster import ClusterView
from services.core.selection.eligibility import Ask
from services.core.selection.instances import MANY, MOMENT, Instance, InstanceSampler, usual
from services.core.selection.policy import InfaasPolicy
from tests.support.simulated.fleet import PRICES, SIGNATURE, variant

RECORD = variant("m-v1-ort-fp32-t1-b1", max_batch=1, base_ms=100.0, per_item_ms=0.0)  # 100 ms, one at a time
NOW = 1000.0


def view(queued: list[int], busy: list[float] | None = None) -> ClusterView:
    """A worker for each instance, with so many queries in its queue, and busy for such a part of the time."""
    found = ClusterView(PRICES)
    found.set_app(AppRecord(app="app", links={"m": "1"}, signature=SIGNATURE), [RECORD])
    device = DeviceStatus(
        device="cpu", kind="cpu", cores=1, memory_mb=1000.0, memory_used_mb=10.0, cores_used=1.0, utilisation=0.5,
        price_per_hour=0.05,
    )  # fmt: skip
    for n, waiting in enumerate(queued):
        share = busy[n] if busy else 0.5
        status = InstanceStatus(
            instance=f"i{n:04}", variant=RECORD.variant, device="cpu", state="Active", since=0.0, queued=waiting,
            load=share * 10.0, latency_ms=100.0, mean_batch=1.0,
        )  # fmt: skip
        found.heartbeat(
            WorkerHeartbeat(
                worker=f"w{n:04}", hardware="cpu", incarnation=1, at=NOW, devices=[device], instances=[status]
            ),
            NOW,
        )
    return found


def ask(seconds: float, now: float = NOW) -> Ask:
    return Ask(app="app", items=1, deadline=now + seconds, latency_s=seconds)


def test_queries_are_spread_evenly_over_many() -> None:
    fleet, policy = view([0] * 300), InfaasPolicy()
    for _ in range(1500):
        decision = policy.select(ask(10.0), NOW, fleet)
        fleet.instances[decision.assignments[0]].take(1)
    taken = [instance.own for instance in fleet.instances.values()]
    assert (min(taken), max(taken)) == (5, 5)


@given(st.integers(MANY + 1, 150), st.integers(0, 1000))
@settings(max_examples=30)
def test_the_only_one_in_time_is_found_wherever_it_is(count: int, place: int) -> None:
    queued = [50] * count
    queued[place % count] = 2
    fleet, policy = view(queued), InfaasPolicy()
    assert policy.select(ask(1.0), NOW, fleet).assignments == (f"i{place % count:04}",)


def test_when_all_are_full_that_is_believed_for_a_moment_only() -> None:
    fleet, policy = view([50] * 100), InfaasPolicy()
    assert policy.select(ask(1.0), NOW, fleet).refusal is not None
    fleet.instances["i0042"].others = 0
    assert policy.select(ask(1.0), NOW, fleet).refusal is not None
    assert policy.select(ask(20.0), NOW, fleet).assignments  # who has more time is not refused with them
    later = NOW + 2 * MOMENT
    assert policy.select(ask(1.0, later), later, fleet).assignments == ("i0042",)


class Counting(Instance):
    """Counts how often it is asked."""

    __slots__ = ()
    asked = 0

    def predict(self, items: int, length: int | None = None) -> float:
        Counting.asked += 1
        return super().predict(items, length)


def test_few_are_looked_at() -> None:
    fleet = view([0] * 1)
    known = next(iter(fleet.instances.values()))
    device = known.worker.devices["cpu"]
    instances: list[Instance] = [Counting(known.status, RECORD, known.worker, device) for _ in range(1000)]
    crowd = InstanceSampler(instances)
    for at in range(500):
        chosen = crowd.soonest(1, None, 10.0, NOW + at)
        assert chosen is not None
        chosen.take(1)
    assert Counting.asked < 500 * 4
    for instance in instances:
        instance.own = 3
    Counting.asked = 0
    assert crowd.soonest(1, None, 10.0, NOW) is not None
    assert Counting.asked <= 20


def test_packing_fills_the_fullest_that_is_not_full() -> None:
    busy = [0.1] * 100
    busy[33], busy[66] = 0.7, 0.95
    fleet, policy = view([0] * 100, busy), InfaasPolicy(dispatch="pack")
    assert policy.select(ask(1.0), NOW, fleet).assignments == ("i0033",)
    fleet.remove("i0033")
    assert policy.select(ask(1.0), NOW, fleet).assignments != ("i0033",)


def test_the_usual_batch_is_the_most_frequent() -> None:
    assert usual([1, 4, 4, 2]) == 4
    assert usual([2, 1]) == 1

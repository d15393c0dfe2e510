"""Several controllers on stage: one leads; when it is killed another goes on, and nothing happens twice."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bus.messages.scaling import LeaderRecord
from bus.subjects import Subjects
from services.autoscaler.vms.actor import Controller
from services.autoscaler.vms.commands import ClaimLease, LeaseClaimed
from services.autoscaler.vms.lease import Lease
from services.autoscaler.vms.rules import FleetLimits
from services.core.actor import After, Envelope, Started
from services.core.settings import MachineSettings
from tests.support.simulated.controllers import CloudFleet, kind
from tests.support.simulated.fleet import variant


def test_one_of_three_leads_and_hands_over_when_it_is_stopped() -> None:
    fleet = CloudFleet(controllers=3, workers=1)
    fleet.stage.run(20.0)
    assert fleet.leader in ("c0", "c1", "c2")
    fleet = CloudFleet(controllers=2, workers=1)
    first = fleet.leader
    fleet.stage.stop(first, seconds=1.0)
    assert fleet.leader != first


def test_another_takes_over_within_5_seconds_and_goes_on_with_the_machine_that_boots() -> None:
    fleet = CloudFleet(kinds=(kind(boot_s=15.0),), controllers=2, workers=1)
    fleet.stage.run(12.0)
    first = fleet.leader
    fleet.used = 0.95
    while not fleet.started:
        fleet.stage.run(0.01)
    fleet.stage.kill(first)
    died = fleet.stage.now
    while fleet.acted[-1][1] == first:
        fleet.stage.run(0.01)
        assert fleet.stage.now - died <= 5.0
    fleet.stage.run(40.0)
    names = Counter(order.worker for order in fleet.started)
    assert len(names) == 2  # up to the maximum of 3, one after the other
    assert names["cpu-1-1"] == 2  # the second leader asked for the same machine again, which is idempotent
    assert next(event.worker for event in fleet.scalings("add_worker")) == "cpu-1-1"
    assert len(fleet.scalings("add_worker")) == 2
    assert len(fleet.workers) == 3
    assert {order.epoch for order in fleet.started} == {1, 2}


def test_a_leader_that_dies_between_its_note_and_its_order_is_followed_by_one_that_orders() -> None:
    fleet = CloudFleet(controllers=2, workers=1)
    fleet.stage.run(12.0)
    first = fleet.leader
    fleet.used = 0.95
    while fleet.machine("cpu-1-1") is None:
        fleet.stage.run(0.005)
    assert fleet.started == []
    fleet.stage.kill(first, seconds=10.0)
    assert next(order.worker for order in fleet.started) == "cpu-1-1"
    assert fleet.started[0].epoch == 2
    assert "cpu-1-1" in fleet.workers


def test_a_drain_under_way_is_finished_by_the_next_leader() -> None:
    fleet = CloudFleet(controllers=2, workers=2, limits={"idle_s": 10.0})
    while not fleet.worker_events("Draining"):
        fleet.stage.run(0.05)
    fleet.stage.kill(fleet.leader, seconds=12.0)
    assert len(fleet.workers) == 1
    assert [order.epoch for order in fleet.stopped] == [2]
    assert len(fleet.worker_events("Draining")) == 1
    assert len(fleet.scalings("remove_worker")) == 1


def test_a_leader_that_cannot_renew_stops_acting_before_another_begins() -> None:
    fleet = CloudFleet(variant(), controllers=2, workers=1, kinds=(kind(maximum=9),))
    fleet.stage.run(12.0)
    first = fleet.leader
    fleet.cut_off.add(first)
    fleet.use(0.95, 60.0)
    assert fleet.leader != first
    acts = [(at, name, epoch) for at, name, _, epoch in fleet.acted]
    others = [at for at, name, _ in acts if name != first]
    assert others
    assert all(at < others[0] for at, name, _ in acts if name == first)
    assert [epoch for _, _, epoch in acts] == sorted(epoch for _, _, epoch in acts)


# -- Leading by a lease: several candidates, one bucket, delays and losses; never two that act, epochs grow.


class Bucket:
    """One record, changed by compare-and-set."""

    def __init__(self) -> None:
        self.record: LeaderRecord | None = None

    def claim(self, claim: ClaimLease) -> LeaseClaimed:
        if not claim.allows(self.record):
            return LeaseClaimed(ok=False, present=self.record)
        self.record = claim.record
        return LeaseClaimed(ok=True)


def lead(lease: Lease, bucket: Bucket, now: float) -> None:
    claim = lease.due(now)
    assert claim is not None
    lease.claimed(bucket.claim(claim), now)


def test_the_first_leads_and_renews() -> None:
    bucket, lease = Bucket(), Lease("a", 3.0)
    assert lease.due(0.0) is None  # it does not know yet whether somebody leads
    lease.known(0.0)
    lead(lease, bucket, 0.0)
    assert (lease.epoch, lease.leads(0.0)) == (1, True)
    assert lease.due(0.5) is None
    lead(lease, bucket, 1.0)
    assert lease.leads(3.5)
    assert not lease.leads(3.8)  # before the end, not at it


def test_who_leads_is_left_alone_until_it_is_silent_for_the_lease() -> None:
    bucket, other = Bucket(), Lease("b", 3.0)
    bucket.record = LeaderRecord(holder="a", epoch=7, until=0.0)  # its clock is not ours
    other.changed(bucket.record, 100.0)
    assert other.due(102.9) is None
    lead(other, bucket, 103.0)
    assert other.epoch == 8


def test_a_lead_that_was_given_up_is_taken_at_once() -> None:
    bucket, first, second = Bucket(), Lease("a", 3.0), Lease("b", 3.0)
    first.known(0.0)
    lead(first, bucket, 0.0)
    second.changed(bucket.record, 0.0)
    claim = first.give_up(1.0)
    assert claim is not None
    assert bucket.claim(claim).ok
    assert not first.leads(1.0)
    second.changed(bucket.record, 1.0)
    lead(second, bucket, 1.0)
    assert second.epoch == 2


def test_a_claim_that_nobody_answered_is_found_out() -> None:
    bucket, lease = Bucket(), Lease("a", 3.0)
    lease.known(0.0)
    claim = lease.due(0.0)
    assert claim is not None
    bucket.claim(claim)  # it was written, and the answer was lost
    lease.claimed(None, 1.0)
    assert not lease.leads(1.0)
    lease.changed(bucket.record, 1.1)
    lead(lease, bucket, 1.1)
    assert lease.leads(1.1)


steps = st.lists(
    st.tuples(
        st.integers(0, 2),  # whose turn
        st.floats(0.01, 2.0),  # seconds until then
        st.sampled_from(["ok", "late", "lost", "unheard"]),
    ),
    max_size=80,
)


@given(steps)
def test_never_two_act_and_epochs_only_grow(script: list[tuple[int, float, str]]) -> None:
    bucket, leases, now, epochs = Bucket(), [Lease(f"c{n}", 3.0) for n in range(3)], 0.0, [0]
    late: list[tuple[Lease, LeaseClaimed]] = []
    for lease in leases:
        lease.known(now)
    for who, seconds, fate in script:
        now += seconds
        for lease, result in late:
            lease.claimed(result, now)
        late.clear()
        lease = leases[who]
        lease.changed(bucket.record, now) if bucket.record != lease._present else None
        claim = lease.due(now)
        if claim is not None:
            result = bucket.claim(claim) if fate != "unheard" else None
            if fate == "late":
                late.append((lease, result))
            else:
                lease.claimed(result if fate == "ok" else None, now)
        acting = [each for each in leases if each.leads(now)]
        assert len(acting) <= 1
        if acting:
            assert acting[0].epoch >= max(epochs)
            epochs.append(acting[0].epoch)


@pytest.mark.parametrize(("lease_s", "period_s"), [(1.0, 0.5), (30.0, 7.0)])
def test_a_controller_waits_for_a_silent_leader_and_reviews_as_the_settings_say(
    lease_s: float, period_s: float
) -> None:
    limits = FleetLimits(kinds={}, settings=MachineSettings(lease_s=lease_s, period_s=period_s))
    controller = Controller("b", Subjects(), limits)
    timers = {one.key: one.delay for one in controller.handle(Envelope(0.0, Started())) if isinstance(one, After)}
    assert timers["review"] == period_s
    assert timers["renew"] < lease_s
    controller.lease.changed(LeaderRecord(holder="a", epoch=7, until=0.0), 100.0)
    assert controller.lease.due(100.0 + 0.97 * lease_s) is None
    assert controller.lease.due(100.0 + lease_s) is not None

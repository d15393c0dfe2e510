"""Leading by a lease: several candidates, one bucket, delays and losses; never two that act, epochs grow."""

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

"""Whatever happens on stage: never more machines than the maximum or the budget allows, never fewer than the minimum, no stop
before a drain, no name twice, and all queries answered.
"""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.data.examples import examples
from tests.support.simulated.controllers import CloudFleet, kind
from tests.support.simulated.fleet import variant

events = st.lists(
    st.tuples(
        st.sampled_from(["busy", "calm", "calm", "burst", "kill leader", "cut off", "break", "mend", "lose an answer"]),
        st.floats(0.5, 15.0),
    ),
    min_size=4,
    max_size=12,
)


@pytest.mark.slow
@settings(max_examples=examples(25), deadline=None)
@given(events, st.integers(2, 4), st.sampled_from([0.2, 0.3, 0.4, float("inf")]))
def test_limits_and_order_hold_on_any_course(script: list[tuple[str, float]], maximum: int, budget: float) -> None:
    record = variant(base_ms=10.0, per_item_ms=10.0)
    kinds = (kind(minimum=1, maximum=maximum, boot_s=3.0),)
    fleet = CloudFleet(record, workers=1, controllers=3, kinds=kinds, limits={"idle_s": 6.0, "budget_per_hour": budget})
    price, asked, added = kinds[0].price_per_hour, [], 0
    for what, seconds in script:
        if what in ("busy", "calm"):
            fleet.used = 0.95 if what == "busy" else 0.2
        elif what == "burst":
            asked += [fleet.ask(latency_ms=60_000) for _ in range(200)]
        elif what in ("kill leader", "cut off"):
            leaders = [name for name, one in fleet._controllers() if one.lease.leads(fleet.stage.now)]
            for name in leaders:
                if what == "cut off":
                    fleet.cut_off = {name}
                else:
                    fleet.stage.kill(name)
                    added += 1
                    fleet.start_controller(f"c{2 + added}")
        elif what in ("break", "mend"):
            fleet.broken = "no more quota" if what == "break" else ""
        else:
            fleet.mute = 1
        end = fleet.stage.now + seconds
        while fleet.stage.now < end:
            fleet.stage.run(0.25)
            machines = len(fleet.workers)
            assert 1 <= machines <= maximum
            assert machines * price <= budget
    fleet.cut_off = set()
    fleet.stage.run(45.0)
    assert len([n for n, c in fleet._controllers() if c.lease.leads(fleet.stage.now)]) == 1
    names = [event.worker for event in fleet.scalings("add_worker") if event.count]
    assert len(names) == len(set(names))
    drained = {event.worker for event in fleet.worker_events("Draining")}
    served = {event.worker for event in fleet.worker_events("Ready")}
    assert {order.worker for order in fleet.stopped} & served <= drained
    assert [epoch for _, _, _, epoch in fleet.acted] == sorted(epoch for _, _, _, epoch in fleet.acted)
    for one in asked:
        [reply] = fleet.replies(one)
        assert "outputs" in reply

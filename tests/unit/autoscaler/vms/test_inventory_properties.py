"""Whatever happens to machines of the provider's own: limits hold, no machine carries two workers, nothing that is shut or down is
chosen, and in the end what is labelled is what serves.
"""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.autoscaler.vms.commands import Node
from tests.support.data.examples import examples
from tests.support.simulated.controllers import PoolFleet, kind

NAMES = ("n0", "n1", "n2", "n3")
events = st.lists(
    st.tuples(
        st.sampled_from(
            ["busy", "busy", "calm", "calm", "down", "up", "pause", "drain", "active", "leave", "join", "away", "back",
             "stuck", "kill leader", "lose an answer"]
        ),
        st.sampled_from(NAMES),
        st.floats(0.5, 25.0),
    ),
    min_size=5,
    max_size=14,
)  # fmt: skip


@pytest.mark.slow
@settings(max_examples=examples(25), deadline=None)
@given(events, st.integers(0, 2), st.integers(2, 3), st.sampled_from([0.2, 0.3, float("inf")]), st.booleans())
def test_limits_hold_with_machines_that_come_and_go(
    script: list[tuple[str, str, float]], minimum: int, maximum: int, budget: float, buys: bool
) -> None:
    kinds = (kind(minimum=minimum, maximum=maximum, boot_s=10.0),)
    fleet = PoolFleet(
        pool=NAMES[:3], kinds=kinds, controllers=2, buys=8.0 if buys else None,
        limits={"idle_s": 6.0, "budget_per_hour": budget},
    )  # fmt: skip
    price, added = kinds[0].price_per_hour, 0
    for what, name, seconds in script:
        node = fleet.nodes.get(name)
        if what in ("busy", "calm"):
            fleet.used = 0.95 if what == "busy" else 0.1
        elif what == "away":
            fleet.away = "no manager answers"
        elif what == "back":
            fleet.away = ""
        elif what == "stuck":
            fleet.stuck ^= {name}
        elif what == "kill leader":
            for leader in [each for each, one in fleet._controllers() if one.lease.leads(fleet.stage.now)]:
                fleet.stage.kill(leader)
                added += 1
                fleet.start_controller(f"c{1 + added}")
        elif what == "lose an answer":
            fleet.mute = 1
        elif what == "join":
            fleet.nodes.setdefault(name, Node(name=name, kind="cpu"))
        elif node is not None and what == "leave":
            fleet.leave(name)
        elif node is not None and what in ("down", "up"):
            fleet.change(name, up=what == "up")
        elif node is not None:
            fleet.change(name, availability=what)
        end = fleet.stage.now + seconds
        while fleet.stage.now < end:
            fleet.stage.run(0.25)
            assert len(fleet.workers) <= maximum
            assert len(fleet.workers) * price <= budget
        if node is not None and what in ("down", "pause", "drain") and not fleet.away:
            told = end - seconds + 2.5  # a survey that was under way still showed it open
            assert not [at for at, _, act, _ in fleet.acted if act == f"start {name}" and at > told]
    fleet.away, fleet.stuck, fleet.used = "", set(), 0.1
    for name in NAMES:
        if name in fleet.nodes:
            fleet.change(name, up=True, availability="active")
        else:
            fleet.nodes[name] = Node(name=name, kind="cpu")
    fleet.stage.run(240.0)
    labelled = sorted(name for name, node in fleet.nodes.items() if node.worker)
    assert labelled == fleet.workers
    wanted = min(minimum, int(budget / price)) if budget < float("inf") else minimum
    assert len(labelled) >= wanted
    noted = {key.removeprefix("machine.") for key in fleet.bucket if key.startswith("machine.")}
    assert noted <= set(labelled)
    assert [epoch for _, _, _, epoch in fleet.acted] == sorted(epoch for _, _, _, epoch in fleet.acted)

"""Who has gone is not served: what has not begun ends at once, with one reply and one row, wherever it is. Virtual time."""

from itertools import count
from typing import Any

import pytest

from bus.codec import encode
from bus.messages.catalog import Ensemble
from bus.messages.public import RESENT, CancelQuery, Tensor
from services.core.actor import Envelope
from services.core.line import ECHO_S
from services.dispatcher.cancelling import MOST_S
from tests.support.simulated.fleet import Fleet, refused, variant
from tests.unit.dispatcher.test_join import Several, members
from tests.unit.dispatcher.test_pipelines import CHAIN, Staged, planned
from tests.unit.dispatcher.test_resent import ready, send

SLOW = 400.0  # times its profile that a batch takes: a second
_numbers = count()


def key(label: str) -> bytes:
    return label.encode().ljust(16, b"-")


def ask(fleet: Fleet, app: str = "app", **needs: Any) -> str:
    label = f"k{next(_numbers)}"
    return fleet.ask(app, id=label, retry_key=key(label), **needs)


def cancel(fleet: Fleet, label: str, app: str = "app", *, seconds: float = 0.1) -> list[dict[str, Any]]:
    """The replies to a client that takes its query back, within so much time."""
    fleet.stage.publish(fleet.subjects.cancel(app), CancelQuery(retry_key=key(label)), f"_INBOX.test.cancel-{label}")
    fleet.stage.run(seconds)
    return fleet.replies(f"cancel-{label}")


def row(fleet: Fleet, label: str) -> Any:
    [one] = [one for one in fleet.outcomes() if one.id == label]
    return one


def is_cancelled(fleet: Fleet, label: str) -> None:
    """It has one reply and one row, and costs nothing."""
    refused(fleet.reply(label), "cancelled")
    assert (row(fleet, label).outcome, row(fleet, label).code, row(fleet, label).cost) == (
        "cancelled",
        "cancelled",
        0.0,
    )


def busy(fleet: Fleet) -> str:
    """A query that is computed for a second, after which the next one is."""
    fleet.asks(1, seconds=2.0)
    fleet.devices["w0"].slow = SLOW
    label = ask(fleet)
    fleet.stage.run(0.05)
    return label


def test_what_waits_in_an_executors_queue_leaves_it_and_what_runs_is_charged() -> None:
    fleet = Fleet()
    runs = busy(fleet)
    waits, stays = ask(fleet), ask(fleet, accuracy=0.5)
    fleet.stage.run(0.05)
    assert (cancel(fleet, waits), cancel(fleet, runs)) == ([{"cancelled": True}], [{"cancelled": False}])
    is_cancelled(fleet, waits)
    fleet.stage.run(3.0)
    for label in (runs, stays):
        assert "outputs" in fleet.reply(label)
        assert row(fleet, label).outcome == "ok"
        assert row(fleet, label).cost > 0.0
    assert not any(waits in batch for batch in fleet.devices["w0"].batches)
    assert cancel(fleet, waits) == [{"cancelled": True}] * 2, "who asks again hears the same"
    assert cancel(fleet, stays) == [{"cancelled": False}]


def test_what_is_not_known_or_named_wrongly_is_not_cancelled() -> None:
    fleet = Fleet()
    assert cancel(fleet, "nobody's") == [{"cancelled": False}]
    refused(fleet.request(fleet.subjects.cancel("app"), CancelQuery(retry_key=b"short")), "bad_request", "retry_key")


def test_another_caller_cannot_take_a_query_back() -> None:
    fleet = Fleet()
    busy(fleet)
    waits = ask(fleet)
    fleet.stage.listen("other.>")
    fleet.stage.publish(fleet.subjects.cancel("app"), CancelQuery(retry_key=key(waits)), "other.inbox", seconds=0.1)
    assert "outputs" in fleet.reply(waits, 5.0)


def test_what_waits_for_a_load_leaves_and_so_does_what_no_worker_can_serve() -> None:
    fleet = Fleet(variant(load_ms=3000.0))
    loads = ask(fleet)
    fleet.stage.run(0.1)
    assert cancel(fleet, loads) == [{"cancelled": True}]
    is_cancelled(fleet, loads)
    nobody = Fleet(workers=0)
    waits = ask(nobody)
    nobody.stage.run(0.05)
    assert cancel(nobody, waits) == [{"cancelled": True}]
    is_cancelled(nobody, waits)
    assert not nobody.dispatcher().in_flight


def test_members_that_have_not_begun_leave_and_the_row_says_what_the_others_cost() -> None:
    fleet = Several()
    fleet.devices["w0"].late = {"b": SLOW}
    first = ask(fleet)
    fleet.stage.run(0.05)
    second = ask(fleet)
    fleet.stage.run(0.05)
    computed = fleet.computed
    assert cancel(fleet, second) == [{"cancelled": True}]
    refused(fleet.reply(second), "cancelled")
    fleet.stage.run(5.0)
    assert fleet.computed == computed, "nothing more of it was computed"
    assert "outputs" in fleet.reply(first)
    parts = [one for one in fleet.outcomes() if one.parent == row(fleet, second).uid]
    gone = [one for one in parts if one.outcome == "cancelled"]
    assert gone
    assert not sum(one.cost for one in gone)
    whole = row(fleet, second)
    assert (whole.outcome, whole.missing) == ("cancelled", len(gone))
    assert whole.cost > 0.0
    assert whole.cost == pytest.approx(sum(one.cost for one in parts))
    assert not fleet.dispatcher().composites.joins.open
    assert not fleet.dispatcher().in_flight


def test_a_part_that_others_wait_for_goes_on() -> None:
    fleet = Several(*members("a"), selection=Ensemble(policy="majority", cache_mb=1.0))
    fleet.devices["w0"].slow = SLOW / 10
    fleet.stage.run(1.0)
    busy_with = ask(fleet, context="other")
    fleet.stage.run(0.01)
    first, second = ask(fleet), None
    fleet.stage.run(0.001)
    second = ask(fleet)
    fleet.stage.run(0.001)
    assert cancel(fleet, first, seconds=0.01) == [{"cancelled": True}]
    assert "outputs" in fleet.reply(second, 2.0)
    assert "outputs" in fleet.reply(busy_with)


@pytest.mark.parametrize("plan", [None, planned(batch=1)], ids=["alone", "planned"])
def test_stages_that_have_not_begun_are_never_asked(plan: Any) -> None:
    fleet = Staged(CHAIN)
    if plan is not None:
        fleet.change("p", plan=plan, seconds=0.5)
    fleet.devices["w0"].slow = 40.0
    first = ask(fleet, "p", latency_ms=5000.0)
    fleet.stage.run(0.01)
    second = ask(fleet, "p", latency_ms=5000.0)
    fleet.stage.run(0.01)
    assert cancel(fleet, second, "p", seconds=0.01) == [{"cancelled": True}], "in the queue of its first stage"
    assert cancel(fleet, first, "p", seconds=0.01) == [{"cancelled": True}], "its first stage runs"
    fleet.stage.run(3.0)
    for label in (first, second):
        refused(fleet.reply(label), "cancelled")
    parts = [one for one in fleet.outcomes() if one.parent is not None]
    assert sorted((one.stage, one.outcome) for one in parts) == [("a", "cancelled"), ("a", "ok")]
    assert [row(fleet, label).outcome for label in (first, second)] == ["cancelled"] * 2
    assert not fleet.dispatcher().in_flight


@pytest.mark.parametrize("to", ["d0", "d1"])
def test_whichever_dispatcher_hears_of_it_the_one_that_has_it_ends_it(to: str) -> None:
    fleet = ready()
    fleet.devices["w0"].slow = SLOW
    busy_with = ask(fleet)
    fleet.stage.run(0.05)
    send(fleet, "d0")  # with the key k...
    fleet.stage.run(0.05)
    asked = CancelQuery(retry_key=b"k" * 16)
    deliver(fleet, to, fleet.subjects.cancel("app"), asked, "_INBOX.test.c")
    fleet.stage.run(0.2)
    assert fleet.replies("c") == [{"cancelled": True}]
    refused(fleet.reply("q"), "cancelled")
    send(fleet, to, age_ms=300)
    fleet.stage.run(2.0)
    assert [refused(one, "cancelled")["code"] for one in fleet.replies("q")] == ["cancelled"] * 2
    assert [one.outcome for one in fleet.outcomes() if one.id == "q"] == ["cancelled"]
    assert "outputs" in fleet.reply(busy_with)


def deliver(fleet: Fleet, to: str, subject: str, message: Any, reply: str) -> None:
    """This one of a queue group gets the message."""
    envelope = Envelope(fleet.stage.now, message, subject, reply, encode(message))
    fleet.stage.kernel._deliver(fleet.stage.members[to], envelope)


def test_what_nobody_has_is_said_once_all_have_said_so_or_are_silent() -> None:
    fleet = ready()
    assert cancel(fleet, "nobody's", seconds=0.01) == [{"cancelled": False}]
    fleet.stage.stop("d1")
    deliver(fleet, "d0", fleet.subjects.cancel("app"), CancelQuery(retry_key=key("none")), "_INBOX.test.n")
    fleet.stage.run(0.01)
    assert fleet.replies("n") == []
    fleet.stage.run(MOST_S + 2 * ECHO_S)
    assert fleet.replies("n") == [{"cancelled": False}]


@pytest.mark.parametrize("marked", [True, False])
def test_what_comes_again_after_that_is_not_begun_again(marked: bool) -> None:
    fleet = Fleet()
    busy(fleet)
    waits = ask(fleet)
    fleet.stage.run(0.05)
    cancel(fleet, waits)
    body = encode({"inputs": Tensor("FP32", [1, 2], b"\0" * 8), "id": waits, "retry_key": key(waits)})
    headers = {RESENT: "100"} if marked else None
    fleet.stage.kernel.publish(fleet.subjects.query("app"), body, f"_INBOX.test.{waits}", body, headers=headers)
    fleet.stage.run(3.0)
    assert [one["error"]["code"] for one in fleet.replies(waits)] == ["cancelled"] * 2
    assert row(fleet, waits).outcome == "cancelled"
    assert not any(waits in batch for batch in fleet.devices["w0"].batches)


def test_what_its_executor_loses_is_not_begun_elsewhere() -> None:
    fleet = Fleet(workers=2)
    fleet.order(variant(), "w0", seconds=1.0)
    fleet.devices["w0"].slow = SLOW
    runs = ask(fleet)
    fleet.stage.run(0.05)
    assert cancel(fleet, runs) == [{"cancelled": False}]
    fleet.end_executor("w0", running=fleet.running("w0"))
    fleet.stage.run(3.0)
    refused(fleet.reply(runs), "cancelled")
    assert row(fleet, runs).outcome == "cancelled"


def test_a_flood_that_leaves_costs_nobody_anything_and_is_in_no_objective() -> None:
    fleet = Fleet()
    runs = busy(fleet)
    labels = []
    for _ in range(60):
        labels.append(ask(fleet))
        fleet.stage.run(0.0001)
    for label in labels:
        cancel(fleet, label, seconds=0.0)
    fleet.stage.run(5.0)
    for label in labels:
        is_cancelled(fleet, label)
    assert row(fleet, runs).cost > 0.0
    served = fleet.dispatcher()._outcomes.take_served()
    assert served.get("app", (0, 0))[0] <= 2, "what was cancelled is not counted"

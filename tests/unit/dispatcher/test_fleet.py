"""Dispatchers, monitors and executors together on virtual time: every query ends exactly once, whatever dies."""

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec import convert
from msgspec.structs import replace

from bus.codec import decode
from bus.messages.fleet import EnsureLoaded, ExecutorExited, Release
from services.core.settings import Settings
from services.dispatcher.actor import LOAD_AGAIN
from tests.support.data.examples import examples
from tests.support.simulated.fleet import Fleet, refused, variant


def test_first_queries_wait_for_the_load_and_tight_ones_are_refused() -> None:
    fleet = Fleet()
    reply = fleet.reply(fleet.ask(), 2.0)
    assert (reply["variant"], reply["outputs"]["y"]["shape"]) == ("m-v1-ort-fp32-t1-b8", [1, 1])
    assert [o.outcome for o in fleet.outcomes()] == ["ok"]
    fleet = Fleet(variant(load_ms=500.0))
    refusal = fleet.reply(fleet.ask(latency_ms=20.0), 0.2)["error"]
    assert refusal["code"] == "deadline"
    assert 300 < refusal["retry_after_ms"] < 700
    fleet.stage.run(1.0)
    assert fleet.reply(fleet.ask(latency_ms=20.0), 0.5)["missed"] == []
    fleet = Fleet(variant(), variant("n-v1-ort-fp32-t1-b8", model="n", accuracy=0.97))
    error = fleet.reply(fleet.ask(accuracy=0.99), 0.5)["error"]
    assert (error["code"], error["closest"]["variant"]) == ("unsatisfiable", "n-v1-ort-fp32-t1-b8")


def test_queries_that_wait_share_a_batch_in_order_of_deadline() -> None:
    fleet = Fleet()
    fleet.reply(fleet.ask(seconds=1.0))
    fleet.ask(latency_ms=1000.0)  # runs alone, and the others wait for it
    labels = [fleet.ask(latency_ms=1000.0 - 10 * n) for n in range(5)]
    assert [reply["batch"] for reply in fleet.each(labels, 1.0)] == [5] * 5
    assert fleet.devices["w0"].batches[-1] == labels[::-1]


def test_executor_killed_in_mid_batch_on_one_of_two_workers() -> None:
    fleet = Fleet(workers=2)
    home = fleet.reply(fleet.ask(), 1.0)["worker"]
    labels = fleet.asks(20, seconds=0.001)
    fleet.stage.kill(f"{home}/cpu")
    exited = ExecutorExited(worker=home, device="cpu", at=fleet.stage.now, reason="killed")
    fleet.stage.publish(fleet.subjects.exited(home, "cpu"), exited, seconds=1.0)
    fleet.start_executor(home)
    assert all("outputs" in reply for reply in fleet.each(labels, 5.0))
    uids = [o.uid for o in fleet.outcomes()]
    assert len(uids) == len(set(uids)) == 21


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("dispatchers", [1, 2, 3])
def test_a_poisonous_query_costs_only_itself(dispatchers: int, known: bool) -> None:
    """Also when another dispatcher tries its innocent ones again on the executor that the poison is about to end."""
    fleet = Fleet(dispatchers=dispatchers)
    fleet.ask(seconds=1.0)
    labels = [fleet.ask(id="poison" if n == 0 else f"good{n}", latency_ms=300.0 if known else 500.0) for n in range(12)]
    deaths = 0
    for _ in range(200):
        device = fleet.devices["w0"]
        device.poison = {"poison"}
        fleet.stage.run(0.002)
        if device.died:
            deaths += 1
            fleet.end_executor("w0", fleet.running("w0") if known else None, seconds=0.1)
            fleet.start_executor("w0")
    fleet.stage.run(5.0)
    for label in labels:
        reply = fleet.reply(label)
        if label == "poison":
            refused(reply, "model_error")
        else:
            assert "outputs" in reply, (label, reply)
            assert reply["missed"] == [], (label, reply)
    assert deaths == 2, "the second one, alone, says which query it is"


def test_one_of_two_dispatchers_dies_and_what_it_had_forwarded_is_answered_and_recorded_once() -> None:
    fleet = Fleet(dispatchers=2)
    fleet.ask(seconds=1.0)
    labels = fleet.asks(30, seconds=0.0015)
    fleet.stage.kill("d0")
    assert all("outputs" in reply for reply in fleet.each(labels, 6.0))
    recorded = {o.id for o in fleet.outcomes()}
    assert set(labels) <= recorded


@settings(max_examples=examples(40), deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(
    steps=st.lists(
        st.one_of(
            st.tuples(st.just("ask"), st.integers(1, 12), st.sampled_from([None, 5.0, 30.0, 400.0])),
            st.tuples(st.just("run"), st.floats(0.0, 0.7), st.none()),
            st.tuples(st.just("crash"), st.integers(0, 1), st.booleans()),
            st.tuples(st.just("silence"), st.integers(0, 1), st.none()),
        ),
        min_size=1,
        max_size=25,
    )
)
def test_every_query_ends_exactly_once(steps: list[tuple[str, Any, Any]]) -> None:
    """Arrivals, executor crashes (announced or not) and whole workers falling silent, in any order."""
    fleet = Fleet(dispatchers=1, workers=2)
    labels: list[str] = []
    for kind, first, second in steps:
        if kind == "ask":
            needs = {} if second is None else {"latency_ms": second}
            labels += [fleet.ask(**needs) for _ in range(first)]
        elif kind == "run":
            fleet.stage.run(first)
        elif kind == "crash":
            crash(fleet, f"w{first}", announced=second)
        else:
            silence(fleet, f"w{first}")
    fleet.stage.run(40.0)
    fleet.each(labels)
    mine = [o for o in fleet.outcomes() if o.id in set(labels)]
    assert sorted(o.id for o in mine) == sorted(labels)


@settings(max_examples=examples(25), deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(
    steps=st.lists(
        st.one_of(
            st.tuples(st.just("ask"), st.integers(1, 12)),
            st.tuples(st.just("run"), st.floats(0.0, 0.5)),
            st.tuples(st.just("dispatcher"), st.integers(0, 1)),
            st.tuples(st.just("executor"), st.integers(0, 1)),
        ),
        min_size=1,
        max_size=20,
    )
)
def test_with_retry_keys_nothing_is_lost_when_dispatchers_die(steps: list[tuple[str, Any]]) -> None:
    """Dispatchers and executors are killed at any time; a client that hears nothing asks again with the same key."""
    fleet = Fleet(dispatchers=2, workers=2)
    names = ["d0", "d1"]
    asked: dict[str, bytes] = {}
    for kind, number in steps:
        if kind == "ask":
            for _ in range(number):
                key = len(asked).to_bytes(16, "big")
                asked[fleet.ask(retry_key=key)] = key
        elif kind == "run":
            fleet.stage.run(number)
        elif kind == "dispatcher":
            fleet.stage.kill(names[number])
            names[number] = f"{names[number]}x"
            fleet.start_dispatcher(names[number])
        else:
            crash(fleet, f"w{number}", announced=True)
    for _ in range(6):
        fleet.stage.run(1.5)
        for label, key in asked.items():
            if not fleet.replies(label):
                fleet.ask(id=label, retry_key=key)
    fleet.stage.run(60.0)
    for label in asked:
        replies = fleet.replies(label)
        assert replies, label
        assert all("outputs" in reply for reply in replies), (label, replies)
    mine = [o for o in fleet.outcomes() if o.id in asked]
    if {"dispatcher", "executor"} - {kind for kind, _ in steps}:
        assert {o.id for o in mine} == set(asked)  # only what both knew can be lost, when both die within seconds
    # The database keeps one outcome a uid: whoever recorded it, it must be one uid a query, and a good end.
    assert len({(o.id, o.uid) for o in mine}) == len(asked)
    assert {o.outcome for o in mine} <= {"ok", "late"}


def crash(fleet: Fleet, worker: str, *, announced: bool) -> None:
    if f"{worker}/cpu" in fleet.stage.members:
        if announced:
            fleet.end_executor(worker, fleet.running(worker))
        else:
            fleet.stage.kill(f"{worker}/cpu")
        fleet.stage.run(0.05)
        fleet.start_executor(worker)


def silence(fleet: Fleet, worker: str) -> None:
    """A machine is gone for three seconds, then comes back as new."""
    for name in (worker, f"{worker}/cpu"):
        if name in fleet.stage.members:
            fleet.stage.kill(name)
    fleet.stage.run(3.0)
    fleet.start_worker(worker)


def test_a_worker_that_has_no_room_is_followed_by_the_next_one_at_once() -> None:
    """The first one holds what it may and has just used it. The query does not wait for a plan, and is not refused."""
    other = variant("other-v1", model="other")
    fleet = Fleet(variant(), other, workers=3, settings=convert({"monitor": {"max_models": 1}}, Settings))
    fleet.ask(model="other", id="kept")
    assert fleet.reply("kept", 0.3)["worker"] == "w0"
    began = fleet.stage.now
    fleet.ask(model="m", latency_ms=300.0, id="m")
    assert fleet.reply("m", 0.3)["worker"] == "w1"
    refusals = [e for kind, e in fleet.stage.records if kind == "scaling" and e.time >= began]
    assert [(e.worker, e.action) for e in refusals] == [("w1", "load")]


def test_workers_without_room_are_asked_once_each_and_then_another_variant_is_taken() -> None:
    large = variant("m-v1-large", profile=replace(variant().profile, memory_mb=3_500.0))
    fleet = Fleet(large, variant("m-v1-small", load_ms=100.0), workers=2)
    fleet.stage.listen("infaas.worker.*.load")
    fleet.ask(latency_ms=300.0, id="m")
    assert fleet.reply("m", 0.3)["variant"] == "m-v1-small"
    asked = [
        (subject.split(".")[2], decode(EnsureLoaded, body).variant.variant)
        for _, subject, body in fleet.stage.heard
        if subject.endswith(".load")
    ]
    assert asked == [("w0", "m-v1-large"), ("w1", "m-v1-large"), ("w0", "m-v1-small")]


def test_a_worker_that_had_no_room_is_asked_again_after_a_while() -> None:
    fleet = Fleet(
        variant(), variant("other-v1", model="other"), settings=convert({"monitor": {"max_models": 1}}, Settings)
    )
    fleet.ask(model="other", id="other", seconds=0.3)
    fleet.ask(model="m", latency_ms=200.0, id="early", seconds=0.01)
    fleet.stage.publish(fleet.subjects.worker("w0", "release"), Release(variant="other-v1", orderer="vm-c0"))
    error = fleet.reply("early", LOAD_AGAIN + 0.1)["error"]
    assert error["code"] == "overloaded"
    assert "w0 cannot load it: cpu holds 1 instances in use, as many as monitor.max_models allows" in error["message"]
    fleet.ask(model="m", latency_ms=200.0, id="later")
    assert "outputs" in fleet.reply("later", 0.3), "what was there then has gone"

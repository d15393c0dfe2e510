"""Equal queries of apps that ask for it: answered from what is kept, or by one evaluation, and never by what does not suit. Virtual time."""

import os
from typing import Any

import pytest
from msgspec.structs import replace

from bus.messages.catalog import Ensemble, VariantRecord
from bus.messages.public import Tensor
from tests.support.simulated.fleet import metrics, refused, variant
from tests.unit.dispatcher.test_join import MODELS, SLO_MS, Several, members, value

CACHE = Ensemble(cache_mb=1)
MAJORITY = Ensemble(policy="majority", cache_mb=1)


def inputs(number: int) -> Tensor:
    return Tensor("FP32", [1, 2], number.to_bytes(8, "little"))


def v(version: str, *, accuracy: float = 0.9, name: str = "") -> VariantRecord:
    return variant(name or f"m-v{version}-ort-fp32-t1-b8", version=version, accuracy=accuracy)


def fleet_of(*variants: VariantRecord, selection: Ensemble | None = CACHE, **options: Any) -> Several:
    """An app that keeps answers and links version 1 of the model m, or what the variants say."""
    fleet = Several(*(variants or (v("1"),)), selection=selection or Ensemble(), **options)
    if any(one.version == "2" for one in variants):
        fleet.change(links={"m": "1"})
    return fleet


def asked(fleet: Several, number: int = 1, **needs: Any) -> dict[str, Any]:
    """The reply to a query with the inputs of this number."""
    return fleet.one(fleet.ask(inputs=inputs(number), **needs))[1]


def evaluated(fleet: Several) -> int:
    """Queries that executors have computed."""
    return sum(len(batch) for device in fleet.devices.values() for batch in device.batches)


def says(fleet: Several, number: float) -> None:
    for device in fleet.devices.values():
        device.says = dict.fromkeys((*MODELS, "m"), number)


def test_an_equal_query_is_answered_at_once_without_the_model_and_costs_nothing() -> None:
    fleet = fleet_of()
    says(fleet, 3.0)
    _, first = fleet.one(fleet.ask(inputs=inputs(1)))
    seconds, again = fleet.one(fleet.ask(inputs=inputs(1)))
    assert evaluated(fleet) == 1
    assert seconds == pytest.approx(0.0, abs=5e-4)
    assert (first["cached"], again["cached"], again["cost"], again["missed"]) == (False, True, 0.0, [])
    assert value(again) == value(first) == 3.0
    assert {again[name] == first[name] for name in ("model", "version", "variant", "hardware", "accuracy")} == {True}
    queries, parts = fleet.ended()
    assert [(one.cached, one.cost > 0, one.outcome) for one in queries] == [(False, True, "ok"), (True, False, "ok")]
    assert len(parts) == 1


def test_equal_queries_are_one_evaluation_with_a_cache_only() -> None:
    fleet = fleet_of(*members(*MODELS), selection=Ensemble(policy="majority"))
    labels = fleet.asks(2, inputs=inputs(1), seconds=5.0)
    assert evaluated(fleet) == 10
    assert [fleet.replies(label)[0]["cached"] for label in labels] == [False, False]
    fleet = fleet_of()
    replies = [asked(fleet, retry_key=os.urandom(16)) for _ in range(3)]
    assert evaluated(fleet) == 1
    assert [reply["cached"] for reply in replies] == [False, True, True]
    assert len({reply["query"] for reply in replies}) == 3
    fleet = fleet_of()
    asked(fleet)
    assert (asked(fleet, variant="m-v1-ort-fp32-t1-b8")["cached"], evaluated(fleet)) == (False, 2)


# -- what must not be answered from the cache


def test_two_inputs_under_one_digest_or_key_are_two() -> None:
    fleet = fleet_of()
    says(fleet, 1.0)
    asked(fleet, 1, input_digest="same")
    says(fleet, 2.0)
    other = asked(fleet, 2, input_digest="same")
    assert (value(other), other["cached"], evaluated(fleet)) == (2.0, False, 2)
    equal = asked(fleet, 1, input_digest="another")
    assert (value(equal), equal["cached"]) == (1.0, True)
    # An executor repeats the answer to a uid that it knows. It must not be kept for other inputs.
    fleet = fleet_of()
    key = os.urandom(16)
    for number in (1, 2):
        says(fleet, number)
        asked(fleet, number, retry_key=key)
    assert value(asked(fleet, 2)) == 2.0


@pytest.mark.parametrize("selection", [CACHE, MAJORITY], ids=["one variant", "majority"])
def test_an_answer_of_another_version_is_not_given(selection: Ensemble) -> None:
    fleet = fleet_of(v("1"), v("2"), selection=selection)
    says(fleet, 1.0)
    asked(fleet)
    fleet.change(links={"m": "2"})
    says(fleet, 2.0)
    after = asked(fleet)
    assert (value(after), after["cached"]) == (2.0, False)
    fleet.change(links={"m": "1"})  # rolled back
    back = asked(fleet)
    assert (back["members"] if "members" in back else [f"m@{back['version']}"]) == ["m@1"]
    if selection is MAJORITY:  # kept by version
        assert (value(back), back["cached"]) == (1.0, True)


def test_answers_below_the_accuracy_defaults_and_refusals_are_not_kept() -> None:
    cheap = v("1", accuracy=0.8, name="m-v1-ort-int8-t1-b8")
    dear = variant("m-v1-ort-fp32-t1-b8", accuracy=0.95, base_ms=8.0, per_item_ms=2.0)
    fleet = fleet_of(cheap, dear)
    assert asked(fleet)["accuracy"] == 0.8
    for floor, kept in ((0.9, False), (0.9, True), (0.5, True)):
        reply = asked(fleet, accuracy=floor)
        assert (reply["accuracy"], reply["cached"], reply["missed"]) == (0.95, kept, [])
    assert evaluated(fleet) == 2
    refused(asked(fleet, accuracy=0.99), "unsatisfiable")
    fleet = fleet_of(*(replace(one, model_accuracy=0.95) for one in (cheap, dear)))
    for floor, kept in ((0.7, 0.8), (None, 0.95)):  # a query that states none gets the model's own
        assert asked(fleet, **({} if floor is None else {"accuracy": floor}))["accuracy"] == kept
    fleet = fleet_of()
    fleet.change(default_output=[7.0])
    says(fleet, 4.0)
    fleet.devices["w0"].late = {"m": 400.0}
    assert fleet.one(fleet.ask(inputs=inputs(1), latency_ms=20.0), seconds=0.1)[1]["default"] is True
    fleet.stage.run(5.0)
    _, answer = fleet.one(fleet.ask(inputs=inputs(1), latency_ms=20.0))
    assert ("default" in answer, value(answer), answer["cached"]) == (False, 4.0, True)  # the model's, which came late


# -- equal queries at the same time


@pytest.mark.parametrize("selection", [CACHE, MAJORITY], ids=["one variant", "majority"])
def test_a_hundred_equal_queries_are_one_evaluation(selection: Ensemble) -> None:
    fleet = fleet_of(selection=selection)
    replies = fleet.each([fleet.ask(inputs=inputs(1)) for _ in range(100)], 5.0)
    assert evaluated(fleet) == 1
    assert sorted(reply["cached"] for reply in replies) == [False] + [True] * 99
    assert sum(reply["cost"] > 0 for reply in replies) == 1
    queries, parts = fleet.ended()
    assert (len(queries), len(parts), {one.outcome for one in queries}) == (100, 1, {"ok"})


def test_waiting_queries_are_asked_anew_when_the_first_is_refused() -> None:
    fleet = fleet_of()
    fleet.devices["w0"].late = {"m": 100.0}
    filler = fleet.ask(inputs=inputs(9), latency_ms=2000.0)  # takes 0.25 s instead of 2.5 ms
    fleet.stage.run(0.002)
    hurried = fleet.ask(inputs=inputs(1), latency_ms=60.0)
    patient = [fleet.ask(inputs=inputs(1), latency_ms=4000.0) for _ in range(5)]
    fleet.devices["w0"].late = {}
    refused(fleet.reply(hurried, 5.0), "deadline")
    assert [reply["missed"] for reply in fleet.each([filler, *patient])] == [[]] * 6
    assert evaluated(fleet) == 2
    assert sum(reply["cached"] for reply in fleet.each(patient)) == 4


def test_a_query_that_needs_more_does_not_wait_for_one_that_needs_less() -> None:
    fleet = fleet_of()
    for needs in (
        {"latency_ms": 4000.0},
        {"latency_ms": 50.0},
        {"latency_ms": 50.0, "accuracy": 0.9},
        {"latency_ms": 60.0, "accuracy": 0.9},
        {"latency_ms": 60.0, "accuracy": 0.9, "priority": 4},
        {"latency_ms": 60.0, "priority": 4},  # which none states is the model's own, and may be more
        {"latency_ms": 60.0},
    ):
        fleet.ask(inputs=inputs(1), **needs)
    fleet.stage.run(5.0)
    assert evaluated(fleet) == 5
    queries, _ = fleet.ended()
    assert [one.outcome for one in queries] == ["ok"] * 7


def test_a_version_that_comes_while_queries_wait_answers_them() -> None:
    fleet = fleet_of(v("1"), v("2"))
    fleet.devices["w0"].late = {"m": 10.0}
    says(fleet, 1.0)
    first, second = fleet.ask(inputs=inputs(1)), fleet.ask(inputs=inputs(1))
    fleet.stage.run(0.005)
    fleet.change(links={"m": "2"})
    fleet.devices["w0"].late = {}
    third = fleet.ask(inputs=inputs(1))
    assert [reply["version"] for reply in fleet.each([first, second, third], 5.0)] == ["1", "2", "2"]


def test_an_executor_that_dies_with_the_first_ends_none_of_them() -> None:
    fleet = fleet_of(workers=2)
    fleet.devices["w0"].late = {"m": 10.0}
    labels = fleet.asks(5, inputs=inputs(1), latency_ms=4000.0, seconds=0.01)
    fleet.kill_worker("w0")
    assert all("outputs" in reply for reply in fleet.each(labels, 8.0))


# -- several models


def test_members_are_kept_each_and_one_that_was_late_counts_the_next_time() -> None:
    fleet = fleet_of(*members(*MODELS), selection=MAJORITY)
    fleet.devices["w0"].late = {"e": 100.0}
    first = asked(fleet)
    assert (first["missing"], first["cached"]) == (1, False)
    fleet.devices["w0"].late = {}
    again = asked(fleet)
    assert (again["missing"], again["cached"], again["cost"], len(again["members"])) == (0, True, 0.0, 5)
    assert evaluated(fleet) == 5
    assert again["latency_ms"] < SLO_MS


def test_some_members_kept_and_one_new_is_not_cached_and_costs_the_new_one() -> None:
    fleet = fleet_of(*members(*MODELS), selection=Ensemble(policy="majority", members=["a", "b"], cache_mb=1))
    two = asked(fleet)
    fleet.change(selection=Ensemble(policy="majority", members=["a", "b", "c"], cache_mb=1))
    three = asked(fleet)
    assert (three["cached"], three["members"], evaluated(fleet)) == (False, ["a@1", "b@1", "c@1"], 3)
    assert 0 < three["cost"] < two["cost"]


# -- memory and figures


def test_the_cache_goes_with_the_setting_and_its_figures_are_shown() -> None:
    fleet = fleet_of()
    for number in (1, 1, 2):
        asked(fleet, number)
    fleet.asks(3, inputs=inputs(3), seconds=5.0)
    actor, figures = fleet.dispatcher(), metrics(fleet)
    lookups = {what: figures["infaas_cache_lookups_total", "app", what] for what in ("hit", "miss", "coalesced")}
    assert lookups == {"hit": 1, "miss": 3, "coalesced": 2}
    assert figures["infaas_cache_evictions_total", "app"] == 0
    assert figures["infaas_cache_bytes", "app"] == actor.composites.cached.caches["app"].size > 0
    fleet.change(selection=Ensemble(policy="majority"))
    assert actor.composites.cached.caches == {}

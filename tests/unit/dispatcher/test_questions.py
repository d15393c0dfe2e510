"""Questions: lists and explanations show what is reclaimable and quarantined, and which members would be asked."""

from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from bus.codec import encode
from bus.messages.catalog import AppRecord, ModelSelection
from bus.messages.fleet import EnsureLoaded, Release
from bus.messages.public import ListRequest, Requirements
from services.core.actor import Changed
from services.core.catalog import key_of
from services.core.placement import quarantine_key
from tests.support.simulated.fleet import Fleet, variant


def test_lists_say_what_is_reclaimable() -> None:
    fleet = Fleet(variant(), workers=1)
    fleet.stage.publish(fleet.subjects.worker("w0", "load"), EnsureLoaded(variant=variant(), at_least=2))
    fleet.stage.run(1.0)
    fleet.stage.publish(fleet.subjects.worker("w0", "release"), Release(variant=NAME, keep=1, reclaim=True))
    fleet.stage.run(1.0)
    [item] = said(fleet, fleet.subjects.list("variants"), ListRequest())["items"]
    assert (item["state"], item["instances"], item["reclaimable"]) == ("Active", 2, 1)
    [item] = said(fleet, fleet.subjects.list("workers"), ListRequest())["items"]
    assert sorted(one["reclaimable"] for one in item["instances"]) == [False, True]
    [device] = item["devices"]
    assert device["memory_reclaimable_mb"] == device["memory_used_mb"] > 0


# -- A variant that one worker cannot load is served by another one; where none can, everybody is told so. Virtual
# time.

NAME = "m-v1-ort-fp32-t1-b8"


def said(fleet: Fleet, subject: str, message: object) -> dict:
    """The reply to one request."""
    fleet.stage.publish(subject, message, "_INBOX.test.listing")
    fleet.stage.run(0.1)
    body = [body for _, heard, body in fleet.stage.heard if heard == "_INBOX.test.listing"][-1]
    return msgspec.msgpack.decode(body)


def asked_for(fleet: Fleet, seconds: float) -> list[str]:
    """Two queries a second."""
    labels = []
    for _ in range(round(2 * seconds)):
        labels.append(fleet.ask(latency_ms=400.0))
        fleet.stage.run(0.5)
    return labels


def test_another_worker_loads_what_one_cannot() -> None:
    fleet = Fleet(variant(), workers=2)
    fleet.devices["w0"].broken = "no such operator"
    labels = asked_for(fleet, 30.0)
    assert "outputs" in fleet.replies(labels[-1])[0]
    assert fleet.replies(labels[-1])[0]["worker"] == "w1"
    assert fleet.devices["w0"].loads <= 3
    assert fleet.devices["w1"].loads == 1


def test_where_nobody_can_load_it_lists_and_explanations_say_so_until_it_is_released() -> None:
    fleet = Fleet(variant(), workers=2)
    for device in fleet.devices.values():
        device.broken = "no such operator"
    labels = asked_for(fleet, 60.0)
    fleet.stage.run(2.0)
    assert all(len(fleet.replies(label)) == 1 for label in labels)
    assert [device.loads for device in fleet.devices.values()] == [3, 3]
    [item] = said(fleet, fleet.subjects.list("variants"), ListRequest())["items"]
    assert item["state"] == "Quarantined"
    assert set(item["quarantined"]) == {"w0", "w1"}
    assert item["quarantined"]["w0"] == "its last 3 loads failed: no such operator"
    [candidate] = said(fleet, fleet.subjects.explain("app"), Requirements())["candidates"]
    assert candidate["state"] == "Quarantined"
    assert candidate["why_not"] == "quarantined on w0: its last 3 loads failed: no such operator"

    fleet.devices["w1"].broken = ""
    fleet.stage.send("w1", Changed("infaas-control", quarantine_key("w1", NAME), None))
    labels = asked_for(fleet, 10.0)
    assert fleet.replies(labels[-1])[0]["worker"] == "w1"
    [item] = said(fleet, fleet.subjects.list("variants"), ListRequest())["items"]
    assert item["state"] == "Active"
    assert set(item["quarantined"]) == {"w0"}


# -- several models answer together

THREE = tuple(variant(f"{model}-v1-ort-fp32-t1-b8", model=model) for model in "abc")


def answering_together(**fields: Any) -> Fleet:
    fleet = Fleet(*THREE)
    [app] = [record for record in fleet.records if isinstance(record, AppRecord)]
    after = replace(app, selection=ModelSelection(**fields))
    fleet.stage.send("d0", Changed("infaas-catalog", key_of(after), encode(after)))
    for record in THREE:
        fleet.stage.publish(fleet.subjects.worker("w0", "load"), EnsureLoaded(variant=record, app="app"))
    fleet.stage.run(2.0)
    return fleet


def test_an_explanation_says_which_members_would_be_asked_and_why() -> None:
    fleet = answering_together(policy="exp4", members=["a", "b"])
    unread = said(fleet, fleet.subjects.explain("app"), Requirements())
    assert [(row["member"], row["weight"]) for row in unread["members"]] == [("a@1", None), ("b@1", None)]
    assert unread["members"][0]["why"] == "what was learnt is not in this dispatcher's memory; the next query reads it"

    label = fleet.ask()
    fleet.stage.run(1.0)
    asked = fleet.replies(label)[0]["members"]
    found = said(fleet, fleet.subjects.explain("app"), Requirements())
    assert {row["member"] for row in found["members"]} == set(asked)
    for row in found["members"]:
        assert (row["weight"], row["probability"]) == (0.5, 1.0)
        assert row["why"] == "every member is asked; its weight follows from 0 feedbacks"
        assert row["variant"] == f"{row['member'][0]}-v1-ort-fp32-t1-b8"
    why_not = {candidate["model"]: candidate["why_not"] for candidate in found["candidates"]}
    assert why_not == {"a": "", "b": "", "c": "not among the members that set-selection names"}
    assert found["chosen"]["model"] in ("a", "b")


def test_an_explanation_of_chance_gives_probabilities_and_names_members_that_would_be_missing() -> None:
    fleet = answering_together(policy="exp3")
    fleet.ask()
    fleet.stage.run(1.0)
    found = said(fleet, fleet.subjects.explain("app"), Requirements(accuracy=0.99))
    assert [row["probability"] for row in found["members"]] == [pytest.approx(1 / 3)] * 3
    assert all("by chance" in row["why"] and "has an accuracy of 0.99" in row["why"] for row in found["members"])
    hurried = said(fleet, fleet.subjects.explain("app"), Requirements(latency_ms=0.001))
    assert all("it would be missing: " in row["why"] and row["variant"] is None for row in hurried["members"])
    assert hurried["chosen"] is None
    assert hurried["refusal"]["code"] == "unsatisfiable"


def test_a_query_that_names_a_model_is_explained_as_one_that_one_variant_answers() -> None:
    fleet = answering_together(policy="exp3")
    found = said(fleet, fleet.subjects.explain("app"), Requirements(model="b"))
    assert "members" not in found
    assert found["chosen"]["model"] == "b"

"""Questions: lists and explanations show what is reclaimable and quarantined, and which members would be asked."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from msgspec.structs import replace

from bus.messages.catalog import AppRecord, Ensemble, Functions, PipelineEdge, PipelineRecord, PipelineVertex
from bus.messages.fleet import Release
from bus.messages.public import ListRequest, Requirements
from services.core.actor import Changed
from services.core.placement import quarantine_key
from services.core.selection.eligibility import Ask
from services.core.selection.policy import BruteForce, InfaasPolicy, RoundRobin, SelectionPolicy
from tests.support.simulated.fleet import SIGNATURE, Fleet, variant
from tests.unit.core.selection.test_work import work
from tests.unit.dispatcher.test_pipelines import CASCADE, ONE, SLO_MS, Staged, planned, vertex


def test_lists_say_what_is_reclaimable() -> None:
    fleet = Fleet(variant(), workers=1)
    fleet.order(variant(), at_least=2, app=None, seconds=1.0)
    fleet.stage.publish(fleet.subjects.worker("w0", "release"), Release(variant=NAME, keep=1, reclaim=True))
    fleet.stage.run(1.0)
    [item] = fleet.request(fleet.subjects.list("variants"), ListRequest())["items"]
    assert (item["state"], item["instances"], item["reclaimable"]) == ("Active", 2, 1)
    [item] = fleet.request(fleet.subjects.list("workers"), ListRequest())["items"]
    assert sorted(one["reclaimable"] for one in item["instances"]) == [False, True]
    [device] = item["devices"]
    assert device["memory_reclaimable_mb"] == device["memory_used_mb"] > 0


# -- A variant that one worker cannot load is served by another one; where none can, everybody is told so. Virtual
# time.

NAME = "m-v1-ort-fp32-t1-b8"


def test_what_cannot_serve_is_said_with_the_reason() -> None:
    int8 = variant("m-v1-ort-int8-t1-b8", precision="int8", arithmetic="exact", base_ms=0.5)
    for arithmetic, why in (("saturating", "was measured on a CPU with exact sums"), ("exact", "not loaded")):
        fleet = Fleet(variant(), int8, arithmetic=arithmetic)
        fleet.order(variant(), seconds=2.0)
        found = fleet.request(fleet.subjects.explain("app"), Requirements())
        [one] = [one for one in found["candidates"] if one["variant"] == int8.variant]
        assert why in one["why_not"]
    fleet = Fleet(variant(), workers=2)
    fleet.devices["w0"].broken = "no such operator"
    labels = asked_for(fleet, 30.0)
    assert "outputs" in fleet.replies(labels[-1])[0]
    assert fleet.replies(labels[-1])[0]["worker"] == "w1"
    assert fleet.devices["w0"].loads <= 3
    assert fleet.devices["w1"].loads == 1
    fleet = Fleet(variant(), workers=1)
    fleet.order(variant(), app=None, seconds=1.0)
    alone = variant().profile.rows[0].p50_ms
    found = fleet.request(fleet.subjects.explain("app"), Requirements(latency_ms=alone + 0.1))
    assert found["refusal"]["code"] == "unsatisfiable"
    [candidate] = found["candidates"]
    assert candidate["why_not"].startswith("inference and the way to it take")


def test_explanations_name_the_functions_of_a_models_owner_and_their_time() -> None:
    fleet = Fleet(variant(functions=Functions(before="o.py:f", sources={"o.py": ""}, ms=1.25)))
    fleet.order(variant(), seconds=2.0)
    found = fleet.request(fleet.subjects.explain("app"), Requirements())
    assert (found["chosen"]["functions"], found["chosen"]["why_not"]) == ("before o.py:f (1.25 ms)", "")


def asked_for(fleet: Fleet, seconds: float) -> list[str]:
    """Two queries a second."""
    labels = []
    for _ in range(round(2 * seconds)):
        labels.append(fleet.ask(latency_ms=400.0))
        fleet.stage.run(0.5)
    return labels


def test_where_nobody_can_load_it_lists_and_explanations_say_so_until_it_is_released() -> None:
    fleet = Fleet(variant(), workers=2)
    for device in fleet.devices.values():
        device.broken = "no such operator"
    labels = asked_for(fleet, 60.0)
    fleet.stage.run(2.0)
    assert all(len(fleet.replies(label)) == 1 for label in labels)
    assert [device.loads for device in fleet.devices.values()] == [3, 3]
    [item] = fleet.request(fleet.subjects.list("variants"), ListRequest())["items"]
    assert (item["state"], set(item["quarantined"])) == ("Quarantined", {"w0", "w1"})
    assert item["quarantined"]["w0"] == "its last 3 loads failed: no such operator"
    [candidate] = fleet.request(fleet.subjects.explain("app"), Requirements())["candidates"]
    assert candidate["state"] == "Quarantined"
    assert candidate["why_not"].startswith(
        "m-v1-ort-fp32-t1-b8 is quarantined on w0 until infaas.admin.release-variant"
    )
    assert candidate["why_not"].endswith("its last 3 loads failed: no such operator")

    fleet.devices["w1"].broken = ""
    fleet.stage.send("w1", Changed("infaas-control", quarantine_key("w1", NAME), None))
    labels = asked_for(fleet, 10.0)
    assert fleet.replies(labels[-1])[0]["worker"] == "w1"
    [item] = fleet.request(fleet.subjects.list("variants"), ListRequest())["items"]
    assert (item["state"], set(item["quarantined"])) == ("Active", {"w0"})


def full(policy: SelectionPolicy) -> Fleet:
    """Two variants. One has two instances, which are full of queries; the other one is loaded nowhere."""
    fleet = Fleet(variant(), variant("n-v1-ort-fp32-t1-b8", model="n", load_ms=900.0), workers=1, policy=policy)
    fleet.order(variant(), at_least=2, seconds=1.0)
    fleet.asks(500, priority=5, latency_ms=5000.0, seconds=0.01)
    return fleet


@pytest.mark.parametrize("made", [InfaasPolicy, RoundRobin, BruteForce])
def test_an_explanation_leaves_no_trace_in_what_queries_get_or_what_their_decisions_cost(
    made: Callable[[], SelectionPolicy],
) -> None:
    """For one, that of the lowest priority told queries of others to look for those that give way to them."""
    ends, works = [], []
    for questions in (0, 3):
        policy = made()
        fleet = full(policy)
        view = fleet.dispatcher().view
        for priority in (9, 5, 1)[:questions]:
            for needs in ({}, {"latency_ms": 20.0}, {"accuracy": 0.99}, {"latency_ms": 0.001}):
                fleet.stage.publish(
                    fleet.subjects.explain("app"), Requirements(priority=priority, **needs), "_INBOX.test.why"
                )
        fleet.stage.run(0.001)
        ask = Ask(app="app", items=1, deadline=fleet.stage.now + 0.02, latency_s=0.02)
        policy.select(ask, fleet.stage.now, view)  # which variants meet its needs is kept
        works.append(work(partial(policy.select, ask, fleet.stage.now, view)))
        labels = [fleet.ask(priority=priority, latency_ms=ms) for priority in (5, 3) for ms in (20.0, 900.0, 4000.0)]
        fleet.stage.run(10.0)
        ends.append([fleet.replies(label) for label in labels])
    assert works[0] == works[1]
    assert ends[0] == ends[1]


# -- several models answer together

THREE = tuple(variant(f"{model}-v1-ort-fp32-t1-b8", model=model) for model in "abc")


def answering_together(**fields: Any) -> Fleet:
    fleet = Fleet(*THREE)
    fleet.change(selection=Ensemble(**fields))
    for record in THREE:
        fleet.order(record)
    fleet.stage.run(2.0)
    return fleet


def test_an_explanation_says_which_members_would_be_asked_and_why() -> None:
    fleet = answering_together(policy="exp4", members=["a", "b"])
    unread = fleet.request(fleet.subjects.explain("app"), Requirements())
    assert [(row["member"], row["weight"]) for row in unread["members"]] == [("a@1", None), ("b@1", None)]
    assert unread["members"][0]["why"] == "what was learnt is not in this dispatcher's memory; the next query reads it"

    asked = fleet.replies(fleet.ask(seconds=1.0))[0]["members"]
    found = fleet.request(fleet.subjects.explain("app"), Requirements())
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
    fleet.ask(seconds=1.0)
    found = fleet.request(fleet.subjects.explain("app"), Requirements(accuracy=0.99))
    assert [row["probability"] for row in found["members"]] == [pytest.approx(1 / 3)] * 3
    assert all("by chance" in row["why"] and "has an accuracy of 0.99" in row["why"] for row in found["members"])
    hurried = fleet.request(fleet.subjects.explain("app"), Requirements(latency_ms=0.001))
    assert all("it would be missing: " in row["why"] and row["variant"] is None for row in hurried["members"])
    assert hurried["chosen"] is None
    assert hurried["refusal"]["code"] == "unsatisfiable"


def test_a_query_that_names_a_model_is_explained_as_one_that_one_variant_answers() -> None:
    fleet = answering_together(policy="exp3")
    found = fleet.request(fleet.subjects.explain("app"), Requirements(model="b"))
    assert "members" not in found
    assert found["chosen"]["model"] == "b"


# -- pipelines


def explained(fleet: Fleet, **needs: Any) -> dict[str, Any]:
    return fleet.request(fleet.subjects.explain("p"), Requirements(**needs))


def test_an_explanation_of_a_pipeline_says_of_each_vertex_what_would_answer_and_why() -> None:
    found = explained(Staged(CASCADE))
    cheap, dear = found["stages"]
    assert (cheap["vertex"], cheap["app"], cheap["variant"]) == ("cheap", "cheap", "cheap-v1-ort-fp32-t1-b8")
    assert (cheap["when"], dear["when"]) == ([], ["cheap: y > 0.5"])
    assert (cheap["planned"], cheap["waiting"], cheap["accuracy"]) == (False, 0, None)
    assert cheap["why"] == "it comes first by cost of the loaded ones that meet its needs"
    assert cheap["share_ms"] == pytest.approx(SLO_MS - 2.5), "what is left by the stage behind it"
    assert found["chosen"]["stage"] == "cheap"
    assert {(one["stage"], one["variant"]) for one in found["candidates"] if not one["why_not"]} == {
        ("cheap", "cheap-v1-ort-fp32-t1-b8"),
        ("dear", "dear-v1-ort-fp32-t1-b8"),
    }


def test_a_stage_that_would_be_refused_refuses_the_query_only_if_each_query_visits_it() -> None:
    fleet = Staged(CASCADE, changes={"dear": {"accuracy": 0.5}})
    fleet.change("p", pipeline=replace(CASCADE, vertices=[vertex("cheap"), vertex("dear", "cheap.y", accuracy=0.8)]))
    found = explained(fleet)
    assert found["stages"][1]["why"].startswith("it would be refused: ")
    assert (found["stages"][1]["variant"], found["stages"][1]["accuracy"]) == (None, 0.8)
    assert found["chosen"]["stage"] == "cheap"
    assert "refusal" not in found
    [dear] = [one for one in found["candidates"] if one["stage"] == "dear"]
    assert dear["why_not"] == "accuracy 0.5000 is below 0.8"
    sure = {"accuracy": 0.5, "accuracy_low": 0.4, "accuracy_high": 0.61, "samples": 1300}
    fleet = Staged(CASCADE, changes={"dear": sure})
    for floor, why in (
        (0.6, "accuracy 0.5000 is below 0.6, but within its 95 % interval of 1,300"),
        (0.7, "accuracy 0.5000 is below 0.7"),
    ):
        fleet.change(
            "p", pipeline=replace(CASCADE, vertices=[vertex("cheap"), vertex("dear", "cheap.y", accuracy=floor)])
        )
        [dear] = [one for one in explained(fleet)["candidates"] if one["stage"] == "dear"]
        assert {name: dear[name] for name in sure} == sure
        assert dear["why_not"] == why
    always = [PipelineEdge(source="cheap", target="dear")]
    fleet.change("p", pipeline=PipelineRecord(
        vertices=[vertex("cheap"), vertex("dear", accuracy=0.8)], edges=always, output={"y": "dear.y"}
    ))  # fmt: skip
    found = explained(fleet)
    assert found["chosen"] is None
    assert found["refusal"]["code"] == "unsatisfiable"
    assert found["refusal"]["message"].startswith("vertex dear: ")


def test_the_needs_of_a_query_reach_vertices_without_their_own() -> None:
    fleet = Staged(CASCADE)
    found = explained(fleet, latency_ms=50.0, accuracy=0.99)
    assert found["refusal"]["code"] == "unsatisfiable"
    assert [row["accuracy"] for row in found["stages"]] == [0.99, 0.99]
    assert found["stages"][0]["share_ms"] == pytest.approx(47.5)
    found = explained(fleet, model="cheap")
    assert (found["refusal"]["code"], found["stages"]) == ("bad_request", [])
    fleet.stage.send("d0", Changed("infaas-catalog", "app.dear", None))
    assert explained(fleet)["refusal"]["code"] == "unknown_app"


def test_a_plan_says_what_serves_a_vertex_and_what_waits_for_it() -> None:
    fleet = Staged(ONE)
    fleet.change("p", plan=planned(batch=4))
    [row] = explained(fleet)["stages"]
    assert (row["planned"], row["variant"], row["waiting"]) == (True, "a-v1-ort-fp32-t1-b8", 0)
    assert row["why"] == "planned, and 1 serves: an idle one takes up to 4 that wait"
    plan = planned()
    fleet.change("p", plan=replace(plan, vertices={"a": replace(plan.vertices["a"], variant="gone")}))
    [row] = explained(fleet)["stages"]
    assert (row["planned"], row["variant"]) == (False, "a-v1-ort-fp32-t1-b8"), "a plan for what is not there is none"


def test_stages_that_are_answered_by_several_models_or_by_a_pipeline_are_explained_too() -> None:
    fleet = Staged(CASCADE)
    fleet.change("cheap", selection=Ensemble(policy="majority"))
    inner = PipelineRecord(vertices=[vertex("dear")], output={"y": "dear.y"})
    fleet.add(AppRecord(app="inner", links={}, signature=SIGNATURE, pipeline=inner))
    fleet.change("p", pipeline=PipelineRecord(
        vertices=[vertex("cheap"), PipelineVertex(name="rest", app="inner", inputs={"x": "cheap.y"})],
        edges=[PipelineEdge(source="cheap", target="rest", probability=0.4)],
        output={"y": "rest.y | cheap.y"},
    ))  # fmt: skip
    found = explained(fleet)
    cheap, rest, deep = found["stages"]
    assert (cheap["variant"], cheap["why"]) == (None, "several models answer together: explain cheap shows them")
    assert (rest["variant"], rest["why"]) == (None, "a pipeline, whose own stages answer")
    assert rest["when"] == ["cheap: 40 % of its queries, by a hash"]
    assert (deep["vertex"], deep["variant"]) == ("rest/dear", "dear-v1-ort-fp32-t1-b8")
    assert found["chosen"]["stage"] == "rest/dear"
    assert "rest/dear" in {one["stage"] for one in found["candidates"]}

"""Labels measure each variant in production, and queries with a floor go to what reaches it."""

from typing import Any

import numpy as np
import pytest

from bus.messages.catalog import Ensemble, PipelineRecord
from bus.messages.events import FeedbackEvent
from bus.messages.flow import Payload
from bus.messages.public import ListRequest, Requirements
from bus.messages.quality import AppQuality
from bus.tensors import from_array
from services.core.outcomes import is_client_error
from services.dispatcher.contexts import FORGOTTEN_S
from services.dispatcher.metrics import DispatcherMetrics
from tests.support.simulated.fleet import Fleet, catalogue, refused, variant
from tests.unit.dispatcher.test_feedback import Taught, pipeline, stage

CHEAP = variant("cheap-1", model="cheap", accuracy=0.98)
DEAR = variant("dear-1", model="dear", accuracy=0.96, base_ms=6.0, per_item_ms=2.0)
WRONG = {"cheap": 1.0}
FLOOR = {"accuracy": 0.95}
BOTH = "=cheap/1/cpu/ort/fp32/aaaaaaaaaaaa, dear/1/cpu/ort/fp32/aaaaaaaaaaaa"


def serving(*records: Any, says: dict[str, float] = WRONG, **settings: Any) -> Fleet:
    """All variants are loaded. What is right is class 0, and what each model says by `says`, else that."""
    fleet = Fleet(*records, **settings)
    for record in records:
        fleet.order(record, seconds=0.5)
    fleet.behave(says=says)
    return fleet


def labelled(fleet: Fleet, count: int = 1, app: str = "app", **needs: Any) -> dict[str, Any]:
    """So many queries, each with its label sent back; the last answer."""
    answer = {}
    for _ in range(count):
        answer = fleet.reply(fleet.ask(app, **needs), 0.05)
        if "error" in answer:
            break
        fleet.stage.publish(fleet.subjects.feedback(app), {"query": answer["query"], "label": 0}, "", 0.05)
    fleet.stage.run(1.0)
    return answer


def known(fleet: Fleet) -> AppQuality:
    [found] = [one for one in fleet.records if isinstance(one, AppQuality)]
    return found


def test_another_variant_takes_over_once_labels_show_that_the_first_does_not_reach_the_floor() -> None:
    fleet = serving(CHEAP, DEAR)
    assert labelled(fleet, 1, **FLOOR)["variant"] == "cheap-1"
    labelled(fleet, 19, **FLOOR)
    answer = fleet.reply(fleet.ask(**FLOOR), 0.05)
    assert (answer["variant"], answer["accuracy"], answer["accuracy_source"]) == ("dear-1", 0.96, "registered")
    assert answer["missed"] == []
    answer = fleet.reply(fleet.ask(), 0.05)  # it states no accuracy
    live = known(fleet).variants["cheap-1"]
    assert (answer["variant"], answer["accuracy_source"], answer["missed"]) == ("cheap-1", "labels", [])
    assert answer["accuracy"] == live.accuracy < 0.1
    assert live.low <= live.accuracy <= live.high < 0.98
    assert fleet.outcomes()[-1].accuracy == live.accuracy


@pytest.mark.parametrize("act", ["report", "select", "refuse"])
def test_where_no_variant_reaches_it_the_app_says_what_happens(act: str) -> None:
    fleet = serving(CHEAP, variant("weak-1", model="weak", accuracy=0.5, base_ms=6.0), says=WRONG | {"weak": 0.0})
    fleet.change(quality_act=act)
    labelled(fleet, 20, **FLOOR)
    reply = fleet.reply(fleet.ask(**FLOOR), 0.05)
    live = known(fleet).variants["cheap-1"].accuracy
    if act == "refuse":
        closest = refused(reply, "unsatisfiable", "accuracy")["closest"]
        assert (closest["variant"], closest["accuracy"]) == ("weak-1", 0.5)
        assert not is_client_error(fleet.outcomes()[-1]), "it counts against the app: its promise is broken"
        return
    assert reply["missed"] == ["accuracy"]
    expected = ("cheap-1", live, "labels") if act == "report" else ("weak-1", 0.5, "registered")
    assert (reply["variant"], reply["accuracy"], reply["accuracy_source"]) == expected


def test_an_accuracy_that_was_never_promised_stays_unsatisfiable() -> None:
    fleet = serving(CHEAP)
    labelled(fleet, 20)
    refused(fleet.reply(fleet.ask(accuracy=0.99), 0.05), "unsatisfiable")


def test_when_the_world_goes_back_so_does_the_choice() -> None:
    fleet = serving(CHEAP, DEAR)
    labelled(fleet, 20, **FLOOR)
    assert fleet.reply(fleet.ask(**FLOOR), 0.05)["variant"] == "dear-1"
    fleet.behave(says={})
    labelled(fleet, 90)
    answer = fleet.reply(fleet.ask(**FLOOR), 0.05)
    assert (answer["variant"], answer["accuracy"], answer["accuracy_source"]) == ("cheap-1", 0.98, "registered")


def test_a_variant_that_has_had_no_label_for_long_counts_as_it_was_registered() -> None:
    fleet = serving(CHEAP, DEAR)
    labelled(fleet, 20, **FLOOR)
    assert labelled(fleet, 1, **FLOOR)["variant"] == "dear-1"
    fleet.behave(says={})
    fleet.stage.run(FORGOTTEN_S)
    while labelled(fleet, 100, **FLOOR)["variant"] != "cheap-1":
        assert known(fleet).answers is not None
        assert known(fleet).answers.labels < 1200
    assert fleet.reply(fleet.ask(**FLOOR), 0.05)["variant"] == "cheap-1"


@pytest.mark.parametrize("dispatchers", [1, 2])
def test_all_dispatchers_and_their_successors_know_it(dispatchers: int) -> None:
    fleet = serving(CHEAP, DEAR, dispatchers=dispatchers)
    labelled(fleet, 30, **FLOOR)
    for _ in range(4):
        assert fleet.reply(fleet.ask(**FLOOR), 0.05)["variant"] == "dear-1"
    labels = known(fleet).variants["cheap-1"].labels
    for number in range(dispatchers):
        fleet.stage.kill(f"d{number}")
    fleet.start_dispatcher("next", seconds=1.0)
    assert fleet.reply(fleet.ask(**FLOOR), 0.05)["variant"] == "dear-1"
    labelled(fleet, 1)  # what they have counted goes on
    assert known(fleet).variants["cheap-1"].labels == labels + 1


def test_a_label_counts_once_for_the_variant_that_answered_whenever_it_comes() -> None:
    fleet = serving(CHEAP)
    answer = fleet.reply(fleet.ask(items=2), 0.05)
    word = {"query": answer["query"], "label": 0}
    fleet.stage.run(30.0)
    for more in ({}, {}, {"retry_key": b"k" * 16}, {"label": 1}, {"item": 1}, {"item": 1}):
        fleet.stage.publish(fleet.subjects.feedback("app"), word | more, "_INBOX.word", 1.0)
    fleet.stage.publish(fleet.subjects.feedback("app"), word | {"item": 2}, "_INBOX.none", 1.0)
    assert known(fleet).variants["cheap-1"].labels == 2
    rows = [event for kind, event in fleet.stage.records if kind == "feedback"]
    assert all(isinstance(row, FeedbackEvent) for row in rows)
    assert [(row.variant, row.score, row.promised) for row in rows if row.score is not None] == 2 * [
        ("cheap-1", 0.0, 0.98)
    ]
    [none] = fleet.sent(dict, "_INBOX.none")
    assert "items" in none["error"]["message"] or "item 2" in none["error"]["message"]


@pytest.mark.parametrize("policy", ["", "majority"])
def test_an_id_that_an_answer_named_as_its_query_is_that_one_as_over_http(policy: str) -> None:
    fleet = serving(CHEAP, dispatchers=2)
    if policy:
        fleet.change(selection=Ensemble(policy=policy, contextual=True), seconds=0.1)
    for number in range(4):
        named = fleet.reply(fleet.ask(context="here"), 0.2)["query"]
        for word in ({"id": named}, {"query": named}):
            fleet.stage.publish(fleet.subjects.feedback("app"), {"label": 0} | word, f"_INBOX.{number}", 1.0)
        assert len(fleet.sent(dict, f"_INBOX.{number}")) == 2
    assert known(fleet).variants["cheap-1"].labels == 4


def test_of_two_labels_of_an_item_that_come_at_once_the_rows_score_one() -> None:
    """Both are written together, and kept: by its query and by its id."""
    fleet = serving(CHEAP)
    before, answer = (fleet.reply(fleet.ask(id=name), 0.05)["query"] for name in ("q0", "q1"))
    for said in ({"query": before}, {"query": answer, "label": 0}, {"id": "q1", "label": 1}):
        fleet.stage.publish(fleet.subjects.feedback("app"), {"label": 0} | said, "", 0.0)
    fleet.stage.run(1.0)
    rows = [event for kind, event in fleet.stage.records if kind == "feedback"]
    assert [(row.label, row.score) for row in rows] == [("0", 0.0), ("0", 0.0), ("1", None)]
    assert known(fleet).variants["cheap-1"].labels == 2


def test_a_label_of_a_query_that_all_have_forgotten_counts_where_its_app_keeps_it() -> None:
    fleet = serving(CHEAP)
    answers = [fleet.reply(fleet.ask(items=2, id=name), 0.05) for name in "ab"]
    asked, said = fleet.stage.now, {"y": from_array(np.array([1.0, 0.0], np.float32))}
    named = zip(answers, "ab", strict=True)
    fleet.contexts.kept = [
        Payload(query=one["query"], id=name, time=asked, variant="cheap-1", inputs={}, outputs=said)
        for one, name in named
    ]
    fleet.stage.kill("d0")
    fleet.start_dispatcher("next", seconds=1.0)

    def tell(**word: Any) -> dict[str, Any]:
        fleet.stage.publish(fleet.subjects.feedback("app"), word, f"_INBOX.{word}", 2.0)
        [said] = fleet.sent(dict, f"_INBOX.{word}")
        return said

    assert tell(query=answers[0]["query"], label=1)["accepted"], "nothing is known of it: its app keeps nothing"
    fleet.change(payloads=1.0)
    for word in ({"query": answers[1]["query"]}, {"id": "b"}):
        assert tell(**word, label=1)["accepted"]
    assert tell(id="b", label=1, item=1)["accepted"]
    assert "0 to 1" in tell(id="b", label=1, item=2)["error"]["message"]
    rows = [event for kind, event in fleet.stage.records if kind == "feedback"]
    uid = bytes.fromhex(answers[1]["query"])
    assert [(row.query, row.variant, row.score, row.asked) for row in rows if row.variant] == [
        (uid, "cheap-1", 1.0, asked), (uid, "cheap-1", None, asked), (uid, "cheap-1", 0.0, asked)
    ]  # fmt: skip
    assert known(fleet).variants["cheap-1"].labels == 2


def test_variants_that_answer_alike_share_their_labels() -> None:
    twin = variant("cheap-2", model="cheap", accuracy=0.98, threads=2, base_ms=3.0)
    fleet = serving(CHEAP, twin, DEAR)
    labelled(fleet, 20, **FLOOR)
    assert known(fleet).variants["cheap-1"] == known(fleet).variants["cheap-2"]
    assert fleet.reply(fleet.ask(**FLOOR), 0.05)["variant"] == "dear-1"


def test_lists_and_explain_say_it() -> None:
    fleet = serving(CHEAP, DEAR)
    labelled(fleet, 20, **FLOOR)
    found = fleet.request(fleet.subjects.explain("app"), Requirements(accuracy=0.95))
    assert found["chosen"]["variant"] == "dear-1"
    [cheap] = [one for one in found["candidates"] if one["variant"] == "cheap-1"]
    assert (cheap["accuracy_source"], "below 0.95" in cheap["why_not"]) == ("labels", True)
    items = fleet.request(fleet.subjects.list("variants"), ListRequest())["items"]
    [row] = [one for one in items if one["variant"] == "cheap-1"]
    assert (row["accuracy_source"], row["registered"], row["live"]["labels"] > 2) == ("labels", 0.98, True)
    assert row["accuracy"] == cheap["accuracy"]
    [app] = fleet.request(fleet.subjects.list("apps"), ListRequest())["items"]
    assert app["quality_act"] == "select"
    assert (app["quality"]["promised"], app["quality"]["found"] < 1.0) == (0.95, True)
    shown = {one.name: one.samples for one in DispatcherMetrics().families(fleet.dispatcher())}
    assert shown["infaas_accuracy_promised"] == [({"app": "app"}, 0.95)]
    assert shown["infaas_accuracy_labels"] == [({"app": "app"}, 20)]


def test_a_variant_that_went_wrong_in_one_context_alone_shows_there() -> None:
    fleet = serving(CHEAP, DEAR, says={})
    fleet.change(selection=Ensemble(policy="majority", contextual=True), seconds=0.1)
    labelled(fleet, 30, context="here")
    fleet.behave(says=WRONG)
    labelled(fleet, 30, context="there")
    found = {}
    for context in ("here", "there"):
        asked = ListRequest(app="app", context=context)
        items = fleet.request(fleet.subjects.list("selection"), asked)["items"]
        found[context] = {one["member"]: one["live"] for one in items}
    here, there = found["here"]["cheap"]["cheap-1"], found["there"]["cheap"]["cheap-1"]
    assert (here["labels"], here["accuracy"], here["registered"]) == (30, 1.0, 0.98)
    assert there["high"] < 0.5 < found["there"]["dear"]["dear-1"]["low"]
    assert known(fleet).variants["dear-1"].labels == 60, "the whole is there beside it"


def test_labels_measure_an_app_that_keeps_answers_by_kept_ones_too() -> None:
    fleet = serving(CHEAP, DEAR)
    fleet.change(selection=Ensemble(cache_mb=1.0), seconds=0.1)
    assert labelled(fleet, 1, **FLOOR)["variant"] == "cheap-1"
    labelled(fleet, 19, **FLOOR)
    assert known(fleet).variants["cheap-1"].labels >= 4
    for _ in range(2):
        answer = fleet.reply(fleet.ask(**FLOOR), 0.05)
        assert (answer["variant"], answer["missed"]) == ("dear-1", []), "no kept answer of what does not reach it"
    rows = [event for kind, event in fleet.stage.records if kind == "feedback"]
    assert all(row.score is not None for row in rows)


OTHER = variant("cheap-2", model="cheap", accuracy=0.97, artifact="other", base_ms=6.0)


@pytest.mark.parametrize("dispatchers", [1, 2])
def test_labels_of_a_context_decide_for_its_queries_alone(dispatchers: int) -> None:
    fleet = serving(CHEAP, OTHER, says={}, dispatchers=dispatchers)
    fleet.change(selection=Ensemble(policy="exp4", contextual=True), seconds=0.1)
    labelled(fleet, 30, context="here", **FLOOR)
    fleet.behave(says={"cheap-1": 1.0})
    labelled(fleet, 30, context="there", **FLOOR)
    for _ in range(2 * dispatchers):
        there = fleet.reply(fleet.ask(context="there", **FLOOR), 0.2)
        assert (there["variant"], there["accuracy"], there["accuracy_source"]) == ("cheap-2", 0.97, "registered")
        here = fleet.reply(fleet.ask(context="here", **FLOOR), 0.2)
        assert (here["variant"], here["accuracy"], here["accuracy_source"]) == ("cheap-1", 0.98, "registered")
        new = fleet.reply(fleet.ask(context="new", **FLOOR), 0.2)
        assert new["variant"] == "cheap-1", "of which nothing is known: the app's labels decide"
    for context, chosen, source in (("there", "cheap-2", "labels"), ("here", "cheap-1", "registered")):
        needs = Requirements(context=context, **FLOOR)
        fleet.reply(fleet.ask(model="cheap", context=context, **FLOOR), 0.2)
        alone = fleet.reply(fleet.ask(model="cheap", context=context, **FLOOR), 0.2)
        found = fleet.request(fleet.subjects.explain("app"), needs)
        listed = fleet.request(fleet.subjects.list("variants"), ListRequest(app="app", context=context))["items"]
        assert (alone["variant"], found["chosen"]["variant"]) == (chosen, chosen)
        for rows in (found["candidates"], listed):
            [one] = [row for row in rows if row["variant"] == "cheap-1"]
            assert (one["accuracy_source"], one["accuracy"] < 0.5) == (source, source == "labels")


def test_a_floor_that_none_reaches_in_one_context_is_missed_there_and_a_kept_answer_says_so() -> None:
    fleet = serving(CHEAP, says={})
    fleet.change(selection=Ensemble(policy="exp4", contextual=True, cache_mb=1.0), seconds=0.1)
    labelled(fleet, 30, context="here", **FLOOR)
    fleet.behave(says=WRONG)
    for number in range(30):
        inputs = from_array(np.full((1, 2), number + 1.0, np.float32))
        answer = fleet.reply(fleet.ask(context="there", inputs=inputs, **FLOOR), 0.1)
        fleet.stage.publish(fleet.subjects.feedback("app"), {"query": answer["query"], "label": 0}, "", 0.05)
    fleet.stage.run(1.0)
    said = {}
    for context in ("there", "here", "there"):
        answer = fleet.reply(fleet.ask(context=context, inputs=inputs, **FLOOR), 0.2)
        said[context] = answer["cached"], answer["accuracy_source"], answer["missed"]
    assert said == {"there": (True, "labels", ["accuracy"]), "here": (True, "registered", [])}


# -- ensembles, by their joint answers

THIRD = variant("third-1", model="third", accuracy=0.94, base_ms=6.0)
MOST_WRONG = {"cheap": 1.0, "dear": 1.0}


def ensemble(policy: str = "majority", says: dict[str, float] = MOST_WRONG, **settings: Any) -> Fleet:
    """Three that vote."""
    fleet = serving(CHEAP, DEAR, THIRD, says={}, **settings)
    fleet.change(selection=Ensemble(policy=policy, contextual=True), seconds=0.1)
    labelled(fleet, 20, **FLOOR)
    fleet.behave(says=says)
    return fleet


def said(answer: dict[str, Any]) -> tuple[float, str, list[str]]:
    return answer["accuracy"], answer["accuracy_source"], answer["missed"]


def named(fleet: Fleet, *numbers: int) -> None:
    """Queries with a floor, and labels by their ids, whatever became of them."""
    for number in numbers:
        fleet.reply(fleet.ask(id=f"mine{number}", **FLOOR), 0.05)
        fleet.stage.publish(fleet.subjects.feedback("app"), {"id": f"mine{number}", "label": 0}, "", 0.3)
    fleet.stage.run(1.0)


def test_a_label_scores_every_member_of_an_ensemble() -> None:
    fleet = serving(CHEAP, DEAR)
    fleet.change(selection=Ensemble(policy="majority", contextual=True), seconds=0.1)
    answer = labelled(fleet, 20, **FLOOR)
    variants = known(fleet).variants
    assert {name: one.labels for name, one in variants.items()} == {"cheap-1": 20, "dear-1": 20, BOTH: 20}
    assert variants["cheap-1"].high < 0.5 < variants["dear-1"].low
    answer = fleet.reply(fleet.ask(**FLOOR), 0.05)
    assert said(answer) == (0.97, "registered", []), "of two that disagree the more accurate one is right"


@pytest.mark.parametrize("dispatchers", [1, 2])
@pytest.mark.parametrize("act", ["report", "select", "refuse"])
def test_what_members_reach_together_counts_once_labels_of_their_answers_show_it(act: str, dispatchers: int) -> None:
    fleet = ensemble(dispatchers=dispatchers)
    assert said(fleet.reply(fleet.ask(**FLOOR), 0.05)) == (0.96, "registered", [])
    fleet.change(quality_act=act)
    named(fleet, *range(40))
    [live] = [one for name, one in known(fleet).variants.items() if name.startswith("=")]
    found = fleet.request(fleet.subjects.explain("app"), Requirements(**FLOOR))
    assert all(f"their answers reach {live.accuracy:.4g} by " in one["why"] for one in found["members"])
    for _ in range(2 * dispatchers):
        reply = fleet.reply(fleet.ask(**FLOOR), 0.2)
        if act != "refuse":
            assert said(reply) == (live.accuracy, "labels", ["accuracy"])
            continue
        closest = refused(reply, "unsatisfiable", "by their labels")["closest"]
        assert found["refusal"]["closest"]["accuracy"] == closest["accuracy"] <= live.accuracy
        assert not is_client_error(fleet.outcomes()[-1]), "it counts against the app: its promise is broken"
        assert "error" not in fleet.reply(fleet.ask(accuracy=closest["accuracy"]), 0.2)
    assert (found.get("refusal") is None) == (act != "refuse")
    fleet.behave(says={})
    named(fleet, *range(40, 190))
    accuracy, _, missed = said(fleet.reply(fleet.ask(**FLOOR), 0.2))
    assert (accuracy >= 0.95, missed) == (True, []), "the world went back"


def test_members_of_which_one_alone_went_wrong_keep_what_they_promise_together() -> None:
    fleet = ensemble(says=WRONG)
    labelled(fleet, 100, **FLOOR)
    assert known(fleet).variants["cheap-1"].high < 0.7
    assert said(fleet.reply(fleet.ask(**FLOOR), 0.05)) == (0.96, "registered", [])
    alone = fleet.reply(fleet.ask(model="cheap", **FLOOR), 0.05)
    assert (alone["accuracy_source"], alone["missed"]) == ("labels", ["accuracy"])


def test_one_member_that_answers_alone_is_refused_by_what_labels_say_of_it() -> None:
    fleet = serving(CHEAP)
    fleet.change(selection=Ensemble(policy="exp3"), quality_act="refuse", seconds=0.1)
    named(fleet, *range(20))
    refused(fleet.reply(fleet.ask(**FLOOR), 0.05), "unsatisfiable", "by their labels")
    found = fleet.request(fleet.subjects.explain("app"), Requirements(**FLOOR))
    assert (found["chosen"], found["refusal"]["code"]) == (None, "unsatisfiable")


def test_labels_of_a_context_say_what_members_reach_together_there() -> None:
    fleet = ensemble(says={})
    labelled(fleet, 40, context="here", **FLOOR)
    fleet.behave(says=MOST_WRONG)
    labelled(fleet, 40, context="there", **FLOOR)
    here, there = (fleet.reply(fleet.ask(context=one, **FLOOR), 0.2) for one in ("here", "there"))
    assert said(here) == (0.96, "registered", [])
    assert (there["accuracy"], there["missed"]) == (0.0, ["accuracy"])


# -- pipelines, from end to end

PLAIN = "one=plain-v1-ort-fp32-t1-b8, zero=plain-v1-ort-fp32-t1-b8"
TWO = PipelineRecord(vertices=[stage("zero", "plain"), stage("one", "plain")], output={"y": "one.y"})


def told(fleet: Taught, count: int, **needs: Any) -> None:
    for _ in range(count):
        fleet.teach(query=fleet.one(fleet.ask("p", **needs))[1]["query"])


@pytest.mark.parametrize("dispatchers", [1, 2])
def test_labels_at_its_end_measure_a_pipeline_whose_answers_no_policy_makes(dispatchers: int) -> None:
    fleet = Taught(pipeline("p", TWO), dispatchers=dispatchers)
    answer = fleet.asked()
    for word in ({"query": answer["query"]}, {"query": answer["query"]}, {"query": answer["query"], "label": 1}):
        assert fleet.teach(**word) == "accepted"
    told(fleet, 39)
    assert (fleet.whole().answers.labels, fleet.whole().answers.accuracy) == (40, 1.0)
    assert (fleet.whole().products, fleet.whole().promised) == ({PLAIN: 0.81}, 0.9)
    assert fleet.whole().variants[PLAIN].labels == 40
    rows = [event for _, event in fleet.stage.records if isinstance(event, FeedbackEvent)]
    assert [(one.app, one.score, one.promised) for one in rows if one.score is not None] == 40 * [("p", 1.0, 0.9)]
    assert not fleet.known("plain"), "which of its stages was right is not known"


def test_a_pipeline_that_does_not_reach_what_its_stages_claim_says_so() -> None:
    fleet = Taught(pipeline("p", TWO))
    before = fleet.one(fleet.ask("p", accuracy=0.5))[1]
    assert (before["accuracy"], before["accuracy_source"], before["missed"]) == (0.9, "registered", [])
    fleet.behave(says={"plain": 1.0})
    told(fleet, 20, accuracy=0.5)
    after = fleet.one(fleet.ask("p", accuracy=0.5))[1]
    assert (after["accuracy"], after["accuracy_source"], after["missed"]) == (0.0, "labels", ["accuracy"])
    [listed] = fleet.request(fleet.subjects.list("pipelines"), ListRequest())["items"]
    assert (listed["quality"]["promised"], listed["quality"]["found"]) == (0.5, 0.0)
    [one] = listed["measured"]
    assert (one["stages"], one["accuracy"], one["product"], one["labels"]) == (PLAIN, 0.0, 0.81, 20)
    fleet.change("p", quality_act="refuse")
    refused(fleet.one(fleet.ask("p", accuracy=0.5))[1], "unsatisfiable", "by their labels")
    fleet.behave(says={})
    for number in range(60):
        fleet.one(fleet.ask("p", accuracy=0.5, id=f"mine{number}"))
        assert fleet.teach(id=f"mine{number}") == "accepted"
    assert fleet.one(fleet.ask("p", accuracy=0.5))[1]["accuracy"] >= 0.9, "the world went back"


def test_what_labels_say_of_a_pipeline_is_of_those_that_answered() -> None:
    dear = variant("dear-v1-ort-fp32-t1-b8", model="dear", accuracy=0.99, base_ms=6.0)
    fleet = Taught(pipeline("p", TWO))
    plain = variant("plain-v1-ort-fp32-t1-b8", model="plain")
    fleet.add(*catalogue(plain, dear, app="plain"))
    for record in (plain, dear):
        fleet.order(record, seconds=0.5)
    fleet.behave(says={"plain": 1.0})
    told(fleet, 20)
    told(fleet, 20, accuracy=0.95)
    for needs, accuracy, source in (({}, 0.0, "labels"), ({"accuracy": 0.95}, 0.99, "registered")):
        answer = fleet.one(fleet.ask("p", **needs))[1]
        assert (answer["accuracy"], answer["accuracy_source"], answer["missed"]) == (accuracy, source, [])
    assert sorted(one.labels for one in fleet.whole().variants.values()) == [20, 20]


@pytest.mark.parametrize("dispatchers", [1, 2])
@pytest.mark.parametrize("contextual", [False, True])
@pytest.mark.parametrize("by", ["query", "id"])
def test_labels_measure_the_one_model_that_a_query_of_an_ensemble_names(
    by: str, contextual: bool, dispatchers: int
) -> None:
    fleet = serving(CHEAP, DEAR, dispatchers=dispatchers)
    fleet.change(selection=Ensemble(policy="exp4", contextual=contextual), seconds=0.1)
    for number, named in enumerate([{"model": "cheap"}, {"variant": "cheap-1"}] * 3):
        answer = fleet.reply(fleet.ask(context="here", id=f"q{number}", **named), 0.2)
        label = {"label": 0, by: answer["query"] if by == "query" else f"q{number}"}
        fleet.stage.publish(fleet.subjects.feedback("app"), label, "", 1.0)
    assert known(fleet).variants["cheap-1"].labels == 6
    if contextual:
        items = fleet.request(fleet.subjects.list("selection"), ListRequest(app="app", context="here"))["items"]
        assert {one["member"]: one["live"] for one in items}["cheap"]["cheap-1"]["labels"] == 6


@pytest.mark.parametrize("policy", ["exp4", ""])
def test_labels_of_earlier_queries_count_when_a_policy_comes_or_goes(policy: str) -> None:
    fleet, both = serving(CHEAP, DEAR), (Ensemble(policy="exp4"), None)
    before, after = both if policy else both[::-1]
    fleet.change(selection=before, seconds=0.1)
    queries = [fleet.reply(fleet.ask(**FLOOR), 0.1)["query"] for _ in range(5)]
    fleet.change(selection=after, seconds=0.1)
    for query in queries:
        fleet.stage.publish(fleet.subjects.feedback("app"), {"query": query, "label": 0}, "", 1.0)
    assert known(fleet).variants["cheap-1"].labels == 5

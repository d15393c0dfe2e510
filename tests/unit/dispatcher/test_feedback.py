"""Feedback finds the prediction that it is for, teaches once, and is accepted when it is durable; what is wrong is named."""

from collections import Counter
from typing import Any

import pytest

from bus.messages.catalog import Ensemble
from bus.messages.events import FeedbackEvent, SelectionEvent
from bus.messages.public import Feedback
from bus.subjects import Subjects
from services.core.actor import Envelope
from services.core.selection.policy import InfaasPolicy
from services.core.settings import Settings
from services.dispatcher.actor import make_dispatcher
from services.dispatcher.feedback import UNKNOWN
from services.dispatcher.metrics import DispatcherMetrics
from tests.support.simulated.fleet import Fleet, refused, variant
from tests.support.simulated.taught_dispatchers import DURABLE, INPUTS, Dispatchers
from tests.unit.dispatcher.test_join import Several, members

# -- apps without a selection


def test_it_is_accepted_once_it_is_on_disk() -> None:
    system = Dispatchers()
    reply = system.tell("plain", seconds=0.1, id="q1", label=7, context="user")
    [event] = system.events(FeedbackEvent)
    assert (event.app, event.id, event.context, event.label) == ("plain", "q1", "user", "7")
    assert not system.said(reply)
    system.stage.run(DURABLE)
    assert system.answer(reply) == "accepted"


def test_inputs_are_kept_as_their_digest() -> None:
    system = Dispatchers()
    for inputs in ([[1.0]], [[1.0]], [[2.0]]):
        system.tell("plain", inputs=inputs, label="x")
    digests = [event.input_digest for event in system.events(FeedbackEvent)]
    assert digests[0] == digests[1] != digests[2]
    assert len(digests[0] or "") == 32


@pytest.mark.parametrize(
    ("fields", "code", "word"),
    [
        ({"label": 1}, "bad_request", "id"),
        ({"label": 1, "inputs": None}, "bad_request", "id"),
        ({"id": "q", "label": None}, "bad_request", "label"),
        ({"id": "q", "label": "x" * 1000}, "bad_request", "label"),
        ({"id": "q" * 1001, "label": 1}, "bad_request", "id"),
        ({"id": "q", "label": 1, "context": "c" * 1001}, "bad_request", "context"),
        ({"id": "q", "item": -1}, "bad_request", "item"),
        ({"id": "q", "retry_key": b"short"}, "bad_request", "retry_key"),
        ({"query": "xyz"}, "bad_request", "query"),
        ({"query": "00" * 15}, "bad_request", "query"),
        ({"app": "other", "id": "q", "label": 1}, "unknown_app", "other"),
    ],
)
@pytest.mark.parametrize("app", ["plain", "a"])
def test_what_is_wrong_is_named(app: str, fields: dict[str, Any], code: str, word: str) -> None:
    system = Dispatchers()
    fields = {"app": app} | fields
    answer = system.answer(system.tell(**fields))
    assert answer.startswith(f"{code}: ")
    assert word in answer
    assert not system.stage.records
    assert system.dispatcher().composites.feedback.ended == {(UNKNOWN if fields["app"] == "other" else app, code): 1}


def test_before_the_catalogue_is_known_it_says_so() -> None:
    subjects = Subjects()
    actor = make_dispatcher(Settings(), subjects, "d0", InfaasPolicy(), {"cpu": 1.0}, lambda: bytes(16))
    [effect] = actor.handle(Envelope(1.0, Feedback(id="q", label=1), subjects.feedback("a"), "_INBOX.1"))
    assert effect.message.error.code == "overloaded"


# -- joined with its prediction


def test_it_teaches_about_the_query_that_it_names() -> None:
    system = Dispatchers()
    query = system.predicted()
    assert system.answer(system.tell(query=query)) == "accepted"
    rows = system.rows()
    assert rows["good"]["weight"] > rows["bad"]["weight"]
    events = {event.member: event for event in system.events(SelectionEvent)}
    assert {event.loss for event in events.values()} == {0.0, 1.0}
    assert (events["bad"].loss, events["good"].weight) == (1.0, pytest.approx(rows["good"]["weight"]))
    assert {event.query.hex() for event in events.values()} == {query}
    assert {event.probability for event in events.values()} == {0.5}
    [kept] = system.events(FeedbackEvent)
    assert kept.query.hex() == query


def test_two_clients_with_the_same_id_are_told_apart_by_query_and_by_inputs() -> None:
    """Trap 14: joined by `id`, both would be the latest query's."""
    system = Dispatchers()
    mine = system.predicted(id="1", context="me", inputs=[[1.0]])
    system.predicted(id="1", context="you", inputs=[[2.0]])
    assert system.answer(system.tell(query=mine, id="1")) == "accepted"
    assert (system.taught("me"), system.taught("you")) == (1, 0)
    assert system.answer(system.tell(inputs=[[2.0]], id="1", context="you")) == "accepted"
    assert (system.taught("me"), system.taught("you")) == (1, 1)


def test_a_query_that_is_not_known_is_not_joined_by_its_id() -> None:
    system = Dispatchers()
    system.predicted(id="1")
    answer = system.answer(system.tell(query="ab" * 16, id="1"))
    assert answer.startswith("bad_request: ")
    assert "inputs" in answer
    assert system.taught() == 0


def test_by_its_id_alone_the_latest_query_is_meant_and_an_unknown_one_needs_inputs() -> None:
    system = Dispatchers()
    system.predicted(id="1", context="me")
    system.predicted(id="1", context="you")
    assert system.answer(system.tell(id="1")) == "accepted"
    assert (system.taught("me"), system.taught("you")) == (0, 1)
    answer = system.answer(system.tell(id="2"))
    assert answer.startswith("bad_request: ")
    assert "inputs" in answer


def test_how_feedback_ended_is_counted_once() -> None:
    """Whichever dispatcher took it, and whichever made the prediction."""
    system = Dispatchers(2)
    query = system.predicted("d1")
    for label in ("zebra", 0, 1):
        system.tell(query=query, label=label)
    system.tell("b", query=query)
    found: Counter[tuple[str, str]] = Counter()
    for name in ("d0", "d1"):
        metrics = DispatcherMetrics().families(system.dispatcher(name))
        [family] = [one for one in metrics if one.name == "infaas_feedback_total"]
        found.update({(labels["app"], labels["outcome"]): value for labels, value in family.samples})
    assert found == {("a", "accepted"): 2, ("a", "bad_request"): 1, ("b", "bad_request"): 1}


def test_another_apps_query_is_not_known() -> None:
    system = Dispatchers()
    query = system.predicted(app="b")
    assert system.answer(system.tell("a", query=query)).startswith("bad_request: ")
    assert not system.stage.records
    assert system.taught() == 0


def test_each_item_of_a_query_may_be_told_once() -> None:
    system = Dispatchers()
    query = system.predicted(items=2)
    for item in (0, 1, 1):
        assert system.answer(system.tell(query=query, item=item)) == "accepted"
    assert system.taught() == 2
    answer = system.answer(system.tell(query=query, item=2))
    assert answer.startswith("bad_request: ")
    assert "item 2" in answer


@pytest.mark.parametrize("label", ["zebra", 2, -1, 0.5, [0, 1], {"a": 1}])
def test_a_label_that_the_models_do_not_have_is_refused_and_teaches_nothing(label: Any) -> None:
    system = Dispatchers()
    query = system.predicted()
    reply = system.tell(query=query, label=label)
    assert system.answer(reply).startswith("bad_request: label")
    assert not system.stage.records
    assert (system.answer(system.tell(query=query)), system.taught()) == ("accepted", 1)


def test_contexts_converge_apart() -> None:
    """Row 76: two users with opposite best models."""
    system = Dispatchers()
    for _ in range(40):
        system.tell(query=system.predicted(context="me"), label=0, seconds=0.05)
        system.tell(query=system.predicted(context="you"), label=1, seconds=0.05)
    system.stage.run(DURABLE)
    mine, yours = system.rows("me"), system.rows("you")
    assert mine["good"]["weight"] > 0.9
    assert yours["bad"]["weight"] > 0.9
    assert system.rows(None)["good"]["n"] == 0


def test_without_contexts_all_share_the_weights() -> None:
    system = Dispatchers(selection=Ensemble(policy="exp4"))
    system.tell(query=system.predicted(context="me"))
    assert system.taught("you") == system.taught(None) == 1
    assert {event.context for event in system.events(SelectionEvent)} == {None}


def test_without_contexts_inputs_are_the_same_whoever_asked() -> None:
    system = Dispatchers(selection=Ensemble(policy="exp4"))
    query = system.predicted(context="me")
    assert system.answer(system.tell(inputs=INPUTS, context="you")) == "accepted"
    assert {event.query.hex() for event in system.events(SelectionEvent)} == {query}


# -- with the members themselves, on virtual time


def shapes(**fields: Any) -> Several:
    """Models a, b and c. The one score that each gives is a probability: a says the class is 1, b and c that it is 0."""
    fleet = Several(*members("a", "b", "c"), selection=Ensemble(policy="exp4", **fields))
    fleet.devices["w0"].says = {"a": 1.0}
    return fleet


def report(fleet: Fleet, **fields: Any) -> dict[str, Any]:
    """Send a feedback; the one reply."""
    label = f"f{len(fleet.stage.heard)}"
    fleet.stage.publish(fleet.subjects.feedback("app"), fields, f"_INBOX.test.{label}")
    return fleet.reply(label, 5.0)


@pytest.mark.parametrize("label", [2, 99, "x", float("nan")])
def test_a_label_that_no_model_of_a_plain_app_has_is_refused(label: Any) -> None:
    fleet = Fleet(variant())
    assert report(fleet, id="q", label=1) == {"accepted": True}
    refused = report(fleet, id="q", label=label)["error"]
    assert refused["code"] == "bad_request"
    assert refused["message"].startswith(f"label {label!r} is ")


def learnt(fleet: Fleet, kind: str = "selection") -> list[Any]:
    return [event for one, event in fleet.stage.records if one == kind]


INPUTS_OF_THE_FLEET = {"datatype": "FP32", "shape": [1, 2], "data": b"\0" * 8}


def test_feedback_of_an_answered_query_teaches_about_its_members() -> None:
    fleet = shapes()
    _, reply = fleet.one(fleet.ask())
    assert report(fleet, query=reply["query"], label=1) == {"accepted": True}
    assert {event.member: event.loss for event in learnt(fleet)} == {"a": 0.0, "b": 1.0, "c": 1.0}
    assert {event.query.hex() for event in learnt(fleet)} == {reply["query"]}


def test_feedback_by_inputs_joins_the_query_that_had_them() -> None:
    fleet = shapes()
    fleet.one(fleet.ask())
    batches = fleet.computed
    assert report(fleet, inputs=INPUTS_OF_THE_FLEET, label=1) == {"accepted": True}
    assert not any(event.reevaluated for event in learnt(fleet))
    assert fleet.computed == batches


@pytest.mark.parametrize("dispatchers", [1, 2])
def test_inputs_that_nobody_remembers_are_evaluated_again_once(dispatchers: int) -> None:
    """Row 77: feedback before and after the prediction is forgotten teaches once each."""
    fleet = Several(*members("a", "b", "c"), selection=Ensemble(policy="exp4"), dispatchers=dispatchers)
    fleet.devices["w0"].says = {"a": 1.0}
    key = b"k" * 16
    for _ in range(3):
        assert report(fleet, inputs=INPUTS_OF_THE_FLEET, label=1, retry_key=key) == {"accepted": True}
    events = learnt(fleet)
    assert {event.member: event.loss for event in events} == {"a": 0.0, "b": 1.0, "c": 1.0}
    assert len(events) == 3
    assert all(event.reevaluated for event in events)
    assert len(learnt(fleet, "feedback")) == 1
    assert (report(fleet, inputs=INPUTS_OF_THE_FLEET, label=1), len(learnt(fleet))) == ({"accepted": True}, 6)


@pytest.mark.parametrize("policy", ["exp3", "exp4"])
def test_inputs_that_no_model_can_answer_are_refused_at_once(policy: str) -> None:
    fleet = Several(*members("a", "b"), selection=Ensemble(policy=policy))
    fleet.change(links={})
    reply = report(fleet, inputs=INPUTS_OF_THE_FLEET, label=1)
    refused(reply, "unknown_model", "links none of its members")
    assert not fleet.dispatcher().composites.joins.open


def test_inputs_that_do_not_fit_the_app_are_refused() -> None:
    reply = report(shapes(), inputs={"datatype": "FP32", "shape": [0, 2], "data": b""}, label=1)
    refused(reply, "bad_request")


def test_a_late_member_is_judged_too() -> None:
    fleet = shapes()
    fleet.devices["w0"].late = {"c": 400.0}
    _, reply = fleet.one(fleet.ask())
    assert reply["missing"] == 1
    assert report(fleet, query=reply["query"], label=1) == {"accepted": True}
    assert {event.member for event in learnt(fleet)} == {"a", "b", "c"}


def test_exp3_judges_by_the_probability_of_the_prediction() -> None:
    """Trap 8: the probability has changed by the time that the feedback comes."""
    fleet = shapes(eta=1.0)
    fleet.change(selection=Ensemble(policy="exp3", eta=1.0))
    replies = [fleet.one(fleet.ask())[1] for _ in range(4)]
    for reply in replies:
        assert report(fleet, query=reply["query"], label=1) == {"accepted": True}
    assert len(learnt(fleet)) == 4
    assert [event.probability for event in learnt(fleet)] == [pytest.approx(1 / 3)] * 4

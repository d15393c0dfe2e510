"""Feedback finds the prediction that it is for, teaches once, and is accepted when it is durable; what is wrong is named."""

import itertools
from collections import Counter
from typing import Any

import pytest

from bus.codec import decode, encode
from bus.messages.catalog import AppRecord, EdgeCondition, Ensemble, PipelineEdge, PipelineRecord, PipelineVertex
from bus.messages.events import FeedbackEvent, SelectionEvent
from bus.messages.flow import DoneBatch
from bus.messages.public import Feedback, QueryHead, Tensor
from bus.messages.quality import AppQuality
from bus.subjects import Subjects
from services.core.actor import Envelope
from services.core.selection.policy import InfaasPolicy
from services.core.settings import Settings
from services.dispatcher.actor import make_dispatcher
from services.dispatcher.answered import KEPT, LABELLED, PIECES, AnsweredQueries
from services.dispatcher.feedback import PATIENCE, UNKNOWN
from services.dispatcher.feedback_names import LIST_S
from services.dispatcher.metrics import DispatcherMetrics
from services.dispatcher.needs import needs_of
from services.dispatcher.query import Query
from tests.support.simulated.fleet import SIGNATURE, Fleet, catalogue, refused, variant
from tests.support.simulated.taught_dispatchers import DURABLE, INPUTS, Dispatchers
from tests.unit.dispatcher.test_join import Several, members

# -- apps without a selection


def test_it_is_accepted_on_disk_with_inputs_as_their_digest() -> None:
    system = Dispatchers()
    reply = system.tell("plain", seconds=PATIENCE + 0.0021, id="q1", label=7, context="user")
    [event] = system.events(FeedbackEvent)
    assert (event.app, event.id, event.context, event.label) == ("plain", "q1", "user", "7")
    assert not system.said(reply)
    system.stage.run(DURABLE)
    assert system.answer(reply) == "accepted"
    system = Dispatchers()
    for inputs in ([[1.0]], [[1.0]], [[2.0]]):
        system.tell("plain", inputs=inputs, label="x")
    digests = [event.input_digest for event in system.events(FeedbackEvent)]
    assert digests[0] == digests[1] != digests[2]
    assert len(digests[0] or "") == 32


def test_so_many_answered_queries_are_remembered_and_hardly_more() -> None:
    answered, head = AnsweredQueries(), QueryHead()
    ask = needs_of(head, "plain", 1, None, None, 1e9, 30.0)
    for first in range(0, 2 * KEPT, 50):
        uids = [number.to_bytes(16, "little") for number in range(first, first + 50)]
        queries = [Query(uid, "plain", head, ask, "", b"", 1e9) for uid in uids]
        answered.ended(DoneBatch("q", "w", 1, "i", "v", 50, 1.0, 2.0, 0.0, 0, uids, said=[[1]] * 50), queries)
    known = [answered.find("plain", number.to_bytes(16, "little"), None) is not None for number in range(2 * KEPT)]
    assert all(known[-KEPT:])
    assert sum(known) <= KEPT + KEPT // PIECES


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
    assert system.dispatcher().composites.feedback.learning.ended == {
        (UNKNOWN if fields["app"] == "other" else app, code): 1
    }


def test_feedback_too_early_or_with_wrong_inputs_is_refused() -> None:
    subjects = Subjects()
    actor = make_dispatcher(Settings(), subjects, "d0", InfaasPolicy(), {"cpu": 1.0}, lambda: bytes(16))
    [effect] = actor.handle(Envelope(1.0, Feedback(id="q", label=1), subjects.feedback("a"), "_INBOX.1"))
    assert effect.message.error.code == "overloaded"
    reply = report(shapes(), inputs={"datatype": "FP32", "shape": [0, 2], "data": b""}, label=1)
    refused(reply, "bad_request")


def test_a_list_is_as_each_alone_whichever_dispatcher_sees_to_them() -> None:
    system = Dispatchers(2)
    mine, theirs = system.predicted("d0"), system.predicted("d1", inputs=[[2.0]])
    items = [
        {"label": 0, "query": mine},
        {"label": 0, "query": theirs},
        {"label": None, "query": mine},
        {"label": 1, "query": mine, "item": -1},
    ]
    reply = f"_INBOX.{next(system.replies)}"
    system.stage.publish(system.subjects.feedback("a"), {"items": [*items, items[0]]}, reply)
    system.stage.run(2.0)
    [said] = system.said(reply)
    assert said["accepted"] is False
    assert {one["item"]: one["error"]["message"].split()[0] for one in said["refused"]} == {2: "field", 3: "item"}
    assert system.taught() == 2
    for wrong in ([], [{"items": [items[0]]}]):
        reply = system.tell(items=wrong)
        assert system.answer(reply).startswith("bad_request: items must be a list")


def test_what_of_a_list_is_not_stored_in_time_is_named() -> None:
    system = Dispatchers()
    query = system.predicted()
    system.store.seconds = 2 * LIST_S
    reply = system.tell(seconds=LIST_S + 1, items=[{"label": 0, "query": query}, {"label": 0}])
    [said] = system.said(reply)
    assert [one["item"] for one in said["refused"]] == [0, 1]
    assert said["refused"][0]["error"]["retry_after_ms"] > 0


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


def test_ids_mean_the_latest_query_and_clients_are_told_apart() -> None:
    """Trap 14: joined by `id`, both would be the latest query's."""
    system = Dispatchers()
    mine = system.predicted(id="1", context="me", inputs=[[1.0]])
    system.predicted(id="1", context="you", inputs=[[2.0]])
    assert system.answer(system.tell(query=mine, id="1")) == "accepted"
    assert (system.taught("me"), system.taught("you")) == (1, 0)
    assert system.answer(system.tell(inputs=[[2.0]], id="1", context="you")) == "accepted"
    assert (system.taught("me"), system.taught("you")) == (1, 1)
    system = Dispatchers()
    system.predicted(id="1", context="me")
    system.predicted(id="1", context="you")
    assert system.answer(system.tell(id="1")) == "accepted"
    assert (system.taught("me"), system.taught("you")) == (0, 1)
    answer = system.answer(system.tell(id="2"))
    assert answer.startswith("bad_request: ")
    assert "inputs" in answer


def test_unknown_queries_are_not_joined_by_id_or_app() -> None:
    system = Dispatchers()
    system.predicted(id="1")
    answer = system.answer(system.tell(query="ab" * 16, id="1"))
    assert answer.startswith("bad_request: ")
    assert "inputs" in answer
    assert system.taught() == 0
    system = Dispatchers()
    query = system.predicted(app="b")
    assert system.answer(system.tell("a", query=query)).startswith("bad_request: ")
    assert not system.stage.records
    assert system.taught() == 0


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
    assert system.answer(system.tell(query=query, label=label)).startswith("bad_request: label")
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


def test_without_contexts_all_share_the_weights_and_the_inputs() -> None:
    system = Dispatchers(selection=Ensemble(policy="exp4"))
    system.tell(query=system.predicted(context="me"))
    assert system.taught("you") == system.taught(None) == 1
    assert {event.context for event in system.events(SelectionEvent)} == {None}
    system = Dispatchers(selection=Ensemble(policy="exp4"))
    query = system.predicted(context="me")
    assert system.answer(system.tell(inputs=INPUTS, context="you")) == "accepted"
    assert {event.query.hex() for event in system.events(SelectionEvent)} == {query}


# -- with the members themselves, on virtual time


def shapes(**fields: Any) -> Several:
    """Models a, b and c. The one score that each gives is a probability: a says the class is 1, b and c that it is 0."""
    return Several(*members("a", "b", "c"), selection=Ensemble(policy="exp4", **fields), says={"a": 1.0})


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


def test_feedback_teaches_about_members_by_query_or_inputs() -> None:
    fleet = shapes()
    _, reply = fleet.one(fleet.ask())
    assert report(fleet, query=reply["query"], label=1) == {"accepted": True}
    assert {event.member: event.loss for event in learnt(fleet)} == {"a": 0.0, "b": 1.0, "c": 1.0}
    assert {event.query.hex() for event in learnt(fleet)} == {reply["query"]}
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


def test_late_members_are_judged_too_and_exp3_by_its_probability() -> None:
    fleet = shapes()
    fleet.devices["w0"].late = {"c": 400.0}
    _, reply = fleet.one(fleet.ask())
    assert reply["missing"] == 1
    assert report(fleet, query=reply["query"], label=1) == {"accepted": True}
    assert {event.member for event in learnt(fleet)} == {"a", "b", "c"}
    # Trap 8: the probability has changed by the time that the feedback comes.
    fleet = shapes(eta=1.0)
    fleet.change(selection=Ensemble(policy="exp3", eta=1.0))
    replies = [fleet.one(fleet.ask())[1] for _ in range(4)]
    for reply in replies:
        assert report(fleet, query=reply["query"], label=1) == {"accepted": True}
    assert len(learnt(fleet)) == 4
    assert [event.probability for event in learnt(fleet)] == [pytest.approx(1 / 3)] * 4


# -- Feedback to a pipeline teaches the stage that made the answer, or is refused with the remedy. Virtual time.
SURE = EdgeCondition(output="y", reduce="first", op=">", value=0.5)
LONG_MS = 20_000.0


def pipeline(name: str, record: PipelineRecord) -> AppRecord:
    return AppRecord(app=name, links={}, signature=SIGNATURE, pipeline=record, latency_ms=LONG_MS)


def stage(name: str, app: str) -> PipelineVertex:
    return PipelineVertex(name=name, app=app, inputs={"x": "$.x"})


ALONE = PipelineRecord(vertices=[stage("votes", "app")], output={"y": "votes.y"})
THEN = PipelineRecord(  # the plain stage answers where the ensemble says 1
    vertices=[stage("votes", "app"), stage("one", "plain")],
    edges=[PipelineEdge(source="votes", target="one", when=SURE)],
    output={"y": "one.y | votes.y", "asked": "$.x"},
)


class Taught(Several):
    """The ensemble `app`, the plain app `plain`, and pipelines of them."""

    def __init__(self, *pipelines: AppRecord, **options: Any) -> None:
        super().__init__(selection=Ensemble(policy="exp4"), **options)
        self.add(*catalogue(variant("plain-v1-ort-fp32-t1-b8", model="plain"), app="plain"))
        self.change("plain", latency_ms=LONG_MS)
        self.add(*pipelines)
        self._replies = itertools.count()
        self.change(latency_ms=LONG_MS)

    def asked(self, app: str = "p") -> dict[str, Any]:
        return self.one(self.ask(app))[1]

    def teach(self, app: str = "p", **fields: Any) -> str:
        """Send a feedback: "accepted", or the code and message of its refusal."""
        reply = f"_INBOX.feedback.{next(self._replies)}"
        self.stage.publish(self.subjects.feedback(app), {"label": 0} | fields, reply, seconds=2.0)
        [one] = [decode(dict[str, Any], body) for _, subject, body in self.stage.heard if subject == reply]
        return "accepted" if one.get("accepted") else f"{one['error']['code']}: {one['error']['message']}"

    def known(self, app: str) -> list[AppQuality]:
        return [one for one in self.records if isinstance(one, AppQuality) and one.app == app]

    def whole(self, app: str = "p") -> Any:
        [found] = self.known(app)
        return found

    def lessons(self) -> list[SelectionEvent]:
        return [event for _, event in self.stage.records if isinstance(event, SelectionEvent)]


def test_it_teaches_the_stage_that_made_the_answer() -> None:
    fleet = Taught(pipeline("p", ALONE))
    answer = fleet.asked()
    assert fleet.teach(query=answer["query"]) == "accepted"
    assert {one.app for one in fleet.lessons()} == {"app"}
    assert len(fleet.lessons()) == len(answer["members"])
    [event] = [event for _, event in fleet.stage.records if isinstance(event, FeedbackEvent)]
    assert (event.app, event.query) == ("p", bytes.fromhex(answer["query"]))
    count = len(fleet.lessons())
    assert fleet.teach(query=answer["query"]) == "accepted"
    assert len(fleet.lessons()) == count, "an item teaches once"


def test_it_is_found_by_the_inputs_and_by_the_id_as_of_any_app() -> None:
    fleet = Taught(pipeline("p", ALONE))
    fleet.one(fleet.ask("p", id="mine"))
    assert fleet.teach(id="mine") == "accepted"
    taught = len(fleet.lessons())
    fleet.one(fleet.ask("p"))
    assert fleet.teach(inputs=Tensor("FP32", [1, 2], b"\0" * 8)) == "accepted"
    assert len(fleet.lessons()) == 2 * taught > 0


@pytest.mark.parametrize("sure", [False, True])
def test_only_the_stage_that_decided_learns(sure: bool) -> None:
    fleet = Taught(pipeline("p", THEN), says=dict.fromkeys(("abcde"), float(sure)))
    said = fleet.teach(query=fleet.asked()["query"])
    assert said == "accepted"
    assert len(fleet.lessons()) > 0 or sure
    assert fleet.whole().answers.labels == 1, "the whole is measured, whoever answered"


def test_stages_within_another_pipeline_or_of_another_dispatcher_learn() -> None:
    outer = PipelineRecord(vertices=[stage("inner", "p")], output={"y": "inner.y"})
    fleet = Taught(pipeline("p", ALONE), pipeline("outer", outer))
    assert fleet.teach("outer", query=fleet.asked("outer")["query"]) == "accepted"
    assert {one.app for one in fleet.lessons()} == {"app"}
    fleet = Taught(pipeline("p", ALONE), dispatchers=3)
    answers = [fleet.asked() for _ in range(3)]
    assert [fleet.teach(query=answer["query"]) for answer in answers] == ["accepted"] * 3
    assert len(fleet.lessons()) == 3 * len(answers[0]["members"])


def test_a_label_measures_a_stage_without_a_policy_by_its_own_query() -> None:
    fleet = Taught(
        pipeline("p", PipelineRecord(vertices=[stage("one", "plain")], output={"y": "one.y"})), dispatchers=2
    )
    fleet.asked()
    [part] = [one for one in fleet.outcomes() if one.stage == "one"]
    assert [fleet.teach("plain", query=part.uid.hex()) for _ in range(2)] == ["accepted"] * 2
    events = [event for _, event in fleet.stage.records if isinstance(event, FeedbackEvent)]
    counted = [event for event in events if event.score is not None]
    assert [(one.app, one.variant, one.score, one.query) for one in counted] == [("plain", part.variant, 1.0, part.uid)]


def test_several_stages_that_made_an_answer_together_are_named() -> None:
    both = PipelineRecord(
        vertices=[stage("votes", "app"), stage("one", "plain")], output={"y": "votes.y", "z": "one.y"}
    )
    fleet = Taught(pipeline("p", both))
    answer = fleet.one(fleet.ask("p", items=LABELLED + 1))[1]  # of fewer items the whole would be measured
    said = fleet.teach(query=answer["query"])
    assert said.startswith(
        "bad_request: votes and one made this answer together: nothing learns from it; send feedback"
    )


def test_a_query_that_nobody_knows_any_more_is_refused_and_not_asked_again() -> None:
    fleet = Taught(pipeline("p", ALONE))
    said = fleet.teach(query="00" * 16)
    assert said.startswith(
        f"bad_request: query {'00' * 16} is not known to this app, or not any more: send the feedback"
    )
    assert "sooner, or to the app of the stage that answered, with its `inputs`" in said
    said = fleet.teach(inputs=encode([[9.0, 9.0]]) and [[9.0, 9.0]])
    assert said.startswith("bad_request: the query with these inputs is not known")
    assert fleet.computed == 0


@pytest.mark.parametrize("by", ["query", "key"])
def test_what_comes_again_counts_once_after_the_stages_dispatcher_has_gone(by: str) -> None:
    """The bucket knows it: the pipeline's query was asked again, and so was its stage."""
    fleet = Taught(pipeline("p", ALONE), dispatchers=2)
    key = b"q" * 16
    fleet.one(fleet.ask("p", id="first", retry_key=key))
    [reply] = fleet.replies("first")
    told = {"query": reply["query"]} | ({"retry_key": b"k" * 16} if by == "key" else {})
    for _ in range(3):
        assert fleet.teach(**told) == "accepted"
    before = fleet.lessons()
    assert len(before) == len(reply["members"])
    for name in ("d0", "d1"):
        fleet.stage.kill(name)
    fleet.start_dispatcher("later", seconds=1.0)
    assert fleet.teach(**told).startswith("bad_request: ")
    fleet.one(fleet.ask("p", id="second", retry_key=key))
    [again] = fleet.replies("second")
    assert again["query"] == reply["query"]
    assert (fleet.teach(**told), fleet.teach(**told, label=1)) == ("accepted", "accepted")
    assert fleet.lessons() == before


def test_labels_that_come_together_all_teach_and_measure_the_members_of_their_app() -> None:
    fleet = Taught(pipeline("p", ALONE))
    fleet.change(selection=Ensemble(policy="exp4", contextual=True), seconds=0.1)
    asked = [
        (app, fleet.one(fleet.ask(app, context=context))[1]["query"])
        for context in ("here", None) * 5
        for app in ("app", "p")
    ]
    for app, query in asked:
        fleet.stage.publish(fleet.subjects.feedback(app), {"label": 0, "query": query}, "")
    fleet.stage.run(2.0)
    assert len({one.query for one in fleet.lessons()}) == 20
    assert {one.labels for one in fleet.whole("app").variants.values()} == {20}
    assert not any(name.startswith("=") for name in fleet.whole().variants), "a pipeline has no members of its own"

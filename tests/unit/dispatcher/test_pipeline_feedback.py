"""Feedback to a pipeline teaches the stage that made the answer, or is refused with the remedy. Virtual time."""

import itertools
from typing import Any

import pytest

from bus.codec import decode, encode
from bus.messages.catalog import AppRecord, EdgeCondition, Ensemble, PipelineEdge, PipelineRecord, PipelineVertex
from bus.messages.events import FeedbackEvent, SelectionEvent
from bus.messages.public import Tensor
from tests.support.simulated.fleet import SIGNATURE, catalogue, variant
from tests.unit.dispatcher.test_join import Several

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
        self.stage.publish(self.subjects.feedback(app), {"label": 0} | fields, reply)
        self.stage.run(2.0)
        [one] = [decode(dict[str, Any], body) for _, subject, body in self.stage.heard if subject == reply]
        return "accepted" if one.get("accepted") else f"{one['error']['code']}: {one['error']['message']}"

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
    inputs = Tensor("FP32", [1, 2], b"\0" * 8)
    assert fleet.teach(inputs=inputs) == "accepted"
    assert len(fleet.lessons()) == 2 * taught > 0


@pytest.mark.parametrize("sure", [False, True])
def test_only_the_stage_that_decided_learns(sure: bool) -> None:
    fleet = Taught(pipeline("p", THEN))
    fleet.devices["w0"].says = dict.fromkeys(("abcde"), float(sure))
    answer = fleet.asked()
    said = fleet.teach(query=answer["query"])
    if sure:
        assert said == (
            "bad_request: one made this answer, and its app plain has no policy: nothing learns from it; send feedback to the"
            " app of a stage that has one, with its `inputs`"
        )
        assert fleet.lessons() == []
    else:
        assert said == "accepted"
        assert len(fleet.lessons()) > 0


def test_the_stage_of_a_pipeline_within_another_learns() -> None:
    outer = PipelineRecord(vertices=[stage("inner", "p")], output={"y": "inner.y"})
    fleet = Taught(pipeline("p", ALONE), pipeline("outer", outer))
    assert fleet.teach("outer", query=fleet.asked("outer")["query"]) == "accepted"
    assert {one.app for one in fleet.lessons()} == {"app"}


def test_a_pipeline_whose_answers_no_policy_makes_refuses_it() -> None:
    fleet = Taught(pipeline("p", PipelineRecord(vertices=[stage("one", "plain")], output={"y": "one.y"})))
    said = fleet.teach(query=fleet.asked()["query"])
    assert said.startswith(
        "bad_request: app: p is a pipeline, and no policy makes its answers, so nothing learns: send"
    )
    assert "infaas admin set-selection" in said
    assert not [event for _, event in fleet.stage.records if isinstance(event, FeedbackEvent)]


def test_several_stages_that_made_an_answer_together_are_named() -> None:
    both = PipelineRecord(
        vertices=[stage("votes", "app"), stage("one", "plain")], output={"y": "votes.y", "z": "one.y"}
    )
    fleet = Taught(pipeline("p", both))
    said = fleet.teach(query=fleet.asked()["query"])
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


def test_another_dispatcher_may_have_answered() -> None:
    fleet = Taught(pipeline("p", ALONE), dispatchers=3)
    answers = [fleet.asked() for _ in range(3)]
    assert [fleet.teach(query=answer["query"]) for answer in answers] == ["accepted"] * 3
    assert len(fleet.lessons()) == 3 * len(answers[0]["members"])


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
    fleet.start_dispatcher("later")
    fleet.stage.run(1.0)
    assert fleet.teach(**told).startswith("bad_request: ")
    fleet.one(fleet.ask("p", id="second", retry_key=key))
    [again] = fleet.replies("second")
    assert again["query"] == reply["query"]
    assert (fleet.teach(**told), fleet.teach(**told, label=1)) == ("accepted", "accepted")
    assert fleet.lessons() == before

"""Feedback finds the prediction that it is for, teaches once, and is accepted when it is durable; what is wrong is named."""

import itertools
from collections import Counter
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from bus.codec import decode, encode
from bus.messages.catalog import AppRecord, ModelSelection
from bus.messages.events import FeedbackEvent, SelectionEvent
from bus.messages.flow import SelectionChanged
from bus.messages.public import Feedback, ListRequest
from bus.subjects import Subjects
from services.core.actor import Changed, Envelope, Publish, Synced
from services.core.catalog import key_of
from services.core.ensemble.base import Learnt, Member
from services.core.selection.policy import InfaasPolicy
from services.core.settings import Settings
from services.dispatcher.actor import Dispatcher, make_dispatcher
from services.dispatcher.commands import RunPolicy, WriteContext
from services.dispatcher.contexts import context_key
from services.dispatcher.feedback import MOST_OPEN, UNKNOWN
from services.dispatcher.metrics import DispatcherMetrics
from services.dispatcher.predictions import Prediction, digest_of
from tests.support.simulated.fleet import ContextStore, catalogue, variant
from tests.support.simulated.virtual_time import Stage
from tests.unit.dispatcher.test_join import Several, members

RIGHT, WRONG = np.array([[0.9, 0.1]], np.float32), np.array([[0.1, 0.9]], np.float32)
MODELS = ("bad", "good")
MEMBERS = [Member(model=model, version="1", accuracy=0.9) for model in MODELS]
SELECTION = ModelSelection(policy="exp4", contextual=True)
PLAIN = AppRecord(app="plain", links={})
INPUTS = [[1.0, 2.0]]
DURABLE = 0.5  # s after which all that was recorded is on disk


class Slow(ContextStore):
    """A bucket that takes its time, or is away. The write is there at once; only the word of it comes late."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds = 0.001
        self.away = False
        self.writes = 0
        self.fails: set[str] = set()  # methods of the user's own policy

    def __call__(self, command: Any) -> tuple[float, Any]:
        if self.away:
            return self.seconds, RuntimeError("nobody is there")
        if isinstance(command, RunPolicy):
            return 0.01, self.own(command)
        self.writes += isinstance(command, WriteContext)
        return self.seconds, super().__call__(command)[1]

    def own(self, command: RunPolicy) -> Any:
        """A user's own policy, which counts the feedbacks that it has observed."""
        if command.method in self.fails:
            return RuntimeError("my.votes:Own.observe raised ValueError: no")
        seen = int(command.args[0] or b"0")
        if command.method == "observe":
            return str(seen + 1).encode()
        return [Learnt(model, 0.5, 1.0, seen) for model in MODELS]


class Dispatchers:
    """Dispatchers with one store, apps "a" and "b" whose two models answer together, and "plain", which has no selection."""

    def __init__(self, count: int = 1, selection: ModelSelection | None = SELECTION) -> None:
        self.stage = Stage()
        self.stage.listen("_INBOX.>")
        self.store = Slow()
        self.subjects = Subjects()
        both = [variant(f"{model}-1", model=model) for model in MODELS]
        *records, app = catalogue(*both, app="a")
        self.apps = [replace(app, app=name, selection=selection) for name in ("a", "b")]
        self.records = [*records, *self.apps, PLAIN]
        self.uids = itertools.count()
        self.replies = itertools.count()
        self.lives = itertools.count()
        for number in range(count):
            self.start(f"d{number}")

    def start(self, name: str) -> Dispatcher:
        new_uid = lambda: next(self.uids).to_bytes(16, "big")  # noqa: E731
        actor = make_dispatcher(Settings(), self.subjects, name, InfaasPolicy(), {"cpu": 1.0}, new_uid)
        self.stage.enter(name, actor, self.store)
        for record in self.records:
            self.stage.send(name, Changed("infaas-catalog", key_of(record), encode(record)))
        self.stage.send(name, Synced("infaas-catalog"))
        return actor

    def dispatcher(self, name: str = "d0") -> Dispatcher:
        actor = self.stage.members[name].actor
        assert isinstance(actor, Dispatcher)
        return actor

    def predicted(self, name: str = "d0", **fields: Any) -> str:
        """The good model said class 0, the bad one class 1. Returns the query's uid."""
        uid = fields.pop("uid", None) or (1000 + next(self.uids)).to_bytes(16, "big")
        items = fields.pop("items", 1)
        inputs = fields.pop("inputs", INPUTS)
        outputs = {"good": {"y": np.repeat(RIGHT, items, 0)}, "bad": {"y": np.repeat(WRONG, items, 0)}}
        p = {"good": 0.5, "bad": 0.5}
        values: dict[str, Any] = {"app": "a", "context": None, "digest": digest_of(encode(inputs))} | fields
        self.dispatcher(name).layer.predictions.add(
            Prediction(uid, at=self.stage.now, members=MEMBERS, p=p, outputs=outputs, items=items, **values)
        )
        return uid.hex()

    def tell(self, app: str = "a", seconds: float = 1.0, **fields: Any) -> str:
        """Send a feedback; its reply subject. The label 0 is what the good model says."""
        reply = f"_INBOX.{next(self.replies)}"
        self.stage.publish(self.subjects.feedback(app), {"label": 0} | fields, reply)
        self.stage.run(seconds)
        return reply

    def said(self, reply: str) -> list[Any]:
        return [decode(dict[str, Any], body) for _, subject, body in self.stage.heard if subject == reply]

    def answer(self, reply: str) -> str:
        """The one reply: "accepted", or the code and message of the refusal."""
        [one] = self.said(reply)
        return "accepted" if one.get("accepted") else f"{one['error']['code']}: {one['error']['message']}"

    def rows(self, context: str | None = None, app: str = "a") -> dict[str, dict[str, Any]]:
        """What any dispatcher says has been learnt, by member."""
        reply = f"_INBOX.list{next(self.replies)}"
        self.stage.publish(self.subjects.list("selection"), ListRequest(app=app, context=context), reply)
        self.stage.run(0.1)
        [one] = self.said(reply)
        return {row["member"]: row for row in one["items"]}

    def taught(self, context: str | None = None) -> int:
        return max(row["n"] for row in self.rows(context).values())

    def events(self, kind: type) -> list[Any]:
        return [event for _, event in self.stage.records if type(event) is kind]


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


def test_what_comes_again_with_the_same_key_is_kept_once() -> None:
    system = Dispatchers()
    replies = [system.tell("plain", id="q", retry_key=b"k" * 16) for _ in range(3)]
    assert [system.answer(reply) for reply in replies] == ["accepted"] * 3
    assert len(system.events(FeedbackEvent)) == 1


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
    assert system.dispatcher().layer.feedback.ended == {(UNKNOWN if fields["app"] == "other" else app, code): 1}


def test_before_the_catalogue_is_known_it_says_so() -> None:
    subjects = Subjects()
    actor = make_dispatcher(Settings(), subjects, "d0", InfaasPolicy(), {"cpu": 1.0}, lambda: bytes(16))
    [effect] = actor.handle(Envelope(1.0, Feedback(id="q", label=1), subjects.feedback("a"), "_INBOX.1"))
    assert isinstance(effect, Publish)
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
    assert events["bad"].loss == 1.0
    assert events["good"].weight == pytest.approx(rows["good"]["weight"])
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
    assert system.answer(system.tell(query=query)) == "accepted"
    assert system.taught() == 1


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
    system = Dispatchers(selection=ModelSelection(policy="exp4"))
    system.tell(query=system.predicted(context="me"))
    assert system.taught("you") == system.taught(None) == 1
    assert {event.context for event in system.events(SelectionEvent)} == {None}


def test_without_contexts_inputs_are_the_same_whoever_asked() -> None:
    system = Dispatchers(selection=ModelSelection(policy="exp4"))
    query = system.predicted(context="me")
    assert system.answer(system.tell(inputs=INPUTS, context="you")) == "accepted"
    assert {event.query.hex() for event in system.events(SelectionEvent)} == {query}


# -- once


@pytest.mark.parametrize("count", [1, 2, 3])
def test_feedback_that_is_sent_again_teaches_once(count: int) -> None:
    """Trap 15, through whichever dispatcher."""
    system = Dispatchers(count=count)
    query = system.predicted()
    replies = [system.tell(query=query, retry_key=b"k" * 16) for _ in range(6)]
    assert [system.answer(reply) for reply in replies] == ["accepted"] * 6
    assert system.taught() == 1
    assert len(system.events(SelectionEvent)) == 2
    assert len(system.events(FeedbackEvent)) == 1


def test_feedback_that_is_sent_again_before_it_is_stored_teaches_once() -> None:
    system = Dispatchers(count=2)
    system.store.seconds = 0.2
    query = system.predicted()
    replies = [system.tell(query=query, retry_key=b"k" * 16, seconds=0.01) for _ in range(8)]
    system.stage.run(5.0)
    assert {system.answer(reply) for reply in replies} == {"accepted"}
    system.store.seconds = 0.001
    assert system.taught() == 1
    assert len(system.events(SelectionEvent)) == 2


def test_all_who_send_the_same_at_once_are_answered() -> None:
    system = Dispatchers(count=3)
    query = system.predicted("d2")
    replies = [system.tell(query=query, retry_key=b"k" * 16, seconds=0.0) for _ in range(9)]
    system.stage.run(2.0)
    assert [system.answer(reply) for reply in replies] == ["accepted"] * 9
    assert system.taught() == 1
    assert len(system.events(FeedbackEvent)) == 1


def test_of_two_words_about_one_answer_the_first_teaches_and_both_are_kept() -> None:
    system = Dispatchers()
    query = system.predicted()
    replies = [system.tell(query=query, label=label, retry_key=bytes([label]) * 16) for label in (0, 1)]
    assert [system.answer(reply) for reply in replies] == ["accepted"] * 2
    assert system.taught() == 1
    assert [event.label for event in system.events(FeedbackEvent)] == ["0", "1"]
    assert system.rows()["good"]["weight"] > 0.5


def test_it_is_not_accepted_before_it_is_durable() -> None:
    """Trap 15: neither before the weights are stored, nor before the rows are on disk."""
    system = Dispatchers()
    query = system.predicted()
    system.store.seconds = 1.0
    reply = system.tell(query=query, seconds=2.0)  # read, and the write has begun
    assert not system.said(reply)
    assert not system.stage.records
    system.stage.run(0.01)
    assert len(system.events(SelectionEvent)) == 2
    assert not system.said(reply)
    system.stage.run(DURABLE)
    assert system.answer(reply) == "accepted"


def test_a_dispatcher_killed_before_it_has_accepted_counts_once() -> None:
    """Trap 13 and 15: killed when the weights are stored and their rows are not; it is sent again to one that knows nothing."""
    system = Dispatchers()
    query = system.predicted()
    reply = system.tell(query=query, retry_key=b"k" * 16, seconds=0.05)
    assert system.store.writes == 1
    system.stage.kill("d0")
    system.stage.run(DURABLE)
    assert not system.said(reply)
    before = len(system.stage.records)
    system.start("d1")
    system.predicted("d1", uid=bytes.fromhex(query))  # the query was asked again, too
    assert system.answer(system.tell(query=query, retry_key=b"k" * 16)) == "accepted"
    assert system.taught() == 1
    assert [type(event) for _, event in system.stage.records[before:]] == [FeedbackEvent]


def test_weights_are_there_after_all_dispatchers_were_killed() -> None:
    """Trap 13."""
    system = Dispatchers(count=2)
    for _ in range(5):
        system.tell(query=system.predicted(context="me"))
    before = system.rows("me")
    assert before["good"]["n"] == 5
    for name in ("d0", "d1"):
        system.stage.kill(name)
    system.start("d2")
    assert system.rows("me") == before


def test_two_dispatchers_lose_nothing_when_they_learn_at_once() -> None:
    """Trap 13: each has its own predictions; every feedback is in the weights."""
    system = Dispatchers(count=2)
    system.store.seconds = 0.03
    replies = [system.tell(query=system.predicted(name), seconds=0.01) for _ in range(20) for name in ("d0", "d1")]
    system.stage.run(10.0)
    assert {system.answer(reply) for reply in replies} == {"accepted"}
    assert system.store.writes < 80
    assert system.taught() == 40
    assert len(system.events(SelectionEvent)) == 80


# -- other dispatchers


@pytest.mark.parametrize("by", ["query", "inputs", "id"])
def test_the_dispatcher_that_made_the_prediction_takes_feedback_over(by: str) -> None:
    system = Dispatchers(count=3)
    replies = []
    for number in range(6):
        query = system.predicted("d0", id=f"q{number}", inputs=[[float(number)]])
        fields = {"query": query, "inputs": [[float(number)]], "id": f"q{number}"}
        replies.append(system.tell(**{by: fields[by]}))
    assert [system.answer(reply) for reply in replies] == ["accepted"] * 6
    assert system.taught() == 6
    assert not any(event.reevaluated for event in system.events(SelectionEvent))


def test_another_dispatcher_hears_what_was_learnt_and_serves_by_it() -> None:
    system = Dispatchers(count=2)
    system.rows("me")
    system.rows("me")  # each of them holds the context now
    query = system.predicted("d0", context="me")
    system.tell(query=query)
    held = [system.dispatcher(name).layer.contexts.held("a", SELECTION, "me") for name in ("d0", "d1")]
    assert [one.n for one in held if one is not None] == [1, 1]


# -- what goes wrong


def test_while_the_bucket_is_away_feedback_is_refused_and_counts_once_when_sent_again() -> None:
    system = Dispatchers()
    query = system.predicted()
    system.store.away = True
    assert system.answer(system.tell(query=query, retry_key=b"k" * 16)).startswith("overloaded: ")
    assert not system.stage.records
    system.store.away = False
    system.stage.run(0.1)  # a read that had begun before has failed
    assert system.answer(system.tell(query=query, retry_key=b"k" * 16)) == "accepted"
    assert system.taught() == 1


def test_a_write_whose_end_is_not_known_counts_once() -> None:
    """The write is stored, but its word takes too long: the feedback is refused, and sent again."""
    system = Dispatchers()
    query = system.predicted()
    system.rows()
    system.store.seconds = 10.0
    assert system.answer(system.tell(query=query, retry_key=b"k" * 16, seconds=6.0)).startswith("overloaded: ")
    system.store.seconds = 0.001
    assert system.store.writes == 1
    assert system.answer(system.tell(query=query, retry_key=b"k" * 16)) == "accepted"
    assert system.taught() == 1


def test_a_reset_that_comes_between_read_and_write_is_not_undone() -> None:
    system = Dispatchers()
    system.tell(query=system.predicted())
    assert system.taught() == 1
    key = context_key("a", SELECTION, None)
    system.store.stored.clear()
    for name in ("d0",):
        system.stage.send(name, SelectionChanged("a", key, 0, None))
    assert system.taught() == 0
    system.tell(query=system.predicted())
    system.store.stored.clear()  # this time, the dispatcher does not hear of it
    assert system.answer(system.tell(query=system.predicted())) == "accepted"
    assert system.taught() == 1


def test_more_than_fits_is_refused() -> None:
    system = Dispatchers()
    for number in range(MOST_OPEN + 1):
        system.stage.publish(system.subjects.feedback("a"), {"label": 0, "query": f"{number:032x}"}, f"_INBOX.{number}")
    system.stage.run(0.1)  # the others wait for word from other dispatchers
    assert [subject for _, subject, _ in system.stage.heard] == [f"_INBOX.{MOST_OPEN}"]
    assert system.answer(f"_INBOX.{MOST_OPEN}").startswith("overloaded: ")


# -- a user's own policy


OWN = ModelSelection(policy="my.votes:Own")


def test_a_users_policy_learns_in_its_process_and_its_state_survives() -> None:
    """Row 78."""
    system = Dispatchers(selection=OWN)
    queries = [system.predicted() for _ in range(5)]
    replies = [system.tell(query=query, seconds=0.0) for query in queries]
    system.stage.run(2.0)
    assert [system.answer(reply) for reply in replies] == ["accepted"] * 5
    assert system.taught() == 5
    assert len(system.events(SelectionEvent)) == 10
    assert {event.weight for event in system.events(SelectionEvent)} == {0.5}
    system.stage.kill("d0")
    system.start("d1")
    assert system.taught() == 5


def test_a_users_policy_that_fails_costs_its_own_feedback_only() -> None:
    system = Dispatchers(selection=OWN)
    query = system.predicted()
    system.store.fails = {"observe"}
    assert system.answer(system.tell(query=query)) == "model_error: my.votes:Own.observe raised ValueError: no"
    system.store.fails = {"learnt"}
    assert system.answer(system.tell(query=query)) == "accepted"
    system.store.fails = set()
    assert system.taught() == 1


def test_dispatchers_do_not_read_all_contexts_when_they_start() -> None:
    system = Dispatchers()
    assert [watch.bucket for watch in system.dispatcher().watches] == [system.subjects.catalog_bucket]


# -- with the members themselves, on virtual time


def shapes(**fields: Any) -> Several:
    """Models a, b and c. The one score that each gives is a probability: a says the class is 1, b and c that it is 0."""
    fleet = Several(*members("a", "b", "c"), selection=ModelSelection(policy="exp4", **fields))
    fleet.devices["w0"].says = {"a": 1.0}
    return fleet


def report(fleet: Several, **fields: Any) -> dict[str, Any]:
    """Send a feedback; the one reply."""
    label = f"f{len(fleet.stage.heard)}"
    fleet.stage.publish(fleet.subjects.feedback("app"), fields, f"_INBOX.test.{label}")
    fleet.stage.run(5.0)
    [reply] = fleet.replies(label)
    return reply


def learnt(fleet: Several, kind: str = "selection") -> list[Any]:
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
    fleet = Several(*members("a", "b", "c"), selection=ModelSelection(policy="exp4"), dispatchers=dispatchers)
    fleet.devices["w0"].says = {"a": 1.0}
    key = b"k" * 16
    for _ in range(3):
        assert report(fleet, inputs=INPUTS_OF_THE_FLEET, label=1, retry_key=key) == {"accepted": True}
    events = learnt(fleet)
    assert {event.member: event.loss for event in events} == {"a": 0.0, "b": 1.0, "c": 1.0}
    assert len(events) == 3
    assert all(event.reevaluated for event in events)
    assert len(learnt(fleet, "feedback")) == 1
    assert report(fleet, inputs=INPUTS_OF_THE_FLEET, label=1) == {"accepted": True}
    assert len(learnt(fleet)) == 6


def test_inputs_that_do_not_fit_the_app_are_refused() -> None:
    reply = report(shapes(), inputs={"datatype": "FP32", "shape": [0, 2], "data": b""}, label=1)
    assert reply["error"]["code"] == "bad_request"


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
    fleet.change(selection=ModelSelection(policy="exp3", eta=1.0))
    replies = [fleet.one(fleet.ask())[1] for _ in range(4)]
    for reply in replies:
        assert report(fleet, query=reply["query"], label=1) == {"accepted": True}
    assert len(learnt(fleet)) == 4
    assert [event.probability for event in learnt(fleet)] == [pytest.approx(1 / 3)] * 4

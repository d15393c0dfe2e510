"""A feedback counts once, and for the prediction that it names: after restarts, after 10,000 others, with several dispatchers. Virtual time."""

from typing import Any

import pytest

from bus.codec import encode
from bus.messages.catalog import Ensemble
from bus.messages.events import FeedbackEvent, SelectionEvent
from bus.messages.flow import ContextChanged
from services.core.ensemble.policies import Exp4
from services.dispatcher.commands import StoredContext
from services.dispatcher.contexts import context_key, read_value
from services.dispatcher.counted import MARK, MOVED
from services.dispatcher.feedback import MOST_OPEN
from tests.support.simulated.fleet import refused
from tests.support.simulated.taught_dispatchers import DURABLE, INPUTS, MEMBERS, SELECTION, Dispatchers
from tests.unit.dispatcher.test_feedback import INPUTS_OF_THE_FLEET, learnt, report, shapes

KEY = b"k" * 16


def kept(system: Dispatchers) -> int:
    """Rows of feedback in SQL, where those of one uid are one."""
    return len({event.uid for event in system.events(FeedbackEvent)})


def queries_taught(system: Dispatchers) -> set[str]:
    return {event.query.hex() for event in system.events(SelectionEvent)}


# -- for the prediction that it names


def test_a_local_prediction_of_equal_inputs_is_not_taken_for_the_query_that_is_named() -> None:
    system = Dispatchers(2)
    theirs = system.predicted("d1")
    mine = [system.predicted("d0") for _ in range(3)]
    for _ in range(4):  # each dispatcher gets some
        assert system.answer(system.tell(query=theirs, inputs=INPUTS)) == "accepted"
    assert (queries_taught(system), system.taught()) == ({theirs}, 1)
    assert system.answer(system.tell(query=mine[0], inputs=INPUTS)) == "accepted"
    assert queries_taught(system) == {theirs, mine[0]}


@pytest.mark.parametrize("last", ["d0", "d1", "d2"])
def test_an_id_means_its_latest_query_whichever_dispatcher_answered_it(last: str) -> None:
    system = Dispatchers(3)
    for name in ("d0", "d1", "d2"):
        system.predicted(name, id="q", inputs=[[1.0]])
        system.stage.run(0.1)
    latest = system.predicted(last, id="q", inputs=[[1.0]])
    for _ in range(6):  # each dispatcher gets some
        assert system.answer(system.tell(id="q")) == "accepted"
    assert (queries_taught(system), system.taught(), kept(system)) == ({latest}, 1, 1)


@pytest.mark.parametrize("count", [1, 2])
def test_an_id_with_inputs_means_the_query_that_had_both(count: int) -> None:
    system = Dispatchers(count)
    theirs = system.predicted(f"d{count - 1}", id="theirs")
    system.stage.run(0.1)
    system.predicted("d0", id="other")
    for _ in range(3):
        assert system.answer(system.tell(id="theirs", inputs=INPUTS)) == "accepted"
    assert queries_taught(system) == {theirs}


def test_a_context_that_is_not_the_querys_is_refused() -> None:
    system = Dispatchers()
    query = system.predicted(context="me")
    refused = system.answer(system.tell(query=query, context="you"))
    assert refused.startswith("bad_request: context is not that of the query")
    assert system.answer(system.tell(query=query, context="me")) == "accepted"


# -- once


@pytest.mark.parametrize(
    "by", [{"query": True}, {"query": True, "retry_key": KEY}, {"id": "mine"}, {"id": "mine", "retry_key": KEY}]
)
@pytest.mark.parametrize("inputs", [True, False])
def test_what_is_sent_again_after_a_restart_counts_once(by: dict[str, Any], inputs: bool) -> None:
    fleet = shapes()
    _, reply = fleet.one(fleet.ask(id="mine"))
    told: dict[str, Any] = by | {"label": 1}
    if "query" in told:
        told["query"] = reply["query"]
    if inputs:
        told["inputs"] = INPUTS_OF_THE_FLEET
    for _ in range(2):
        assert report(fleet, **told) == {"accepted": True}
    before = learnt(fleet)
    assert len(before) == 3
    for name in ("d0", "later"):
        fleet.stage.kill(name)
        fleet.start_dispatcher(f"{name}r" if name == "later" else "later", seconds=1.0)
        said = report(fleet, **told)
        assert said == {"accepted": True} if inputs or len(by) > 1 or "query" in by else "error" in said, "not known"
        assert learnt(fleet) == before
    if "retry_key" in by or "query" in by:
        assert len({event.uid for event in learnt(fleet, "feedback")}) == 1


@pytest.mark.parametrize("told", [{"id": "q", "retry_key": KEY}, {"query": "ab" * 16}])
def test_feedback_to_an_app_without_a_policy_is_kept_once(told: dict[str, Any]) -> None:
    system = Dispatchers(2)
    for _ in range(6):
        assert system.answer(system.tell("plain", **told)) == "accepted"
    assert len(system.events(FeedbackEvent)) == 1
    for name in ("d0", "d1"):
        system.stage.kill(name)
    system.start("d2")
    assert (system.answer(system.tell("plain", **told)), kept(system)) == ("accepted", 1)


@pytest.mark.parametrize("keys", [False, True])
def test_of_two_words_about_one_query_the_first_teaches_and_both_are_kept_each_once(keys: bool) -> None:
    system = Dispatchers()
    query = system.predicted()
    for label in (0, 1, 0, 1):
        told = {"query": query, "label": label} | ({"retry_key": bytes([label]) * 16} if keys else {})
        assert system.answer(system.tell(**told)) == "accepted"
    assert system.taught() == 1
    assert system.rows()["good"]["weight"] > 0.5
    assert [event.label for event in system.events(FeedbackEvent)] == ["0", "1"]


@pytest.mark.slow
def test_after_ten_thousand_other_feedbacks_it_is_known_again() -> None:
    """By a dispatcher that has just started, from the bucket alone."""
    system = Dispatchers()
    first = system.predicted()
    told = {"query": first, "retry_key": KEY}
    assert system.answer(system.tell(**told)) == "accepted"
    flood(system, 10_000)
    assert system.taught() == 10_001
    system.stage.kill("d0")
    system.start("d1")
    system.predicted("d1", uid=bytes.fromhex(first))
    assert system.answer(system.tell(**told)) == "accepted"
    assert (system.answer(system.tell(query=first, label=1)), system.taught()) == ("accepted", 10_001)


def flood(system: Dispatchers, count: int, names: tuple[str, ...] = ("d0",)) -> None:
    """So many other feedbacks, of predictions of these dispatchers in turn."""
    for at in range(0, count, 100):
        queries = [system.predicted(names[number % len(names)]) for number in range(at, min(at + 100, count))]
        for query in queries:
            system.stage.publish(system.subjects.feedback("a"), {"query": query, "label": 0}, "")
        system.stage.run(1.0)


@pytest.mark.parametrize("after", range(1, 12))
def test_a_crash_while_marks_move_forgets_and_loses_nothing(after: int) -> None:
    """The dispatcher dies at any write around the move of the oldest marks to their own key."""
    system = Dispatchers()
    queries = [system.predicted() for _ in range(300)]
    for query in queries:
        system.stage.publish(system.subjects.feedback("a"), {"query": query, "label": 0}, "")
    system.store.dies_at = lambda writes: system.stage.kill("d0") if writes == after else None
    system.stage.run(1.0)
    before = [event.query.hex() for event in system.events(SelectionEvent) if event.member == "good"]
    system.start("d1")
    for query in queries:
        system.predicted("d1", uid=bytes.fromhex(query))
    for _ in range(2):
        for query in queries:
            system.stage.publish(system.subjects.feedback("a"), {"query": query, "label": 0}, "")
        system.stage.run(2.0)
    assert system.taught() == 300
    assert len(before) == len(set(before))


def test_several_dispatchers_move_marks_at_once_and_forget_none() -> None:
    system = Dispatchers(3)
    system.store.seconds = 0.004
    flood(system, 1500, ("d0", "d1", "d2"))
    system.stage.run(20.0)
    assert system.taught() == 1500
    stored = system.store.stored
    older, value = stored["a._.counted"].value or b"", read_value(stored["a._"].value)
    marks = {older[at : at + MARK] for at in range(0, len(older), MARK)} | value.known()
    assert len(marks) == 3000, "two each"
    assert len(value.marks) < MARK * 2 * MOVED
    assert len(older) % (MARK * MOVED) == 0


def old_value(marks: int) -> bytes:
    """What a release before this one had stored, with so many marks."""
    policy = Exp4()
    return encode(("exp4", policy.dump(policy.init(MEMBERS)), 64, bytes(range(1, 9)) * marks))


@pytest.mark.parametrize(("marks", "said"), [(20, "accepted"), (128, "bad_request")])
def test_a_query_that_nobody_remembers_is_not_evaluated_if_its_feedback_may_have_counted(marks: int, said: str) -> None:
    """The value of an older release has the marks of 64 feedbacks; if it is full, others may be forgotten."""
    fleet = shapes()
    fleet.contexts.stored["app._"] = StoredContext(old_value(marks), 1)
    told = {"inputs": INPUTS_OF_THE_FLEET, "label": 1}
    reply = report(fleet, query="ab" * 16, **told)
    if said == "accepted":
        assert reply == {"accepted": True}
        assert all(event.reevaluated for event in learnt(fleet))
    else:
        refused(reply, said, "many others have counted since")
        assert not learnt(fleet)
        assert report(fleet, id="q", **told)["error"]["code"] == said
        assert report(fleet, **told) == {"accepted": True}, "inputs alone name no query"
    assert len(learnt(fleet)) == 3


def test_what_a_prediction_has_had_is_known_as_long_as_it_is() -> None:
    """Its marks are gone from the bucket."""
    system = Dispatchers()
    query = system.predicted()
    assert system.answer(system.tell(query=query)) == "accepted"
    system.store.stored["a._"] = StoredContext(old_value(128), 100)
    system.store.stored.pop("a._.counted", None)
    system.dispatcher().composites.contexts.drop("a._")
    assert system.answer(system.tell(query=query, label=1)) == "accepted"
    assert system.taught() == 0, "it taught nothing to the state that is there now"


@pytest.mark.parametrize("context", [None, "me"])
def test_a_forgotten_query_of_an_app_with_contexts_needs_its_context(context: str | None) -> None:
    fleet = shapes(contextual=True)
    told = {"query": "ab" * 16, "inputs": INPUTS_OF_THE_FLEET, "label": 1}
    reply = report(fleet, **told, **({} if context is None else {"context": context}))
    if context is None:
        assert "send the `context` that it had" in reply["error"]["message"]
        assert report(fleet, inputs=INPUTS_OF_THE_FLEET, label=1) == {"accepted": True}
    else:
        assert reply == {"accepted": True}
        assert report(fleet, **told, context=context) == {"accepted": True}
    assert len(learnt(fleet)) == 3


def test_while_older_marks_cannot_be_read_feedback_is_refused_and_counts_later() -> None:
    system = Dispatchers()
    flood(system, 600)
    system.stage.kill("d0")
    system.start("d1")
    query = system.predicted("d1")
    system.rows()  # the context is in memory now
    system.store.away = True
    assert system.answer(system.tell(query=query)).startswith("overloaded: ")
    system.store.away = False
    assert (system.answer(system.tell(query=query)), system.taught()) == ("accepted", 601)


@pytest.mark.parametrize("by", [{"query": "ab" * 16}, {"id": "q"}])
def test_a_query_that_nobody_remembers_is_evaluated_once_whatever_the_key(by: dict[str, Any]) -> None:
    fleet = shapes()
    for number in range(3):
        told = by | {"inputs": INPUTS_OF_THE_FLEET, "label": 1, "retry_key": bytes([number]) * 16}
        assert report(fleet, **told) == {"accepted": True}
    assert (len(learnt(fleet)), len(learnt(fleet, "feedback"))) == (3, 3)


@pytest.mark.parametrize(("key", "held"), [("", True), ("", False), ("a._", True)])
def test_after_a_reset_nothing_has_counted(key: str, held: bool) -> None:
    system = Dispatchers()
    told = {"query": system.predicted(), "retry_key": KEY}
    assert system.answer(system.tell(**told)) == "accepted"
    flood(system, 600)
    contexts = system.dispatcher().composites.contexts
    assert list(contexts.counted)
    if not held:
        contexts.drop("a._")
    system.store.stored.clear()
    system.stage.send("d0", ContextChanged("a", key, 0, None))
    assert system.taught() == 0
    assert not list(contexts.counted)


# -- What feedback teaches is durable and counts once: sent again, at several dispatchers, after kills, while the bucket is
# away, by a user's own policy.
# -- once


@pytest.mark.parametrize("count", [1, 2, 3])
def test_feedback_that_is_sent_again_teaches_once(count: int) -> None:
    """Trap 15, through whichever dispatcher."""
    system = Dispatchers(count=count)
    query = system.predicted()
    replies = [system.tell(query=query, retry_key=b"k" * 16) for _ in range(6)]
    assert [system.answer(reply) for reply in replies] == ["accepted"] * 6
    assert (system.taught(), len(system.events(SelectionEvent))) == (1, 2)
    assert len(system.events(FeedbackEvent)) == 1


def test_sent_again_or_at_once_it_teaches_once_and_all_are_answered() -> None:
    system = Dispatchers(count=2)
    system.store.seconds = 0.2
    query = system.predicted()
    replies = [system.tell(query=query, retry_key=b"k" * 16, seconds=0.01) for _ in range(8)]
    system.stage.run(5.0)
    assert {system.answer(reply) for reply in replies} == {"accepted"}
    system.store.seconds = 0.001
    assert (system.taught(), len(system.events(SelectionEvent))) == (1, 2)
    system = Dispatchers(count=3)
    query = system.predicted("d2")
    replies = [system.tell(query=query, retry_key=b"k" * 16, seconds=0.0) for _ in range(9)]
    system.stage.run(2.0)
    assert [system.answer(reply) for reply in replies] == ["accepted"] * 9
    assert (system.taught(), len(system.events(FeedbackEvent))) == (1, 1)


def test_it_is_not_accepted_before_it_is_durable() -> None:
    """Trap 15: neither before the weights are stored, nor before the rows are on disk."""
    system = Dispatchers()
    query = system.predicted()
    system.store.seconds = 1.0
    reply = system.tell(query=query, seconds=2.0)  # read, and the write has begun
    assert not system.said(reply)
    assert not system.stage.records
    system.stage.run(0.0003)
    assert len(system.events(SelectionEvent)) == 2
    assert not system.said(reply)
    system.stage.run(DURABLE)
    assert system.answer(reply) == "accepted"


def test_a_dispatcher_killed_before_it_has_accepted_counts_once() -> None:
    """Trap 13 and 15: killed when the weights are stored and their rows are not; it is sent again to one that knows nothing."""
    system = Dispatchers()
    query = system.predicted()
    reply = system.tell(query=query, retry_key=b"k" * 16, seconds=0.0022)
    assert system.store.writes == 1
    system.stage.kill("d0", seconds=DURABLE)
    assert not system.said(reply)
    before = len(system.stage.records)
    system.start("d1")
    system.predicted("d1", uid=bytes.fromhex(query))  # the query was asked again, too
    assert (system.answer(system.tell(query=query, retry_key=b"k" * 16)), system.taught()) == ("accepted", 1)
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
    assert (system.taught(), len(system.events(SelectionEvent))) == (40, 80)


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
    system.tell(query=system.predicted("d0", context="me"))
    held = [system.dispatcher(name).composites.contexts.held("a", SELECTION, "me") for name in ("d0", "d1")]
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
    assert (system.answer(system.tell(query=query, retry_key=b"k" * 16)), system.taught()) == ("accepted", 1)


def test_a_write_whose_end_is_not_known_counts_once() -> None:
    """The write is stored, but its word takes too long: the feedback is refused, and sent again."""
    system = Dispatchers()
    query = system.predicted()
    system.rows()
    system.store.seconds = 10.0
    assert system.answer(system.tell(query=query, retry_key=b"k" * 16, seconds=6.0)).startswith("overloaded: ")
    system.store.seconds = 0.001
    assert system.store.writes == 1
    assert (system.answer(system.tell(query=query, retry_key=b"k" * 16)), system.taught()) == ("accepted", 1)


def test_a_reset_that_comes_between_read_and_write_is_not_undone() -> None:
    system = Dispatchers()
    system.tell(query=system.predicted())
    assert system.taught() == 1
    key = context_key("a", SELECTION, None)
    system.store.stored.clear()
    for name in ("d0",):
        system.stage.send(name, ContextChanged("a", key, 0, None))
    assert system.taught() == 0
    system.tell(query=system.predicted())
    system.store.stored.clear()  # this time, the dispatcher does not hear of it
    assert (system.answer(system.tell(query=system.predicted())), system.taught()) == ("accepted", 1)


def test_more_than_fits_is_refused() -> None:
    system = Dispatchers()
    for number in range(MOST_OPEN + 1):
        system.stage.publish(system.subjects.feedback("a"), {"label": 0, "query": f"{number:032x}"}, f"_INBOX.{number}")
    system.stage.run(0.1)  # the others wait for word from other dispatchers
    assert [subject for _, subject, _ in system.stage.heard] == [f"_INBOX.{MOST_OPEN}"]
    assert system.answer(f"_INBOX.{MOST_OPEN}").startswith("overloaded: ")


# -- a user's own policy


OWN = Ensemble(policy="my.votes:Own")


def test_a_users_policy_learns_in_its_process_and_its_state_survives() -> None:
    """Row 78."""
    system = Dispatchers(selection=OWN)
    queries = [system.predicted() for _ in range(5)]
    replies = [system.tell(query=query, seconds=0.0) for query in queries]
    system.stage.run(2.0)
    assert [system.answer(reply) for reply in replies] == ["accepted"] * 5
    assert (system.taught(), len(system.events(SelectionEvent))) == (5, 10)
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
    watched = [watch.bucket for watch in system.dispatcher().watches]
    assert watched == [system.subjects.catalog_bucket, system.subjects.control_bucket]

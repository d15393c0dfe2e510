"""What feedback teaches is durable and counts once: sent again, at several dispatchers, after kills, while the bucket is away, by a user's own policy."""

import pytest

from bus.messages.catalog import Ensemble
from bus.messages.events import FeedbackEvent, SelectionEvent
from bus.messages.flow import ContextChanged
from services.dispatcher.contexts import context_key
from services.dispatcher.feedback import MOST_OPEN
from tests.support.simulated.taught_dispatchers import DURABLE, SELECTION, Dispatchers

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


def test_feedback_that_is_sent_again_before_it_is_stored_teaches_once() -> None:
    system = Dispatchers(count=2)
    system.store.seconds = 0.2
    query = system.predicted()
    replies = [system.tell(query=query, retry_key=b"k" * 16, seconds=0.01) for _ in range(8)]
    system.stage.run(5.0)
    assert {system.answer(reply) for reply in replies} == {"accepted"}
    system.store.seconds = 0.001
    assert (system.taught(), len(system.events(SelectionEvent))) == (1, 2)


def test_all_who_send_the_same_at_once_are_answered() -> None:
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
    query = system.predicted("d0", context="me")
    system.tell(query=query)
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

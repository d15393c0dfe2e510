"""Apps with a default output: at the deadline it is answered, with the reason, and nobody hears twice. Virtual time."""

from typing import Any

import pytest
from msgspec.structs import replace

from bus.codec import encode
from bus.messages.catalog import AppRecord, VariantRecord
from bus.messages.fleet import EnsureLoaded
from bus.messages.public import QueryHead, Tensor
from services.core.actor import Changed
from services.core.ask import Ask
from services.core.catalog import key_of
from services.dispatcher.fallback import FEW, Fallbacks
from services.dispatcher.flights import Flights
from services.dispatcher.query import Query
from tests.support.simulated.fleet import Fleet, variant

SLO_MS = 100.0


class WithDefault(Fleet):
    """A fleet whose app answers 7 where nothing better can come within its latency."""

    def __init__(self, *variants: VariantRecord, loaded: bool = True, **options: Any) -> None:
        super().__init__(*(variants or (variant(),)), **options)
        self.change(default_output=7, latency_ms=SLO_MS)
        if loaded:
            for record in variants or (variant(),):
                self.stage.publish(self.subjects.worker("w0", "load"), EnsureLoaded(variant=record, app="app"))
            self.stage.run(1.0)

    def change(self, **fields: Any) -> None:
        [app] = [record for record in self.records if isinstance(record, AppRecord)]
        after = replace(app, **fields)
        self.records[self.records.index(app)] = after
        for name, member in self.stage.members.items():
            if member.actor.watches:
                self.stage.send(name, Changed("infaas-catalog", key_of(after), encode(after)))

    def heard(self, label: str) -> list[tuple[float, dict[str, Any]]]:
        """(seconds after now, reply) of one query, over what follows."""
        asked = self.stage.now
        self.stage.run(5.0)
        times = [at - asked for at, subject, _ in self.stage.heard if subject == f"_INBOX.test.{label}"]
        return list(zip(times, self.replies(label), strict=True))

    def one(self, label: str) -> tuple[float, dict[str, Any]]:
        [end] = self.heard(label)
        return end


def is_default(reply: dict[str, Any], word: str) -> bool:
    return bool(reply["default"]) and word in reply["reason"] and reply["outputs"]["y"]["data"] == b"\0\0\xe0@"


def test_a_model_that_sleeps_ten_times_its_objective_is_answered_for_at_the_objective() -> None:
    fleet = WithDefault()
    fleet.devices["w0"].slow = 1000.0 / 2.5  # one second instead of 2.5 ms
    seconds, reply = fleet.one(fleet.ask())
    assert seconds == pytest.approx(SLO_MS / 1000.0, rel=0.1)
    assert is_default(reply, "deadline: the model had not answered")
    assert (reply["model"], reply["variant"], reply["cost"], reply["missed"]) == ("", "", 0.0, [])
    [outcome] = fleet.outcomes()
    assert (outcome.outcome, outcome.code, outcome.cost) == ("default", "deadline", 0.0)


def test_what_waits_behind_it_is_answered_at_its_own_deadline() -> None:
    fleet = WithDefault()
    fleet.devices["w0"].slow = 1000.0 / 2.5
    labels = [fleet.ask() for _ in range(3)]
    fleet.stage.run(0.01)
    labels += [fleet.ask() for _ in range(3)]
    fleet.stage.run(3.0)
    assert [[is_default(reply, "deadline") for reply in fleet.replies(label)] for label in labels] == [[True]] * 6
    assert sorted(outcome.outcome for outcome in fleet.outcomes()) == ["default"] * 6


def test_an_answer_in_time_is_no_default() -> None:
    fleet = WithDefault()
    _, reply = fleet.one(fleet.ask())
    assert "default" not in reply
    assert reply["variant"] == variant().variant
    assert [outcome.outcome for outcome in fleet.outcomes()] == ["ok"]


def test_a_model_that_can_never_make_it_is_answered_for_at_the_deadline() -> None:
    fleet = WithDefault(variant(base_ms=1000.0), loaded=False)
    seconds, reply = fleet.one(fleet.ask(items=2))
    assert seconds == pytest.approx(SLO_MS / 1000.0, rel=0.1)
    assert reply["default"] is True
    assert reply["reason"].startswith("unsatisfiable: ")
    assert reply["outputs"]["y"]["shape"] == [2, 1]
    assert reply["outputs"]["y"]["data"] == b"\0\0\xe0@" * 2


def test_a_query_that_demands_what_nobody_can_give_is_told_so() -> None:
    fleet = WithDefault()
    seconds, reply = fleet.one(fleet.ask(accuracy=0.99))
    assert reply["error"]["code"] == "unsatisfiable"
    assert seconds < 0.01


def test_a_load_that_ends_before_the_deadline_answers_after_all() -> None:
    fleet = WithDefault(variant(load_ms=300.0), loaded=False)
    fleet.change(latency_ms=1000.0)
    _, reply = fleet.one(fleet.ask())
    assert "default" not in reply


def test_a_load_that_takes_longer_than_the_objective_is_waited_for_no_longer() -> None:
    fleet = WithDefault(variant(load_ms=400.0), loaded=False)
    seconds, reply = fleet.one(fleet.ask())
    assert seconds == pytest.approx(SLO_MS / 1000.0, rel=0.1)
    assert is_default(reply, "being loaded")
    _, later = fleet.one(fleet.ask())
    assert "default" not in later


def test_without_a_model_the_default_comes_at_once() -> None:
    fleet = WithDefault()
    fleet.change(links={})
    seconds, reply = fleet.one(fleet.ask())
    assert is_default(reply, "unknown_model")
    assert seconds < 0.01


def test_a_bad_query_is_refused_with_or_without_a_default() -> None:
    fleet = WithDefault()
    _, reply = fleet.one(fleet.ask(priority=11))
    assert reply["error"]["code"] == "bad_request"


def test_when_the_executor_dies_the_default_comes_and_only_once() -> None:
    fleet = WithDefault()
    fleet.devices["w0"].slow = 1000.0 / 2.5
    label = fleet.ask()
    fleet.stage.run(0.02)
    fleet.stage.kill("w0/cpu")
    fleet.stage.kill("w0")
    [(_, reply)] = fleet.heard(label)
    assert is_default(reply, "deadline")


def test_when_its_dispatcher_dies_another_gives_the_default() -> None:
    fleet = WithDefault(dispatchers=2)
    fleet.devices["w0"].slow = 1000.0 / 2.5
    labels = [fleet.ask() for _ in range(2)]  # one each
    fleet.stage.run(0.02)
    fleet.stage.kill("d0")
    fleet.stage.run(6.0)
    for label in labels:
        ends = fleet.replies(label)
        assert len(ends) <= 1, "nobody hears twice"
    assert any(is_default(reply, "deadline") for label in labels for reply in fleet.replies(label))


def test_a_dispatcher_that_stops_hands_on_what_waits_for_its_default() -> None:
    fleet = WithDefault(variant(load_ms=4000.0), loaded=False, dispatchers=2)
    labels = [fleet.ask() for _ in range(2)]
    fleet.stage.run(0.02)
    fleet.stage.stop("d0")
    fleet.stage.run(1.0)
    assert [[is_default(r, "loaded") for r in fleet.replies(label)] for label in labels] == [[True]] * 2


def test_versions_are_switched_and_rolled_back_and_no_answer_mixes_them() -> None:
    first = variant("m-v1", version="1")
    second = variant("m-v2", version="2")
    fleet = WithDefault(first, second)
    fleet.change(links={"m": "1"})
    answers = []
    for version in ("1", "2", "1"):
        fleet.change(links={"m": version})
        labels = [fleet.ask() for _ in range(5)]
        fleet.stage.run(0.5)
        answers.append({(r["version"], r["variant"]) for label in labels for r in fleet.replies(label)})
    assert answers == [{("1", "m-v1")}, {("2", "m-v2")}, {("1", "m-v1")}]


def test_ids_and_several_items_come_back() -> None:
    fleet = WithDefault(variant(base_ms=1000.0), loaded=False)
    inputs = Tensor("FP32", [3, 2], bytes(24))
    body = encode({"inputs": inputs, "id": "mine"})
    fleet.stage.publish(fleet.subjects.query("app"), body, "_INBOX.test.mine")
    _, reply = fleet.one("mine")
    assert (reply["id"], reply["outputs"]["y"]["shape"]) == ("mine", [3, 1])


def test_more_items_than_the_default_fits_into_a_message_for_are_refused_as_without_one() -> None:
    fleet = WithDefault(variant(base_ms=1000.0), loaded=False)
    fleet.change(default_output="x" * 60_000)
    seconds, reply = fleet.one(fleet.ask(items=1000))
    assert reply["error"]["code"] == "unsatisfiable"
    assert seconds == pytest.approx(SLO_MS / 1000.0, rel=0.1)
    assert [outcome.outcome for outcome in fleet.outcomes()] == ["refused"]
    _, one = fleet.one(fleet.ask())
    assert one["default"] is True


def test_deadlines_of_what_was_served_are_not_kept_for_ever() -> None:
    fallbacks = Fallbacks()
    app = AppRecord(app="a", links={}, default_output=1)
    waiting: dict[bytes, Query] = {}
    for number in range(3 * FEW):
        uid = number.to_bytes(16)
        query = Query(uid, "a", QueryHead(), Ask("a", 1, deadline=1e9), "_INBOX.1", b"", arrived=0.0)
        query.fallback = app
        waiting = {uid: query}
        fallbacks.hold(query, 0.0, waiting)
    assert len(fallbacks) <= FEW + 4
    flights = Flights()
    flights.waiting.update(waiting)
    due, _ = fallbacks.due(1e9, flights)
    assert [query.uid for query in due] == list(waiting)

"""Queries that only their dispatcher has: what its successor says of them if it is killed."""

from collections.abc import Iterable
from typing import Any

from bus.messages.catalog import Ensemble
from services.core.actor import Effect, Envelope, Publish, Will
from services.core.settings import DispatcherSettings, Settings
from tests.support.simulated.fleet import Fleet
from tests.unit.dispatcher.test_join import Several, members


class Willing:
    """A fleet, and what its dispatcher wants said if it is killed."""

    def __init__(self, fleet: Fleet | None = None, **options: Any) -> None:
        self.fleet = fleet or Fleet(**options)
        self.wills: dict[bytes, Publish] = {}
        member = self.fleet.stage.members["d0"]
        handle = member.handle

        def noted(envelope: Envelope) -> Iterable[Effect]:
            for effect in handle(envelope):
                if isinstance(effect, Will):
                    self.wills.pop(effect.key, None)
                    if effect.publish is not None:
                        self.wills[effect.key] = effect.publish
                yield effect

        member.handle = noted

    def kill(self) -> None:
        """The dispatcher is killed, another one starts, and its will is done."""
        stage = self.fleet.stage
        stage.kill("d0")
        self.fleet.start_dispatcher("d1")
        stage.run(0.6)
        for will in self.wills.values():
            stage.publish(will.subject, will.message)


def test_what_waited_in_a_killed_dispatcher_is_answered_by_its_successor() -> None:
    system = Willing(workers=0)
    labels = [system.fleet.ask(), system.fleet.ask()]
    system.fleet.stage.run(0.3)
    assert len(system.wills) == 2
    system.kill()
    system.fleet.start_worker("w0", seconds=3.0)
    for label in labels:
        [reply] = system.fleet.replies(label)
        assert "outputs" in reply
    rows = [one for one in system.fleet.outcomes() if one.id in labels]
    assert sorted(one.id for one in rows) == sorted(labels)


def test_what_an_executor_has_even_in_part_needs_no_will() -> None:
    system = Willing(workers=0)
    system.fleet.ask(seconds=0.1)
    assert len(system.wills) == 1
    system.fleet.start_worker("w0", seconds=3.0)
    assert system.wills == {}
    assert (system.fleet.replies(system.fleet.ask(seconds=0.0002)), system.wills) == ([], {})
    system = Willing(Several())
    assert (system.fleet.replies(system.fleet.ask(seconds=0.0002)), system.wills) == ([], {})


def test_there_is_a_will_of_what_waits_and_of_nothing_else() -> None:
    """Some are refused at their deadline, some give way, some come to a full queue, and in the end a worker comes."""
    system = Willing(workers=0, settings=Settings(dispatcher=DispatcherSettings(max_queue=10)))
    stage, seen = system.fleet.stage, 0
    for number in range(300):
        if number == 200:
            system.fleet.start_worker("w0")
        system.fleet.ask(priority=number % 3, latency_ms=50.0 + number % 7 * 100.0, items=1 + number % 5)
        stage.run(0.003)
        waiting = stage.members["d0"].actor.in_flight.waiting
        assert system.wills.keys() == waiting.keys()
        seen = max(seen, len(waiting))
    assert seen == 10
    stage.run(3.0)
    assert system.wills == {}


def test_of_a_query_whose_parts_all_wait_there_is_one_will_and_its_successor_starts_it_again() -> None:
    system = Willing(Fleet(*members("a", "b"), workers=0))
    fleet, stage = system.fleet, system.fleet.stage
    fleet.change(selection=Ensemble(policy="majority"), latency_ms=1000.0)
    label, late = fleet.ask(latency_ms=20_000.0), fleet.ask(latency_ms=100.0)
    stage.run(0.05)
    assert [one.message.reason for one in system.wills.values()] == ["orphaned"] * 2
    stage.run(0.3)
    assert len(fleet.replies(late)) == 1
    assert len(system.wills) == 1, "one has ended"
    system.kill()
    fleet.start_worker("w0")
    stage.run(25.0)
    [reply] = fleet.replies(label)
    assert reply["members"]
    assert len([one for one in fleet.outcomes() if one.id == label]) == 1


def test_a_query_whose_parts_have_reached_no_executor_has_a_will() -> None:
    system = Willing(Several())
    label = system.fleet.ask()
    system.fleet.kill_worker("w0", seconds=0.002)
    assert [one.message.reason for one in system.wills.values()] == ["orphaned"]
    assert system.fleet.replies(label) == []

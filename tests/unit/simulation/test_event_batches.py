"""Batches of events on their way to the stream: what processes, connections and acknowledgements may do to them."""

import pytest

from bus.messages.events import Event
from services.core.actor import Record, Recorded
from services.shell.runtime.outbox import LATEST
from services.simulation.connections import ANSWERED
from tests.support.simulated.scripted_actors import START, Play, Puppet, Word
from tests.unit.simulation.test_connections import net, play
from tests.unit.simulation.test_kernel import event, on

__all__ = ["play"]  # a fixture


class Stream:
    """Batches as they came: when, their id, and the numbers of their events."""

    def __init__(self, play: Play) -> None:
        self.batches: list[tuple[float, str, list[float]]] = []
        self._play = play
        net(play).stored = self._stored

    def _stored(self, name: str, identity: str, events: list[Event]) -> None:
        del name
        self.batches.append((self._play.stage.now - START, identity, [one.time for one in events]))


def recording(play: Play) -> Puppet:
    return play.enter("p.a", Puppet("s", says=on(Word, Record(event(1)), Record(event(2)))))


def test_events_are_recorded_once_the_stream_has_them(play: Play) -> None:
    stream, puppet = Stream(play), recording(play)
    play.say("s", "x", seconds=1.0)
    ((at, _, numbers),) = stream.batches
    assert numbers == [1.0, 2.0]
    ((then, message),) = puppet.got(Recorded)
    assert message == Recorded(2)
    assert LATEST < at < then


def test_events_that_no_process_has_sent_die_with_it(play: Play) -> None:
    stream, _ = Stream(play), recording(play)
    play.say("s", "x", seconds=0.1)
    net(play).die("p")
    play.run(1.0)
    assert stream.batches == []


def test_one_that_says_goodbye_sends_what_it_has(play: Play) -> None:
    stream, _ = Stream(play), recording(play)
    play.say("s", "x", seconds=0.1)
    play.stage.leave("p.a", goodbye=True)
    play.run(1.0)
    assert [numbers for _, _, numbers in stream.batches] == [[1.0, 2.0]]


def test_a_process_that_is_stopped_writes_its_events_when_it_goes_on(play: Play) -> None:
    stream, _ = Stream(play), recording(play)
    play.say("s", "x", seconds=0.1)
    net(play).stop("p")
    play.run(1.0)
    assert stream.batches == []
    net(play).go_on("p")
    play.run(1.0)
    assert [round(at) for at, _, _ in stream.batches] == [1]


def test_a_batch_is_stored_twice_under_one_id(play: Play) -> None:
    stream, puppet = Stream(play), recording(play)
    net(play).process("p").twice = 1
    play.say("s", "x", seconds=1.0)
    assert len(stream.batches) == 2
    assert len({identity for _, identity, _ in stream.batches}) == 1
    assert len(puppet.got(Recorded)) == 1


@pytest.mark.parametrize(("fault", "stored"), [("deaf", 1), ("unstored", 0)])
def test_a_batch_whose_acknowledgement_is_lost_or_whose_stream_is_down_is_sent_again_under_its_id(
    play: Play, fault: str, stored: int
) -> None:
    stream, puppet = Stream(play), recording(play)
    setattr(net(play).process("p"), fault, 1)
    play.say("s", "x", seconds=2.0)
    assert (len(stream.batches), puppet.got(Recorded)) == (stored, [])
    setattr(net(play).process("p"), fault, 0)
    play.run(ANSWERED)
    assert [numbers for _, _, numbers in stream.batches] == [[1.0, 2.0]] * (stored + 1)
    assert len({identity for _, identity, _ in stream.batches}) == 1
    assert [message for _, message in puppet.got(Recorded)] == [Recorded(2)]

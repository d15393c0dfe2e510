"""Workers whose clocks are off."""

import pytest
from msgspec import Raw

from bus.messages.fleet import WorkerHeartbeat
from bus.messages.flow import DoneBatch, HandBack, Route
from services.core.line import Line
from services.dispatcher.silence import MUCH_S, STALE, WINDOW_S, Clocks

NOW = 1_000_000.0
ROUTE = Route(b"u" * 16, 0, 0, "inbox", NOW + 0.3, NOW, "d", "faces-s.w1-1", "faces", 1, None)


class World:
    def __init__(self) -> None:
        self.line = Line("echo", STALE)
        self.clocks = Clocks(self.line, ("w", "w0", "w1"))
        self.now = NOW

    def hear(self, behind: float, incarnation: int = 1, *, echo: bool = True) -> None:
        """A heartbeat that says a time so much earlier than now."""
        if echo:
            self.line.came(self.line.echo(self.now).message, self.now)
        at = self.now - behind
        self.clocks.heard(WorkerHeartbeat(worker="w1", hardware="cpu", incarnation=incarnation, at=at, devices=[], instances=[]), self.now)  # fmt: skip
        self.now += 0.5


@pytest.mark.parametrize("behind", [5.0, -5.0])
def test_a_worker_reads_a_deadline_by_its_own_clock_and_its_times_are_read_by_ours(behind: float) -> None:
    world = World()
    world.hear(behind)
    sent = world.clocks.sent(ROUTE, "w1")
    assert (sent.deadline, sent.arrived) == (ROUTE.deadline - behind, ROUTE.arrived - behind)
    assert world.clocks.sent(ROUTE, "w2") is ROUTE
    done = DoneBatch("w1/cpu/1", "w1", 1, "faces-s.w1-1", "faces-s", 1, NOW - behind, NOW - behind + 0.1, 0.0, 0, [])
    ours = world.clocks.done(done)
    assert (ours.started, ours.finished) == pytest.approx((NOW, NOW + 0.1))
    assert world.clocks.back(HandBack(sent, "late", Raw(b"\xc0"))).route == ROUTE
    whole = HandBack(ROUTE, "orphaned", Raw(b"\xc0"))
    assert world.clocks.back(whole) is whole, "it never was in that worker's time"


def test_what_is_only_late_is_no_wrong_clock() -> None:
    world = World()
    world.hear(0.001)
    for late in (3.0, 2.5, 2.0, 1.5, 1.0, 0.5):
        world.hear(late)
        assert not world.clocks.off
    world = World()
    world.hear(0.001)
    world.now += STALE
    world.hear(-5.0, echo=False)
    assert not world.clocks.off, "what waited here says nothing"
    world.hear(6.0, incarnation=2, echo=False)
    assert world.clocks.off == {"w1": 6.0}, "but of a clock that is not known at all"
    world.hear(5.0, incarnation=2)
    assert world.clocks.off == {"w1": 5.0}


def test_a_clock_that_is_set_is_noticed() -> None:
    world = World()
    world.hear(MUCH_S / 2)
    assert not world.clocks.off
    world.hear(5.0, incarnation=2)
    assert world.clocks.off == {"w1": pytest.approx(5.0)}
    world.hear(0.0)
    assert not world.clocks.off
    for _ in range(round(2 * WINDOW_S / 0.5) + 3):
        world.hear(5.0, incarnation=2)
    assert world.clocks.off == {"w1": pytest.approx(5.0)}

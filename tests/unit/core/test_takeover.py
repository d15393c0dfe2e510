"""Commands are repeated until they succeed; work of a peer that is gone is taken over, by one of several."""

from services.core.actor import After, Do, Envelope
from services.core.requests import Commands, Retry, TakeOvers


def test_a_command_that_failed_is_given_again_after_a_pause() -> None:
    commands = Commands(2.0)
    do = commands.start(Do(("keep", "j"), "command", 10.0))
    (again,) = commands.failed(do.id)
    assert again == After(do.id, 2.0, Retry(do))
    assert commands.retry(Envelope(1.0, Retry(do))) == (do,)
    assert commands.get(do.id) == do
    commands.ended(do.id)
    assert commands.failed(do.id) == ()
    assert commands.get(do.id) is None


def test_own_work_and_that_of_peers_that_are_gone_is_taken_over() -> None:
    takeovers = TakeOvers("a", timeout_s=5.0, command_s=10.0)
    takeovers.heard("alive", 99.0, leaving=False)
    takeovers.heard("silent", 90.0, leaving=False)
    takeovers.heard("left", 99.0, leaving=True)
    unfinished = [("w1", "alive"), ("w2", "silent"), ("w3", "left"), ("w4", "a"), ("w5", "never heard of")]
    assert takeovers.orphans(unfinished, 100.0, since=98.0) == ["w2", "w3", "w4"]
    assert takeovers.orphans(unfinished, 104.0, since=98.0) == ["w2", "w3", "w4", "w5"]
    assert takeovers.start("w2", "command") == Do(("takeover", "w2"), "command", 10.0)
    assert takeovers.orphans(unfinished, 100.0, since=98.0) == ["w3", "w4"]
    takeovers.ended("w2")
    assert takeovers.orphans(unfinished, 100.0, since=98.0) == ["w2", "w3", "w4"]

"""A process is ended when it is still, never when it is busy or starved: the decision, look by look."""

import os

from services.shell.host.watch import BUSY, COMPUTES, HUNG, LONGEST, LOOK, ProcessStillness, Seen, Thread, threads_of

MINUTE = round(60 / LOOK)  # looks


def verdict(still: ProcessStillness, *looks: Seen, passed: float = LOOK) -> str:
    """The first reason to end the process, or the last word."""
    return next((why for one in looks if (why := still.looked(one, passed))), "")


def asleep(turns: int = 7, state: str = "S", *, busy: bool = False, threads: int = 2) -> Seen:
    return Seen(turns, busy, (Thread(state, 1.0, 1.0),) * threads)


def test_a_stopped_process_is_ended_after_2_s_of_silence() -> None:
    still = ProcessStillness()
    stopped = asleep(state="T", busy=True)  # what it computes makes no difference
    found = [still.looked(stopped, LOOK) for _ in range(20)]
    # the first look has nothing to compare with
    assert found.index("did not turn for 2 s (stopped by a signal)") == HUNG / LOOK


def test_one_that_waits_for_what_does_not_come_too() -> None:
    assert verdict(ProcessStillness(), *[asleep()] * MINUTE) == "did not turn for 2 s (it waits for what does not come)"


def test_a_turn_begins_the_count_anew() -> None:
    still = ProcessStillness()
    for turns in range(1, 20):
        assert verdict(still, *[asleep(turns)] * 7) == ""


def test_one_that_starts_or_stops_is_left_alone_unless_it_is_stopped_by_a_signal() -> None:
    assert verdict(ProcessStillness(), *[asleep(0)] * MINUTE) == ""
    assert "stopped by a signal" in verdict(ProcessStillness(), *[asleep(0, "T", threads=1)] * 10)
    assert verdict(ProcessStillness(10.0), *[asleep(0, "T", threads=1)] * 39) == "", "a database is given more time"
    assert "for 10 s" in verdict(ProcessStillness(10.0), *[asleep(0, "T", threads=1)] * 42)


def test_one_that_runs_or_waits_for_a_cpu_or_a_disk_is_not_ended() -> None:
    for state in "RDt":
        looks = [Seen(7, False, (Thread(state, 1.0, 1.0), Thread("S", 1.0, 1.0)))] * MINUTE
        assert verdict(ProcessStillness(), *looks) == "", state
        looks = [Seen(7, False, (Thread("S", 1.0, 1.0), Thread(state, 1.0, 1.0)))] * MINUTE
        assert verdict(ProcessStillness(), *looks) == "", f"another thread: {state}"


def test_time_that_any_thread_ran_or_waited_for_a_cpu_is_no_silence() -> None:
    """Asleep at every look, and yet it has not stood still: so is a process that is starved by others."""
    starved = [Seen(7, False, (Thread("S", 1.0, 1.0), Thread("S", 1.0, LOOK * n))) for n in range(MINUTE)]
    computing = [Seen(7, False, (Thread("S", 1.0, 1.0), Thread("S", LOOK * n, 1.0))) for n in range(MINUTE)]
    assert verdict(ProcessStillness(), *starved) == ""
    assert verdict(ProcessStillness(), *computing) == ""
    half = [Seen(7, False, (Thread("S", 1.0, LOOK / 2 * n),)) for n in range(MINUTE)]
    still = ProcessStillness()
    assert [still.looked(one, LOOK) for one in half].index(
        "did not turn for 2 s (it waits for what does not come)"
    ) == 16


def test_threads_that_come_and_go_are_work() -> None:
    assert verdict(ProcessStillness(), *[asleep(threads=2 + n % 2) for n in range(MINUTE)]) == ""


def test_only_looks_of_a_supervisor_that_turns_itself_count() -> None:
    still = ProcessStillness()
    still.looked(asleep(state="T"), LOOK)
    assert still.looked(asleep(state="T"), 3600.0) == "", "it was starved, or the machine slept"
    assert still.still == LONGEST


def test_one_that_loads_or_computes_a_model_has_longer() -> None:
    assert verdict(ProcessStillness(), *[asleep(busy=True)] * (MINUTE - 10)) == ""
    assert verdict(ProcessStillness(), *[asleep(busy=True)] * (MINUTE + 10)).startswith(f"did not turn for {BUSY:g} s")


def test_a_loop_that_only_computes_is_ended_after_30_s_of_its_own_computing() -> None:
    held = [Seen(7, False, (Thread("R", LOOK * n, 1.0),)) for n in range(MINUTE)]
    still = ProcessStillness()
    found = [still.looked(one, LOOK) for one in held]
    assert found.index("did not turn in 30 s of computing") == COMPUTES / LOOK
    starved = [Seen(7, False, (Thread("R", LOOK / 10 * n, LOOK * n),)) for n in range(3 * MINUTE)]
    assert verdict(ProcessStillness(), *starved) == "", "it got a tenth of a CPU: 18 s in three minutes"
    beside = [Seen(7, False, (Thread("S", 1.0, 1.0), Thread("R", LOOK * n, 1.0))) for n in range(5 * MINUTE)]
    assert verdict(ProcessStillness(), *beside) == "", "another thread computes: so looks a load"


def test_where_the_system_says_nothing_nobody_is_ended() -> None:
    assert verdict(ProcessStillness(), *[Seen(7, False, ())] * MINUTE) == ""
    assert threads_of(2**22 + 1) == ()


def test_our_own_threads() -> None:
    mine, *_ = threads_of(os.getpid())
    assert mine.state == "R"
    assert mine.ran > 0
    assert threads_of(os.getpid(), main=True)[0].ran >= mine.ran

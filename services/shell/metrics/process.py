"""What a process shows of itself: the figures of the operating system, and what its runtimes count of each actor."""

import os
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from services.core.metric import Histogram, MetricFamily, MetricKind

STARTED = time.time()


def families() -> Iterable[MetricFamily]:
    """CPU, memory, open files; without /proc only CPU."""
    spent = os.times()
    cpu = MetricFamily("infaas_process_cpu_seconds_total", "counter", "CPU time of this process, user and system.")
    cpu.add(spent.user + spent.system)
    started = MetricFamily("infaas_process_start_time_seconds", "gauge", "When it was started, Unix time.")
    started.add(STARTED)
    yield cpu
    yield started
    with suppress(OSError, ValueError, IndexError):
        resident = MetricFamily(
            "infaas_process_resident_memory_bytes", "gauge", "Resident memory, shared parts included."
        )
        resident.add(int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE"))
        yield resident
    with suppress(OSError):
        opened = MetricFamily("infaas_process_open_fds", "gauge", "Open file descriptors.")
        opened.add(len(os.listdir("/proc/self/fd")))
        yield opened


class ActorCounts:
    """What a runtime counts of one actor: messages by type, commands by type and result, failures.

    taken: for each type of message a list of one number, so that counting is one addition.
    """

    def __init__(self) -> None:
        self.taken: dict[str, list[int]] = {}
        self.undecodable = 0
        self.forged = 0
        self.faults = 0
        self.restarts = 0
        self._commands: dict[tuple[str, str], int] = defaultdict(int)
        self._seconds: dict[str, Histogram] = defaultdict(Histogram)

    def carried_out(self, command: str, result: str, seconds: float) -> None:
        """Count a command that the edge has ended: result is done, failed or timedout."""
        self._commands[command, result] += 1
        self._seconds[command].observe(seconds)

    def families(self, actor: str, *, under_way: int, held: int, lost: int) -> Iterator[MetricFamily]:
        """under_way: commands; held, lost: events."""
        messages = MetricFamily("infaas_messages_total", "counter", "Messages that actors took, by type.")
        for message, (count,) in self.taken.items():
            messages.add(count, actor=actor, message=message)
        commands = MetricFamily(
            "infaas_commands_total", "counter", "Commands that edges carried out, by type and result."
        )
        for (command, result), count in self._commands.items():
            commands.add(count, actor=actor, command=command, result=result)
        seconds = MetricFamily("infaas_command_seconds", "histogram", "How long commands took, by type.")
        for command, histogram in self._seconds.items():
            seconds.add(histogram, actor=actor, command=command)
        yield from (messages, commands, seconds)
        single: tuple[tuple[str, MetricKind, str, int], ...] = (
            (
                "infaas_undecodable_messages_total",
                "counter",
                "Messages that were none of their subject's.",
                self.undecodable,
            ),
            (
                "infaas_forged_messages_total",
                "counter",
                "Messages with a reply subject or source not their sender's.",
                self.forged,
            ),
            ("infaas_handler_faults_total", "counter", "Messages that an actor failed on.", self.faults),
            ("infaas_actor_restarts_total", "counter", "Actors started again after repeated faults.", self.restarts),
            ("infaas_commands_under_way", "gauge", "Commands that edges are carrying out.", under_way),
            ("infaas_events_held", "gauge", "Recorded events that the stream has not acknowledged.", held),
            (
                "infaas_events_lost_total",
                "counter",
                "Recorded events dropped since more than two million were held.",
                lost,
            ),
        )
        for name, kind, about, value in single:
            family = MetricFamily(name, kind, about)
            family.add(value, actor=actor)
            yield family

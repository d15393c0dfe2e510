"""Counts of one process: the events that actors record, batch by batch as they leave (queries, attainment, cost, scaling, states), and its own.

A batch of outcomes costs about a fifth of a microsecond a row. Labels are bounded: a metric shows at most `most` sets of them, and
counts further ones under "_other". Queries that were wrong themselves, whose apps may not exist, are counted by code alone.
"""

import os
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import Any

from bus.messages.events import (
    ClientError,
    CostEvent,
    JobEvent,
    OutcomeEvent,
    RegistrationEvent,
    ScalingEvent,
    StateEvent,
    WorkerEvent,
)
from bus.messages.jobs import OFFLINE, SYSTEM
from services.core.actor import Changed
from services.core.metric import SECONDS, Histogram, MetricFamily, counter, gauge, histogram
from services.core.outcomes import CANCELLED, is_client_error

OTHER, IDLE = "_other", "_idle"
MINUTE = 60.0
STEP = 5.0  # s between marks of the last minute
GONE_S = 60.0  # s after its deletion of which nothing is shown of an app or a variant: what it still cost is booked meanwhile
Counts = dict[tuple[str, ...], Any]
ENDED = ("done", "failed", "cancelled")
ANSWERED = ("ok", "late", "default")
FAILED = ("refused", "error")
SHARES = (0.2, 0.4, 0.6, 0.8, 0.9, 1.0)
MILLISECONDS = tuple(1000.0 * bound for bound in SECONDS)

_what = attrgetter("app", "outcome", "variant", "policy")
_part = attrgetter("app", "stage", "variant", "outcome")
_code = attrgetter("code")
_latency = attrgetter("latency_ms")
_cost = attrgetter("cost")


@dataclass(slots=True, eq=False)
class AppTotals:
    """Totals of one app: the latency of its answers, and what the ratios of the last minute are made of.

    confidence: of answers made by several models; None: there were none.
    """

    milliseconds: Histogram = field(default_factory=lambda: Histogram(MILLISECONDS))
    confidence: Histogram | None = None
    offered: int = 0
    ok: int = 0
    rated: int = 0  # answers in time of variants with a known accuracy
    accuracy: float = 0.0  # their sum
    marks: deque[tuple[float, int, int, int, float]] = field(default_factory=deque)

    def mark(self, now: float) -> None:
        """Keep the totals of every few seconds, for a minute."""
        if not self.marks or now - self.marks[-1][0] >= STEP:
            self.marks.append((now, self.offered, self.ok, self.rated, self.accuracy))
        while len(self.marks) > 1 and now - self.marks[0][0] > MINUTE:
            self.marks.popleft()


class EventTotals:
    """Counts all events of one process. clock: seconds. most: label sets a metric may have."""

    def __init__(self, clock: Callable[[], float], most: int = 1000) -> None:
        self._clock = clock
        self._most = most
        self._apps: dict[str, AppTotals] = {}
        self._gone: dict[tuple[str, str], float] = {}  # labels of what was deleted, and when
        self._counters: list[tuple[MetricFamily, tuple[str, ...], Counts]] = []  # with the names of their labels
        table = self._table
        self._ends = table(
            "infaas_queries_total",
            "Queries that ended: ok (answered in time), late, refused, error, default, or cancelled (in no objective).",
            "app",
            "outcome",
        )
        self._refusals = table(
            "infaas_refusals_total", "Queries without an answer, by the refusal's code.", "app", "code"
        )
        self._mistakes = table(
            "infaas_client_errors_total",
            "Queries that were wrong themselves, by the refusal's code; in no app's.",
            "code",
        )
        self._defaults = table(
            "infaas_default_outputs_total",
            "Default outputs given, by the refusal in whose place, or confidence.",
            "app",
            "code",
        )
        self._parts = table(
            "infaas_parts_total",
            "Parts of queries that ended, by member or vertex; in no number of queries.",
            *("app", "stage", "variant", "outcome"),
        )
        self._variants = table(
            "infaas_answers_total",
            "Queries answered, in time or not; without a variant: several models answered.",
            "app",
            "variant",
        )
        self._charged = table("infaas_query_cost_dollars_total", "Charged for answers.", "app", "variant")
        self._offline = table(
            "infaas_offline_chunks_total",
            "Chunks of offline jobs that ended; in no other number of queries.",
            "outcome",
        )
        spent = ("worker", "hardware", "app", "variant", "simulated")
        self._cost = table(
            "infaas_cost_dollars_total",
            "What loaded instances cost, booked every 10 s; app _idle: nobody. Adds up to the bill.",
            *spent,
        )
        self._busy = table("infaas_busy_seconds_total", "Time that instances computed.", *spent)
        self._scaling = table(
            "infaas_scaling_actions_total", "Loads, evictions and other actions, by who decided.", "scaler", "action"
        )
        self._states = table("infaas_state_changes_total", "Instances that changed their state.", "to")
        self._workers = table("infaas_worker_changes_total", "Workers that changed their state.", "to")
        self._registrations = table("infaas_registrations_total", "Registrations that ended.", "state")
        self._jobs = table("infaas_jobs_ended_total", "Offline jobs that ended.", "state")
        self._rows = table("infaas_events_total", "Events recorded.", "kind")
        self._folds: dict[str, Callable[[Sequence[Any]], None]] = {
            OutcomeEvent.kind: self._outcomes,
            ClientError.kind: self._client_errors,
            CostEvent.kind: self._costs,
            ScalingEvent.kind: self._scalings,
            StateEvent.kind: lambda rows: self._each(self._states, (row.to_state for row in rows)),
            WorkerEvent.kind: lambda rows: self._each(
                self._workers, (row.to_state for row in rows if row.to_state != row.from_state)
            ),
            RegistrationEvent.kind: lambda rows: self._each(self._registrations, _ends_of(rows)),
            JobEvent.kind: lambda rows: self._each(self._jobs, _ends_of(rows)),
        }

    def _table(self, name: str, help: str, *labels: str) -> Counts:
        """The table of a metric, by the values of its labels."""
        counts: Counts = defaultdict(int)
        self._counters.append((counter(name, help), labels, counts))
        return counts

    def fold(self, kind: str, rows: Sequence[Any]) -> None:
        """Count a batch of one kind."""
        self._forget()
        self._rows[(kind,)] += len(rows)
        fold = self._folds.get(kind)
        if fold is not None:
            fold(rows)

    def changed(self, change: Changed) -> None:
        """What a deleted app or variant counted makes room for others, one minute later."""
        self._forget()
        kind, _, name = change.key.partition(".")
        self._gone.pop((kind, name), None)
        if change.value is None and kind in ("app", "variant"):
            self._gone[kind, name] = self._clock()

    def _forget(self) -> None:
        until = self._clock() - GONE_S
        if not self._gone or next(iter(self._gone.values())) >= until:
            return
        gone = {label for label, at in self._gone.items() if at < until}
        self._gone = {label: at for label, at in self._gone.items() if at >= until}
        for _, labels, table in self._counters:
            if not {"app", "variant"}.isdisjoint(labels):
                for key in [key for key in table if not gone.isdisjoint(zip(labels, key, strict=True))]:
                    del table[key]
        for kind, name in gone:
            if kind == "app":
                self._apps.pop(name, None)

    def _room(self, table: Counts, key: tuple[str, ...]) -> tuple[str, ...]:
        """The key, or the one for all others where the table is full."""
        return key if key in table or len(table) < self._most else (OTHER,) * len(key)

    def _each(self, table: Counts, names: Iterable[str]) -> None:
        for name in names:
            table[self._room(table, (name,))] += 1

    def _app(self, name: str) -> str:
        return name if name in self._apps or len(self._apps) < self._most else OTHER

    def _outcomes(self, rows: Sequence[OutcomeEvent]) -> None:
        several = [row for row in rows if row.missing is not None or row.parent is not None]
        if several:
            self._several(several)
            rows = [row for row in rows if row.parent is None]
        groups: dict[tuple[str, str, str | None, str | None], list[OutcomeEvent]] = defaultdict(list)
        for key, run in groupby(rows, _what):  # those of one batch stand together
            groups[key] += run
        for (app, outcome, variant, policy), group in groups.items():
            if outcome in FAILED:  # several codes may be among them
                mistakes = [row for row in group if is_client_error(row)]
                for row in mistakes:
                    self._mistakes[(row.code or "",)] += 1
                if mistakes:
                    group = [row for row in group if not is_client_error(row)]
                if not group:
                    continue
            if policy == OFFLINE:
                self._offline[(outcome,)] += sum(row.payer != SYSTEM for row in group)
            elif outcome in ANSWERED:
                self._answered(app, outcome, variant or "", group)
            elif outcome == CANCELLED.code:
                self._ends[self._app(app), outcome] += len(group)
            else:
                for code, count in Counter(map(_code, group)).items():
                    self._refused(app, outcome, code or "", count)

    def _client_errors(self, rows: Sequence[ClientError]) -> None:
        for row in rows:
            self._mistakes[(row.code,)] += row.count

    def _several(self, rows: Sequence[OutcomeEvent]) -> None:
        """Parts of queries, which are no queries, and the confidence of what several models answered."""
        parts = Counter(_part(row) for row in rows if row.parent is not None)
        for (app, stage, variant, outcome), count in parts.items():
            key = (self._app(app), stage or "", variant or "", outcome)
            self._parts[self._room(self._parts, key)] += count
        for row in rows:
            if row.parent is None and row.confidence is not None:
                totals = self._apps.setdefault(self._app(row.app), AppTotals())
                if totals.confidence is None:
                    totals.confidence = Histogram(SHARES)
                totals.confidence.observe(row.confidence)

    def _totals(self, app: str, outcome: str, count: int) -> AppTotals:
        totals = self._apps.get(app)
        if totals is None:
            totals = self._apps[app] = AppTotals()
        totals.mark(self._clock())
        totals.offered += count
        self._ends[app, outcome] += count
        return totals

    def _refused(self, app: str, outcome: str, code: str, count: int) -> None:
        app = self._app(app)
        self._totals(app, outcome, count)
        self._refusals[self._room(self._refusals, (app, code))] += count

    def _answered(self, app: str, outcome: str, variant: str, rows: list[OutcomeEvent]) -> None:
        app, count = self._app(app), len(rows)
        totals = self._totals(app, outcome, count)
        latencies = list(map(_latency, rows))
        totals.milliseconds.observe_all([ms for ms in latencies if ms is not None] if None in latencies else latencies)
        key = self._room(self._variants, (app, variant))
        self._variants[key] += count
        self._charged[key] += sum(map(_cost, rows))
        if outcome == "ok":
            totals.ok += count
            # All answers of one variant have its accuracy. Those of several models have their mean, of whichever were there.
            if not variant:
                known = [row.accuracy for row in rows if row.accuracy is not None]
                totals.rated += len(known)
                totals.accuracy += sum(known)
            elif (accuracy := rows[0].accuracy) is not None:
                totals.rated += count
                totals.accuracy += accuracy * count
        elif outcome == "default":
            for code, times in Counter(map(_code, rows)).items():
                self._defaults[self._room(self._defaults, (app, code or ""))] += times

    def _costs(self, rows: Sequence[CostEvent]) -> None:
        for row in rows:
            simulated = "true" if row.simulated else "false"
            spent = (row.worker, row.hardware, row.app or IDLE, row.variant or IDLE, simulated)
            key = self._room(self._cost, spent)
            self._cost[key] += row.cost
            self._busy[key] += row.busy_seconds

    def _scalings(self, rows: Sequence[ScalingEvent]) -> None:
        for row in rows:
            self._scaling[self._room(self._scaling, (row.scaler, row.action))] += max(1, abs(row.count))

    def families(self) -> list[MetricFamily]:
        """Everything counted so far."""
        for family, labels, table in self._counters:
            family.samples = [(dict(zip(labels, key, strict=True)), value) for key, value in table.items()]
        return [*(family for family, _, _ in self._counters), *self._by_app()]

    def _by_app(self) -> list[MetricFamily]:
        latency = histogram("infaas_query_latency_seconds", "Arrival at the dispatcher to the answer.")
        rated = counter("infaas_rated_answers_total", "Answers in time of variants with a measured accuracy.")
        summed = counter(
            "infaas_rated_answers_accuracy_total",
            "Their accuracies, summed up: over infaas_rated_answers_total, the effective accuracy.",
        )
        attained = gauge(
            "infaas_slo_attainment_ratio", "Answered in time over all offered, last minute, of one dispatcher."
        )
        accurate = gauge("infaas_effective_accuracy_ratio", "Mean accuracy of answers in time, last minute.")
        confident = histogram("infaas_answer_confidence_ratio", "Members that agree with the answer of several models.")
        now = self._clock()
        for app, totals in self._apps.items():
            latency.add(totals.milliseconds.scaled(SECONDS, 0.001), app=app)
            if totals.confidence is not None:
                confident.add(totals.confidence, app=app)
            rated.add(totals.rated, app=app)
            summed.add(totals.accuracy, app=app)
            totals.mark(now)
            _, offered, ok, known, accuracy = totals.marks[0]
            if totals.offered > offered:
                attained.add((totals.ok - ok) / (totals.offered - offered), app=app)
            if totals.rated > known:
                accurate.add((totals.accuracy - accuracy) / (totals.rated - known), app=app)
        return [latency, rated, summed, attained, accurate, confident]


def _ends_of(rows: Sequence[Any]) -> list[str]:
    return [row.state for row in rows if row.state in ENDED]


# -- the process itself: the figures of the operating system, and what its runtimes count of each actor

STARTED = time.time()


def process_families() -> Iterable[MetricFamily]:
    """CPU, memory, open files; without /proc only CPU."""
    spent = os.times()
    cpu = counter("infaas_process_cpu_seconds_total", "CPU time of this process, user and system.")
    yield cpu.add(spent.user + spent.system)
    yield gauge("infaas_process_start_time_seconds", "When it was started, Unix time.").add(STARTED)
    with suppress(OSError, ValueError, IndexError):
        resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        yield gauge("infaas_process_resident_memory_bytes", "Resident memory, shared parts included.").add(resident)
    with suppress(OSError):
        opened = len(os.listdir("/proc/self/fd"))
        yield gauge("infaas_process_open_fds", "Open file descriptors.").add(opened)


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
        taken = counter("infaas_messages_total", "Messages that actors took, by type.")
        for message, (count,) in self.taken.items():
            taken.add(count, actor=actor, message=message)
        commands = counter("infaas_commands_total", "Commands that edges carried out, by type and result.")
        for (command, result), count in self._commands.items():
            commands.add(count, actor=actor, command=command, result=result)
        seconds = histogram("infaas_command_seconds", "How long commands took, by type.")
        for command, took in self._seconds.items():
            seconds.add(took, actor=actor, command=command)
        yield from (taken, commands, seconds)
        for family, value in (
            (
                counter("infaas_undecodable_messages_total", "Messages that were none of their subject's."),
                self.undecodable,
            ),
            (
                counter("infaas_forged_messages_total", "Messages with a reply subject or source not their sender's."),
                self.forged,
            ),
            (counter("infaas_handler_faults_total", "Messages that an actor failed on."), self.faults),
            (counter("infaas_actor_restarts_total", "Actors started again after repeated faults."), self.restarts),
            (gauge("infaas_commands_under_way", "Commands that edges are carrying out."), under_way),
            (gauge("infaas_events_held", "Recorded events that the stream has not acknowledged."), held),
            (
                counter("infaas_events_lost_total", "Recorded events dropped since more than two million were held."),
                lost,
            ),
        ):
            yield family.add(value, actor=actor)

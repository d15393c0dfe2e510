"""What was violated, and how long faults held up what was on its way."""

from collections.abc import Iterable, Iterator, Sequence

from msgspec import Struct

from services.executor.dispatchers import TOLD
from services.shell.host.watch import HUNG, LOOK
from services.simulation.scenario.model import FaultSpec

KEPT = 200  # violations of a run


class Violation(Struct, frozen=True):
    """time: the scenario's, in seconds. query: the number of the client's query that broke; empty: none did. words: what is wrong."""

    invariant: str
    time: float
    query: str
    words: str


class Violations(Struct, eq=False):
    """All of one run, in their order. begins: the clock at the scenario's time 0."""

    begins: float
    found: list[Violation] = []

    def add(self, invariant: str, now: float, words: str, query: str = "") -> None:
        if len(self.found) < KEPT:
            self.found.append(Violation(invariant, round(now - self.begins, 6), query, words))


# -- time in which connections and processes are held up

RETURNS_S = 3.1  # after a process has died, until others have taken over what it had
HOPS = 12  # messages of one query, about
LINKS = ("link-clogged", "link-lost", "messages-delayed")
DEATHS = ("process-dies", "worker-dies")
HELD = ("link-clogged", "link-lost", "process-stopped")  # whose processes hear nobody, or are not heard
PROCESSES = (*DEATHS, "process-stopped", "clock-off", "boot-twice", "watch-late")


class HeldUp:
    """The times in which faults hold something up. begins: the clock at the scenario's time 0."""

    def __init__(
        self, faults: Iterable[FaultSpec], begins: float, *, kinds: Sequence[str] = (*LINKS, *PROCESSES)
    ) -> None:
        counted = [fault for fault in faults if fault.kind in kinds]
        held = sorted((one.at_s, one.until_s + one.delay_s) for one in counted if one.kind in HELD)
        self._times = sorted(
            (begins + at, begins + (_returns(at, until, held) if _ends(fault) else until))
            for fault in counted
            for at, until in _times(fault)
        )

    def seconds(self, since: float, until: float) -> float:
        """In this time, at most. What is held up at the end of one fault may meet the next."""
        held, at = 0.0, since
        for begin, end in self._times:
            if begin > until:
                break
            if end > at:
                held += min(end, until) - max(at, begin)
                at = min(end, until)
        return held


def _ends(fault: FaultSpec) -> bool:
    """Whether a process ends, also since its supervisor ends it."""
    hangs = fault.kind == "process-stopped" and fault.until_s - fault.at_s > HUNG + LOOK
    return fault.kind in DEATHS or (hangs and fault.process.startswith("d-"))


def _returns(at: float, until: float, held: Iterable[tuple[float, float]]) -> float:
    """When others have taken over what a process had that died then. Whoever was held up meanwhile has heard nobody, and must hear again who lives."""
    for begin, end in held:
        if begin <= until and end >= at:
            until = max(until, end + TOLD)
    return until


def _times(fault: FaultSpec) -> Iterator[tuple[float, float]]:
    """When a fault holds something up."""
    match fault.kind:
        case kind if kind in DEATHS:
            yield fault.at_s, fault.at_s + max(RETURNS_S, fault.delay_s + 1.0)
        case "clock-off":  # its processes start again
            yield fault.at_s, fault.at_s + RETURNS_S
            yield fault.until_s, fault.until_s + RETURNS_S
        case "messages-delayed":
            yield fault.at_s, fault.until_s + HOPS * fault.delay_s
        case "boot-twice":
            yield fault.at_s, fault.until_s + fault.delay_s + RETURNS_S
        case "process-stopped" if _ends(fault):
            # Its supervisor has ended it: the next one gets its queries.
            yield fault.at_s, max(fault.until_s, fault.at_s + HUNG + LOOK + RETURNS_S)
        case _:
            yield fault.at_s, fault.until_s + fault.delay_s


def last_end(faults: Iterable[FaultSpec]) -> float:
    """When the last fault has ended, in seconds from the scenario's beginning. 0: there is none."""
    return max((end_of(one) for one in faults), default=0.0)


def end_of(fault: FaultSpec) -> float:
    """When a fault has ended, in seconds from the scenario's beginning."""
    return (fault.until_s if fault.until_s < float("inf") else fault.at_s) + max(0.0, fault.delay_s)

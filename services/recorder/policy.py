"""When the recorder fetches next, and which of several facts about the same thing is the latest. Pure."""

from collections.abc import Callable, Hashable, Iterable
from typing import TypeVar

from bus.messages.events import Event

E = TypeVar("E", bound=Event)

MOST = 32  # messages a fetch; at the outbox's 512 rows each, about 16,000 rows a transaction
GATHER = 0.4  # s to let messages gather after a fetch that emptied the stream: fewer, larger transactions
FIRST_PAUSE = 0.25  # s before the first repeat after a failure, then doubled
LONGEST_PAUSE = 2.0  # s; well within the 5 s in which what happened is to be in SQL once the database is back


def pause_after_fetch(messages: int) -> float:
    """Seconds until the next fetch: none while there is more, or nothing (the fetch itself waits for the first)."""
    return GATHER if 0 < messages < MOST else 0.0


def pause_after_failure(failures: int) -> float:
    """Seconds before the next try, after so many failures in a row."""
    return float(min(FIRST_PAUSE * 2.0 ** (failures - 1), LONGEST_PAUSE))


def latest(events: Iterable[E], key: Callable[[E], Hashable]) -> list[E]:
    """For each key the event with the greatest time; of equal times the last one."""
    found: dict[Hashable, E] = {}
    for event in events:
        before = found.get(key(event))
        if before is None or event.time >= before.time:
            found[key(event)] = event
    return list(found.values())

"""When a batch gets cores of its device: as its executor gives them out, and as a dispatcher predicts that."""

from collections.abc import Iterable

MANY = 64  # instances that a decision looks at, each of them; of more, at some
SHUT = 1e9  # s; not infinity, since those that will join are counted in whole items
PATIENCE_S = 1.0  # waited by all models alike, in the order of deadlines
STRETCH = 100.0  # times as long as its queue takes, a quiet model waits


def urgent_at(deadline: float, arrived: float, seconds: float) -> float:
    """The time by which a device's executor orders the batches of several models, Unix seconds: the first deadline of each. But a quiet one is not
    to wait for all that another one's flood has put before it: it takes a hundredth of that time. seconds: of all that waits in its queue.
    """
    return min(deadline, arrived + PATIENCE_S + STRETCH * seconds)


def cores_free(total: float, needed: float, work: float, held: Iterable[tuple[float, float]]) -> float:
    """Seconds until so many of all cores are free, and free ones have done so much work first (seconds of cores). held: seconds until when batches
    under way keep how many cores. One keeps no others.
    """
    held = sorted(held)
    free, at = total - sum(cores for _, cores in held), 0.0
    for until, cores in held:
        if free >= needed and work <= free * (until - at):
            break
        work = max(0.0, work - free * (until - at))
        at, free = until, free + cores
    return at + work / free

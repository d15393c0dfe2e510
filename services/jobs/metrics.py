"""What a coordinator of offline jobs shows. Pure."""

from collections import Counter
from collections.abc import Iterable

from services.core.metric import Family
from services.jobs.actor import Coordinator


def families(actor: Coordinator) -> Iterable[Family]:
    jobs = Family("infaas_jobs", "gauge", "Offline jobs that are remembered, by their state.")
    for state, count in Counter(record.status.state for record in actor._records.values()).items():
        jobs.add(count, state=state)
    return (jobs,)


def missing(actor: Coordinator, now: float) -> str:
    del now
    return "the catalogue and the jobs" if actor._unsynced else ""

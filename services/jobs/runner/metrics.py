"""What a worker's runner of offline jobs shows. Pure."""

from collections import Counter
from collections.abc import Iterable

from services.core.metric import Family
from services.jobs.runner.actor import Runner


def families(actor: Runner) -> Iterable[Family]:
    chunks = Family(
        "infaas_offline_chunks_held", "gauge", "Chunks of offline jobs that a worker has taken, by their state."
    )
    for state, count in Counter(held.state for held in actor._held.values()).items():
        chunks.add(count, worker=actor.worker, state=state)
    return (chunks,)


def missing(actor: Runner, now: float) -> str:
    del actor, now
    return ""

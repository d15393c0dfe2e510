"""An executor's metrics: what waits and runs on its device, sizes and times of batches. Pure."""

from collections.abc import Iterable

from services.core.metric import ITEMS, Histogram, MetricFamily
from services.executor.actor import Executor


def families(actor: Executor) -> Iterable[MetricFamily]:
    waiting = MetricFamily("infaas_instance_queue_items", "gauge", "Items that wait in an instance's queue.")
    running = MetricFamily("infaas_instance_running_items", "gauge", "Items that an instance computes now.")
    overlapping = MetricFamily(
        "infaas_instance_running_batches",
        "gauge",
        "Batches that an instance computes now, at most one for each context.",
    )
    factor = MetricFamily(
        "infaas_instance_latency_factor", "gauge", "Live correction of the profiled latency; 1: as profiled."
    )
    limit = MetricFamily(
        "infaas_instance_batch_limit", "gauge", "The most items of an instance's next batch, by its batching policy."
    )
    for loaded in actor.instances.values():
        where = {
            "worker": actor.worker,
            "device": actor.device,
            "variant": loaded.record.variant,
            "instance_id": loaded.id,
        }
        waiting.add(loaded.queue.items, **where)
        running.add(loaded.running_items, **where)
        overlapping.add(loaded.running, **where)
        factor.add(loaded.queue.factor, **where)
        limit.add(loaded.queue.max_batch, policy=loaded.rule.policy if loaded.rule is not None else "edf", **where)
    pending = MetricFamily("infaas_executor_queries", "gauge", "Queries that an executor has taken and not yet ended.")
    pending.add(len(actor.pending), worker=actor.worker, device=actor.device)
    sizes = MetricFamily("infaas_batch_items", "histogram", "Items of the batches that were computed.")
    busy = MetricFamily("infaas_batch_seconds_total", "counter", "Time spent computing batches.")
    for variant, tally in actor.tallies.items():
        where = {"worker": actor.worker, "device": actor.device, "variant": variant}
        histogram = Histogram(ITEMS)
        for size, batches in tally.sizes.items():
            histogram.observe(size, batches)
        sizes.add(histogram, **where)
        busy.add(tally.seconds, **where)
    return waiting, running, overlapping, factor, limit, pending, sizes, busy


def missing(actor: Executor, now: float) -> str:
    del now
    return actor.succession.missing


def under_way(actor: Executor) -> bool:
    """Whether queries that it took have not ended."""
    return bool(actor.pending)

"""Metrics of a model-autoscaler: the load that it plans for. Pure."""

from collections.abc import Iterable

from services.autoscaler.models.actor import GONE, ModelAutoscaler
from services.core.metric import MetricFamily


def families(actor: ModelAutoscaler) -> Iterable[MetricFamily]:
    load = MetricFamily("infaas_autoscaler_load_items_per_second", "gauge", "Load of this worker when last looked at.")
    load.add(actor._rate, worker=actor._worker)
    barred = MetricFamily(
        "infaas_autoscaler_barred_variants", "gauge", "Variants that were refused here, planned without for now."
    )
    barred.add(len(actor._barred), worker=actor._worker)
    return load, barred


def missing(actor: ModelAutoscaler, now: float) -> str:
    if not actor._synced:
        return "the catalogue"
    return "" if now - actor._heartbeat[0] <= GONE else "a heartbeat of its worker's monitor"

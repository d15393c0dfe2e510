"""Metrics of a VM-autoscaler: whether it leads, and the workers it knows. Pure."""

from collections.abc import Iterable

from services.autoscaler.vms.actor import Controller
from services.core.metric import MetricFamily


def families(actor: Controller) -> Iterable[MetricFamily]:
    leads = MetricFamily("infaas_controller_leads", "gauge", "1 while this VM-autoscaler leads the cluster.")
    leads.add(int(actor.lease.epoch > 0))
    workers = MetricFamily("infaas_controller_workers", "gauge", "Workers that this VM-autoscaler knows.")
    workers.add(len(actor.fleet.workers))
    return leads, workers


def missing(actor: Controller, now: float) -> str:
    del actor, now
    return ""

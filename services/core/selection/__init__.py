"""Selection: which instance answers a query.

`policy` decides, on `cluster` (all workers and instances), `eligibility` (which variants of an app may serve which needs) and
`instances` (the instances and workers themselves). A policy of one's own imports what it needs from here.
"""

from services.core.selection.cluster import ClusterView
from services.core.selection.eligibility import INFINITE, Ask
from services.core.selection.instances import Instance, Worker
from services.core.selection.policy import (
    BruteForce,
    Decision,
    InfaasPolicy,
    LoadOrder,
    RoundRobin,
    SelectionPolicy,
    order_for,
    refuse,
)

__all__ = [
    "INFINITE", "Ask", "BruteForce", "ClusterView", "Decision", "InfaasPolicy", "Instance", "LoadOrder", "RoundRobin",
    "SelectionPolicy", "Worker", "order_for", "refuse",
]  # fmt: skip

"""Rules of batching: where they are kept, which fields a policy reads, and what is wrong with one. The policies are the executor's
(services/executor/batching.py).
"""

from collections.abc import Iterable
from math import isfinite

from bus.messages.catalog import MOST_CONTEXTS, BatchingRule

SCOPES = ("app", "model", "variant")  # from the widest to the narrowest, which counts
PREFIX = "batching."
LARGEST_BATCH = 1024
LONGEST_MS = 600_000.0
QUANTUM_MS = 5.0  # of `threshold`, where its rule does not say it (Rafiqi, paper 001, section 3.3)
SHORTEST_QUANTUM_MS, LONGEST_QUANTUM_MS = 0.5, 10_000.0
# policy: the fields that it needs, and the fields that it may have
POLICIES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "edf": ((), ("batch", "contexts")),
    "fixed": (("batch",), ("contexts",)),
    "aimd": ((), ("batch", "slo_ms", "contexts")),
    "quantile": ((), ("batch", "slo_ms", "contexts")),
    "delayed": (("wait_ms",), ("batch", "contexts")),
    "threshold": ((), ("batch", "quantum_ms", "contexts")),
}
FIELDS = ("batch", "slo_ms", "wait_ms", "quantum_ms", "contexts")


def batching_key(scope: str, name: str) -> str:
    """The key of a rule in the control bucket."""
    return f"{PREFIX}{scope}.{name}"


def batching_at(key: str) -> tuple[str, str] | None:
    """(scope, name) of a rule's key; None if it is the key of something else."""
    if not key.startswith(PREFIX):
        return None
    scope, _, name = key.removeprefix(PREFIX).partition(".")
    return (scope, name) if scope in SCOPES and name else None


def rule_errors(rule: BatchingRule) -> list[str]:
    """What is wrong with a rule, each text with its field first. Empty: nothing is."""
    known = POLICIES.get(rule.policy)
    if known is None:
        return [f"policy: {rule.policy[:80]!r} is unknown; use one of {', '.join(POLICIES)}"]
    needed, possible = known
    given = {field for field in FIELDS if getattr(rule, field) is not None}
    wrong = [f"{field}: {rule.policy} needs it" for field in needed if field not in given]
    wrong += [_unused(rule.policy, field) for field in FIELDS if field in given and field not in (*needed, *possible)]
    if rule.batch is not None and not 1 <= rule.batch <= LARGEST_BATCH:
        wrong.append(f"batch: must be from 1 to {LARGEST_BATCH} items")
    if rule.slo_ms is not None and not (isfinite(rule.slo_ms) and 0 < rule.slo_ms <= LONGEST_MS):
        wrong.append(f"slo_ms: must be above 0 and at most {LONGEST_MS:.0f}")
    if rule.wait_ms is not None and not (isfinite(rule.wait_ms) and 0 <= rule.wait_ms <= LONGEST_MS):
        wrong.append(f"wait_ms: must be from 0 to {LONGEST_MS:.0f}")
    if rule.quantum_ms is not None and not SHORTEST_QUANTUM_MS <= rule.quantum_ms <= LONGEST_QUANTUM_MS:
        wrong.append(f"quantum_ms: must be from {SHORTEST_QUANTUM_MS:g} to {LONGEST_QUANTUM_MS:.0f}")
    if rule.contexts is not None and not 1 <= rule.contexts <= MOST_CONTEXTS:
        wrong.append(f"contexts: must be from 1 to {MOST_CONTEXTS} batches at once")
    return wrong


def _unused(policy: str, field: str) -> str:
    takers: Iterable[str] = (name for name, (needed, possible) in POLICIES.items() if field in (*needed, *possible))
    return f"{field}: {policy} does not read it; leave it out, or use {' or '.join(takers)}"

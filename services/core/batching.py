"""Rules of batching: where they are kept, which fields a policy reads, and what is wrong with one. The policies are the executor's
(services/executor/batching.py).
"""

from collections.abc import Iterable

from bus.fields import faults
from bus.messages.catalog import BatchingRule

SCOPES = ("app", "model", "variant")  # from the widest to the narrowest, which counts
PREFIX = "batching."
QUANTUM_MS = 5.0  # of `threshold`, where its rule does not say it (Rafiqi, paper 001, section 3.3)
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
    return wrong + [f"{fault.key}: {fault.reason}" for fault in faults(rule)]


def _unused(policy: str, field: str) -> str:
    takers: Iterable[str] = (name for name, (needed, possible) in POLICIES.items() if field in (*needed, *possible))
    return f"{field}: {policy} does not read it; leave it out, or use {' or '.join(takers)}"

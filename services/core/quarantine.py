"""Where quarantines are kept: keys `quarantine.<worker>.<variant>` of the control bucket, so that they outlive a monitor.

A worker's monitor writes them; the registrar deletes them when an operator releases a variant, and the monitors see it.
"""

_PREFIX = "quarantine"


def quarantine_key(worker: str, variant: str) -> str:
    return f"{_PREFIX}.{worker}.{variant}"


def quarantined_at(key: str) -> tuple[str, str] | None:
    """(worker, variant) of such a key; None for any other."""
    parts = key.split(".")
    return (parts[1], parts[2]) if len(parts) == 3 and parts[0] == _PREFIX else None

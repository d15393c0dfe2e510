"""What a developer of a static or replicating system would have chosen, knowing the profiles and the peak. Pure."""

from collections.abc import Iterable, Mapping
from math import ceil
from typing import Any, NamedTuple

SLACK = 1.05  # throughput wanted over the peak, as the autoscaler's setting


class Chosen(NamedTuple):
    """One variant, and how many instances of it."""

    variant: str
    instances: int


def choose(
    policy: str, variants: Iterable[Mapping[str, Any]], peak: float, *, latency_ms: float, accuracy: float, cores: int
) -> Chosen | None:
    """The choice for a baseline; None for infaas, which needs none. cores: of the CPU.

    static: the variant and count that carry the peak at least cost. replicate: the variant that is cheapest while there is one,
    on a CPU unless another kind is named. `static@gpu`: of a developer who considers only GPUs. Raises ValueError when nothing meets the requirements, and
    for a policy that there is not.
    """
    base, _, hardware = policy.partition("@")
    if base == "infaas" and not hardware:
        return None
    if base not in ("static", "replicate"):
        raise ValueError(f"no policy {policy!r}: use infaas, static or replicate, the last two also as static@gpu")
    wanted = hardware or ("cpu" if base == "replicate" else "")
    able = [
        one
        for one in variants
        if wanted in ("", one["hardware"])
        and (one["accuracy"] or 0.0) >= accuracy
        and one["latency_ms"] <= latency_ms / 2  # a query may have to wait for the batch before its own
    ]
    if base == "static":
        counted = [(one, ceil(SLACK * peak / one["saturation_qps"])) for one in able]
        able = [one | {"count": n} for one, n in counted if one["hardware"] != "cpu" or n * one["threads"] <= cores]
        best = min(able, key=lambda one: (one["count"] * one["price_per_hour"], one["variant"]), default=None)
    else:
        best = min(able, key=lambda one: (one["price_per_hour"], -one["saturation_qps"], one["variant"]), default=None)
    if best is None:
        raise ValueError(f"{policy}: no variant{f' for {wanted}' * bool(wanted)} meets the requirements")
    return Chosen(best["variant"], best.get("count", 1))

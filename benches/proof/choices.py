"""What a developer of a static or replicating system would have chosen, knowing the profiles and the peak. Pure."""

from collections.abc import Iterable, Mapping
from math import ceil
from typing import Any, NamedTuple

SLACK = 1.05  # throughput wanted over the peak, as the autoscaler's setting
BASES = ("infaas", "static", "replicate")


class Chosen(NamedTuple):
    """One variant, and how many instances of it."""

    variant: str
    instances: int


class Policy(NamedTuple):
    """A policy of the autoscaler. hardware: the only kind that the developer considers; "" for the policy's own way."""

    name: str
    base: str
    hardware: str


def parse(text: str) -> Policy:
    """`static`, or `static@gpu` for a developer who considers only GPUs; raises ValueError that says what there is."""
    base, _, hardware = text.partition("@")
    if base not in BASES or (hardware and base == "infaas"):
        raise ValueError(f"no policy {text!r}: use infaas, static or replicate, the last two also as static@gpu")
    return Policy(text, base, hardware)


def choose(
    policy: Policy,
    variants: Iterable[Mapping[str, Any]],
    peak: float,
    *,
    latency_ms: float,
    accuracy: float,
    cores: int,
) -> Chosen | None:
    """The choice for a baseline; None for infaas, which needs none. cores: of the CPU.

    static: the variant and count that carry the peak at least cost. replicate: the variant that is cheapest while there is one,
    on a CPU unless another kind is named. Raises ValueError when nothing meets the requirements.
    """
    if policy.base == "infaas":
        return None
    wanted = policy.hardware or ("cpu" if policy.base == "replicate" else "")
    able = [
        one
        for one in variants
        if wanted in ("", one["hardware"])
        and (one["accuracy"] or 0.0) >= accuracy
        and one["latency_ms"] <= latency_ms / 2  # a query may have to wait for the batch before its own
    ]
    if policy.base == "static":
        carrying = [(one, ceil(SLACK * peak / one["saturation_qps"])) for one in able]
        fitting = [(one, n) for one, n in carrying if one["hardware"] != "cpu" or n * one["threads"] <= cores]
        if fitting:
            best, count = min(fitting, key=lambda each: (each[1] * each[0]["price_per_hour"], each[0]["variant"]))
            return Chosen(best["variant"], count)
    elif able:
        cheapest = min(able, key=lambda one: (one["price_per_hour"], -one["saturation_qps"], one["variant"]))
        return Chosen(cheapest["variant"], 1)
    raise ValueError(f"{policy.name}: no variant{f' for {wanted}' * bool(wanted)} meets the requirements")

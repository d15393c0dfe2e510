"""The states of an instance: the legal transitions, and when an instance counts as Overloaded or Interfered.

    Inactive -> Loading -> Active <-> Overloaded | Interfered -> Unloading -> Inactive
                Loading <- Warm <- Unloading | Loading

Every state may change to Inactive (a failed load, a dead executor). The states are those of INFaaS (Romero et al., section 4.1,
Fig. 4), and Warm: the model is in host memory and serves nobody (Rafiqi, section 3.4.1). The papers give no thresholds. The defaults are those of its published code (worker/query_executor.cc, qpsMonitor). They depend on
the hardware: see `thresholds_for`.
"""

from functools import lru_cache

from msgspec import Struct
from msgspec.structs import replace

from bus.messages.fleet import InstanceStatus, State

EDGES: dict[State, frozenset[State]] = {
    "Inactive": frozenset({"Loading", "Active", "Warm"}),  # not by Loading: a restarted monitor finds the instance
    "Loading": frozenset({"Active", "Warm", "Unloading", "Inactive"}),
    "Warm": frozenset({"Loading", "Unloading", "Inactive"}),
    "Active": frozenset({"Overloaded", "Interfered", "Unloading", "Inactive"}),
    "Overloaded": frozenset({"Active", "Interfered", "Unloading", "Inactive"}),
    "Interfered": frozenset({"Active", "Overloaded", "Unloading", "Inactive"}),
    "Unloading": frozenset({"Warm", "Inactive"}),
}
SERVING: frozenset[State] = frozenset({"Active", "Overloaded", "Interfered"})
COUNTED: frozenset[State] = SERVING | {"Loading"}  # the instance serves, or will serve soon


def needed(status: InstanceStatus) -> bool:
    """Whether the instance serves or will serve, and somebody needs it. Others are reclaimable, or they are being unloaded."""
    return status.state in COUNTED and not status.reclaimable


def legal(old: State, new: State) -> bool:
    """Whether an instance may change from the old state to the new one."""
    return new in EDGES.get(old, ())


class Thresholds(Struct, frozen=True, kw_only=True):
    """When an instance counts as Overloaded or Interfered. The defaults are those of one CPU instance among several (`thresholds_for`).

    overloaded_backlog_s, overloaded_slo_share: limits of the backlog, in seconds of work and as a share of the app's SLO. The smaller
    limit counts. overloaded_clear_share: Overloaded ends once load and backlog are below this share of their limits.
    interfered_ratio, interfered_least_s: limits of the ratio of measured to profiled latency, and of their difference in seconds. Both
    must be exceeded. interfered_load_share: a slow instance with a backlog counts as Interfered, not Overloaded, if its load is below this
    share of saturation, since then the slowness causes the backlog. clear_ratio: Interfered ends at this ratio of measured to profiled
    latency. least_items: with fewer items than this, the measured latency is ignored.
    """

    overloaded_backlog_s: float = 0.8
    overloaded_slo_share: float = 0.5
    overloaded_clear_share: float = 0.8
    interfered_ratio: float = 2.5
    interfered_least_s: float = 0.005
    interfered_load_share: float = 0.5
    clear_ratio: float = 1.5
    least_items: int = 8


# Zero means "by hardware". A value that a user sets holds for all hardware.
BY_HARDWARE = Thresholds(overloaded_backlog_s=0.0, interfered_ratio=0.0, interfered_load_share=0.0, clear_ratio=0.0)
GPU_SHORT_S = 0.010  # for GPU batches shorter than this, the limit is an absolute latency
GPU_SHORT_LATE_S = 0.015
GPU_SHORT_MOST = 5.0


def thresholds_for(hardware: str, profiled_s: float, instances: int, given: Thresholds = BY_HARDWARE) -> Thresholds:
    """The thresholds of an instance on this kind of hardware. A value in `given` that is not 0 replaces the default.

    profiled_s: profiled latency of a batch of the present mean size. instances: how many instances of the variant this worker has, with
    this one. The defaults are those of the published code:

        hardware                            latency ratio          load share   backlog   clears at
        CPU, the variant's only instance    4.0                    1.0          1.1 s     1.5
        CPU, one of several; Inferentia     2.5                    0.5          0.8 s     1.5
        GPU, batch below 10 ms              min(5, 15 ms / batch)  0.3          0.8 s     1.25
        GPU, 10 ms and more                 1.5                    0.3          0.8 s     1.25

    The published code has one flag for both states, and raises it for latency only while arrivals exceed the load share. Here, that share
    tells the two states apart: below it, the slowness causes the backlog.
    """
    if hardware == "gpu":
        short = 0.0 < profiled_s < GPU_SHORT_S
        ratio, share, backlog, clear = 1.5, 0.3, 0.8, 1.25
        if short:
            ratio = min(GPU_SHORT_MOST, GPU_SHORT_LATE_S / profiled_s)
    elif hardware == "cpu" and instances <= 1:
        ratio, share, backlog, clear = 4.0, 1.0, 1.1, 1.5
    else:
        ratio, share, backlog, clear = 2.5, 0.5, 0.8, 1.5
    return _filled(given, ratio, share, backlog, clear)


@lru_cache(maxsize=256)
def _filled(given: Thresholds, ratio: float, share: float, backlog: float, clear: float) -> Thresholds:
    return replace(
        given,
        interfered_ratio=given.interfered_ratio or ratio,
        interfered_load_share=given.interfered_load_share or share,
        overloaded_backlog_s=given.overloaded_backlog_s or backlog,
        clear_ratio=min(given.clear_ratio or clear, given.interfered_ratio or ratio),
    )


class Observed(Struct, frozen=True, kw_only=True):
    """Recent measurements of an instance.

    load: items/s that it serves. saturation: items/s that it can serve, by its profile. backlog_s: seconds of work that waits.
    latency_s, profiled_s: mean compute time of a batch, as measured and as profiled for the batch sizes that ran. items: how many items
    these two times are based on. slo_s: the app's latency objective in seconds, 0 for none.
    """

    load: float
    saturation: float
    backlog_s: float
    latency_s: float
    profiled_s: float
    items: int
    slo_s: float = 0.0


def judge(state: State, seen: Observed, limits: Thresholds, slo_s: float | None = None) -> tuple[State, str]:
    """The present state of a serving instance, and the reason. The reason is empty if the state does not change.

    The thresholds that end a state are lower than those that begin it, so that noise does not make the state change back and forth.
    slo_s: the latency objective to compare with, if it is not the one in `seen`.
    """
    if state not in SERVING:
        return state, ""
    patience = limits.overloaded_clear_share if state == "Overloaded" else 1.0
    backlog_limit = limits.overloaded_backlog_s
    slo_s = seen.slo_s if slo_s is None else slo_s
    if slo_s > 0:
        backlog_limit = min(backlog_limit, limits.overloaded_slo_share * slo_s)
    full = seen.saturation > 0 and seen.load >= patience * seen.saturation
    late = seen.backlog_s > patience * backlog_limit
    slow = _slow(state, seen, limits)
    interfered = slow and not full and (not late or seen.load < limits.interfered_load_share * seen.saturation)
    new: State = "Interfered" if interfered else "Overloaded" if full or late else "Active"
    if new == state:
        return new, ""
    if interfered:
        why = f"{_latencies(seen)}, at {_share(seen)} of saturation"
    elif full:
        why = f"serves {seen.load:.4g} items/s of {seen.saturation:.4g} at saturation"
    elif late:
        why = f"{seen.backlog_s:.3g} s of work waits, the limit is {backlog_limit:.3g} s"
    elif state == "Interfered":
        why = _latencies(seen) if seen.items else "no batches any more to judge by"
    else:
        why = f"{_share(seen)} of saturation, {seen.backlog_s:.3g} s of work waits"
    return new, why


def _slow(state: State, seen: Observed, limits: Thresholds) -> bool:
    if seen.items == 0 or seen.profiled_s <= 0:
        return False
    over = seen.latency_s - seen.profiled_s
    if state == "Interfered":
        return seen.latency_s > limits.clear_ratio * seen.profiled_s and over > limits.interfered_least_s / 2
    enough = seen.items >= limits.least_items
    return enough and seen.latency_s > limits.interfered_ratio * seen.profiled_s and over > limits.interfered_least_s


def _latencies(seen: Observed) -> str:
    return f"a batch takes {seen.latency_s * 1e3:.3g} ms, its profile says {seen.profiled_s * 1e3:.3g} ms"


def _share(seen: Observed) -> str:
    return f"{seen.load / seen.saturation:.0%}" if seen.saturation > 0 else "an unknown share"

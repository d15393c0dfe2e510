"""Simulated devices: their kinds, and the profile of a variant on each kind. The profile is derived from the one measured on the CPU.

Each device kind is a linear model: the latency of a batch = fixed_ms + the CPU's time for that batch / speedup. So small models gain
nothing and large batches gain most, as on real accelerators. The models match published figures of a ResNet50 family whose CPU instance
with one thread takes 200 ms for an item (INFaaS, Romero et al., ATC 2021, Table 2, section 6 and figure 6):

    gpu (one V100 with TensorRT): 300 to 350 items/s one at a time, 750 items/s in batches of 8: 2.0 ms + 1.08 ms an item
    inferentia (one core):        20 ms one at a time, 100 items/s at most:                     10 ms + 10 ms an item

Load times are the middle of the values (TensorRT 5 to 10 s, Neuron 3 to 5 s) that fit the paper's range of 0.59 to 11 s. A TensorRT
instance took 1.34 GB, of which the model took 98 MB. The rest is added to the model's own memory. No memory figure is published for
Neuron. Its instances count like those of the CPU, 1 GB. The result is an estimate, named `synthetic`. It is never called a measurement.

A model in a GPU's memory can be moved to host memory and back, at 2.6 GB/s: 233 MB took 90 ms (Rafiqi, section 3.4.1). This is the last part
of its load time; the rest made it.
"""

from collections.abc import Iterable, Mapping
from math import inf, prod

from msgspec import Struct
from msgspec.structs import replace

from bus.datatypes import SIZES
from bus.messages.catalog import Profile, ProfileRow, TensorSpec, VariantRecord
from bus.messages.public import Tensor
from services.core.placement import Device

MOST = 16  # devices of one kind on a worker
PROVENANCE = "synthetic"
SINGLE_MS = "cpu_single_ms"  # attribute: ms that one item took on the CPU, which can compute the real outputs


class AcceleratorKind(Struct, frozen=True, kw_only=True):
    """One kind of accelerator. `largest_batch`, `cores` and `device_memory_mb` are those of a whole device. The module explains the other fields.

    transfer_mb_s: of a model, to host memory and back; None: its models cannot be kept there.
    """

    fixed_ms: float
    speedup: float
    load_ms: float
    memory_mb: float
    largest_batch: int
    cores: int
    device_memory_mb: float
    transfer_mb_s: float | None = None


KINDS: Mapping[str, AcceleratorKind] = {
    # A V100 has 16 GB and runs one batch at a time.
    "gpu": AcceleratorKind(
        fixed_ms=2.0,
        speedup=185.0,
        load_ms=7500.0,
        memory_mb=1240.0,
        largest_batch=64,
        cores=1,
        device_memory_mb=16384.0,
        transfer_mb_s=2600.0,
    ),
    # One chip has four cores with 8 GB together. Its compiled models are for small batches.
    "inferentia": AcceleratorKind(
        fixed_ms=10.0,
        speedup=20.0,
        load_ms=4000.0,
        memory_mb=1000.0,
        largest_batch=8,
        cores=4,
        device_memory_mb=8192.0,
    ),
}


def simulated_devices(counts: Mapping[str, int], first: Mapping[str, int] = {}) -> list[Device]:
    """The devices `gpu-0`, `inferentia-0`, ... for a count of each kind. Raises ValueError; its text names the kind and the remedy.

    first: by kind, the number in the first name (after those of real devices).
    """
    for kind, count in counts.items():
        if kind not in KINDS:
            raise ValueError(f"{kind!r} cannot be simulated; the kinds are {', '.join(KINDS)}")
        if not 0 <= count <= MOST:
            raise ValueError(f"{kind} must be a count from 0 to {MOST}, not {count}")
    return [
        Device(name=f"{kind}-{number}", kind=kind, cores=made.cores, memory_mb=made.device_memory_mb, simulated=True)
        for kind, made in KINDS.items()
        for number in range(first.get(kind, 0), first.get(kind, 0) + counts.get(kind, 0))
    ]


def originals(variants: Iterable[VariantRecord], kind: str) -> list[VariantRecord]:
    """The measured variants of one model that get a simulated variant of this kind: at most one for each largest batch.

    They are fp32 on the fewest CPU threads, since the published ratios compare with that. onnxruntime is preferred to other frameworks.
    """
    best: dict[int, VariantRecord] = {}
    limit = KINDS[kind].largest_batch
    for record in sorted(variants, key=lambda r: (r.threads, r.framework != "ort", -r.max_batch, r.variant)):
        if record.hardware == "cpu" and not record.simulated and record.precision == "fp32" and record.profile.rows:
            best.setdefault(min(record.max_batch, limit), record)
    fewest = min((record.threads for record in best.values()), default=0)
    return [replace(r, max_batch=batch) for batch, r in sorted(best.items()) if r.threads == fewest]


def emulated(original: VariantRecord, kind: str, variant: str) -> VariantRecord:
    """This measured variant on a simulated device of this kind, under the name `variant`.

    It has the same artifact, and so the same accuracy. Latencies, load time, memory and throughput come from the model of the kind.
    """
    made = KINDS[kind]
    profile = original.profile
    rows = [_row(row, made) for row in profile.rows if row.batch <= original.max_batch] or [_row(profile.rows[0], made)]
    longest = max((row.length for row in rows if row.length is not None), default=None)
    single = max(profile.rows, key=lambda row: (-row.batch, row.length or 0)).p50_ms
    return replace(
        original,
        variant=variant,
        hardware=kind,
        simulated=True,
        dominated=False,
        contexts=1,
        profile=with_tiers(
            Profile(
                rows=rows,
                load_ms=made.load_ms,
                memory_mb=made.memory_mb + profile.memory_mb,
                saturation_qps=max(row.batch * 1000.0 / row.p50_ms for row in rows if row.length == longest),
                provenance=f"{PROVENANCE}: the CPU profile of {original.variant} scaled to a simulated {kind}",
            ),
            kind,
        ),
        attributes={**original.attributes, "original": original.variant, SINGLE_MS: f"{single:.6g}"},
    )


def with_tiers(profile: Profile, kind: str) -> Profile:
    """The profile with the parts of its load time, if a simulated device of this kind can keep models in host memory."""
    made = KINDS.get(kind)
    if made is None or made.transfer_mb_s is None:
        return profile
    transfer_ms = min(1000.0 * profile.memory_mb / made.transfer_mb_s, profile.load_ms)
    return replace(profile, init_ms=profile.load_ms - transfer_ms, transfer_ms=transfer_ms, host_mb=profile.memory_mb)


def computable(record: VariantRecord, items: int, seconds: float) -> bool:
    """Whether the CPU can compute a simulated variant's real outputs for `items` items within `seconds`."""
    return items * float(record.attributes.get(SINGLE_MS, "inf")) <= seconds * 1000.0


def zeros(specs: Iterable[TensorSpec], items: int) -> dict[str, Tensor]:
    """Outputs of these specs, all of fixed shapes, for this many items. Texts are empty: only their four-byte lengths."""
    found = {}
    for spec in specs:
        shape = [items, *spec.shape]
        found[spec.name] = Tensor(spec.datatype, shape, bytes(prod(shape) * (SIZES[spec.datatype] or 4)))
    return found


def one_at_a_time(kind: str) -> str:
    """Why an instance on a simulated device of this kind computes one batch at a time; empty: it computes several."""
    return "a core of this device computes one batch at a time" if kind == "inferentia" else ""


ROUNDING = 1e-9  # s


class SharedSpeed(Struct, eq=False):
    """The batches that overlap on one GPU. strength: how much they slow each other, from 0, not at all, to 1. Times: seconds.

    Their kernels take turns, and one with long kernels holds the device longer at each turn. A batch that takes t_i alone goes on at the rate

        1 / (1 + strength * sum of t_j / t_i over the others)

    So a short batch suffers most. At strength 1 the rates add up to 1: n equal batches take n times as long, and no work is lost. Below it,
    the device does more at once than one batch can use.
    """

    strength: float
    _running: dict[int, tuple[float, float]] = {}  # what is left of it, what it takes; alone
    _at: float = 0.0
    _busy: float = 0.0
    _number: int = 0

    def begin(self, seconds: float, now: float) -> int:
        """A batch begins that takes so long alone; returns its number. `advance` was called with the same time."""
        self._at = now
        self._number += 1
        self._running[self._number] = (seconds, max(seconds, 1e-9))
        return self._number

    def advance(self, now: float) -> list[int]:
        """The batches that have ended by now and were not returned before, in order."""
        ended = []
        while self._running:
            at = self.next_end() - ROUNDING
            until = min(at, now)
            passed = max(0.0, until - self._at)
            self._busy += passed
            total = self._total()
            self._running = {
                number: (left - passed * self._rate(takes, total), takes)
                for number, (left, takes) in self._running.items()
            }
            self._at = max(self._at, until)
            if at > now:
                break
            first = min(
                self._running, key=lambda number: self._running[number][0] / self._rate(self._running[number][1], total)
            )
            del self._running[first]
            ended.append(first)
        return ended

    def drop(self, number: int) -> None:
        """A batch ends early, or has ended. `advance` was called with the present time."""
        self._running.pop(number, None)

    def next_end(self) -> float:
        """When the next batch ends, if none begins before. Infinity if there is none."""
        total = self._total()
        return self._at + min((left / self._rate(takes, total) for left, takes in self._running.values()), default=inf)

    def busy(self, now: float) -> float:
        """Seconds until now in which at least one batch ran."""
        return self._busy + (max(0.0, now - self._at) if self._running else 0.0)

    def _total(self) -> float:
        return sum(takes for _, takes in self._running.values())

    def _rate(self, takes: float, total: float) -> float:
        return takes / (takes + self.strength * (total - takes))


def _row(row: ProfileRow, made: AcceleratorKind) -> ProfileRow:
    """The simulated row. A sleep has almost no spread, and takes no CPU."""
    ms = made.fixed_ms + row.p50_ms / made.speedup
    return ProfileRow(batch=row.batch, p50_ms=ms, p99_ms=ms, cpu_ms=0.0, wall_over_cpu=1.0, length=row.length)

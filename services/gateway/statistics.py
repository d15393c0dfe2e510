"""What became of the queries that this gateway passed on, in Triton's terms: counts and times by app, model, version and variant. Pure."""

from collections.abc import Iterator
from typing import Any

from infaas.answers import Answer

NS_PER_MS = 1e6
MOST = 4096  # variants counted apart; beyond, only by app
MOST_SIZES = 256  # of batches counted apart: clients choose how many items a query has


class ModelStatistics:
    """One model's numbers. Times in ns; batches: size to how many items were computed in such, and in how much time."""

    __slots__ = (
        "batches",
        "cached",
        "compute_ns",
        "defaults",
        "executions",
        "failed",
        "failed_ns",
        "items",
        "last_ms",
        "ok",
        "ok_ns",
        "queue_ns",
    )

    def __init__(self) -> None:
        self.ok = self.failed = self.cached = self.defaults = self.items = self.last_ms = 0
        self.executions = 0.0
        self.ok_ns = self.failed_ns = self.queue_ns = self.compute_ns = 0.0
        self.batches: dict[int, list[float]] = {}

    def answered(self, answer: Answer, items: int, ns: float, now: float) -> None:
        self.ok += 1
        self.ok_ns += ns
        self.last_ms = int(now * 1000.0)
        self.queue_ns += answer.queue_ms * NS_PER_MS
        if answer.default:
            self.defaults += 1  # nobody has computed it
            return
        self.items += items
        if answer.cached:
            self.cached += 1
            return
        compute = answer.compute_ms * NS_PER_MS
        batch = max(answer.batch, items, 1)
        self.compute_ns += compute
        self.executions += items / batch
        self._ran(batch, items / batch, compute * items / batch)

    def _ran(self, batch: int, times: float, ns: float) -> None:
        if batch not in self.batches and len(self.batches) >= MOST_SIZES:
            return
        row = self.batches.setdefault(batch, [0.0, 0.0])
        row[0] += times
        row[1] += ns

    def refused(self, ns: float, now: float) -> None:
        self.failed += 1
        self.failed_ns += ns
        self.last_ms = int(now * 1000.0)

    def add(self, other: "ModelStatistics") -> None:
        """Count what another one counted, too."""
        for name in self.__slots__:
            if name not in ("batches", "last_ms"):
                setattr(self, name, getattr(self, name) + getattr(other, name))
        self.last_ms = max(self.last_ms, other.last_ms)
        for batch, (times, ns) in other.batches.items():
            self._ran(batch, times, ns)


class Statistics:
    """Since this gateway started. Apps that do not exist are not counted: anybody may invent some."""

    def __init__(self) -> None:
        self._variants: dict[tuple[str, str, str, str], ModelStatistics] = {}  # app, model, version, variant
        self._apps: dict[str, ModelStatistics] = {}  # refusals, and what is not counted apart

    def answered(self, app: str, answer: Answer, items: int, ns: float, now: float) -> None:
        """A query with so many items was answered; ns: its time here. What is no variant's answer is its app's."""
        if answer.default:
            self._apps.setdefault(app, ModelStatistics()).answered(answer, items, ns, now)
            return
        key = (app, answer.model, answer.version, answer.variant)
        tally = self._variants.get(key)
        if tally is None:
            tally = ModelStatistics()
            if len(self._variants) < MOST:
                self._variants[key] = tally
            else:
                tally = self._apps.setdefault(app, tally)
        tally.answered(answer, items, ns, now)

    def refused(self, app: str, ns: float, now: float) -> None:
        self._apps.setdefault(app, ModelStatistics()).refused(ns, now)

    def of(
        self, app: str, model: str | None = None, variant: str | None = None, version: str | None = None
    ) -> Iterator[tuple[str, str, ModelStatistics]]:
        """Name, version and numbers: of the app, model or variant asked for, then of the variants that answered."""
        parts = [
            (key, tally)
            for key, tally in sorted(self._variants.items())
            if key[0] == app and model in (None, key[1]) and variant in (None, key[3]) and version in (None, key[2])
        ]
        whole = ModelStatistics()
        for _, tally in parts:
            whole.add(tally)
        if model is None and version is None and app in self._apps:
            whole.add(self._apps[app])
        yield ".".join(part for part in (app, model, variant) if part is not None), version or "", whole
        if variant is None:
            for (_, of_model, of_version, name), tally in parts:
                yield f"{app}.{of_model}.{name}", of_version, tally

    @property
    def apps(self) -> list[str]:
        """Those of which there is something to tell."""
        return sorted({key[0] for key in self._variants} | self._apps.keys())


def statistics_json(name: str, version: str, tally: ModelStatistics) -> dict[str, Any]:
    """One entry of Triton's `model_stats`."""
    return {
        "name": name,
        "version": version,
        "last_inference": tally.last_ms,
        "inference_count": tally.items,
        "execution_count": round(tally.executions),
        "inference_stats": {
            "success": _spent(tally.ok, tally.ok_ns),
            "fail": _spent(tally.failed, tally.failed_ns),
            "queue": _spent(tally.ok, tally.queue_ns),
            "compute_input": _spent(0, 0.0),  # part of compute_infer here
            "compute_infer": _spent(tally.ok - tally.cached - tally.defaults, tally.compute_ns),
            "compute_output": _spent(0, 0.0),
            "cache_hit": _spent(tally.cached, 0.0),
            "cache_miss": _spent(0, 0.0),
        },
        "batch_stats": [
            {
                "batch_size": batch,
                "compute_input": _spent(0, 0.0),
                "compute_infer": _spent(round(times), ns),
                "compute_output": _spent(0, 0.0),
            }
            for batch, (times, ns) in sorted(tally.batches.items())
        ],
        "memory_usage": [],
    }


def _spent(count: int, ns: float) -> dict[str, int]:
    return {"count": count, "ns": round(ns)}

"""Statistics of this gateway's queries as Triton reports them: counts and times by app, model, version and variant. Pure."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from msgspec import Struct

from infaas.answers import Answer

NS_PER_MS = 1e6
MAX_VARIANTS = 4096  # variants with numbers of their own; further ones count only for their app
MAX_BATCH_SIZES = 256  # batch sizes with numbers of their own: clients choose how many items a query has


@dataclass(slots=True, eq=False)
class ModelStatistics:
    """One model's numbers. Times in ns. batches: batch size to the number of executions and their time."""

    ok: int = 0
    failed: int = 0
    cached: int = 0
    defaults: int = 0
    items: int = 0
    last_ms: int = 0
    executions: float = 0.0
    ok_ns: float = 0.0
    failed_ns: float = 0.0
    queue_ns: float = 0.0
    compute_ns: float = 0.0
    batches: dict[int, list[float]] = field(default_factory=dict)

    def answered(self, answer: Answer, items: int, ns: float, now: float) -> None:
        self.ok += 1
        self.ok_ns += ns
        self.last_ms = int(now * 1000.0)
        self.queue_ns += answer.queue_ms * NS_PER_MS
        if answer.default:
            self.defaults += 1  # no model has computed it
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
        if batch not in self.batches and len(self.batches) >= MAX_BATCH_SIZES:
            return
        row = self.batches.setdefault(batch, [0.0, 0.0])
        row[0] += times
        row[1] += ns

    def refused(self, ns: float, now: float) -> None:
        self.failed += 1
        self.failed_ns += ns
        self.last_ms = int(now * 1000.0)

    def add(self, other: "ModelStatistics") -> None:
        """Add another model's numbers."""
        for name in self.__slots__:
            if name not in ("batches", "last_ms"):
                setattr(self, name, getattr(self, name) + getattr(other, name))
        self.last_ms = max(self.last_ms, other.last_ms)
        for batch, (times, ns) in other.batches.items():
            self._ran(batch, times, ns)


class Statistics(Struct, eq=False):
    """Numbers since this gateway started, of apps that are there: clients may invent any number of names, and apps come and go.

    known: whether an app is there.
    """

    known: Callable[[str], bool] = lambda _: True
    _variants: dict[tuple[str, str, str, str], ModelStatistics] = {}  # app, model, version, variant
    _apps: dict[str, ModelStatistics] = {}  # refusals, default outputs, and variants beyond MAX_VARIANTS

    def answered(self, app: str, answer: Answer, items: int, ns: float, now: float) -> None:
        """Count an answered query with so many items. ns: its time in this gateway. A default output counts for the app alone."""
        if answer.default:
            self._of_app(app).answered(answer, items, ns, now)
            return
        key = (app, answer.model, answer.version, answer.variant)
        tally = self._variants.get(key)
        if tally is None:
            self._forget()
            if len(self._variants) < MAX_VARIANTS:
                tally = self._variants[key] = ModelStatistics()
            else:
                tally = self._of_app(app)
        tally.answered(answer, items, ns, now)

    def refused(self, app: str, ns: float, now: float) -> None:
        if self.known(app):
            self._of_app(app).refused(ns, now)

    def _of_app(self, app: str) -> ModelStatistics:
        if app not in self._apps:
            self._forget()
        return self._apps.setdefault(app, ModelStatistics())

    def _forget(self) -> None:
        """Something new comes, which is seldom: the moment to forget apps that are gone."""
        self._variants = {key: tally for key, tally in self._variants.items() if self.known(key[0])}
        self._apps = {app: tally for app, tally in self._apps.items() if self.known(app)}

    def of(
        self, app: str, model: str | None = None, variant: str | None = None, version: str | None = None
    ) -> Iterator[tuple[str, str, ModelStatistics]]:
        """Name, version and numbers: first of what is asked for (app, model or variant), then of each variant that answered."""
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

    def all(self, only: str = "") -> Iterator[tuple[str, str, ModelStatistics]]:
        """`of` each app with numbers, or of this one."""
        for app in sorted({key[0] for key in self._variants} | self._apps.keys()):
            if only in ("", app):
                yield from self.of(app)


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
            "compute_input": _spent(0, 0.0),  # compute_infer includes it
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

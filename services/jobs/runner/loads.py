"""Variants that offline work had loaded: ordered once, refused for a while, and let go again when nobody else uses them. Pure."""

from collections.abc import Iterator

from bus.messages.catalog import VariantRecord
from bus.messages.fleet import EnsureLoaded, LoadReply, Release, WorkerHeartbeat
from bus.subjects import Subjects
from services.core.actor import Effect, Publish

AGAIN_S = 5.0  # before an order that nothing came of is repeated
REFUSED_S = 10.0  # before a variant that found no room is tried again
IDLE_S = 10.0  # that a variant of ours stays when no job wants it any more


class Loads:
    """One worker's. An instance that online queries use is not ours any more, and stays."""

    def __init__(self, name: str, worker: str, subjects: Subjects) -> None:
        self._name = name
        self._load = subjects.worker(worker, "load")
        self._release = subjects.worker(worker, "release")
        self._replies = subjects.loads(name)
        self._ordered: dict[str, float] = {}
        self._refused: dict[str, float] = {}
        self._ours: dict[str, float] = {}  # variant -> when it was used last

    def is_refused(self, variant: str, now: float) -> bool:
        return self._refused.get(variant, float("-inf")) > now

    def used(self, variant: str, now: float) -> None:
        if variant in self._ours:
            self._ours[variant] = now

    def order(self, record: VariantRecord, app: str, now: float) -> Iterator[Effect]:
        """Have one instance loaded, unless that was asked for a moment ago."""
        if now - self._ordered.get(record.variant, float("-inf")) < AGAIN_S:
            return
        self._ordered[record.variant] = self._ours[record.variant] = now
        order = EnsureLoaded(variant=record, at_least=1, app=app, orderer=self._name, reason="an offline job needs it")
        yield Publish(self._load, order, self._replies)

    def replied(self, reply: LoadReply, now: float) -> None:
        if reply.reason:
            self._refused[reply.variant] = now + REFUSED_S
            self._ours.pop(reply.variant, None)
            self._ordered.pop(reply.variant, None)

    def seen(self, beat: WorkerHeartbeat) -> None:
        """What serves online queries (offline work does not count as load) is not ours to let go."""
        for instance in beat.instances:
            if instance.load > 0:
                self._ours.pop(instance.variant, None)

    def release(self, wanted: set[str], now: float) -> Iterator[Effect]:
        """Let go what no job wants any more."""
        for variant, used in list(self._ours.items()):
            if variant in wanted:
                self._ours[variant] = now
            elif now - used >= IDLE_S:
                del self._ours[variant]
                self._ordered.pop(variant, None)
                yield Publish(
                    self._release,
                    Release(variant=variant, keep=0, orderer=self._name, reason="no offline job needs it any more"),
                )

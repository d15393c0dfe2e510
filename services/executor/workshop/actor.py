"""One order at a time: the workshop shares its cores with serving. Orders that wait say so, or the registrar gives them up."""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping

from msgspec import Struct

from bus.messages.work import BuildVariants, InspectModel, WorkFinished, WorkProgress
from bus.subjects import Subjects
from services.core.actor import (
    Actor,
    After,
    Cancel,
    Do,
    Done,
    Effect,
    Envelope,
    Failed,
    Inlet,
    Publish,
    Stopping,
    TimedOut,
    Watch,
)
from services.executor.workshop.orders import WorkshopOrder

REMIND_S = 20.0
GRACE_S = 30.0  # beyond its limit, for the helper to say itself that it was too slow


class Remind(Struct, frozen=True):
    """Time to tell the registrar of orders that wait."""


class WorkshopActor(Actor):
    """Queues orders and starts a helper for each; the helper itself publishes what it finds out.

    seconds: after which an order that is under way counts as failed. devices: the worker's accelerators, kind to address.
    """

    def __init__(
        self, worker: str, subjects: Subjects, seconds: float, devices: Mapping[str, str] | None = None
    ) -> None:
        self._worker, self._subjects, self._seconds = worker, subjects, seconds
        self._devices = dict(devices or {})
        self._waiting: deque[WorkshopOrder] = deque()
        self._current: WorkshopOrder | None = None
        self._count = 0

    @property
    def inlets(self) -> tuple[Inlet, ...]:
        return (
            Inlet(subject=self._subjects.workshop(self._worker, "inspect"), message=InspectModel),
            Inlet(subject=self._subjects.workshop(self._worker, "build"), message=BuildVariants),
        )

    @property
    def watches(self) -> tuple[Watch, ...]:
        return ()

    def handle(self, envelope: Envelope) -> Iterable[Effect]:
        message = envelope.message
        if isinstance(message, InspectModel):
            return self._take(self._errand(inspect=message))
        if isinstance(message, BuildVariants):
            return self._take(self._errand(build=message))
        if isinstance(message, Done | Failed | TimedOut) and message.id == self._count:
            return self._ended(message)
        if isinstance(message, Remind):
            return self._remind()
        if isinstance(message, Stopping):
            return self._stop()
        return ()

    def _errand(self, inspect: InspectModel | None = None, build: BuildVariants | None = None) -> WorkshopOrder:
        return WorkshopOrder(worker=self._worker, devices=self._devices, inspect=inspect, build=build)

    def _take(self, errand: WorkshopOrder) -> Iterator[Effect]:
        same = (errand.registration, errand.kind)
        if any((one.registration, one.kind) == same for one in (self._current, *self._waiting) if one is not None):
            return  # the registrar asked again: it is under way
        self._waiting.append(errand)
        yield from self._next()
        if self._waiting:
            yield from self._remind()

    def _next(self) -> Iterator[Effect]:
        if self._current is not None or not self._waiting:
            return
        self._current = self._waiting.popleft()
        self._count += 1
        yield Do(self._count, self._current, self._seconds + GRACE_S)

    def _ended(self, message: Done | Failed | TimedOut) -> Iterator[Effect]:
        errand, self._current = self._current, None
        if errand is not None and not isinstance(message, Done):
            why = message.error if isinstance(message, Failed) else f"it took longer than {self._seconds:g} s"
            yield self._finished(errand, f"the workshop failed: {why}")
        yield from self._next()

    def _remind(self) -> Iterator[Effect]:
        if not self._waiting:
            yield Cancel("remind")
            return
        for errand in self._waiting:
            yield Publish(
                self._subjects.registrar("progress"),
                WorkProgress(
                    registration=errand.registration,
                    worker=self._worker,
                    step="waiting for another model",
                    progress=0.0,
                ),
            )
        yield After("remind", REMIND_S, Remind())

    def _stop(self) -> Iterator[Effect]:
        for errand in (self._current, *self._waiting):
            if errand is not None:
                yield self._finished(errand, "the worker is stopping", lost=True)
        self._current = None
        self._waiting.clear()

    def _finished(self, errand: WorkshopOrder, reason: str, *, lost: bool = False) -> Effect:
        return Publish(
            self._subjects.registrar("finished"),
            WorkFinished(
                registration=errand.registration, worker=self._worker, order=errand.kind, reason=reason, lost=lost
            ),
        )

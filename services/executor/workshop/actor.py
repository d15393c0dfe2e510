"""The workshop's queue: one order at a time, since the workshop shares its cores with serving.

The registrar is told of the orders that wait; otherwise it would give them up. The helper that the executor's process starts for an order
gets it on standard input: no credentials are in the environment.
"""

from collections import deque
from collections.abc import Iterable, Mapping

from msgspec import Struct

from bus.login import Login
from bus.messages.work import ArtifactsKept, BuildVariants, CancelWork, InspectModel, WorkFinished, WorkProgress
from bus.subjects import EXECUTORS, Subjects
from services.core.actor import (
    NOTHING,
    After,
    Cancel,
    Do,
    Done,
    Effect,
    Envelope,
    Failed,
    Handler,
    Inlet,
    Publish,
    Started,
    Stopping,
    TableActor,
    TimedOut,
)
from services.core.settings import RegistrarSettings, Settings

REMIND_S = 20.0
GRACE_S = 30.0  # beyond its limit, in which the helper itself reports that it was too slow


class WorkshopOrder(Struct, frozen=True, kw_only=True):
    """One order for one worker. Exactly one of inspect and build is set.

    devices: addresses of the accelerators that variants are measured on, by kind ("gpu": "cuda:0").
    """

    worker: str
    devices: dict[str, str] = {}
    inspect: InspectModel | None = None
    build: BuildVariants | None = None

    @property
    def registration(self) -> str:
        order = self.inspect or self.build
        return order.registration if order is not None else ""

    @property
    def of_torch(self) -> bool:
        order = self.inspect or self.build
        return order is not None and order.format in ("pt2", "torchscript")

    @property
    def announces(self) -> bool:
        """Whether it only says that a model will come."""
        return self.inspect is not None and not self.inspect.object

    @property
    def kind(self) -> str:
        return "inspect" if self.inspect is not None else "build"

    @property
    def step(self) -> tuple[str, str, bool]:
        """Which of a registration's orders it is."""
        return self.registration, self.kind, self.build is not None and bool(self.build.cascades)


class StopOrder(Struct, frozen=True):
    """Stop the order of this registration that is being carried out; comes back as None once its processes are gone. "": only those that wait."""

    registration: str


class DropCopies(Struct, frozen=True):
    """Delete a worker's copies of files, and engines made of them, that are not kept."""

    worker: str
    kept: ArtifactsKept


class HelperInput(Struct, frozen=True, kw_only=True):
    """What its process reads, once or, for the orders of one registration, again: one order, the bus to publish on, the limits of sandboxes, and an empty directory that the executor's process removes."""

    order: WorkshopOrder
    url: str
    login: Login = Login()
    prefix: str
    limits: RegistrarSettings
    directory: str


class RemindDue(Struct, frozen=True):
    """Timer: tell the registrar of the orders that wait."""


class WorkshopActor(TableActor):
    """Queues orders and starts a helper for each. The helper itself publishes its results.

    devices: the worker's accelerators, kind to address.
    """

    def __init__(
        self, worker: str, subjects: Subjects, settings: RegistrarSettings, devices: Mapping[str, str] | None = None
    ) -> None:
        self._worker, self._subjects, self._settings = worker, subjects, settings
        self._devices = dict(devices or {})
        self._waiting: deque[WorkshopOrder] = deque()
        self._current: WorkshopOrder | None = None
        self._count = 0
        self.inlets = (
            Inlet(subject=subjects.workshop(worker, "inspect"), message=InspectModel, queue=EXECUTORS),
            Inlet(subject=subjects.workshop(worker, "build"), message=BuildVariants, queue=EXECUTORS),
            Inlet(subject=subjects.workshop(worker, "cancel"), message=CancelWork),
            Inlet(subject=subjects.registrar("kept"), message=ArtifactsKept),
        )
        self._on: dict[type, Handler] = {
            InspectModel: self._inspect,
            BuildVariants: self._build,
            CancelWork: self._cancel,
            ArtifactsKept: lambda e: (Do("copies", DropCopies(worker, e.message), GRACE_S),),
            Done: self._ended,
            Failed: self._ended,
            TimedOut: self._ended,
            RemindDue: lambda _: self._report_waiting(),
            Stopping: lambda _: self._stop(),
            Started: lambda _: NOTHING,
        }

    def _inspect(self, envelope: Envelope) -> Iterable[Effect]:
        return self._take(WorkshopOrder(worker=self._worker, devices=self._devices, inspect=envelope.message))

    def _build(self, envelope: Envelope) -> Iterable[Effect]:
        return self._take(WorkshopOrder(worker=self._worker, devices=self._devices, build=envelope.message))

    def _take(self, order: WorkshopOrder) -> Iterable[Effect]:
        if any(one.step == order.step for one in (self._current, *self._waiting) if one is not None):
            return NOTHING  # the registrar asked again: the order waits or is being carried out
        if order.announces and (not order.of_torch or self._current is not None or self._waiting):
            return NOTHING
        self._waiting.append(order)
        return (*self._next(), *(self._report_waiting() if self._waiting else NOTHING))

    def _cancel(self, envelope: Envelope) -> Iterable[Effect]:
        """The order that is being carried out comes back from the edge, and the next one begins."""
        registration = envelope.message.registration
        self._waiting = deque(order for order in self._waiting if order.registration != registration)
        if self._current is None or self._current.registration != registration:
            return self._report_waiting()
        return (Do("stop", StopOrder(registration), GRACE_S),)

    def _next(self) -> Iterable[Effect]:
        if self._current is not None or not self._waiting:
            return NOTHING
        self._current = self._waiting.popleft()
        self._count += 1
        return (Do(self._count, self._current, self._settings.seconds + GRACE_S),)

    def _ended(self, envelope: Envelope) -> Iterable[Effect]:
        message: Done | Failed | TimedOut = envelope.message
        if message.id != self._count:
            return NOTHING
        order, self._current = self._current, None
        if order is None or isinstance(message, Done):
            return self._next()
        why = message.error if isinstance(message, Failed) else f"it took longer than {self._settings.seconds:g} s"
        return (self._finished(order, f"the workshop failed: {why}"), *self._next())

    def _report_waiting(self) -> Iterable[Effect]:
        if not self._waiting:
            return (Cancel("remind"),)
        subject, step = self._subjects.registrar("progress"), "waiting for another model"
        reports = [
            Publish(
                subject, WorkProgress(registration=order.registration, worker=self._worker, step=step, progress=0.0)
            )
            for order in self._waiting
        ]
        return (*reports, After("remind", REMIND_S, RemindDue()))

    def _stop(self) -> Iterable[Effect]:
        orders = [order for order in (self._current, *self._waiting) if order is not None]
        self._current = None
        self._waiting.clear()
        told = [self._finished(order, "the worker is stopping", lost=True) for order in orders]
        return [*told, Do("stop", StopOrder(""), GRACE_S)]

    def _finished(self, order: WorkshopOrder, reason: str, *, lost: bool = False) -> Effect:
        return Publish(
            self._subjects.registrar("finished"),
            WorkFinished(
                registration=order.registration, worker=self._worker, order=order.kind, reason=reason, lost=lost
            ),
        )


def make_workshop(settings: Settings, subjects: Subjects, worker: str, devices: Mapping[str, str]) -> WorkshopActor:
    """The workshop of a worker. devices: its accelerators, kind to address."""
    return WorkshopActor(worker, subjects, settings.registrar, devices)

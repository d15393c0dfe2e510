"""Collects what one turn of the controller brings about. It decides nothing. Pure."""

from typing import Any

from bus.messages.events import ScalingEvent, WorkerEvent
from bus.messages.scaling import MachineRecord
from bus.subjects import Subjects
from services.autoscaler.vms.commands import Drop, Save
from services.core.actor import Do, Effect, Publish, Record

STORE_S = 5.0  # s for one write to the bucket


class Turn:
    """now, epoch: of this turn; epoch 0: not leading, nothing may be ordered."""

    def __init__(self, name: str, subjects: Subjects, *, simulated: bool = False) -> None:
        self.name = name
        self.subjects = subjects
        self.now = 0.0
        self.epoch = 0
        self._mark = "simulated: " if simulated else ""
        self._out: list[Effect] = []
        self._numbers = 0

    def begin(self, now: float, epoch: int) -> None:
        self.now, self.epoch = now, epoch
        self._out = []

    def effects(self) -> list[Effect]:
        return self._out

    def add(self, effect: Effect) -> None:
        self._out.append(effect)

    def order(self, worker: str, order: str, message: Any, reply: str = "") -> None:
        """An order to a worker's monitor."""
        self._out.append(Publish(self.subjects.worker(worker, order), message, reply))

    def reply_subject(self) -> str:
        """A new one, whose last token is a number of our own."""
        self._numbers += 1
        return self.subjects.controller(f"reply.{self.name}.{self._numbers}")

    def save(self, record: MachineRecord) -> None:
        self._out.append(Do(("save", record.worker), Save(record=record), STORE_S))

    def drop(self, worker: str) -> None:
        self._out.append(Do(("drop", worker), Drop(worker=worker), STORE_S))

    def scaling(self, action: str, worker: str | None, reason: str, count: int = 1) -> None:
        event = ScalingEvent(
            time=self.now,
            scaler="vm",
            worker=worker,
            app=None,
            model=None,
            variant=None,
            action=action,
            count=count,
            reason=self._mark + reason,
        )
        self._out.append(Record(event))

    def worker_state(self, worker: str, hardware: str, old: str, new: str, reason: str) -> None:
        event = WorkerEvent(
            time=self.now,
            worker=worker,
            hardware=hardware,
            from_state=old,
            to_state=new,
            reason=self._mark + reason,
        )
        self._out.append(Record(event))

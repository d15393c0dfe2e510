"""Starts and stops workers on this machine while `infaas up` runs, as the VM-autoscaler orders over the bus.

An order carries the epoch of its controller. An order with a smaller epoch than an earlier order's, or than the leader record's, is
refused: a controller that has lost its lease can no longer act.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Iterable
from contextlib import suppress

from msgspec import Struct

from bus.codec import BadMessage, decode, encode
from bus.messages.scaling import LeaderRecord, MachineReply, StartMachine, StopMachine
from bus.port import Bus, BusError, Delivery, KeyValueEntry, Subscription
from bus.rights import from_stream
from bus.subjects import Subjects, valid_name
from services.shell.host.process import ServerError

log = logging.getLogger(__name__)

HOSTS = "machines"  # queue group: one of several hosts starts a worker
LEADER = "controller"
MACHINE = "machine."


class LocalWorkers(Struct, eq=False):
    """The workers of this machine. launch(worker, kind) starts one (may raise ServerError); end(worker) stops one and waits for its end."""

    bus: Bus
    subjects: Subjects
    kinds: Collection[str]
    launch: Callable[[str, str], None]
    end: Callable[[str], Awaitable[None]]
    _epoch: int = 0
    _present: set[str] = set()  # started, or booting
    _ended: set[str] = set()
    _booting: dict[str, asyncio.TimerHandle] = {}
    _ending: dict[str, asyncio.Task[None]] = {}
    _open: list[Subscription] = []

    async def open(self, initial: Iterable[str]) -> None:
        """Take orders from now on. initial: workers that run already. Records of workers of an earlier run are deleted."""
        self._present.update(initial)
        control = await self.bus.key_value(self.subjects.control_bucket)
        for key in await control.keys():
            if key.startswith(MACHINE):
                await control.delete(key)
        self._open = [
            await control.watch(self._changed),
            await self.bus.subscribe(self.subjects.machines("start"), self._start, HOSTS),
            await self.bus.subscribe(self.subjects.machines("stop"), self._stop),
        ]

    async def close(self) -> None:
        """Start nothing more, and wait until the workers that are being stopped have ended."""
        for timer in self._booting.values():
            timer.cancel()
        self._booting.clear()
        for subscription in self._open:
            with suppress(BusError):
                await subscription.drain()
        self._open.clear()
        if self._ending:
            await asyncio.wait(self._ending.values())

    # -- orders

    def _changed(self, entry: KeyValueEntry | None) -> None:
        if entry is not None and entry.key == LEADER and entry.value is not None:
            with suppress(BadMessage):
                self._epoch = max(self._epoch, decode(LeaderRecord, entry.value).epoch)

    def _start(self, delivery: Delivery) -> None:
        if from_stream(delivery.reply, delivery.headers):
            return
        try:
            order = decode(StartMachine, delivery.data)
        except BadMessage as error:
            self._reply(delivery, "", str(error))
            return
        self._reply(delivery, order.worker, self._obstacle(order) or self._begin(order))

    def _obstacle(self, order: StartMachine) -> str:
        if outdated := self._outdated(order.epoch):
            return outdated
        if not valid_name(order.worker):
            return f"worker {order.worker!r} must be 1 to 64 letters, digits, - or _, a letter or digit first"
        if order.kind not in self.kinds:
            return f"there is no kind of machine {order.kind!r} here: {', '.join(sorted(self.kinds))}"
        if not 0 <= order.boot_s < float("inf"):
            return f"boot_s must be at least 0 s, not {order.boot_s}"
        if order.worker in self._ended:
            return f"{order.worker} has been stopped: names are not used again"
        return ""

    def _begin(self, order: StartMachine) -> str:
        if order.worker in self._present:
            return ""
        self._present.add(order.worker)
        if order.boot_s > 0:
            loop = asyncio.get_running_loop()
            self._booting[order.worker] = loop.call_later(order.boot_s, self._booted, order.worker, order.kind)
            return ""
        return self._launched(order.worker, order.kind)

    def _booted(self, worker: str, kind: str) -> None:
        del self._booting[worker]
        self._launched(worker, kind)

    def _launched(self, worker: str, kind: str) -> str:
        try:
            self.launch(worker, kind)
        except ServerError as error:
            log.error("cannot start worker %s: %s", worker, error)
            self._clean_up(worker)
            return str(error)
        return ""

    def _stop(self, delivery: Delivery) -> None:
        if from_stream(delivery.reply, delivery.headers):
            return
        try:
            order = decode(StopMachine, delivery.data)
        except BadMessage as error:
            self._reply(delivery, "", str(error))
            return
        if outdated := self._outdated(order.epoch):
            self._reply(delivery, order.worker, outdated)
            return
        task = self._clean_up(order.worker)
        task.add_done_callback(lambda done: self._reply(delivery, order.worker, _failure(done)))

    def _clean_up(self, worker: str) -> asyncio.Task[None]:
        """Stop a worker, or the start of one. A second call gets the same task."""
        task = self._ending.get(worker)
        if task is None:
            task = self._ending[worker] = asyncio.get_running_loop().create_task(self._ended_now(worker))
            task.add_done_callback(lambda _: self._ending.pop(worker, None))
        return task

    async def _ended_now(self, worker: str) -> None:
        timer = self._booting.pop(worker, None)
        if timer is not None:
            timer.cancel()
        await self.end(worker)
        self._present.discard(worker)
        self._ended.add(worker)

    # -- inside

    def _outdated(self, epoch: int) -> str:
        if epoch < self._epoch:
            return f"the order is of epoch {epoch}, another controller leads since epoch {self._epoch}"
        self._epoch = epoch
        return ""

    def _reply(self, delivery: Delivery, worker: str, error: str) -> None:
        if not delivery.reply:
            return
        with suppress(BusError):
            self.bus.publish(delivery.reply, encode(MachineReply(worker=worker, error=error)))


def _failure(task: asyncio.Task[None]) -> str:
    error = None if task.cancelled() else task.exception()
    return "" if error is None else str(error) or repr(error)

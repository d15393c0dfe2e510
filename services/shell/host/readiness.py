"""When a system can answer queries: every worker has a live device, dispatchers know them, the registrar listens."""

import asyncio
from collections.abc import Iterable
from contextlib import suppress

from bus.codec import BadMessage, decode, encode
from bus.messages.fleet import WorkerHeartbeat
from bus.messages.public import Listing, ListRequest
from bus.port import Bus, BusError, Delivery, NoResponders
from bus.subjects import Subjects
from services.core.hosts import reachable

_PAUSE = 0.05  # s between checks
_ASK = 1.0  # s to wait for one reply


class Readiness:
    """Watches a system until it is ready; `missing` says in words what is still to come."""

    def __init__(
        self, bus: Bus, subjects: Subjects, workers: Iterable[str], addresses: Iterable[tuple[str, int]] = ()
    ) -> None:
        """addresses: those, with ports, that must take connections."""
        self._addresses = list(addresses)
        self._bus = bus
        self._subjects = subjects
        self._expected = frozenset(workers)
        self._alive: set[str] = set()
        self.missing = "everything"

    async def wait(self) -> None:
        """Return once the system is ready. There is no limit: cancel it, and read `missing`."""
        watching = await self._bus.subscribe(self._subjects.worker_heartbeat(), self._heard)
        try:
            while missing := await self._check():
                self.missing = missing
                await asyncio.sleep(_PAUSE)
        finally:
            with suppress(BusError):
                await watching.drain()
        self.missing = ""

    def _heard(self, delivery: Delivery) -> None:
        with suppress(BadMessage):
            heartbeat = decode(WorkerHeartbeat, delivery.data)
            if any(device.alive for device in heartbeat.devices):
                self._alive.add(heartbeat.worker)
            else:
                self._alive.discard(heartbeat.worker)

    async def _check(self) -> str:
        """What is missing now; "" for nothing."""
        if silent := self._expected - self._alive:
            return f"a live device of worker {', '.join(sorted(silent))}"
        try:
            reply = await self._bus.request(self._subjects.list("workers"), encode(ListRequest()), _ASK)
            known = {str(item.get("worker", "")) for item in decode(Listing, reply.data).items}
        except (BusError, BadMessage) as error:
            return f"a dispatcher ({error})"
        if unknown := self._expected - known:
            return f"worker {', '.join(sorted(unknown))} in the dispatcher's view"
        try:
            # Any reply, a refusal too, and even silence: somebody listens.
            await self._bus.request(self._subjects.registration("none"), b"", _ASK)
        except NoResponders:
            return "the registrar"
        except BusError:
            pass
        for address, port in self._addresses:
            if not await _takes_connections(address, port):
                return "the gateway"
        return ""


async def _takes_connections(address: str, port: int) -> bool:
    try:
        _, writer = await asyncio.wait_for(asyncio.open_connection(reachable(address), port), _ASK)
    except (OSError, TimeoutError):
        return False
    writer.close()
    return True

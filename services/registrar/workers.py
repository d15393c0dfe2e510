"""The workers that could do registration work, as their heartbeats tell."""

from collections.abc import Container
from math import inf

from bus.messages.fleet import WorkerHeartbeat

CPU = "cpu"


class Workers:
    """Who is alive, and who takes the next order. timeout: seconds without a heartbeat after which a worker gets no orders."""

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self._beats: dict[str, WorkerHeartbeat] = {}
        self._heard: dict[str, float] = {}
        self._not_before: dict[str, float] = {}

    def heard(self, beat: WorkerHeartbeat, now: float) -> None:
        """Take a heartbeat."""
        self._beats[beat.worker] = beat
        self._heard[beat.worker] = now

    def hold(self, worker: str, until: float) -> None:
        """Give this worker no order before `until`."""
        self._not_before[worker] = until

    def silent_for(self, worker: str, now: float) -> float:
        """Seconds since its last heartbeat; infinite when it has said goodbye."""
        beat = self._beats.get(worker)
        return inf if beat is None or beat.leaving else now - self._heard[worker]

    def any_alive(self, now: float, hardware: str = CPU) -> bool:
        """Whether there is a worker at all that could take orders for such a device, now or when it is free."""
        return any(self._takes_orders(worker, now) and self._has(worker, hardware) for worker in self._beats)

    def choose(self, now: float, busy: Container[str], avoid: str | None = None, hardware: str = CPU) -> str | None:
        """The idlest worker with such a device that takes orders and is not busy with one.

        `avoid` only where there is no other.
        """
        free = [
            worker
            for worker in self._beats
            if worker not in busy
            and self._takes_orders(worker, now)
            and now >= self._not_before.get(worker, 0.0)
            and self._has(worker, hardware)
        ]
        return min(free, key=lambda worker: (worker == avoid, self._utilisation(worker), worker), default=None)

    def cores(self, worker: str, hardware: str) -> int:
        """Cores of the worker's devices of this kind; 1 when unknown."""
        beat = self._beats.get(worker)
        return max((device.cores for device in beat.devices if device.kind == hardware), default=1) if beat else 1

    def simulated_kinds(self, now: float, within: float) -> set[str]:
        """Device kinds that workers heard in the last so many seconds simulate."""
        heard = [beat for worker, beat in self._beats.items() if now - self._heard[worker] <= within]
        return {device.kind for beat in heard for device in beat.devices if device.simulated}

    def accelerators(self, now: float, within: float) -> dict[str, str]:
        """Kinds of real device besides the CPU, of workers heard in the last so many seconds that take orders.

        With each a text that is another one as soon as its first worker has started anew.
        """
        found: dict[str, str] = {}
        for worker in sorted(self._beats):
            beat = self._beats[worker]
            if now - self._heard[worker] <= within and self._takes_orders(worker, now):
                for device in beat.devices:
                    if device.kind != CPU and not device.simulated and device.alive:
                        found.setdefault(device.kind, f"{worker} {beat.incarnation}")
        return found

    def beside(self, worker: str, device: str) -> bool:
        """Whether this is a device beside the worker's CPU; one that is not known counts as the CPU."""
        beat = self._beats.get(worker)
        return any(one.kind != CPU for one in beat.devices if one.device == device) if beat else False

    def _has(self, worker: str, hardware: str) -> bool:
        """Every worker has a CPU."""
        devices = self._beats[worker].devices
        return hardware == CPU or any(one.kind == hardware and not one.simulated and one.alive for one in devices)

    def _takes_orders(self, worker: str, now: float) -> bool:
        return self.silent_for(worker, now) <= self._timeout and not self._beats[worker].draining

    def _utilisation(self, worker: str) -> float:
        return max((device.utilisation for device in self._beats[worker].devices if not device.simulated), default=0.0)

"""Have one worker drain before its processes are stopped: it takes nothing new, and what is queued on it is answered."""

import asyncio
import logging

from bus.codec import BadMessage, decode, encode
from bus.messages.fleet import WorkerHeartbeat
from bus.messages.scaling import Drain
from bus.port import Bus, BusError, Delivery
from bus.subjects import Subjects

log = logging.getLogger(__name__)

ORDERER = "worker"
QUIET_S = 1.0  # s for which nothing must have been queued: what was under way to the worker has arrived by then
SILENT_S = 3.0  # s after which a worker of which nothing is heard has no monitor that could drain it
TELL_S = 0.5  # s until the order is given again while no heartbeat shows that it was heard


async def drain(bus: Bus, subjects: Subjects, worker: str, patience: float) -> bool:
    """Returns once it is empty, at the latest after `patience` s (0: at once); whether it was. Never raises.

    The order has the epoch 0: it is nobody's but the machine's own. Its monitor's heartbeats say when it is heard and how much
    is left.
    """
    if patience <= 0:
        return False
    loop = asyncio.get_running_loop()
    quiet = asyncio.Event()
    heard: list[float] = []  # when it began to drain with nothing queued, as far as is known
    last = loop.time()

    def beat(delivery: Delivery) -> None:
        nonlocal last
        last = loop.time()
        try:
            message = decode(WorkerHeartbeat, delivery.data)
        except BadMessage:
            return
        if message.leaving:
            quiet.set()
        elif not message.draining or any(instance.queued for instance in message.instances):
            heard.clear()
        elif not heard:
            heard.append(loop.time())
        elif loop.time() - heard[0] >= QUIET_S:
            quiet.set()

    end = last + patience
    order = encode(Drain(epoch=0, reason="its processes are being stopped", orderer=ORDERER))
    try:
        hearing = await bus.subscribe(subjects.worker_heartbeat(worker), beat)
        while not quiet.is_set() and (left := end - loop.time()) > 0 and loop.time() - last < SILENT_S:
            if not heard:
                bus.publish(subjects.worker(worker, "drain"), order)
            try:
                await asyncio.wait_for(quiet.wait(), min(TELL_S, left))
            except TimeoutError:
                continue
        await hearing.drain()
    except BusError as error:
        log.warning("the worker %s is stopped without draining: %s", worker, error)
        return False
    if not quiet.is_set():
        log.warning("the worker %s is stopped although it has not become empty within %g s", worker, patience)
    return quiet.is_set()

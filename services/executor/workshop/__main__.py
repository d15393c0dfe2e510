"""`python -m services.executor.workshop`: orders of one registration from standard input, each answered when it is done; results on the bus."""

import asyncio
import errno
import os
import sys
from pathlib import Path

from bus.codec import BadMessage
from bus.natsbus import NatsBus
from bus.port import BusError
from bus.subjects import Subjects
from services.executor.workshop.actor import HelperInput
from services.executor.workshop.helper import Helper
from services.executor.workshop.sandbox.lockdown import NICE, hide
from services.executor.workshop.sandbox.supervisor import TorchForks
from services.shell.child import Channel


def main() -> int:
    """0 when the end of each order was published, else 1 with one line on standard error."""
    hide()
    os.nice(NICE)
    try:
        asyncio.run(_work(Channel.of_child()))
    except (BadMessage, BusError, OSError) as error:
        full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
        print(
            "the worker's disk is full: free some space there, and register again" if full else error, file=sys.stderr
        )
        return 1
    return 0


async def _work(channel: Channel) -> None:
    task = channel.received(HelperInput)
    forks = TorchForks() if task.order.of_torch else None
    bus = await NatsBus.connect(task.url, name=f"workshop-{task.order.worker}", **task.login.options())
    try:
        while True:
            where = Path(task.directory)
            if not task.order.announces:
                await Helper(bus, Subjects(task.prefix), task.limits, task.order, where, forks).run()
            channel.send(True)
            task = await asyncio.to_thread(channel.received, HelperInput)
    except EOFError:
        pass
    finally:
        if forks is not None:
            forks.close()
        await bus.drain()


if __name__ == "__main__":
    sys.exit(main())

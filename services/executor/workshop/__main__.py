"""`python -m services.executor.workshop`: one order from standard input, results on the bus."""

import asyncio
import sys
from pathlib import Path

from bus.codec import BadMessage, decode
from bus.natsbus import NatsBus
from bus.port import BusError
from bus.subjects import Subjects
from services.executor.workshop.actor import HelperInput
from services.executor.workshop.helper import Helper
from services.executor.workshop.sandbox.lockdown import hide


def main() -> int:
    """0 when the order's end was published, else 1 with one line on standard error."""
    hide()
    try:
        asyncio.run(_work(decode(HelperInput, sys.stdin.buffer.read())))
    except (BadMessage, BusError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


async def _work(task: HelperInput) -> None:
    bus = await NatsBus.connect(task.url, name=f"workshop-{task.order.worker}", **task.login.options())
    try:
        await Helper(bus, Subjects(task.prefix), task.limits, task.order, Path(task.directory)).run()
    finally:
        await bus.drain()


if __name__ == "__main__":
    sys.exit(main())

"""`python -m services.executor.workshop DIRECTORY`: one order from standard input, results on the bus."""

import asyncio
import os
import sys
from pathlib import Path

from bus.codec import BadMessage, decode
from bus.natsbus import NatsBus
from bus.port import BusError
from bus.subjects import Subjects
from services.executor.workshop.errand import Errand
from services.executor.workshop.helper import Helper
from services.executor.workshop.lockdown import hide
from services.shell.settings import Settings, SettingsError, load

NICE = 10  # serving comes first


def main() -> int:
    """0 when the order's end was published, else 1 with one line on standard error."""
    hide()
    os.nice(NICE)
    try:
        errand = decode(Errand, sys.stdin.buffer.read())
        asyncio.run(_work(load(), errand, Path(sys.argv[1])))
    except (BadMessage, BusError, SettingsError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


async def _work(settings: Settings, errand: Errand, directory: Path) -> None:
    bus = await NatsBus.connect(settings.bus.url, name=f"workshop-{errand.worker}")
    try:
        await Helper(bus, Subjects(settings.prefix), settings.registrar, errand, directory).run()
    finally:
        await bus.drain()


if __name__ == "__main__":
    sys.exit(main())

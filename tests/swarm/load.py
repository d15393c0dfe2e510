"""A client's load: a query at each beat, over TLS with an app's key, until SIGTERM; how each ended goes to standard output, a line each.

    python -m tests.swarm.load APP RATE    with INFAAS_NATS_URL, INFAAS_NKEY_SEED and INFAAS_TLS_CA

RATE may be changed by a line with another number on standard input. A line: {"id", "at" (Unix seconds of sending), "took" (s),
"how": "answered" | "refused" | "lost", and "worker", "variant" or "why"}; the last one: {"sent", "resent"}.
"""

import asyncio
import json
import secrets
import signal
import sys
import time
from typing import Any

import infaas
from infaas.client import Client
from infaas.demo import digits as data
from infaas.errors import InfaasError, NotConnected, Refused

ITEMS = 4


class Load:
    def __init__(self, client: Client, app: str, rate: float) -> None:
        self._client, self._app = client, app
        self.rate = rate
        self.sent = 0
        self.ending = asyncio.Event()
        self._under_way: set[asyncio.Task[None]] = set()
        digits = data.load(data.UNSEEN).x
        self._x = digits if app == "digits" else digits.reshape(-1, 1, 28, 28)
        self._run = secrets.token_hex(4)

    async def run(self) -> None:
        due = time.monotonic()
        while not self.ending.is_set():
            task = asyncio.create_task(self._one(self.sent))
            self._under_way.add(task)
            task.add_done_callback(self._under_way.discard)
            self.sent += 1
            due = max(due + 1 / self.rate, time.monotonic() - 1.0)
            try:
                await asyncio.wait_for(self.ending.wait(), max(0.0, due - time.monotonic()))
            except TimeoutError:
                pass
        if self._under_way:
            await asyncio.wait(self._under_way)

    async def _one(self, number: int) -> None:
        first = number * ITEMS % (len(self._x) - ITEMS)
        told: dict[str, Any] = {"id": f"{self._run}-{number}", "at": time.time()}
        begun = time.monotonic()
        try:
            answer = await self._client.query(
                self._app, self._x[first : first + ITEMS], id=told["id"], raise_refused=False
            )
            if isinstance(answer, Refused):
                told |= {"how": "refused", "why": str(answer)}
            else:
                told |= {"how": "answered", "worker": answer.worker, "variant": answer.variant}
        except InfaasError as error:
            told |= {"how": "lost", "why": f"{type(error).__name__}: {error}"}
        told["took"] = time.monotonic() - begun
        say(told)


def say(told: dict[str, Any]) -> None:
    print(json.dumps(told), flush=True)


async def main(app: str, rate: str) -> None:
    until = time.monotonic() + 30
    while True:
        try:
            client = await infaas.connect()
            break
        except NotConnected:
            if time.monotonic() > until:
                raise
            await asyncio.sleep(0.5)
    loop = asyncio.get_running_loop()
    async with client:
        load = Load(client, app, float(rate))
        loop.add_signal_handler(signal.SIGTERM, load.ending.set)

        def changed() -> None:
            if line := sys.stdin.readline():
                load.rate = float(line)
            else:
                loop.remove_reader(sys.stdin.fileno())

        loop.add_reader(sys.stdin.fileno(), changed)
        await load.run()
        loop.remove_reader(sys.stdin.fileno())
        say({"sent": load.sent, "resent": client.resent})


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))

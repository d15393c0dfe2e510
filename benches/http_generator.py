"""A load generator for HTTP in a process of its own: so many connections, each with one request under way.

`python benches/http_generator.py HOST PORT REQUESTS.npz --closed 8 --seconds 4`; prints one JSON line. REQUESTS holds `requests`
(uint8 [k, length]: whole requests, head and body), and `expected` (int64 [k]: the class that the answer must name, looked up in the last
`4 * classes` bytes of the reply, which are its raw scores, or with `--json` in its last list of numbers; -1: not looked at).
`--rate 100`: open loop, Poisson arrivals on `--closed` connections; latency counts from the moment when a request was due. `--latency-ms`: how late refusals are.
"""

import asyncio
import time
from typing import Any

from closed_loop import CHECKED, Run, generate


class Connection(asyncio.Protocol):
    """One request after the other."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.buffer = b""
        self.number = 0
        self.began = self.written = 0.0
        self.over = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport: Any = transport
        self.run.free(self.send)

    def send(self, began: float) -> None:
        if self.run.over:
            self.transport.close()
            return
        self.number = self.run.next()
        self.began = began
        self.written = time.perf_counter()
        self.transport.write(self.run.requests[self.number])

    def data_received(self, data: bytes) -> None:
        buffer = self.buffer = self.buffer + data if self.buffer else data
        end = buffer.find(b"\r\n\r\n")
        if end < 0:
            return
        at = buffer.lower().find(b"\ncontent-length:") + 1
        length = int(buffer[at + 15 : buffer.index(b"\r\n", at)])
        if len(buffer) < end + 4 + length:
            return
        self.buffer = b""
        run = self.run
        run.took(self.began)
        status = buffer[9:12]
        if status != b"200":
            run.failed(status.decode())
            if run.refusals is not None:
                run.refusals.came(self.written)
        elif run.sent % CHECKED == 0:
            run.check(self.number, buffer[end + 4 : end + 4 + length])
        run.free(self.send)

    def connection_lost(self, exc: Exception | None) -> None:
        del exc
        if not self.run.over:
            self.run.failed("lost")
        self.over.set_result(None)


async def ask(run: Run, host: str, port: int) -> None:
    _, connection = await asyncio.get_running_loop().create_connection(lambda: Connection(run), host, port)
    await connection.over


def begin(run: Run, host: str, port: int, _: int, group: asyncio.TaskGroup) -> None:
    group.create_task(ask(run, host, port))


if __name__ == "__main__":
    generate("Load on an HTTP server.", begin, paced=True)

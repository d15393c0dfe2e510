"""A load generator for HTTP in a process of its own: so many connections, each with one request under way.

`python benches/http_generator.py HOST PORT REQUESTS.npz --closed 8 --seconds 4`; prints one JSON line. REQUESTS holds `requests`
(uint8 [k, length]: whole requests, head and body), and `expected` (int64 [k]: the class that the answer must name, looked up in the last
`4 * classes` bytes of the reply, which are its raw scores; -1: not looked at).
"""

import argparse
import asyncio
import json
import resource
import time
from typing import Any

import numpy as np
import uvloop

CHECKED = 32  # one reply in so many is compared
PATIENCE = 5.0


class Connection(asyncio.Protocol):
    """One request after the other."""

    def __init__(self, run: "Run") -> None:
        self.run = run
        self.buffer = b""
        self.number = 0
        self.began = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport: Any = transport
        self.send()

    def send(self) -> None:
        run = self.run
        if run.over:
            self.transport.close()
            return
        self.number = run.sent % len(run.requests)
        run.sent += 1
        self.began = time.perf_counter()
        self.transport.write(run.requests[self.number])

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
        now = time.perf_counter()
        if run.measuring:
            run.latencies.append(now - self.began)
            run.last = now
        status = buffer[9:12]
        if status != b"200":
            name = status.decode()
            run.errors[name] = run.errors.get(name, 0) + 1
        elif run.sent % CHECKED == 0 and run.expected[self.number] >= 0:
            scores = np.frombuffer(buffer[end + 4 + length - 4 * run.classes : end + 4 + length], "<f4")
            run.wrong += int(scores.argmax()) != run.expected[self.number]
        self.send()

    def connection_lost(self, exc: Exception | None) -> None:
        del exc
        if not self.run.over:
            self.run.errors["lost"] = self.run.errors.get("lost", 0) + 1


class Run:
    """What all connections share."""

    def __init__(self, requests: list[bytes], expected: list[int], classes: int) -> None:
        self.requests, self.expected, self.classes = requests, expected, classes
        self.sent = self.wrong = 0
        self.last = 0.0
        self.errors: dict[str, int] = {}
        self.latencies: list[float] = []
        self.measuring = self.over = False


async def main(options: argparse.Namespace) -> None:
    with np.load(options.requests) as stored:
        requests = [row.tobytes() for row in stored["requests"]]
        expected = stored["expected"].tolist()
        run = Run(requests, expected, int(stored["classes"]))
    loop = asyncio.get_running_loop()
    for _ in range(options.closed):
        await loop.create_connection(lambda: Connection(run), options.host, options.port)
    await asyncio.sleep(1.0)  # warm-up
    began = time.perf_counter()
    run.measuring = True
    await asyncio.sleep(options.seconds)
    run.measuring = False
    run.over = True
    await asyncio.sleep(0.2)
    found = np.array(run.latencies) * 1000
    used = resource.getrusage(resource.RUSAGE_SELF)
    print(
        json.dumps(
            {
                "rate": len(found) / (run.last - began),
                "p50_ms": float(np.percentile(found, 50)),
                "p99_ms": float(np.percentile(found, 99)),
                "answered": len(found),
                "errors": run.errors,
                "wrong": run.wrong,
                "generator_cpu_s": used.ru_utime + used.ru_stime,
            }
        )
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Load on an HTTP server.")
    parser.add_argument("host")
    parser.add_argument("port", type=int)
    parser.add_argument("requests")
    parser.add_argument("--closed", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=4.0)
    uvloop.run(main(parser.parse_args()))

"""A load generator in a process of its own that speaks NATS by itself, so that it costs little and treats every server alike.

`python benches/generator.py URL SUBJECT BODIES.npz --closed 64 --seconds 4` or `--rate 5000`; prints one JSON line. BODIES holds
`heads` (uint8 [k, length]: a query without its last 16 bytes, or an echo's whole body), `key` (whether 16 random bytes follow)
and `expected` (int64 [k]: the class that the answer must name). Open loop: Poisson, latency from the moment when a query
should have been sent; how late the generator itself was is reported.
"""

import argparse
import asyncio
import json
import os
import time
from typing import Any
from urllib.parse import unquote, urlsplit

import msgspec
import numpy as np
import uvloop
from closed_loop import Refusals
from numpy.typing import NDArray

INBOX = "_INBOX.bench"
CHECKED = 32  # one reply in so many is decoded and compared
PATIENCE = 5.0  # s after the end for what is still under way
TICK = 0.0005  # s between looks at what is due in the open loop


class Reply(msgspec.Struct, gc=False):
    """What is read of an answer."""

    error: Any = None  # not Raw | None: msgspec takes only nil for that
    outputs: dict[str, msgspec.Raw] = {}


class Output(msgspec.Struct, gc=False):
    """One output tensor."""

    data: bytes


decode = msgspec.msgpack.Decoder(Reply).decode
decode_output = msgspec.msgpack.Decoder(Output).decode


class Generator(asyncio.Protocol):
    """One connection, one run. Latencies in seconds, by the order of the replies."""

    def __init__(self, url: str, subject: str, heads: list[bytes], expected: list[int], *, keyed: bool) -> None:
        self.url = urlsplit(url)
        self.subject_bytes = subject.encode()
        self.keyed = keyed
        self.heads = heads
        self.expected = expected
        self.ready = asyncio.get_running_loop().create_future()
        self.finished = asyncio.get_running_loop().create_future()
        self.buffer = b""
        self.under_way: dict[int, float] = {}
        self.latencies: list[float] = []
        self.errors: dict[str, int] = {}
        self.wrong = self.sent = self.number = 0
        self.counting = self.closing = self.unchecked = False
        self.again = False
        self.refusals: Refusals | None = None
        self.written: dict[int, float] = {}  # of those whose refusals are timed

    # -- NATS

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        self.transport.set_write_buffer_limits(high=1 << 28)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.finished.done():
            self.finished.set_exception(ConnectionError(f"the connection was lost: {exc}"))

    def data_received(self, data: bytes) -> None:
        if self.refusals is not None:
            self.refusals.read(len(data))
        buffer = self.buffer + data if self.buffer else data
        at = 0
        while True:
            end = buffer.find(b"\r\n", at)
            if end < 0:
                break
            line = buffer[at:end]
            if line[:4] in (b"MSG ", b"HMSG"):
                words = line.split(b" ")
                size = int(words[-1])
                if len(buffer) < end + 4 + size:
                    break
                at = end + 4 + size
                self.reply(int(words[1].rpartition(b".")[2]), buffer[end + 2 : end + 2 + size])
            else:
                at = end + 2
                self.control(line)
        self.buffer = buffer[at:]

    def control(self, line: bytes) -> None:
        if line.startswith(b"INFO"):
            hello = {"verbose": False, "pedantic": False, "headers": True, "no_responders": True, "protocol": 1}
            if self.url.username:
                hello |= {"user": unquote(self.url.username), "pass": unquote(self.url.password or "")}
            self.write(f"CONNECT {json.dumps(hello)}\r\nSUB {INBOX}.* 1\r\nPING\r\n".encode())
        elif line == b"PING":
            self.write(b"PONG\r\n")
        elif line == b"PONG" and not self.ready.done():
            self.ready.set_result(None)
        elif line.startswith(b"-ERR"):
            raise ConnectionError(line.decode())

    def write(self, data: bytes) -> None:
        self.transport.write(data)

    # -- queries

    def query(self, intended: float) -> bytes:
        number = self.number
        self.number = number + 1
        head = self.heads[number % len(self.heads)]
        self.under_way[number] = intended if self.counting else -1.0
        self.sent += self.counting
        if self.keyed:
            return b"PUB %b %b.%d %d\r\n%b%b\r\n" % (
                self.subject_bytes, INBOX_BYTES, number, len(head) + 16, head, os.urandom(16),
            )  # fmt: skip
        return b"PUB %b %b.%d %d\r\n%b\r\n" % (self.subject_bytes, INBOX_BYTES, number, len(head), head)

    def reply(self, number: int, body: bytes) -> None:
        intended = self.under_way.pop(number, None)
        if intended is None:
            self.wrong += 1  # a second answer to one query
            return
        now = time.perf_counter()
        if intended >= 0:
            self.latencies.append(now - intended)
            if number % CHECKED == 0 or len(body) < 30 or self.refusals is not None:
                self.check(number, body)
        if self.again and not self.closing:
            self.write(self.query(now))
        elif self.closing and not self.under_way and not self.finished.done():
            self.finished.set_result(None)

    def check(self, number: int, body: bytes) -> None:
        scores = body
        if self.keyed:
            reply = decode(body) if body else Reply(error="")
            if reply.error is not None:
                text = str(reply.error)[:200]
                if self.refusals is not None:
                    self.refusals.came(self.written.pop(number))
                    text = reply.error["code"]
                self.errors[text] = self.errors.get(text, 0) + 1
                return
            scores = decode_output(next(iter(reply.outputs.values()))).data
        if (
            not self.unchecked
            and int(np.frombuffer(scores, np.float32).argmax()) != self.expected[number % len(self.heads)]
        ):
            self.wrong += 1

    # -- runs

    async def closed(self, clients: int, warmup: float, seconds: float) -> None:
        self.again = True
        for _ in range(clients):
            self.write(self.query(time.perf_counter()))
        await asyncio.sleep(warmup)
        self.mark = mark()
        self.counting = True
        self.began = time.perf_counter()
        await asyncio.sleep(seconds)
        self.took = time.perf_counter() - self.began
        self.answered = len(self.latencies)
        self.closing = True
        await self.end()

    async def open(self, times: NDArray[np.float64], warmup: float, seconds: float) -> None:
        due = times.tolist()
        lateness = []
        start = time.perf_counter()
        self.mark = mark()
        at = 0
        while at < len(due):
            now = time.perf_counter() - start
            pieces = []
            while at < len(due) and due[at] <= now:
                self.counting = due[at] >= warmup
                if self.counting:
                    lateness.append(now - due[at])
                pieces.append(self.query(start + due[at]))
                at += 1
            if pieces:
                self.write(b"".join(pieces))
                if self.refusals is not None:
                    written = time.perf_counter()
                    self.written |= dict.fromkeys(range(self.number - len(pieces), self.number), written)
            await asyncio.sleep(
                TICK if at < len(due) and due[at] - now < TICK else 0 if at >= len(due) else due[at] - now
            )
        self.closing = True
        self.took = seconds
        await self.end()
        self.answered = len(self.latencies)
        self.late_p99 = float(np.percentile(lateness, 99)) if lateness else 0.0

    async def end(self) -> None:
        if self.under_way:
            await asyncio.wait([self.finished], timeout=PATIENCE)


def mark() -> float:
    """Seconds of CPU that this process has used."""
    return time.process_time()


INBOX_BYTES = INBOX.encode()


async def run(options: argparse.Namespace) -> dict[str, Any]:
    with np.load(options.bodies) as stored:
        heads = [row.tobytes() for row in stored["heads"]]
        expected = stored["expected"].tolist()
        keyed = bool(stored["key"])
    address = urlsplit(options.url)
    loop = asyncio.get_running_loop()
    made = lambda: Generator(options.url, options.subject, heads, expected, keyed=keyed)  # noqa: E731
    _, generator = await loop.create_connection(made, address.hostname, address.port)
    generator.unchecked = options.unchecked
    generator.refusals = Refusals(options.latency_ms / 1000) if options.latency_ms else None
    await generator.ready
    late = 0.0
    if options.rate:
        rng = np.random.default_rng(options.seed)
        total = options.warmup + options.seconds
        gaps = rng.exponential(1 / options.rate, int(options.rate * total * 1.2 + 100))
        times = np.cumsum(gaps)
        await generator.open(times[times < total], options.warmup, options.seconds)
        late = generator.late_p99
    else:
        await generator.closed(options.closed, options.warmup, options.seconds)
    latencies = 1000 * np.array(generator.latencies or [np.inf])
    lost = sum(sent >= 0 for sent in generator.under_way.values())
    return {
        "answered": generator.answered,
        "answered_all": generator.number - len(generator.under_way),
        "sent": generator.sent,
        "lost": lost,
        "rate": generator.answered / generator.took,
        "p50_ms": float(np.percentile(latencies, 50)),
        "p99_ms": float(np.percentile(latencies, 99)),
        "max_ms": float(latencies.max()),
        "late_p99_ms": 1000 * late,
        "generator_cpu_s": mark() - generator.mark,
        "wrong": generator.wrong,
        "errors": generator.errors,
    } | (generator.refusals.report() if generator.refusals else {})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("url")
    parser.add_argument("subject")
    parser.add_argument("bodies")
    parser.add_argument("--closed", type=int, default=64, help="queries under way all the time")
    parser.add_argument("--rate", type=float, default=0.0, help="open loop at so many queries a second")
    parser.add_argument(
        "--latency-ms", type=float, default=0.0, help="of these queries, in an open loop: say how late refusals are"
    )
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--warmup", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--unchecked", action="store_true", help="do not compare classes: `expected` may be wrong for some"
    )
    print(json.dumps(uvloop.run(run(parser.parse_args()))))


if __name__ == "__main__":
    main()

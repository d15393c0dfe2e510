"""A load generator in a process of its own, so that it costs little and treats every server alike: prints one JSON line.

`python benches/generator.py nats URL SUBJECT REQUESTS.npz --closed 64 --seconds 4`, `http HOST PORT REQUESTS.npz` or `grpc HOST PORT REQUESTS.npz`.
nats: speaks the protocol by itself, on one connection with so many queries under way. http: as many connections, each with one request under way. grpc: the
same with grpcio's client, which takes more CPU than its server: rates of many under way are its own.

REQUESTS holds `requests` (uint8 [k, length]: whole requests; of NATS a query, without its last 16 bytes if `keyed`: these are random), `expected` (int64 [k]: the
class that the answer must name; -1: not looked at) and `classes` (how many). Scores are the answer's tensor on NATS, else its last bytes, or with `--json` its
last list of numbers. `--rate 100`: open loop, Poisson arrivals (of HTTP on `--closed` connections); latency counts from the moment when a query was due, and
how late the generator itself was is reported. `--latency-ms`: how late refusals are.
"""

import argparse
import asyncio
import json
import math
import os
import re
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Any
from urllib.parse import unquote, urlsplit

import msgspec
import numpy as np
import uvloop
from numpy.typing import NDArray

CHECKED = 32  # one reply in so many is compared
PATIENCE_S = 5.0  # after the end of an open loop, for what is still under way
TICK_S = 0.0005  # between looks at what is due in the open loop
IN_TIME_S = 0.1  # beyond its deadline within which a refusal is in time
LOOK_S = 0.001  # between looks at how late the generator itself is
FULL = 200_000  # bytes of one read, from which on more may have waited
INBOX = b"_INBOX.bench"
METHOD = "/inference.GRPCInferenceService/ModelInfer"
_NUMBERS = re.compile(rb"\[([-+0-9.eE,\s]+)\]")


class Reply(msgspec.Struct, gc=False):
    """What is read of an answer on NATS."""

    error: Any = None  # not Raw | None: msgspec takes only nil for that
    outputs: dict[str, msgspec.Raw] = {}


class Output(msgspec.Struct, gc=False):
    """One output tensor."""

    data: bytes


_reply = msgspec.msgpack.Decoder(Reply).decode
_output = msgspec.msgpack.Decoder(Output).decode


class Refusals:
    """When refusals came, of queries that may take `latency_s`, counted from when they were written.

    The generator's own loop may be late: whatever it reads came after the time before, when its socket was empty. Both are counted, from when it is read and from then.
    """

    def __init__(self, latency_s: float) -> None:
        self._latency_s = latency_s
        self._looked = (0.0, 0.0)  # the looks before
        self._behind = False
        self.count = self.late = self.late_outside = 0
        self.worst = self.worst_outside = self.own = -math.inf
        self._look()

    def _look(self) -> None:
        if not self._behind:
            self._looked = (self._looked[1], time.perf_counter())
        asyncio.get_running_loop().call_later(LOOK_S, self._look)

    def read(self, size: int) -> None:
        """So many bytes came at once."""
        self._behind = size >= FULL

    def came(self, sent: float) -> None:
        """A refusal of a query that was written then."""
        now, due = time.perf_counter(), sent + self._latency_s
        outside = max(sent, self._looked[0]) - due
        self.count += 1
        self.late += now - due > IN_TIME_S
        self.late_outside += outside > IN_TIME_S
        self.worst, self.worst_outside = max(self.worst, now - due), max(self.worst_outside, outside)
        self.own = max(self.own, now - self._looked[0])

    def report(self) -> dict[str, float]:
        """worst: s after the deadline in ms; `outside`: without what the generator itself may have added, of which `own_ms` is the most."""
        found = {"worst_ms": self.worst, "worst_outside_ms": self.worst_outside, "own_ms": self.own}
        counts = {"refused": self.count, "refused_late": self.late, "refused_late_outside": self.late_outside}
        return counts | {name: 1000 * max(seconds, -1.0) for name, seconds in found.items()}


class Run:
    """What all connections share."""

    def __init__(self, options: argparse.Namespace) -> None:
        with np.load(options.requests) as stored:
            self.requests = [row.tobytes() for row in stored["requests"]]
            self.expected = stored["expected"].tolist()
            self.classes, self.keyed = int(stored["classes"]), bool(stored["keyed"])
        self.options = options
        self.refusals = Refusals(options.latency_ms / 1000) if options.latency_ms else None
        self.sent = self.counted = self.answered = self.wrong = 0
        self.errors: Counter[str] = Counter()
        self.latencies: list[float] = []
        self.over = self.measuring = False
        self.last = self.since = 0.0  # what was due before does not count
        self._due: deque[float] = deque()
        self._idle: list[Callable[[float], None]] = []

    def next(self) -> int:
        """The number of the request that is to be sent now."""
        number = self.sent % len(self.requests)
        self.sent += 1
        return number

    def free(self, send: Callable[[float], None]) -> None:
        """A connection can send. Closed loop: now; open loop: as soon as a request is due."""
        if self.over or not self.options.rate:
            send(time.perf_counter())
        elif self._due:
            send(self._due.popleft())
        else:
            self._idle.append(send)

    def hand_out(self, due: Sequence[float]) -> None:
        """Requests are due: to connections that are idle, or later to the first that is."""
        for one in due:
            if self._idle:
                self._idle.pop()(one)
            else:
                self._due.append(one)

    async def pace(self, hand_out: Callable[[Sequence[float]], None]) -> float:
        """Poisson arrivals, after the warm-up for so many seconds; returns the generator's own lateness, the 99th percentile in ms."""
        rate, total = self.options.rate, self.options.warmup + self.options.seconds
        gaps = np.random.default_rng(self.options.seed).exponential(1 / rate, int(rate * total * 1.2 + 100))
        began = time.perf_counter()
        self.since = began + self.options.warmup
        times = began + np.cumsum(gaps)
        times = times[times < began + total]
        self.counted = int((times >= self.since).sum())
        due, late, at = times.tolist(), [], 0
        while at < len(due):
            first, now = at, time.perf_counter()
            while at < len(due) and due[at] <= now:
                at += 1
            if at > first:
                late += [now - one for one in due[first:at] if one >= self.since]
                hand_out(due[first:at])
            if at < len(due):
                await asyncio.sleep(max(TICK_S, due[at] - now))
        return float(np.percentile(late or [0.0], 99)) * 1000

    async def rest(self) -> None:
        """Wait for what is under way; what does not come is an error."""
        end = time.perf_counter() + PATIENCE_S
        while (left := self.sent + len(self._due) - self.answered) and time.perf_counter() < end:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        if left:
            self.errors["unanswered"] = left

    def hang_up(self) -> None:
        """It is over: connections close, those that wait for a reply after it."""
        self.over = True
        for send in self._idle:
            send(0.0)

    def took(self, began: float) -> bool:
        """A reply came. Whether it counts."""
        self.answered += 1
        counts = self.measuring and began >= self.since
        if counts:
            self.last = time.perf_counter()
            self.latencies.append(self.last - began)
        return counts

    def check(self, number: int, scores: NDArray[np.float32]) -> None:
        """Compare what it says with what it must say."""
        if self.expected[number] >= 0 and not self.options.unchecked:
            self.wrong += len(scores) != self.classes or int(scores.argmax()) != self.expected[number]

    def scores(self, body: bytes) -> NDArray[np.float32]:
        """Of a reply: its last bytes, or the last list of numbers in JSON."""
        if not self.options.json:
            return np.frombuffer(body[-4 * self.classes :], "<f4")
        lists = _NUMBERS.findall(body)
        return np.fromstring(lists[-1].decode(), np.float32, sep=",") if lists else np.zeros(1, np.float32)

    def report(self, began: float, late: float, used: float) -> dict[str, Any]:
        """The line that is printed. Raises SystemExit if no answer came."""
        if not self.latencies:
            raise SystemExit(f"no answer within the time: {self.errors}")
        found = np.array(self.latencies) * 1000
        return {
            "answered": len(found),
            "answered_all": self.answered,
            "sent": self.counted,
            "rate": len(found) / (self.last - began),
            "p50_ms": float(np.percentile(found, 50)),
            "p99_ms": float(np.percentile(found, 99)),
            "max_ms": float(found.max()),
            "late_p99_ms": late,
            "generator_cpu_s": used,
            "wrong": self.wrong,
            "errors": self.errors,
        } | (self.refusals.report() if self.refusals else {})


class NatsConnection(asyncio.Protocol):
    """All queries of a run."""

    def __init__(self, run: Run, url: str, subject: str) -> None:
        self.run, self.url, self.subject = run, urlsplit(url), subject.encode()
        self.ready = asyncio.get_running_loop().create_future()
        self.buffer = b""
        self.under_way: dict[int, float] = {}
        self.written: dict[int, float] = {}  # of those whose refusals are timed

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        transport.set_write_buffer_limits(high=1 << 28)

    def connection_lost(self, exc: Exception | None) -> None:
        del exc
        if not self.run.over:
            self.run.errors["lost"] += 1

    def data_received(self, data: bytes) -> None:
        if self.run.refusals is not None:
            self.run.refusals.read(len(data))
        buffer = self.buffer + data if self.buffer else data
        at = 0
        while (end := buffer.find(b"\r\n", at)) >= 0:
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
            self.transport.write(b"CONNECT %b\r\nSUB %b.* 1\r\nPING\r\n" % (json.dumps(hello).encode(), INBOX))
        elif line == b"PING":
            self.transport.write(b"PONG\r\n")
        elif line == b"PONG" and not self.ready.done():
            self.ready.set_result(None)
        elif line.startswith(b"-ERR"):
            raise ConnectionError(line.decode())

    def query(self, intended: float) -> bytes:
        number = self.run.sent
        head = self.run.requests[self.run.next()]
        self.under_way[number] = intended
        key = os.urandom(16) if self.run.keyed else b""
        return b"PUB %b %b.%d %d\r\n%b%b\r\n" % (self.subject, INBOX, number, len(head) + len(key), head, key)

    def send(self, intended: float) -> None:
        self.transport.write(self.query(intended))

    def hand_out(self, due: Sequence[float]) -> None:
        """All at once, however many are under way."""
        first = self.run.sent
        self.transport.write(b"".join(map(self.query, due)))
        if self.run.refusals is not None:
            self.written |= dict.fromkeys(range(first, self.run.sent), time.perf_counter())

    def reply(self, number: int, body: bytes) -> None:
        intended = self.under_way.pop(number, None)
        if intended is None:
            self.run.wrong += 1  # a second answer to one query
            return
        counts = self.run.took(intended)
        if counts and (number % CHECKED == 0 or len(body) < 30 or self.run.refusals is not None):
            self.check(number, body)
        if not self.run.over and not self.run.options.rate:
            self.send(time.perf_counter())

    def check(self, number: int, body: bytes) -> None:
        if self.run.keyed:
            reply = _reply(body) if body else Reply(error="")
            if reply.error is not None:
                text = str(reply.error)[:200]
                if self.run.refusals is not None:
                    self.run.refusals.came(self.written.pop(number))
                    text = reply.error["code"]
                self.run.errors[text] += 1
                return
            body = _output(next(iter(reply.outputs.values()))).data
        self.run.check(number % len(self.run.requests), np.frombuffer(body, np.float32))


class HttpConnection(asyncio.Protocol):
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
        self.began, self.written = began, time.perf_counter()
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
            run.errors[status.decode()] += 1
            if run.refusals is not None:
                run.refusals.came(self.written)
        elif run.sent % CHECKED == 0:
            run.check(self.number, run.scores(buffer[end + 4 : end + 4 + length]))
        run.free(self.send)

    def connection_lost(self, exc: Exception | None) -> None:
        del exc
        if not self.run.over:
            self.run.errors["lost"] += 1
        self.over.set_result(None)


async def ask_http(run: Run, host: str, port: str, _: int) -> None:
    """One connection."""
    _, connection = await asyncio.get_running_loop().create_connection(lambda: HttpConnection(run), host, int(port))
    await connection.over


async def ask_grpc(run: Run, host: str, port: str, connection: int) -> None:
    """One connection: one call after the other."""
    import grpc.aio

    async with grpc.aio.insecure_channel(f"{host}:{port}", [("grpc.use_local_subchannel_pool", 1)]) as channel:
        call = channel.unary_unary(METHOD)
        while not run.over:
            number = run.next()
            began = time.perf_counter()
            try:
                reply = await call(run.requests[number])
            except grpc.aio.AioRpcError as error:
                run.errors[error.code().name] += 1
                continue
            run.took(began)
            if run.sent % CHECKED == connection % CHECKED:
                run.check(number, run.scores(reply))


async def main(options: argparse.Namespace) -> dict[str, Any]:
    """One run."""
    run = Run(options)
    hand_out, late = run.hand_out, 0.0
    async with asyncio.TaskGroup() as group:
        if options.protocol == "nats":
            address = urlsplit(options.address)
            made = lambda: NatsConnection(run, options.address, options.target)  # noqa: E731
            loop = asyncio.get_running_loop()
            _, nats = await loop.create_connection(made, address.hostname, address.port)
            await nats.ready
            hand_out = nats.hand_out
            for _ in range(0 if options.rate else options.closed):
                nats.send(time.perf_counter())
        else:
            ask = ask_grpc if options.protocol == "grpc" else ask_http
            for number in range(options.closed):
                group.create_task(ask(run, options.address, options.target, number))
        if options.rate:
            used, run.measuring = time.process_time(), True
            late = await run.pace(hand_out)
            await run.rest()
            began = run.since
        else:
            await asyncio.sleep(options.warmup)
            used, began, run.measuring = time.process_time(), time.perf_counter(), True
            await asyncio.sleep(options.seconds)
        run.measuring = False
        run.hang_up()
    return run.report(began, late, time.process_time() - used)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("protocol", choices=("nats", "http", "grpc"))
    parser.add_argument("address", help="URL, or host")
    parser.add_argument("target", help="subject, or port")
    parser.add_argument("requests")
    parser.add_argument("--closed", type=int, default=64, help="queries under way all the time, or connections")
    parser.add_argument("--rate", type=float, default=0.0, help="open loop at so many queries a second (not of gRPC)")
    parser.add_argument("--latency-ms", type=float, default=0.0, help="of these queries: say how late refusals are")
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--warmup", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--unchecked", action="store_true", help="do not compare classes")
    parser.add_argument("--json", action="store_true", help="replies are JSON: scores are their last list of numbers")
    print(json.dumps(uvloop.run(main(parser.parse_args()))))

"""What one message costs: stock nats-py callbacks against our direct path, side by side in one run.

Two echo services wait on one nats-server, one written with nats-py as its documentation shows, one with `bus.natsbus`. A generator
keeps 64 requests of 300 bytes in flight, to one and then to the other, in turns. Printed: answers/s, CPU of the echo service
and of nats-server per answer (user + system, from the kernel's clock), the medians over the turns and their ratio.

    python benches/bus_core.py [--turns 5] [--seconds 1.5] [--window 64] [--bytes 300]
"""

import argparse
import asyncio
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil
import uvloop

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bus.natsbus import NatsBus
from bus.port import Delivery
from tests.support.servers.nats import NatsServer


async def stock(url: str) -> None:
    import nats
    from nats.aio.msg import Msg

    client = await nats.connect(url, pending_size=1 << 26)

    async def echo(message: Msg) -> None:
        await client.publish(message.reply, message.data)

    await client.subscribe("bench.stock", queue="q", cb=echo, pending_bytes_limit=1 << 30)
    await client.flush()
    print("ready", flush=True)
    await asyncio.Event().wait()


async def direct(url: str) -> None:
    bus = await NatsBus.connect(url, name="echo")

    def echo(delivery: Delivery) -> None:
        bus.publish(delivery.reply, delivery.data)

    await bus.subscribe("bench.direct", echo, queue="q")
    print("ready", flush=True)
    await asyncio.Event().wait()


async def load(bus: NatsBus, subject: str, seconds: float, window: int, size: int) -> float:
    """Answers per second with `window` requests in flight."""
    loop = asyncio.get_running_loop()
    body = bytes(size)
    done = loop.create_future()
    inbox = bus.new_inbox()
    begun = loop.time()
    end = begun + seconds
    count = 0

    def answered(_: Delivery) -> None:
        nonlocal count
        count += 1
        if count % 256 == 0 and loop.time() > end and not done.done():
            done.set_result(loop.time())
        if not done.done():
            bus.publish(subject, body, reply=inbox)

    subscription = await bus.subscribe(inbox, answered)
    for _ in range(window):
        bus.publish(subject, body, reply=inbox)
    stopped = await done
    rate = count / (stopped - begun)
    await asyncio.sleep(0.05)
    await subscription.drain()
    return rate


def cpu(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


async def measure(server: NatsServer, echoes: dict[str, psutil.Process], options: argparse.Namespace) -> None:
    bus = await NatsBus.connect(server.url, name="generator")
    nats_server = psutil.Process(server.pid)
    rows: dict[str, list[tuple[float, float, float]]] = {name: [] for name in echoes}
    for turn in range(-1, options.turns):  # the first one warms up
        for name, process in echoes.items():
            before = cpu(process), cpu(nats_server)
            rate = await load(bus, f"bench.{name}", options.seconds, options.window, options.bytes)
            answers = rate * options.seconds
            if turn >= 0:
                own, server_s = cpu(process) - before[0], cpu(nats_server) - before[1]
                rows[name].append((rate, own / answers * 1e6, server_s / answers * 1e6))
    medians = {name: [statistics.median(column) for column in zip(*turns, strict=True)] for name, turns in rows.items()}
    print(f"{'echo':8} {'answers/s':>10} {'service us':>11} {'nats us':>8}")
    for name, (rate, own, server_us) in medians.items():
        print(f"{name:8} {rate:10.0f} {own:11.1f} {server_us:8.1f}")
    first, second = medians["stock"], medians["direct"]
    print(f"direct / stock: answers/s x {second[0] / first[0]:.2f}, service CPU x {second[1] / first[1]:.2f}")
    await bus.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=1.5)
    parser.add_argument("--window", type=int, default=64)
    parser.add_argument("--bytes", type=int, default=300)
    parser.add_argument("--echo", choices=["stock", "direct"], help=argparse.SUPPRESS)
    parser.add_argument("--url", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.echo:
        uvloop.run({"stock": stock, "direct": direct}[options.echo](options.url))
        return
    with tempfile.TemporaryDirectory() as directory:
        server = NatsServer(Path(directory))
        server.start()
        children = []
        try:
            echoes = {}
            for name in ("stock", "direct"):
                child = subprocess.Popen(
                    [sys.executable, __file__, "--echo", name, "--url", server.url], stdout=subprocess.PIPE
                )
                children.append(child)
                assert child.stdout is not None
                child.stdout.readline()
                echoes[name] = psutil.Process(child.pid)
            uvloop.run(measure(server, echoes, options))
        finally:
            for child in children:
                child.terminate()
                child.wait()
            server.stop()


if __name__ == "__main__":
    main()

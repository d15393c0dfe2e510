"""Small services on NATS that the benches compare with: `python benches/echo.py URL WHAT`, until it is ended.

model   the yardstick: stock nats-py and uvloop run the benches' model on the raw FP32 bytes that they get. It decodes nothing, checks nothing,
        batches nothing and promises nothing: what NATS, nats-py and onnxruntime cost without us
stock   answers with what it gets, as nats-py's documentation shows it
direct  the same on `bus.natsbus`
relay   on `bus.natsbus`, too: sends each body on to the sink unread, with the asker's reply subject, as a dispatcher forwards queries
sink    answers that with ten numbers

Each listens on `bench.WHAT`.
"""

import asyncio
import sys

import numpy as np
import rig
import uvloop

from bus.codec import encode
from bus.natsbus import NatsBus
from bus.port import Delivery

ANSWER = encode({"outputs": {"scores": {"datatype": "FP32", "shape": [1, 10], "data": bytes(40)}}})


async def stock(url: str, what: str) -> None:
    """On nats-py."""
    import nats
    from nats.aio.msg import Msg

    run = rig.session().run
    client = await nats.connect(url, pending_size=1 << 26)

    async def scores(message: Msg) -> None:
        (found,) = run(["scores"], {"x": np.frombuffer(message.data, np.float32).reshape(1, -1)})
        await client.publish(message.reply, found.tobytes())

    async def echo(message: Msg) -> None:
        await client.publish(message.reply, message.data)

    answer = scores if what == "model" else echo
    await client.subscribe(f"bench.{what}", queue="q", cb=answer, pending_bytes_limit=1 << 30)
    await client.flush()


async def direct(url: str, what: str) -> None:
    """On our bus."""
    bus = await NatsBus.connect(url, name=what)

    def echo(delivery: Delivery) -> None:
        bus.publish(delivery.reply, delivery.data)

    def relay(delivery: Delivery) -> None:
        bus.publish("bench.sink", delivery.data, delivery.reply)

    def sink(delivery: Delivery) -> None:
        bus.publish(delivery.reply, ANSWER)

    await bus.subscribe(f"bench.{what}", {"direct": echo, "relay": relay, "sink": sink}[what], queue="q")
    await bus.flush()


async def main(url: str, what: str) -> None:
    """Serve until the process is ended."""
    await (stock if what in ("model", "stock") else direct)(url, what)
    print("ready", flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    uvloop.run(main(*sys.argv[1:]))

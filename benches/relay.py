"""What the bus alone costs a hop: a relay on `bus.natsbus` that forwards each body unread, and a sink that answers it.

`python benches/relay.py URL relay|sink`: bodies on `bench.relay` go on to `bench.sink` with the asker's reply subject, as a dispatcher
forwards queries; the sink answers with ten numbers.
"""

import asyncio
import sys
from pathlib import Path

import uvloop

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bus.codec import encode
from bus.natsbus import NatsBus
from bus.port import Delivery

RELAY, SINK = "bench.relay", "bench.sink"
ANSWER = encode({"outputs": {"scores": {"datatype": "FP32", "shape": [1, 10], "data": bytes(40)}}})


async def main(url: str, what: str) -> None:
    """Serve until the process is ended."""
    bus = await NatsBus.connect(url, name=what)

    def forward(delivery: Delivery) -> None:
        bus.publish(SINK, delivery.data, delivery.reply)

    def answer(delivery: Delivery) -> None:
        bus.publish(delivery.reply, ANSWER)

    if what == "relay":
        await bus.subscribe(RELAY, forward, queue="relay")
    else:
        await bus.subscribe(SINK, answer, queue="sink")
    await bus.flush()
    print("ready", flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    uvloop.run(main(sys.argv[1], sys.argv[2]))

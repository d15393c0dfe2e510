"""The yardstick: a bare request-reply service on stock nats-py and uvloop that runs the benches' model on what it gets.

`python benches/echo.py URL [MODEL.onnx]` answers raw FP32 bytes on `bench.echo` until it is ended. It decodes nothing, checks
nothing, batches nothing and promises nothing: what NATS, nats-py and onnxruntime cost without us.
"""

import asyncio
import sys
from pathlib import Path

import nats
import numpy as np
import onnxruntime
import uvloop
from nats.aio.msg import Msg

SUBJECT = "bench.echo"
MODEL = Path(__file__).parent / "models" / "mlp64.onnx"


def session(path: Path = MODEL) -> onnxruntime.InferenceSession:
    """The model on one thread, as an executor loads it."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


async def main(url: str) -> None:
    """Serve until the process is ended."""
    run = session().run
    client = await nats.connect(url, pending_size=1 << 26)

    async def answer(message: Msg) -> None:
        (scores,) = run(["scores"], {"x": np.frombuffer(message.data, np.float32).reshape(1, -1)})
        await client.publish(message.reply, scores.tobytes())

    await client.subscribe(SUBJECT, queue="echo", cb=answer, pending_bytes_limit=1 << 30)
    await client.flush()
    print("ready", flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    uvloop.run(main(sys.argv[1]))

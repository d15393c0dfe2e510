"""A load generator for gRPC in a process of its own: so many calls under way, each on a connection of its own, with grpcio's client.

`python benches/grpc_generator.py HOST PORT REQUESTS.npz --closed 8 --seconds 4`; prints one JSON line. REQUESTS as http_generator.py's, of
ModelInferRequest messages; the reply's last bytes are its raw scores. grpcio's client takes more CPU than its server: rates of many under way are its own.
"""

import asyncio
import time

import grpc
import grpc.aio
from closed_loop import CHECKED, Run, generate

METHOD = "/inference.GRPCInferenceService/ModelInfer"


async def ask(run: Run, target: str, connection: int) -> None:
    """One connection: one call after the other."""
    async with grpc.aio.insecure_channel(target, [("grpc.use_local_subchannel_pool", 1)]) as channel:
        call = channel.unary_unary(METHOD)
        while not run.over:
            number = run.next()
            began = time.perf_counter()
            try:
                reply = await call(run.requests[number])
            except grpc.aio.AioRpcError as error:
                run.failed(error.code().name)
                continue
            run.took(began)
            if run.sent % CHECKED == connection % CHECKED:
                run.check(number, reply[-4 * run.classes :])


def begin(run: Run, host: str, port: int, connection: int, group: asyncio.TaskGroup) -> None:
    group.create_task(ask(run, f"{host}:{port}", connection))


if __name__ == "__main__":
    generate("Load on a gRPC server.", begin)

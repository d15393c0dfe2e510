"""A load generator for gRPC in a process of its own: so many calls under way, each on a connection of its own, with grpcio's client.

`python benches/grpc_generator.py HOST PORT REQUESTS.npz --closed 8 --seconds 4`; prints one JSON line. REQUESTS as http_generator.py's, of
ModelInferRequest messages; the reply's last bytes are its raw scores. grpcio's client takes more CPU than its server: rates of many under way are its own.
"""

import argparse
import asyncio
import json
import resource
import time

import grpc
import grpc.aio
import numpy as np
import uvloop
from http_generator import CHECKED, Run

METHOD = "/inference.GRPCInferenceService/ModelInfer"


async def ask(run: Run, target: str, number: int) -> None:
    """One connection: one call after the other."""
    async with grpc.aio.insecure_channel(target, [("grpc.use_local_subchannel_pool", 1)]) as channel:
        call = channel.unary_unary(METHOD)
        while not run.over:
            which = run.sent % len(run.requests)
            run.sent += 1
            began = time.perf_counter()
            try:
                reply = await call(run.requests[which])
            except grpc.aio.AioRpcError as error:
                name = error.code().name
                run.errors[name] = run.errors.get(name, 0) + 1
                continue
            if run.measuring:
                run.last = time.perf_counter()
                run.latencies.append(run.last - began)
            if run.sent % CHECKED == number % CHECKED:
                scores = np.frombuffer(reply[-4 * run.classes :], "<f4")
                run.wrong += int(scores.argmax()) != run.expected[which]


async def main(options: argparse.Namespace) -> None:
    with np.load(options.requests) as stored:
        requests = [row.tobytes() for row in stored["requests"]]
        run = Run(requests, stored["expected"].tolist(), int(stored["classes"]))
    async with asyncio.TaskGroup() as group:
        for number in range(options.closed):
            group.create_task(ask(run, f"{options.host}:{options.port}", number))
        await asyncio.sleep(1.0)  # warm-up
        began = time.perf_counter()
        run.measuring = True
        await asyncio.sleep(options.seconds)
        run.measuring = False
        run.over = True
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
    parser = argparse.ArgumentParser(description="Load on a gRPC server.")
    parser.add_argument("host")
    parser.add_argument("port", type=int)
    parser.add_argument("requests")
    parser.add_argument("--closed", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=4.0)
    uvloop.run(main(parser.parse_args()))

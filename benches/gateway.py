"""What HTTP and gRPC add to a query: `python benches/gateway.py [--seconds S] [--rounds N] [--gateways N]`.

Starts a system, registers the benches' model (64 numbers in, 10 scores out), and asks the same queries over the bus and over HTTP in turn: with
raw tensors as tritonclient sends them, as JSON numbers, and over gRPC. 8 under way all the time, then one at a time. CPU is the kernel's, by process; what HTTP adds is the difference of
all processes' CPU for an answer, the gateway's included. Then a large tensor, whose copies show in what the gateway's memory grows by at its peak.
`--gateways 2`: so many gateways at one address (reuse_port).
"""

import asyncio
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from http.client import HTTPResponse
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import rig
from numpy.typing import NDArray

from infaas.demo.program import environment
from services.gateway.rpc.infer import INFERENCE

MOST_MS = 0.25  # CPU that HTTP may add to a small query
ITEMS = 65_536  # most that a query may have
WAYS = ("bus", "raw", "json", "grpc")
HEAD = "POST /v2/models/{app}/infer HTTP/1.1\r\nHost: {host}\r\nContent-Length: {length}\r\n{more}\r\n"


def request(host: str, x: NDArray[np.float32], *, raw: bool, app: str = rig.APP, **needs: float) -> bytes:
    """A whole request for one query, raw as tritonclient would send it, or with the numbers in JSON; the reply is raw."""
    tensor: dict[str, Any] = {"name": "x", "shape": list(x.shape), "datatype": "FP32"}
    data = x.tobytes() if raw else b""
    tensor |= {"parameters": {"binary_data_size": len(data)}} if raw else {"data": x.ravel().tolist()}
    body = json.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True} | needs}).encode()
    more = f"Inference-Header-Content-Length: {len(body)}\r\n" if raw else "Content-Type: application/json\r\n"
    return HEAD.format(app=app, host=host, length=len(body) + len(data), more=more).encode() + body + data


def message(x: NDArray[np.float32]) -> bytes:
    """The same as gRPC's message."""
    found = INFERENCE.ModelInferRequest(model_name=rig.APP, raw_input_contents=[x.tobytes()])
    found.inputs.add(name="x", datatype="FP32", shape=x.shape)
    written: bytes = found.SerializeToString()
    return written


@contextmanager
def another_gateway(own: Any, port: int) -> Iterator[int]:
    """One more gateway at the same address; its process id."""
    more = {"INFAAS_GATEWAY__REUSE_PORT": "true", "INFAAS_GATEWAY__PORT": str(port), "INFAAS_GATEWAY__GRPC_PORT": "0"}
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "infaas.cli.run", "gateway"],  # as `infaas up` starts it
        env=environment(dict(os.environ)) | more | {"INFAAS_DATA_DIR": str(own.data_dir)},
        stderr=subprocess.DEVNULL,
    )
    try:
        own_sockets = psutil.Process(process.pid).net_connections
        while not any(one.status == psutil.CONN_LISTEN and one.laddr.port == port for one in own_sockets("tcp")):
            time.sleep(0.05)
        yield process.pid
    finally:
        process.terminate()
        process.wait()


class Bench:
    """One system, asked over the bus and over HTTP in turn."""

    def __init__(self, own: Any, directory: Path, others: list[int]) -> None:
        x, classes = rig.clear_cases()
        self.pids = [own.pid, *others]
        self.host, _, port = own.urls["gateway"].removeprefix("http://").rpartition(":")
        self.port = int(port)
        queries = rig.bodies(directory / "queries.npz", x, classes)
        self.ways = {"bus": partial(rig.generate, "nats", own.urls["nats"], f"infaas.query.{rig.APP}", queries)}
        for way in WAYS[1:]:
            make = message if way == "grpc" else partial(request, self.host, raw=way == "raw")
            table = rig.requests(directory / f"{way}.npz", [make(row[None]) for row in x], classes)
            address = own.urls["gateway_grpc"].rpartition(":")[2] if way == "grpc" else port
            self.ways[way] = partial(rig.generate, "grpc" if way == "grpc" else "http", self.host, address, table)

    def run(self, way: str, *options: str) -> dict[str, Any]:
        """One run, with the CPU milliseconds for an answer by kind of process."""
        result = rig.with_cpu(self.pids, partial(self.ways[way], *options))
        return result | {"server_ms": rig.serving_ms(result, "gateway")}


def compare(bench: Bench, clients: int, seconds: float, rounds: int) -> dict[str, Any]:
    """All ways in turn; medians over the rounds, and of what HTTP adds in each."""

    def told(way: str, one: dict[str, Any]) -> None:
        rig.say(
            f"  {way:5} {clients:2} under way {one['rate']:7.0f}/s  p50 {one['p50_ms']:7.3f} ms  p99 {one['p99_ms']:7.3f} ms"
            f"  CPU {one['server_ms']:.3f} ms, gateway {one['cpu_ms'].get('gateway', 0.0):.3f} {one['errors'] or ''}"
        )

    load = ("--closed", str(clients), "--seconds", str(seconds))
    found = rig.in_turn({way: partial(bench.run, way, *load) for way in WAYS}, rounds, told)
    summary = {way: rig.medians(results) for way, results in found.items()}
    for way, one in summary.items():
        ratio = partial(rig.median_of, found[way], found["bus"])
        one["gateway_ms"] = one["cpu_ms"].get("gateway", 0.0)
        one["adds_ms"] = ratio(lambda a, b: a["server_ms"] - b["server_ms"])
        one["p50_ratio"] = ratio(lambda a, b: a["p50_ms"] / b["p50_ms"])
    return summary


def large(bench: Bench, own: Any) -> dict[str, float]:
    """A tensor of as many items as a query may have: its time, and the peak of the gateway's memory over what it was."""
    pid = rig.part_of(own, "gateway").pid
    data = request(bench.host, np.zeros((ITEMS, 64), np.float32), raw=True)

    def held(name: str) -> float:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith(name)) / 1024

    def ask() -> float:
        began = time.monotonic()
        with socket.create_connection((bench.host, bench.port), 60) as connection:
            connection.sendall(data)
            reply = HTTPResponse(connection)
            reply.begin()
            assert reply.status == 200, reply.read(500)
            reply.read()
        return 1000 * (time.monotonic() - began)

    ask()
    Path(f"/proc/{pid}/clear_refs").write_text("5")  # the peak counts from now on
    before = held("VmRSS")
    took = ask()
    return {"mb": len(data) / 2**20, "ms": took, "peak_mb": held("VmHWM") - before}


def report(found: dict[str, Any]) -> None:
    for title in ("closed 8", "closed 1"):
        print(f"\n{title.removeprefix('closed ')} under way " + " ".join(f"{way:>10}" for way in WAYS))
        one = found[title]
        for key, name in (
            ("rate", "answers/s"),
            ("p50_ms", "p50, ms"),
            ("p99_ms", "p99, ms"),
            ("gateway_ms", "gateway CPU, ms"),
            ("server_ms", "all CPU, ms"),
        ):
            print(f"  {name:15} " + " ".join(f"{one[way][key]:10.3f}" for way in WAYS))
        print(f"  {'adds CPU, ms':15} {'':10} " + " ".join(f"{one[way]['adds_ms']:10.3f}" for way in WAYS[1:]), end="")
        print(f"   wanted <= {MOST_MS}")
        print(f"  {'p50 / bus':15} {'':10} " + " ".join(f"{one[way]['p50_ratio']:10.2f}" for way in WAYS[1:]))
    big = found["large"]
    print(
        f"\na tensor of {big['mb']:.1f} MB took {big['ms']:.0f} ms; the gateway grew by {big['peak_mb']:.1f} MB at its peak"
    )
    print(
        f"memory of the system, MB PSS: {sum(found['memory'].values()):.0f}, the gateway's {found['memory']['gateway']:.0f}"
    )


def main() -> None:
    parser = rig.parser(__doc__, seconds=4.0, rounds=3)
    parser.add_argument("--gateways", type=int, default=1)
    parser.add_argument("--fused", action="store_true", help="a system whose queries stay in one process")
    options = parser.parse_args()
    settings = "[gateway]\nreuse_port = true\n" if options.gateways > 1 else ""
    with rig.system(settings, fused=options.fused) as own, ExitStack() as more:
        asyncio.run(rig.prepare(own.data_dir))
        port = int(own.urls["gateway"].rpartition(":")[2])
        others = [more.enter_context(another_gateway(own, port)) for _ in range(options.gateways - 1)]
        bench = Bench(own, own.data_dir.parent, others)
        found: dict[str, Any] = {
            f"closed {clients}": compare(bench, clients, options.seconds, options.rounds) for clients in (8, 1)
        }
        found["large"] = large(bench, own)
        found["memory"] = rig.memory(own.pid)
    report(found)


if __name__ == "__main__":
    main()

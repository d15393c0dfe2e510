"""The systems that are compared: what is installed for each, what each is given, and how a request to it looks."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

ROOT = Path(__file__).resolve().parents[2]
SERVERS = Path(__file__).parent / "servers"
RUNTIME = "onnxruntime==1.31.1"  # in all of them
WAIT_MS = 1.0  # a batch waits so long for more where a system asks for such a figure
Row = NDArray[np.float32]
Wire = Callable[[Row], tuple[str, bytes]]  # one item -> header lines, body


@dataclass(frozen=True)
class Peer:
    """packages: pip's requirements. path: of requests; `{served}` is the name under which the model is served. given: a sentence for readers.

    `servers/<name>_server.py` is its server; it reads PEER_NAME, PEER_MODEL, PEER_PORT, PEER_BATCH and PEER_WAIT_MS. as_json: its replies are JSON, not raw
    scores. like: another system of this table, whose environment and server it has.
    """

    title: str
    packages: tuple[str, ...]
    path: str
    wire: Wire
    given: str
    as_json: bool = False
    python: str = ""  # an interpreter that it needs
    like: str = ""

    @property
    def version(self) -> str:
        """That of its first package."""
        return self.packages[0].partition("==")[2] or "this tree"


def _raw(x: Row) -> tuple[str, bytes]:
    return "Content-Type: application/octet-stream\r\n", x.tobytes()


def _triton(x: Row) -> tuple[str, bytes]:
    """Raw tensors behind a head in JSON, the binary extension of the Open Inference Protocol."""
    tensor = {"name": "x", "shape": [1, len(x)], "datatype": "FP32", "parameters": {"binary_data_size": x.nbytes}}
    head = json.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}}).encode()
    return f"Inference-Header-Content-Length: {len(head)}\r\n", head + x.tobytes()


def _numbers(x: Row) -> tuple[str, bytes]:
    """The same protocol without its extension."""
    tensor = {"name": "x", "shape": [1, len(x)], "datatype": "FP32", "data": x.tolist()}
    return "Content-Type: application/json\r\n", json.dumps({"inputs": [tensor]}).encode()


def _list(x: Row) -> tuple[str, bytes]:
    return "Content-Type: application/json\r\n", json.dumps({"x": x.tolist()}).encode()


def _rows(x: Row) -> tuple[str, bytes]:
    return "Content-Type: application/json\r\n", json.dumps({"x": [x.tolist()]}).encode()


INFAAS = ("-c", str(ROOT / "constraints.txt"), "-e", f"{ROOT}[up]")
BATCHES = f"one model worker; batches that wait up to {WAIT_MS:g} ms"
PEERS = {
    "infaas": Peer(
        "INFaaS",
        INFAAS,
        "/v2/models/{served}/infer",
        _triton,
        "the variant onnxruntime-fp32 with one thread, asked by its name; one instance, autoscaler off; raw tensors. Every outcome is recorded in PostgreSQL",
    ),
    "infaas-fused": Peer(
        "INFaaS, `up --fused`",
        INFAAS,
        "/v2/models/{served}/infer",
        _triton,
        "the same, gateway, dispatcher and executor in one process",
        like="infaas",
    ),
    "infaas-serve": Peer(
        "INFaaS, `infaas.serve`",
        INFAAS,
        "/v2/models/{served}/infer",
        _triton,
        "one process, no NATS and no PostgreSQL; asked by the app's name; its start has the making and measuring of the variants in it",
        like="infaas",
    ),
    "fastapi": Peer(
        "FastAPI, uvicorn",
        ("fastapi==0.165.0", "uvicorn==0.54.0", "uvloop==0.23.0", "httptools>=0.6", RUNTIME),
        "/infer",
        _raw,
        "one process; the model runs in the event loop, no batches; raw numbers",
    ),
    "mosec": Peer(
        "mosec", ("mosec==0.9.8", RUNTIME), "/inference", _raw, f"{BATCHES}; raw numbers by a codec of four lines"
    ),
    "litserve": Peer("LitServe", ("litserve==0.2.19", RUNTIME), "/predict", _list, f"{BATCHES}; JSON", as_json=True),
    "bentoml": Peer(
        "BentoML",
        ("bentoml==1.4.39", RUNTIME),
        "/infer",
        _rows,
        "one worker; batches whose wait it adapts by itself; JSON",
        as_json=True,
    ),
    "mlserver": Peer(
        "MLServer",
        ("mlserver==1.7.1", "uvloop==0.21.0", RUNTIME),  # with a newer uvloop it does not start
        "/v2/models/model/infer",
        _numbers,
        f"the model in the server's process, which was faster than a worker; batches that wait up to {WAIT_MS:g} ms; JSON",
        as_json=True,
    ),
    "ray": Peer("Ray Serve", ("ray[serve]==2.60.0", RUNTIME), "/", _raw, f"one replica; {BATCHES[18:]}; raw numbers"),
    "pytriton": Peer(
        "Triton (PyTriton)",
        ("nvidia-pytriton==0.7.0", RUNTIME),
        "/v2/models/model/infer",
        _triton,
        "one model worker; Triton's dynamic batches, no wait; raw tensors",
        python="/usr/bin/python3.11",  # its stub is linked with the system's library
    ),
}


def requests(peer: Peer, served: str, port: int, x: Row) -> list[bytes]:
    """Whole requests for one row each. Blanks behind JSON make all of them as long as the longest."""
    wires = [peer.wire(row) for row in x]
    longest = max(len(body) for _, body in wires)
    path = peer.path.format(served=served)
    start = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Length: {longest}\r\n"
    return [f"{start}{head}\r\n".encode() + body.ljust(longest) for head, body in wires]

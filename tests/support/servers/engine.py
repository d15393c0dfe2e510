"""A small server that speaks the Open Inference Protocol as stock servers do, well or badly.

    python -m tests.support.servers.engine PORT

Its model `double` gives `y` = 2 x for `x` FP32 [n, 4]. `tiny` computes what `tiny_models.mlp` does. `digits` scores pictures `x` FP32 [n, 784] by the
nearest mean.
"""

import asyncio
import json
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import numpy as np
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Route

from infaas.demo import digits
from tests.support.models import tiny_models
from tests.support.servers.nats import free_port

HEAD = "Inference-Header-Content-Length"
SHAPES = {"double": ([4], [4]), "tiny": ([16], [4]), "digits": ([784], [10])}


@cache
def means() -> np.ndarray:
    unseen = digits.load(digits.UNSEEN)
    return np.stack([unseen.x[unseen.y == label].mean(axis=0) for label in range(10)])


def computed(model: str, x: np.ndarray) -> np.ndarray:
    if model == "double":
        return 2 * x
    if model == "tiny":
        first, second = tiny_models.weights()
        return np.maximum(x @ first, 0) @ second
    return (-((x[:, None] - means()) ** 2).sum(axis=2)).astype(np.float32)


class StockEngine:
    """extensions: what it says it offers. mode: what is wrong with its answers; empty: nothing. most: items of a batch.

    seen: paths of its requests with the length of their JSON, None: all of it. headers: of the last request.
    """

    def __init__(self, port: int = 0) -> None:
        self.port = port or free_port()
        self.mode = ""
        self.extensions = ["binary_tensor_data"]
        self.most = 0
        self.batched = True
        self.metadata: dict[str, Any] | None = None
        self.seen: list[tuple[str, str | None]] = []
        self.headers: dict[str, str] = {}
        self._server: uvicorn.Server | None = None
        root = "/v2/models/{model}"
        self.app = Starlette(
            routes=[
                Route("/v2", self._about),
                Route(root, self._model),
                Route(f"{root}/config", self._config),
                Route(f"{root}/infer", self._infer, methods=["POST"]),
            ]
        )

    def url(self, model: str = "double") -> str:
        return f"http://127.0.0.1:{self.port}/v2/models/{model}"

    def start(self) -> None:
        """On the same port as before."""
        config = uvicorn.Config(
            self.app, port=self.port, log_level="critical", lifespan="off", timeout_graceful_shutdown=0
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, daemon=True)
        self._thread.start()
        while not self._server.started:
            self._thread.join(0.01)

    def stop(self) -> None:
        """Refuse connections, and close those that there are."""
        if self._server is not None:
            self._server.should_exit = self._server.force_exit = True
            self._thread.join(10)

    # -- endpoints

    def _note(self, request: Request) -> None:
        self.seen.append((request.url.path, request.headers.get(HEAD)))
        self.headers = dict(request.headers)

    async def _about(self, request: Request) -> Response:
        self._note(request)
        return JSONResponse({"name": "stock", "version": "1", "extensions": self.extensions})

    async def _model(self, request: Request) -> Response:
        self._note(request)
        if request.path_params["model"] not in SHAPES:
            return JSONResponse({"error": "no such model"}, 404)
        if self.metadata is not None:
            return JSONResponse(self.metadata)
        inputs, outputs = SHAPES[request.path_params["model"]]
        n = -1 if self.batched else 1
        return JSONResponse(
            {
                "name": request.path_params["model"],
                "platform": "stock",
                "inputs": [{"name": "x", "datatype": "FP32", "shape": [n, *inputs]}],
                "outputs": [{"name": "y", "datatype": "FP32", "shape": [n, *outputs]}],
            }
        )

    async def _config(self, request: Request) -> Response:
        return JSONResponse({"max_batch_size": self.most}) if self.most else PlainTextResponse("no", 404)

    async def _infer(self, request: Request) -> Response:
        body = await request.body()
        self._note(request)
        head = request.headers.get(HEAD)
        given = json.loads(body if head is None else body[: int(head)])["inputs"][0]
        shape = given["shape"]
        if head is None:
            x = np.array(given["data"], np.float32).reshape(shape)
        else:
            x = np.frombuffer(body[int(head) :], "<f4").reshape(shape)
        if self.most and len(x) > self.most:
            return JSONResponse({"error": f"batches have at most {self.most} items"}, 400)
        return await self._bad(computed(request.path_params["model"], x), raw=head is not None)

    async def _bad(self, y: np.ndarray, *, raw: bool) -> Response:
        match self.mode:
            case "error":
                return JSONResponse({"error": "the model is on fire"}, 503)
            case "page":
                return PlainTextResponse("<html>504</html>", 504)
            case "redirect":
                return RedirectResponse(f"http://localhost:{self.port}/v2/models/double/infer", 307)
            case "garbage":
                return Response(b"\x00\x01 no json")
            case "nested":
                return Response(b'{"outputs":[{"name":"y","datatype":"FP32","shape":[1],"data":' + b"[" * 100_000)
            case "hang":
                await asyncio.sleep(600)
            case "drip":
                return StreamingResponse(_drip())
            case "gzip":
                return Response(b"{}", headers={"Content-Encoding": "gzip"})
            case "many":
                y = np.concatenate([y, y])
            case "wide":
                y = np.concatenate([y, y], axis=1)
            case "nan":
                y = np.full_like(y, np.nan)
                raw = True
            case "type":
                return JSONResponse(_reply(y.astype("<i8"), name="y", data=["a"] * y.size))
            case "name":
                return JSONResponse(_reply(y, name="z", data=y.reshape(-1).tolist()))
            case "negative":
                return JSONResponse({"outputs": [{"name": "y", "datatype": "FP32", "shape": [-1], "data": [1.0]}]})
            case "scalar":
                return JSONResponse({"outputs": [{"name": "y", "datatype": "FP32", "shape": [], "data": [1.0]}]})
            case "ragged":
                return JSONResponse(_reply(y, name="y", data=[[1.0], [1.0, 2.0]]))
            case "cut":
                text = json.dumps(_reply(y, name="y", parameters={"binary_data_size": y.nbytes})).encode()
                return Response(text + y.tobytes()[:-4], headers={HEAD: str(len(text))})
            case "longhead":
                return Response(b"{}", headers={HEAD: "1000000"})
        if not raw:
            return JSONResponse(_reply(y, name="y", data=y.tolist()))  # nested, as some servers do
        text = json.dumps(_reply(y, name="y", parameters={"binary_data_size": y.nbytes})).encode()
        return Response(text + y.tobytes(), headers={HEAD: str(len(text))})


def _reply(y: np.ndarray, **more: Any) -> dict[str, Any]:
    return {"outputs": [{"datatype": "FP32" if y.dtype.kind == "f" else "INT64", "shape": list(y.shape), **more}]}


async def _drip() -> Any:
    while True:
        yield b" "
        await asyncio.sleep(0.05)


@contextmanager
def engine() -> Iterator[StockEngine]:
    """One that runs until the block ends."""
    made = StockEngine()
    made.start()
    try:
        yield made
    finally:
        made.stop()


if __name__ == "__main__":
    uvicorn.run(StockEngine(int(sys.argv[1])).app, port=int(sys.argv[1]), log_level="critical", lifespan="off")

"""The protocol over REST: paths and bodies."""

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.routing import Route

from infaas.errors import Refused
from services.gateway.door import Door, Problem
from services.gateway.http.reply import Json
from services.gateway.oip.names import Target, parse

NAME, VERSION = "infaas", "0.1.0"
EXTENSIONS = ["modelless"]


def routes(door: Door) -> list[Route]:
    """All paths below /v2."""
    rest = Rest(door)
    return [
        Route("/v2/models/{model}/infer", rest.infer, methods=["POST"]),
        Route("/v2/models/{model}/versions/{version}/infer", rest.infer, methods=["POST"]),
        Route("/v2", rest.server),
        Route("/v2/health/live", rest.live),
        Route("/v2/health/ready", rest.ready),
    ]


class Rest:
    """The protocol's endpoints."""

    def __init__(self, door: Door) -> None:
        self._door = door

    async def server(self, request: Request) -> Json:
        del request
        return Json({"name": NAME, "version": VERSION, "extensions": EXTENSIONS})

    async def live(self, request: Request) -> Json:
        del request
        return Json({"live": True})

    async def ready(self, request: Request) -> Json:
        del request
        missing = self._door.missing
        return Json({"ready": not missing, **({"missing": missing} if missing else {})}, 503 if missing else 200)

    async def infer(self, request: Request) -> Json:
        target = _target(request)
        body = msgspec.json.decode(await request.body())
        inputs = {one["name"]: one["data"] for one in body["inputs"]}
        answer = await self._door.ask(target.app, inputs, target.needs(), protocol="rest")
        if isinstance(answer, Refused):
            raise answer
        outputs: list[dict[str, Any]] = [
            {
                "name": name,
                "datatype": answer.tensors[name]["datatype"],
                "shape": list(array.shape),
                "data": array.ravel().tolist(),
            }
            for name, array in answer.outputs.items()
        ]
        return Json({"model_name": request.path_params["model"], "model_version": answer.version, "outputs": outputs})


def _target(request: Request) -> Target:
    found = parse(request.path_params["model"], request.path_params.get("version"))
    if found is None:
        raise Problem(None, "there is no such model", code="unknown_model")
    return found

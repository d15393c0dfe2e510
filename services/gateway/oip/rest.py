"""The protocol over REST: paths, headers and bodies."""

from collections.abc import Collection, Iterable
from importlib import metadata as packages
from typing import Any

from starlette.requests import Request
from starlette.routing import Route

from bus.tensors import BadTensor
from infaas.errors import Refused
from services.gateway.door import Door, Problem
from services.gateway.http.reply import Json
from services.gateway.http.wire import Pieces, one_coding, whole_body
from services.gateway.needs import BadParameter, ignored, needs_of
from services.gateway.oip import infer
from services.gateway.oip import metadata as described
from services.gateway.oip.names import Target, parse
from services.gateway.statistics import told
from services.shell.clock import now

NAME = "infaas"
EXTENSIONS = [
    "modelless",
    "binary_tensor_data",
    "model_configuration",
    "model_repository",
    "schedule_policy",
    "statistics",
]
_LENGTH = b"inference-header-content-length"
_JSON = (b"content-type", b"application/json")
_BINARY = (b"content-type", b"application/octet-stream")


def routes(door: Door) -> list[Route]:
    """All paths below /v2."""
    rest = Rest(door)
    of_model = [("", rest.metadata), ("/ready", rest.model_ready), ("/config", rest.config), ("/stats", rest.stats)]
    return [
        Route("/v2/models/{model}/infer", rest.infer, methods=["POST"]),
        Route("/v2/models/{model}/versions/{version}/infer", rest.infer, methods=["POST"]),
        Route("/v2", rest.server),
        Route("/v2/health/live", rest.live),
        Route("/v2/health/ready", rest.ready),
        Route("/v2/models/stats", rest.all_stats),
        *(Route(f"/v2/models/{{model}}{end}", endpoint) for end, endpoint in of_model),
        *(Route(f"/v2/models/{{model}}/versions/{{version}}{end}", endpoint) for end, endpoint in of_model),
        Route("/v2/repository/index", rest.index, methods=["POST"]),
    ]


class Rest:
    """The protocol's endpoints."""

    def __init__(self, door: Door) -> None:
        self._door = door
        self._server = {"name": NAME, "version": _version(), "extensions": EXTENSIONS}

    # -- the server

    async def server(self, request: Request) -> Json:
        del request
        return Json(self._server)

    async def live(self, request: Request) -> Json:
        del request
        return Json({"live": True})

    async def ready(self, request: Request) -> Json:
        del request
        missing = self._door.missing
        return Json({"ready": not missing, **({"missing": missing} if missing else {})}, 503 if missing else 200)

    async def index(self, request: Request) -> Json:
        try:
            only_ready = infer.read_object(await whole_body(request)).get("ready") is True
        except infer.BadInference as error:
            raise Problem(None, str(error)) from error
        ready = self._door.ready
        return Json([] if only_ready and not ready else list(described.index(self._door.catalog, ready=ready)))

    async def all_stats(self, request: Request) -> Json:
        del request
        counted = self._door.statistics
        return Json({"model_stats": [told(*entry) for app in counted.apps for entry in counted.of(app)]})

    # -- one model

    async def metadata(self, request: Request) -> Json:
        return Json(described.metadata(self._known(request)))

    async def model_ready(self, request: Request) -> Json:
        known = self._known(request)
        missing = self._door.missing
        return Json({"name": known.name, "ready": not missing}, 503 if missing else 200)

    async def config(self, request: Request) -> Json:
        return Json(described.config(self._known(request)))

    async def stats(self, request: Request) -> Json:
        self._known(request)
        target = _target(request)
        entries = self._door.statistics.of(target.app, target.model, target.variant, target.version)
        return Json({"model_stats": [told(*entry) for entry in entries]})

    def _known(self, request: Request) -> described.Known:
        target = _target(request)
        known = described.find(self._door.catalog, target)
        if known is None:
            raise Problem(None, f"no model {request.path_params['model'][:80]!r} is registered", code="unknown_model")
        return known

    # -- inference

    async def infer(self, request: Request) -> Pieces:
        door = self._door
        target = _target(request)
        head_length, coding, traceparent = _headers(request)
        app = door.catalog.app(target.app)
        signature = None if app is None else app.signature
        body = await whole_body(request)
        try:
            asked = infer.read(body, head_length, signature)
            needs = _needs(target, asked)
            if asked.outputs is not None and signature is not None:
                _check_outputs(asked.outputs, [spec.name for spec in signature.outputs])
            answer = await door.ask(target.app, asked.inputs, needs, traceparent=traceparent, protocol="rest")
            if isinstance(answer, Refused):
                raise answer
            if asked.outputs is not None:
                _check_outputs(asked.outputs, answer.tensors)
            unread = ignored(asked.parameters)
            head, binary = infer.write(
                asked, request.path_params["model"], answer, {"ignored": unread} if unread else {}
            )
        except (infer.BadInference, BadTensor, BadParameter) as error:
            raise Problem(None, str(error)) from error
        if not binary:
            return Pieces([head], [_JSON], coding=coding)
        return Pieces([head, *binary], [_BINARY, (_LENGTH, b"%d" % len(head))], coding=coding)


def _headers(request: Request) -> tuple[int | None, str, str | None]:
    """Length of the JSON in front of raw data, coding wanted for the reply, and the sender's place in a trace."""
    length, coding, traceparent = None, "", None
    for name, value in request.scope["headers"]:
        if name == _LENGTH:
            if not value.isdigit() or len(value) > 18 or length is not None:
                raise Problem(None, "Inference-Header-Content-Length must be a number of bytes")
            length = int(value)
        elif name == b"accept-encoding":
            coding = one_coding(value)
        elif name == b"traceparent":
            traceparent = value.decode("latin-1")
    return length, coding, traceparent


def _needs(target: Target, asked: infer.Inference) -> dict[str, Any]:
    needs = needs_of(asked.parameters, now()) if asked.parameters else {}
    for name, value in target.needs().items():
        if needs.get(name, value) != value:
            raise BadParameter(
                f"parameters.{name} is {needs[name][:80]!r}, but the model's name in the path says {value!r}"
            )
        needs[name] = value
    if asked.id is not None:
        needs["id"] = asked.id
    return needs


def _check_outputs(wanted: Iterable[str], names: Collection[str]) -> None:
    for name in wanted:
        if name not in names:
            raise infer.BadInference(f"outputs.{name[:80]}: the model has {', '.join(names)}")


def _target(request: Request) -> Target:
    found = parse(request.path_params["model"], request.path_params.get("version"))
    if found is None:
        raise Problem(
            None,
            "no model has such a name: they are <app>, <app>.<model> or <app>.<model>.<variant>, of letters, digits, - and _",
            code="unknown_model",
        )
    return found


def _version() -> str:
    try:
        return packages.version("infaas")
    except packages.PackageNotFoundError:
        return "0"

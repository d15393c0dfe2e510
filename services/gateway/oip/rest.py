"""The protocol over REST: paths, headers and bodies."""

from starlette.requests import Request
from starlette.routing import Route

from services.core import trace
from services.gateway.edge import GatewayService, SystemReadiness
from services.gateway.errors import BadRequest
from services.gateway.http.bodies import BinaryReply, JsonReply, json_body, one_coding
from services.gateway.http.protocol import COMPLETE
from services.gateway.json_checks import read_object
from services.gateway.oip import infer, models
from services.gateway.oip.models import ModelTarget
from services.gateway.oip.parameters import ignored
from services.gateway.statistics import statistics_json
from services.shell.runtime.runtime import unix_now

_LENGTH = b"inference-header-content-length"
_JSON = (b"content-type", b"application/json")
_BINARY = (b"content-type", b"application/octet-stream")


def routes(service: GatewayService) -> list[Route]:
    """All paths below /v2."""
    rest = Rest(service)
    of_model = [("", rest.metadata), ("/ready", rest.model_ready), ("/config", rest.config), ("/stats", rest.stats)]
    return [
        Route("/v2/models/{model}/infer", rest.infer, methods=["POST"]),
        Route("/v2/models/{model}/versions/{version}/infer", rest.infer, methods=["POST"]),
        Route("/v2", rest.server),
        Route("/v2/health/live", rest.live),
        Route("/v2/health/ready", rest.ready),
        Route("/v2/models", rest.all_models),
        Route("/v2/models/stats", rest.all_stats),
        *(Route(f"/v2/models/{{model}}{end}", endpoint) for end, endpoint in of_model),
        *(Route(f"/v2/models/{{model}}/versions/{{version}}{end}", endpoint) for end, endpoint in of_model),
        Route("/v2/repository/index", rest.index, methods=["POST"]),
    ]


class Rest:
    """The protocol's endpoints."""

    def __init__(self, service: GatewayService) -> None:
        self._service = service
        self._server = models.server_metadata(service.version)

    # -- the server

    async def server(self, request: Request) -> JsonReply:
        del request
        return JsonReply(self._server)

    async def live(self, request: Request) -> JsonReply:
        del request
        return JsonReply({"live": True})

    async def ready(self, request: Request) -> JsonReply:
        del request
        return _readiness(await self._service.readiness())

    async def index(self, request: Request) -> JsonReply:
        only_ready = read_object(await json_body(request)).get("ready") is True
        ready = (await self._service.readiness()).ready
        return JsonReply([] if only_ready and not ready else list(models.index(self._service.catalog, ready=ready)))

    async def all_models(self, request: Request) -> JsonReply:
        del request
        ready = (await self._service.readiness()).ready
        return JsonReply(list(models.index(self._service.catalog, ready=ready)))

    async def all_stats(self, request: Request) -> JsonReply:
        del request
        counted = self._service.statistics
        return JsonReply(
            {"model_stats": [statistics_json(*entry) for app in counted.apps for entry in counted.of(app)]}
        )

    # -- one model

    async def metadata(self, request: Request) -> JsonReply:
        return JsonReply(models.metadata(self._known(request)))

    async def model_ready(self, request: Request) -> JsonReply:
        known = self._known(request)
        return _readiness(await self._service.readiness(), name=known.name)

    async def config(self, request: Request) -> JsonReply:
        return JsonReply(models.config(self._known(request)))

    async def stats(self, request: Request) -> JsonReply:
        self._known(request)
        target = _target(request)
        entries = self._service.statistics.of(target.app, target.model, target.variant, target.version)
        return JsonReply({"model_stats": [statistics_json(*entry) for entry in entries]})

    def _known(self, request: Request) -> models.ServedModel:
        return models.served_model(self._service.catalog, request.path_params["model"], _target(request))

    # -- inference

    async def infer(self, request: Request) -> BinaryReply:
        service = self._service
        target = _target(request)
        head_length, coding, traceparent = _headers(request)
        app = service.catalog.app(target.app)
        signature = None if app is None else app.signature
        body = await json_body(request, head_length)
        asked = infer.read(body, head_length, signature)
        needed = infer.requirements(asked, target, app, unix_now())
        answer = await service.query(
            target.app,
            asked.inputs,
            needed,
            traceparent=traceparent,
            protocol="rest",
            complete=request.scope.get(COMPLETE),
        )
        unread = ignored(asked.parameters)
        head, binary = infer.write(
            asked,
            request.path_params["model"],
            infer.answer_of(asked, answer),
            {"ignored": unread} if unread else {},
            [] if answer.labels is None or app is None else service.catalog.classes_of(app),
        )
        headers = [_BINARY, (_LENGTH, b"%d" % len(head))] if binary else [_JSON]
        if traceparent is not None:
            headers.append((b"traceparent", traceparent.encode()))
        return BinaryReply([head, *binary], headers, coding=coding)


def _headers(request: Request) -> tuple[int | None, str, str | None]:
    """The length of the JSON in front of raw data, the coding of the reply, and the trace context."""
    length, coding, traceparent = None, "", None
    for name, value in request.scope["headers"]:
        if name == _LENGTH:
            if not value.isdigit() or len(value) > 18 or length is not None:
                raise BadRequest("Inference-Header-Content-Length must be a number of bytes")
            length = int(value)
        elif name == b"accept-encoding":
            coding = one_coding(value)
        elif name == b"traceparent":
            given = value.decode("latin-1")
            traceparent = given if trace.read({"traceparent": given}) is not None else None
    return length, coding, traceparent


def _readiness(found: SystemReadiness, **first: str) -> JsonReply:
    says = {**first, "ready": found.ready, **({"missing": found.missing} if found.missing else {})}
    return JsonReply(says, 200 if found.ready else 503)


def _target(request: Request) -> ModelTarget:
    return models.target_of(request.path_params["model"], request.path_params.get("version"))

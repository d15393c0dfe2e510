"""The protocol over REST: paths, headers and bodies."""

from services.core import trace
from services.gateway.edge import GatewayService, SystemReadiness
from services.gateway.errors import BadRequest
from services.gateway.json_checks import read_object, sized
from services.gateway.oip import infer, models
from services.gateway.oip.models import ModelTarget
from services.gateway.oip.parameters import ignored
from services.gateway.statistics import statistics_json
from services.shell.http.messages import JSON, HttpReply, HttpRequest, HttpRoute, JsonReply, one_coding
from services.shell.runtime.runtime import unix_now

_BINARY = b"content-type: application/octet-stream\r\ninference-header-content-length: %d\r\n"


def routes(service: GatewayService) -> list[HttpRoute]:
    """All paths below /v2."""
    rest = Rest(service)
    of_model = [("", rest.metadata), ("/ready", rest.model_ready), ("/config", rest.config), ("/stats", rest.stats)]
    return [
        HttpRoute("/v2/models/{model}/infer", rest.infer, methods=["POST"]),
        HttpRoute("/v2/models/{model}/versions/{version}/infer", rest.infer, methods=["POST"]),
        HttpRoute("/v2", rest.server),
        HttpRoute("/v2/health/live", rest.live),
        HttpRoute("/v2/health/ready", rest.ready),
        HttpRoute("/v2/models", rest.all_models),
        HttpRoute("/v2/models/stats", rest.all_stats),
        *(HttpRoute(f"/v2/models/{{model}}{end}", endpoint) for end, endpoint in of_model),
        *(HttpRoute(f"/v2/models/{{model}}/versions/{{version}}{end}", endpoint) for end, endpoint in of_model),
        HttpRoute("/v2/repository/index", rest.index, methods=["POST"]),
    ]


class Rest:
    """The protocol's endpoints."""

    def __init__(self, service: GatewayService) -> None:
        self._service = service
        self._server = models.server_metadata(service.version)

    # -- the server

    async def server(self, _request: HttpRequest) -> JsonReply:
        return JsonReply(self._server)

    async def live(self, _request: HttpRequest) -> JsonReply:
        return JsonReply({"live": True})

    async def ready(self, _request: HttpRequest) -> JsonReply:
        return _readiness(await self._service.readiness())

    async def index(self, request: HttpRequest) -> JsonReply:
        only_ready = read_object(sized(request.body)).get("ready") is True
        ready = (await self._service.readiness()).ready
        return JsonReply(
            []
            if only_ready and not ready
            else list(models.index(self._service.catalog, ready=ready, only=request.only))
        )

    async def all_models(self, request: HttpRequest) -> JsonReply:
        ready = (await self._service.readiness()).ready
        return JsonReply(list(models.index(self._service.catalog, ready=ready, only=request.only)))

    async def all_stats(self, request: HttpRequest) -> JsonReply:
        return JsonReply(
            {"model_stats": [statistics_json(*entry) for entry in self._service.statistics.all(request.only)]}
        )

    # -- one model

    async def metadata(self, request: HttpRequest) -> JsonReply:
        return JsonReply(models.metadata(self._known(request)))

    async def model_ready(self, request: HttpRequest) -> JsonReply:
        known = self._known(request)
        return _readiness(await self._service.readiness(), name=known.name)

    async def config(self, request: HttpRequest) -> JsonReply:
        return JsonReply(models.config(self._known(request)))

    async def stats(self, request: HttpRequest) -> JsonReply:
        self._known(request)
        target = _target(request)
        entries = self._service.statistics.of(target.app, target.model, target.variant, target.version)
        return JsonReply({"model_stats": [statistics_json(*entry) for entry in entries]})

    def _known(self, request: HttpRequest) -> models.ServedModel:
        return models.served_model(self._service.catalog, request.params["model"], _target(request))

    # -- inference

    async def infer(self, request: HttpRequest) -> HttpReply:
        service = self._service
        target = _target(request)
        head_length, traceparent = _head_length(request), request.header(b"traceparent")
        if traceparent is not None and trace.read({"traceparent": traceparent}) is None:
            traceparent = None
        app = service.catalog.app(target.app)
        signature = None if app is None else app.signature
        asked = infer.read(sized(request.body, head_length), head_length, signature)
        needed = infer.requirements(asked, target, app, unix_now())
        answer = await service.query(
            target.app, asked.inputs, needed, traceparent=traceparent, protocol="rest", complete=request.complete
        )
        unread = ignored(asked.parameters)
        head, binary = infer.write(
            asked,
            request.params["model"],
            infer.answer_of(asked, answer),
            {"ignored": unread} if unread else {},
            [] if answer.labels is None or app is None else service.catalog.classes_of(app),
        )
        lines = _BINARY % len(head) if binary else JSON
        if traceparent is not None:
            lines += f"traceparent: {traceparent}\r\n".encode()
        return HttpReply([head, *binary], lines, coding=one_coding(request.headers.get(b"accept-encoding", b"")))


def _head_length(request: HttpRequest) -> int | None:
    """The length of the JSON in front of raw data. Raises BadRequest."""
    value = request.headers.get(b"inference-header-content-length")
    if value is None:
        return None
    if not value.isdigit() or len(value) > 18:
        raise BadRequest("Inference-Header-Content-Length must be a number of bytes")
    return int(value)


def _readiness(found: SystemReadiness, **first: str) -> JsonReply:
    says = {**first, "ready": found.ready, **({"missing": found.missing} if found.missing else {})}
    return JsonReply(says, 200 if found.ready else 503)


def _target(request: HttpRequest) -> ModelTarget:
    return models.target_of(request.params["model"], request.params.get("version"))

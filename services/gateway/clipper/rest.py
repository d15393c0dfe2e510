"""Clipper's query front end: POST /<app>/predict and /<app>/update, GET /clipper/metrics; and all paths of the dialect."""

import itertools
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from hashlib import blake2b
from typing import Any

import msgspec
from msgspec import UNSET, Struct, to_builtins

from bus.fields import near
from bus.messages.catalog import AppRecord
from bus.messages.verbs import verb_of
from infaas.answers import Answer
from services.gateway.clipper.admin import OWN, ClipperAdminApi, no_application
from services.gateway.clipper.bodies import ClipperPrediction, PredictBody, UpdateBody, items_of, tensors_of
from services.gateway.edge import GatewayService
from services.gateway.errors import BadRequest, RequestFailed
from services.gateway.json_checks import fitted, read_object, sized
from services.gateway.oip.parameters import NAMES
from services.gateway.registration import ModelRegistration
from services.shell.http.messages import HttpRequest, HttpRoute, JsonReply, TextReply


class PredictionCounts(Struct, eq=False):
    """Counts by application: predictions, default outputs among them, and their latency. known: whether an application is there."""

    known: Callable[[str], bool]
    _apps: dict[str, list[float]] = {}

    def add(self, app: str, items: int, micros: float, *, default: bool) -> None:
        """Count an answered request."""
        if app not in self._apps:  # seldom: the moment to forget those that are gone
            self._apps = {each: counts for each, counts in self._apps.items() if self.known(each)}
        found = self._apps.setdefault(app, [0.0, 0.0, 0.0, 0.0, 0.0])
        found[0] += items
        found[1] += items if default else 0
        found[2] += 1
        found[3] += micros
        found[4] = max(found[4], micros)

    def report(self) -> dict[str, list[dict[str, Any]]]:
        """The reply to /clipper/metrics: counters, ratios and histograms with Clipper's names."""
        apps = sorted(self._apps.items())
        return {
            "counters": [{f"app:{app}:num_predictions": {"count": int(found[0])}} for app, found in apps],
            "ratio_counters": [
                {f"app:{app}:default_prediction_ratio": {"ratio": found[1] / found[0]}} for app, found in apps
            ],
            "histograms": [
                {
                    f"app:{app}:prediction_latency": {
                        "unit": "microseconds",
                        "size": int(found[2]),
                        "mean": found[3] / found[2],
                        "max": found[4],
                    }
                }
                for app, found in apps
            ],
        }


REMEMBERED = 50_000  # query ids whose queries feedback may name, in 10 MB; of older ones only the id is known


class ClipperQueryApi:
    """The endpoints. Query ids count up from a random number, so that those of several gateways differ."""

    def __init__(self, service: GatewayService) -> None:
        self._service = service
        self._ids = itertools.count(secrets.randbits(52))
        # by query_id: the answer's query, and the item
        self._answered: OrderedDict[str, tuple[str, int]] = OrderedDict()
        self.counts = PredictionCounts(lambda app: service.catalog.app(app) is not None)

    async def predict(self, request: HttpRequest) -> JsonReply:
        began = time.perf_counter()
        app = self._app(request)
        given = read_object(sized(request.body))
        ignored = _unread(given)
        body = fitted({name: given[name] for name in _PREDICT if name in given}, PredictBody)
        items, batch = items_of(body.input, body.input_batch)
        tensors = tensors_of(app, items)
        ids = [next(self._ids) for _ in items]
        requirements: dict[str, Any] = {"id": str(ids[0])}
        if body.version is not None:
            requirements["version"] = str(body.version)
        answer = await self._service.query(
            app.app,
            tensors,
            requirements,
            traceparent=request.header(b"traceparent"),
            protocol="clipper",
            complete=request.complete,
        )
        micros = (time.perf_counter() - began) * 1e6
        self.counts.add(app.app, len(items), micros, default=bool(answer.default))
        if answer.query is not None:
            self._remember(ids, answer.query)
        names: list[Any] = answer.labels or [UNSET] * len(items)
        outputs = zip(ids, _outputs(answer, app, len(items)), names, strict=True)
        replies = [
            ClipperPrediction(query_id=one, output=output, label=label, **_explanation(answer))
            for one, output, label in outputs
        ]
        found: Any = {"batch_predictions": replies} if batch else replies[0]
        return JsonReply({**to_builtins(found), "ignored": ignored} if ignored else found)

    def _remember(self, ids: list[int], query: str) -> None:
        for item, one in enumerate(ids):
            self._answered[str(one)] = (query, item)
        while len(self._answered) > REMEMBERED:
            self._answered.popitem(last=False)

    async def update(self, request: HttpRequest) -> TextReply:
        app = self._app(request)
        given = read_object(sized(request.body))
        body = fitted({name: given[name] for name in UpdateBody.__struct_fields__ if name in given}, UpdateBody)
        query, user = body.query_id, body.uid
        if query is None and body.input is None:
            raise BadRequest("input: is missing, or the query_id of an answer")
        uid, item = self._answered.get(str(query), (None, 0))
        await self._service.client.feedback(
            app.app,
            body.label,
            query=uid,
            item=item,
            id=None if query is None else str(query),
            inputs=tensors_of(app, [body.input]) if query is None else None,
            context=None if user is None else str(user),
            retry_key=None if query is None else _key_of(app.app, query, user, body.label),
        )
        return TextReply("Feedback received? 1")

    async def metrics(self, _request: HttpRequest) -> JsonReply:
        return JsonReply(self.counts.report())

    def _app(self, request: HttpRequest) -> AppRecord:
        name: str = request.params["app"]
        found = self._service.catalog.app(name)
        if found is None:
            raise RequestFailed(None, no_application(name, self._service.catalog), code="unknown_app")
        return found


def _key_of(*named: Any) -> bytes:
    """The same for an update that comes again."""
    return blake2b(msgspec.json.encode(named), digest_size=16).digest()


_PREDICT = PredictBody.__struct_fields__


def _unread(body: Mapping[str, Any]) -> str:
    """Names of the fields that are not read, with commas between them. Raises BadRequest where one is meant as a requirement."""
    unread = [name for name in body if name not in _PREDICT]
    for name in unread:
        if near(name, NAMES):
            raise BadRequest(
                f"{name[:80]}: predict reads {', '.join(_PREDICT)}; POST /v2/models/NAME/infer takes requirements"
            )
    return ",".join(unread)


def _explanation(answer: Answer) -> dict[str, Any]:
    """The fields beside an answer's output: Clipper's own, and the model that answered."""
    if answer.default:
        return {"default": True, "default_explanation": answer.reason or "no answer came in time"}
    words = {name: said for name in ("target", "unit") if (said := getattr(answer, name))}
    return {"default": False, "model": answer.model, "version": answer.version, "variant": answer.variant, **words}


def _outputs(answer: Answer, app: AppRecord, items: int) -> list[Any]:
    """The output of each item; a map of names where the model has several outputs."""
    if answer.default and app.default_output is not None:
        return [app.default_output] * items
    arrays = {name: array.tolist() for name, array in answer.outputs.items()}
    if any(len(values) != items for values in arrays.values()):
        raise RequestFailed(None, "the model returned another number of outputs than inputs", code="internal")
    if len(arrays) == 1:
        [values] = arrays.values()
        return list(values)
    return [{name: values[at] for name, values in arrays.items()} for at in range(items)]


_CORRECTABLE = ("bad_request", "unknown_model", "unsatisfiable")  # refusals with status 400, as in Clipper
_KINDS = {
    "unauthenticated": "Not allowed",
    "forbidden": "Not allowed",
    **dict.fromkeys(("deadline", "overloaded", "model_error", "unavailable", "internal"), "Query processing error"),
}


def clipper_error(failure: RequestFailed) -> JsonReply:
    """The reply for a failure."""
    status = 400 if failure.passed_on and failure.code in _CORRECTABLE else failure.status
    kind = _KINDS.get(failure.code, "Json error" if isinstance(failure, BadRequest) else "Request error")
    return JsonReply({"error": kind, "cause": failure.message}, status, failure.headers)


COUNTS = "/clipper/metrics"  # also at /metrics, for who accepts JSON
VERBS = (
    "add_app", "delete_app", "add_model_links", "delete_model_links", "add_model", "delete_versioned_model",
    "set_model_version",
    "get_all_applications", "get_application", "get_linked_models", "get_all_models", "get_model", "get_all_containers", "get_container", "get_state",
)  # fmt: skip


async def ping(_request: HttpRequest) -> TextReply:
    """Whether it is there."""
    return TextReply("PONG")


def routes(service: GatewayService, registration: ModelRegistration) -> list[HttpRoute]:
    """All paths of the dialect. Those below /admin come first: `admin` is not an application."""
    predicting, managing = ClipperQueryApi(service), ClipperAdminApi(service, registration)
    return [
        *(HttpRoute(f"/admin/{verb}", managing.endpoint(verb), methods=["POST"]) for verb in VERBS),
        *(HttpRoute(f"/admin/{verb_of(kind).replace('-', '_')}", managing.own(kind), methods=["POST"]) for kind in OWN),
        HttpRoute("/admin/ping", ping, methods=["GET"]),
        HttpRoute("/admin/metrics", predicting.metrics, methods=["POST"]),
        HttpRoute(COUNTS, predicting.metrics, methods=["GET"]),
        HttpRoute("/{app}/predict", predicting.predict, methods=["POST"]),
        HttpRoute("/{app}/update", predicting.update, methods=["POST"]),
    ]

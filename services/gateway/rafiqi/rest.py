"""Rafiqi's endpoints: POST /register, POST /classify, GET /list, GET /change_params."""

import asyncio
import math
from collections.abc import Mapping
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.routing import Route

from bus.messages.catalog import BatchingRule, ModelRecord, TensorSpec
from bus.messages.verbs import SetBatching
from infaas.answers import Answer
from infaas.errors import Refused
from services.core.batching import rule_errors
from services.gateway.edge import GatewayService, wait_until
from services.gateway.errors import RequestFailed
from services.gateway.http.bodies import JsonReply, json_body, whole_body
from services.gateway.oip.infer import BadInference, read_object
from services.gateway.rafiqi.images import WrongImage, tensor_of
from services.gateway.registration import VALIDATION_MISSING, ModelRegistration, RegistrationRequest, file_source

TOP = 5


def top(scores: list[float], labels: list[str], most: int = TOP) -> list[dict[str, Any]]:
    """The most likely classes of one item, best first: `confidence` from 0 to 1, and `label`, the class's number where it has no name."""
    shares = _shares(scores)
    order = sorted(range(len(shares)), key=lambda at: (-shares[at], at))[:most]
    return [{"confidence": shares[at], "label": label_of(at, labels)} for at in order]


def label_of(number: int, labels: list[str]) -> str:
    """A class's name."""
    return labels[number] if 0 <= number < len(labels) else str(number)


def _shares(scores: list[float]) -> list[float]:
    """Probabilities as they are; the softmax of other scores."""
    numbers = [score if math.isfinite(score) else -1e30 for score in scores]
    if all(0.0 <= number <= 1.0 for number in numbers) and abs(sum(numbers) - 1.0) < 0.02:
        return numbers
    peak = max(numbers)
    powers = [math.exp(max(number - peak, -700.0)) for number in numbers]
    whole = sum(powers)
    return [power / whole for power in powers]


CLASSIFY_TIMEOUT_S = 10.0  # as Rafiqi's own
MAX_DECODED = 2  # bodies decoded at a time: a picture may take much more memory than its file
_TUNED: dict[str, tuple[str, type]] = {"quanta": ("quantum_ms", float), "batchSize": ("batch", int)}
_TEXTS = ("version", "metric", "inputs_key", "labels_key", "task")


class RafiqiApi:
    """The endpoints."""

    def __init__(self, service: GatewayService, registration: ModelRegistration) -> None:
        self._service = service
        self._registration = registration
        self._decoding = asyncio.Semaphore(MAX_DECODED)

    # -- models

    async def register(self, request: Request) -> JsonReply:
        """Register each model, with an application of the same name. The reply comes when all are measured."""
        body = _object(await json_body(request))
        models = body.get("models")
        if not isinstance(models, dict) or not models:
            raise RequestFailed(
                None, 'models: must be an object {"name": {"model": {"URL" or "blob"}, "validation": ...}}'
            )
        wanted = {name: _registration_request(name, fields) for name, fields in models.items()}
        failed: dict[str, RequestFailed] = {}
        for name, one in wanted.items():
            try:
                done = await self._registration.register(one)
                await wait_until(lambda done=done: self._known(done.model, done.version))  # type: ignore[misc]
            except RequestFailed as failure:
                failed[name] = failure
            except Refused as refusal:
                failed[name] = RequestFailed(None, refusal.message, code=refusal.code)
        return self._all_models(failed)

    def _all_models(self, failed: Mapping[str, RequestFailed]) -> JsonReply:
        """What was done for several models, and the models that there are. failed: by model."""
        reply = {
            "success": not failed,
            "error": "; ".join(f"{name}: {failure.message}" for name, failure in failed.items()),
            "allModels": sorted({record.model for record in self._service.catalog.models}),
        }
        return JsonReply(reply, next(iter(failed.values())).status if failed else 200)

    def _known(self, model: str, version: str | None) -> bool:
        return self._service.catalog.model(model, version) is not None

    async def listed(self, request: Request) -> JsonReply:
        del request
        catalog = self._service.catalog
        records = sorted(catalog.models, key=lambda record: (record.model, record.created))
        return JsonReply([self._described(record) for record in records])

    def _described(self, record: ModelRecord) -> dict[str, Any]:
        variants = self._service.catalog.variants_at(record.model, record.version)
        return {
            "name": record.model,
            "version": record.version,
            "path": f"{self._service.subjects.artifacts_bucket}/{record.source}",
            "size": max((round(variant.profile.memory_mb * 1e6) for variant in variants), default=0),
            "format": record.format,
            "variants": [variant.variant for variant in variants],
            "labels": len(record.labels),
        }

    async def change_params(self, request: Request) -> JsonReply:
        """Batch by threshold, with this quantum and this largest batch: one model, or all that there are. The next batches are so."""
        given = dict(request.query_params)
        name = given.pop("model_name", None)
        fields = _tuning(given)
        known = {record.model for record in self._service.catalog.models}
        if name is not None and name not in known:
            raise _unknown_model(name)
        if not known:
            raise RequestFailed(None, "there is no model: POST /register registers one", code="unknown_model")
        failed: dict[str, RequestFailed] = {}
        for model in sorted(known) if name is None else [name]:
            try:
                await self._service.command(SetBatching(model=model, **fields))
            except Refused as refusal:
                failed[model] = RequestFailed(None, refusal.message, code=refusal.code)
        return self._all_models(failed)

    # -- queries

    async def classify(self, request: Request) -> JsonReply:
        name = request.query_params.get("model_name", "")
        if not name:
            raise RequestFailed(None, "model_name is missing: POST /classify?model_name=NAME")
        unread = [one for one in request.query_params if one != "model_name"]
        if unread:
            text = f"{unread[0][:80]}: classify reads model_name only; POST /v2/models/NAME/infer takes requirements"
            raise RequestFailed(None, text)
        app, spec = self._found(name)
        body = await whole_body(request)
        try:
            async with self._decoding:
                tensor = await asyncio.to_thread(tensor_of, body, spec)
        except WrongImage as error:
            raise RequestFailed(None, str(error)) from error
        requirements: dict[str, Any] = {
            "deadline": self._service.now() + CLASSIFY_TIMEOUT_S,
            **({} if app is not None else {"model": name}),
        }
        traceparent = request.headers.get("traceparent")
        try:
            answer = await self._service.query(
                app,
                {spec.name: tensor},
                requirements,
                timeout=CLASSIFY_TIMEOUT_S,
                traceparent=traceparent,
                protocol="rafiqi",
            )
        except RequestFailed as failure:
            if failure.code == "deadline":
                raise _too_late(failure.message) from failure
            raise
        if isinstance(answer, Refused):
            raise _too_late(answer.message) if answer.code == "deadline" else answer
        found = _predictions(answer, self._labels(answer))
        return JsonReply(found[0] if len(found) == 1 else found)

    def _found(self, name: str) -> tuple[str | None, TensorSpec]:
        """The app to query (None: the model of this name) and its input. Raises RequestFailed."""
        catalog = self._service.catalog
        app, model = catalog.app(name), catalog.model(name)
        signature = app.signature if app is not None else model.signature if model is not None else None
        if signature is None:
            raise _unknown_model(name)
        if len(signature.inputs) != 1:
            raise RequestFailed(None, f"{name} has several inputs: use POST /v2/models/{name}/infer")
        return (None if app is None else name), signature.inputs[0]

    def _labels(self, answer: Answer) -> list[str]:
        record = self._service.catalog.model(answer.model, answer.version)
        return [] if record is None else record.labels


def _unknown_model(name: str) -> RequestFailed:
    return RequestFailed(
        None, f"there is no model {name[:80]!r}: GET /list names those there are", code="unknown_model"
    )


def _tuning(given: Mapping[str, str]) -> dict[str, Any]:
    """Fields of `set-batching`. given: the query's parameters, as Rafiqi calls them: `quanta` in ms, `batchSize` in items."""
    names = " and ".join(_TUNED)
    for parameter in given:
        if parameter not in _TUNED:
            raise RequestFailed(None, f"{parameter[:80]}: there is no such parameter; use {names}")
    if not given:
        raise RequestFailed(None, f"nothing to change: give {names}, or one of them")
    fields: dict[str, Any] = {"policy": "threshold"}
    for parameter, text in given.items():
        field, kind = _TUNED[parameter]
        try:
            fields[field] = kind(text)
        except ValueError as error:
            unit = "a number of milliseconds" if kind is float else "a whole number of items"
            raise RequestFailed(None, f"{parameter}: must be {unit}, not {text[:80]!r}") from error
        for wrong in rule_errors(BatchingRule(policy="threshold", **{field: fields[field]})):
            raise RequestFailed(None, wrong.replace(field, parameter, 1))
    return fields


def _too_late(why: str) -> RequestFailed:
    return RequestFailed(500, f"no answer within {CLASSIFY_TIMEOUT_S:g} s: {why}", code="deadline")


def _predictions(answer: Answer, labels: list[str]) -> list[list[dict[str, Any]]]:
    """The most likely classes of each item."""
    arrays = list(answer.outputs.values())
    scores = next(
        (array for array in arrays if array.ndim == 2 and array.shape[1] > 1 and array.dtype.kind == "f"), None
    )
    if scores is not None:
        found = [top(row, labels) for row in scores.tolist()]
    else:  # the output, or the app's default output, is the class itself
        found = [
            [{"confidence": None, "label": _class(value, labels)}]
            for value in arrays[0].reshape(len(arrays[0]), -1)[:, 0].tolist()
        ]
    if answer.default:
        for one in found:
            one[0] |= {"default": True, "default_explanation": answer.reason}
    return found


def _class(value: Any, labels: list[str]) -> str:
    whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
    return label_of(int(value), labels) if whole else str(value)


def _object(body: bytes) -> dict[str, Any]:
    try:
        return read_object(body)
    except BadInference as error:
        raise RequestFailed(None, str(error)) from error


def _registration_request(name: str, fields: Any) -> RegistrationRequest:
    """The registration of one model. Raises RequestFailed."""
    if not isinstance(fields, Mapping):
        raise RequestFailed(None, f"models.{name}: must be an object with `model` and `validation`")
    at = f"models.{name}"
    for field, why in (
        ("weights", "an ONNX model holds its weights"),
        ("means", "export the model with the preprocessing of its images"),
    ):
        if fields.get(field) is not None:
            raise RequestFailed(None, f"{at}.{field}: cannot be used, {why}; leave it out")
    if fields.get("model") is None:
        raise RequestFailed(None, f'{at}.model is missing: give {{"URL": "https://..."}} or {{"blob": "base64"}}')
    if fields.get("validation") is None:
        raise RequestFailed(None, f"{at}.{VALIDATION_MISSING}")
    labels = fields.get("labels")
    if isinstance(labels, list):
        if not all(isinstance(label, str) for label in labels):
            raise RequestFailed(None, f"{at}.labels: must be a list of texts")
        named: Any = tuple(labels)
    else:
        named = () if labels is None else file_source(labels, f"{at}.labels")
    more: dict[str, Any] = {}
    for field in _TEXTS:
        if fields.get(field) is not None:
            more[field] = _text(fields[field], f"{at}.{field}")
    if fields.get("latency_ms") is not None:
        try:
            more["latency_ms"] = msgspec.convert(fields["latency_ms"], float)
        except msgspec.ValidationError as error:
            raise RequestFailed(None, f"{at}.latency_ms: must be a number of milliseconds") from error
    if fields.get("default_output") is not None:
        more["default_output"] = fields["default_output"]
    return RegistrationRequest(
        app=name,
        model=name,
        source=file_source(fields["model"], f"{at}.model"),
        validation=file_source(fields["validation"], f"{at}.validation"),
        labels=named,
        format=None if fields.get("format") is None else _text(fields["format"], f"{at}.format"),
        more=more,
    )


def _text(value: Any, field: str) -> str:
    if not isinstance(value, str):
        raise RequestFailed(None, f"{field}: must be a text")
    return value


def routes(service: GatewayService, registration: ModelRegistration) -> list[Route]:
    """All paths of the dialect."""
    serving = RafiqiApi(service, registration)
    return [
        Route("/register", serving.register, methods=["POST"]),
        Route("/classify", serving.classify, methods=["POST"]),
        Route("/list", serving.listed, methods=["GET"]),
        Route("/change_params", serving.change_params, methods=["GET"]),
    ]

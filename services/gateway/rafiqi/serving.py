"""POST /register, POST /classify, GET /list: Rafiqi's three endpoints."""

import asyncio
from collections.abc import Mapping
from typing import Any

import msgspec
from starlette.requests import Request

from bus.messages.catalog import ModelRecord, TensorSpec
from infaas.answers import Answer
from infaas.errors import Refused
from services.gateway.door import Door, Problem
from services.gateway.http.reply import Json
from services.gateway.http.wire import json_body, whole_body
from services.gateway.oip.infer import BadInference, read_object
from services.gateway.rafiqi.images import WrongImage, tensor_of
from services.gateway.rafiqi.scores import label_of, top
from services.gateway.registering import NEEDED, Registering, Wish, part_of
from services.gateway.settled import settled
from services.shell.clock import now

PATIENCE = 10.0  # s, after which a classification fails, as Rafiqi's does
AT_A_TIME = 2  # bodies that are read: a picture may take much more memory than its file
_TEXTS = ("version", "metric", "inputs_key", "labels_key", "task")


class Serving:
    """The endpoints."""

    def __init__(self, door: Door, registering: Registering) -> None:
        self._door = door
        self._registering = registering
        self._reading = asyncio.Semaphore(AT_A_TIME)

    # -- models

    async def register(self, request: Request) -> Json:
        """Each model under its own name, as an application of the same name; the reply comes when all are measured."""
        body = _object(await json_body(request))
        models = body.get("models")
        if not isinstance(models, dict) or not models:
            raise Problem(None, 'models: must be an object {"name": {"model": {"URL" or "blob"}, "validation": ...}}')
        wishes = {name: _wish(name, fields) for name, fields in models.items()}
        failed: dict[str, Problem] = {}
        for name, wish in wishes.items():
            try:
                done = await self._registering.register(wish)
                await settled(lambda done=done: self._known(done.model, done.version))  # type: ignore[misc]
            except Problem as problem:
                failed[name] = problem
            except Refused as refusal:
                failed[name] = Problem(None, refusal.message, code=refusal.code)
        reply = {
            "success": not failed,
            "error": "; ".join(f"{name}: {problem.message}" for name, problem in failed.items()),
            "allModels": sorted({record.model for record in self._door.catalog.models}),
        }
        return Json(reply, next(iter(failed.values())).status if failed else 200)

    def _known(self, model: str, version: str | None) -> bool:
        return self._door.catalog.model(model, version) is not None

    async def listed(self, request: Request) -> Json:
        del request
        catalog = self._door.catalog
        records = sorted(catalog.models, key=lambda record: (record.model, record.created))
        return Json([self._described(record) for record in records])

    def _described(self, record: ModelRecord) -> dict[str, Any]:
        variants = self._door.catalog.variants_at(record.model, record.version)
        return {
            "name": record.model,
            "version": record.version,
            "path": f"{self._door.subjects.artifacts_bucket}/{record.source}",
            "size": max((round(variant.profile.memory_mb * 1e6) for variant in variants), default=0),
            "format": record.format,
            "variants": [variant.variant for variant in variants],
            "labels": len(record.labels),
        }

    # -- queries

    async def classify(self, request: Request) -> Json:
        name = request.query_params.get("model_name", "")
        if not name:
            raise Problem(None, "model_name is missing: POST /classify?model_name=NAME")
        app, spec = self._found(name)
        body = await whole_body(request)
        try:
            async with self._reading:
                tensor = await asyncio.to_thread(tensor_of, body, spec)
        except WrongImage as error:
            raise Problem(None, str(error)) from error
        needs: dict[str, Any] = {"deadline": now() + PATIENCE, **({} if app is not None else {"model": name})}
        traceparent = request.headers.get("traceparent")
        try:
            answer = await self._door.ask(
                app, {spec.name: tensor}, needs, timeout=PATIENCE, traceparent=traceparent, protocol="rafiqi"
            )
        except Problem as problem:
            if problem.code == "deadline":
                raise _too_late(problem.message) from problem
            raise
        if isinstance(answer, Refused):
            raise _too_late(answer.message) if answer.code == "deadline" else answer
        found = _predictions(answer, self._labels(answer))
        return Json(found[0] if len(found) == 1 else found)

    def _found(self, name: str) -> tuple[str | None, TensorSpec]:
        """Whom to ask, and the input that it takes. Raises Problem."""
        catalog = self._door.catalog
        app, model = catalog.app(name), catalog.model(name)
        signature = app.signature if app is not None else model.signature if model is not None else None
        if signature is None:
            raise Problem(
                None, f"there is no model {name[:80]!r}: GET /list names those there are", code="unknown_model"
            )
        if len(signature.inputs) != 1:
            raise Problem(None, f"{name} has several inputs: use POST /v2/models/{name}/infer")
        return (None if app is None else name), signature.inputs[0]

    def _labels(self, answer: Answer) -> list[str]:
        record = self._door.catalog.model(answer.model, answer.version)
        return [] if record is None else record.labels


def _too_late(why: str) -> Problem:
    return Problem(500, f"no answer within {PATIENCE:g} s: {why}", code="deadline")


def _predictions(answer: Answer, labels: list[str]) -> list[list[dict[str, Any]]]:
    """For each item its most likely classes."""
    arrays = list(answer.outputs.values())
    scores = next(
        (array for array in arrays if array.ndim == 2 and array.shape[1] > 1 and array.dtype.kind == "f"), None
    )
    if scores is not None:
        found = [top(row, labels) for row in scores.tolist()]
    else:  # the model, or the app's default, names the class itself
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
        raise Problem(None, str(error)) from error


def _wish(name: str, fields: Any) -> Wish:
    """One model of a registration. Raises Problem."""
    if not isinstance(fields, Mapping):
        raise Problem(None, f"models.{name}: must be an object with `model` and `validation`")
    at = f"models.{name}"
    for field, why in (
        ("weights", "an ONNX model holds its weights"),
        ("means", "export the model with what it does to its images"),
    ):
        if fields.get(field) is not None:
            raise Problem(None, f"{at}.{field}: cannot be used, {why}; leave it out")
    if fields.get("model") is None:
        raise Problem(None, f'{at}.model is missing: give {{"URL": "https://..."}} or {{"blob": "base64"}}')
    if fields.get("validation") is None:
        raise Problem(None, f"{at}.{NEEDED}")
    labels = fields.get("labels")
    if isinstance(labels, list):
        if not all(isinstance(label, str) for label in labels):
            raise Problem(None, f"{at}.labels: must be a list of texts")
        named: Any = tuple(labels)
    else:
        named = () if labels is None else part_of(labels, f"{at}.labels")
    more: dict[str, Any] = {}
    for field in _TEXTS:
        if fields.get(field) is not None:
            more[field] = _text(fields[field], f"{at}.{field}")
    if fields.get("latency_ms") is not None:
        try:
            more["latency_ms"] = msgspec.convert(fields["latency_ms"], float)
        except msgspec.ValidationError as error:
            raise Problem(None, f"{at}.latency_ms: must be a number of milliseconds") from error
    if fields.get("default_output") is not None:
        more["default_output"] = fields["default_output"]
    return Wish(
        app=name,
        model=name,
        source=part_of(fields["model"], f"{at}.model"),
        validation=part_of(fields["validation"], f"{at}.validation"),
        labels=named,
        format=None if fields.get("format") is None else _text(fields["format"], f"{at}.format"),
        more=more,
    )


def _text(value: Any, field: str) -> str:
    if not isinstance(value, str):
        raise Problem(None, f"{field}: must be a text")
    return value

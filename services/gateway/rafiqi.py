"""Rafiqi's endpoints: POST /register, POST /classify, GET /list, GET /change_params.

The body of a classification is an image, a .npy file, the bytes of the array, or a nested list.
"""

import asyncio
import io
import math
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from msgspec import Struct, defstruct, field

from bus.codec import DECODE_ERRORS
from bus.datatypes import SIZES
from bus.fields import fields_of
from bus.messages.catalog import BatchingFields, ModelRecord, TensorSpec
from bus.messages.public import Tensor
from bus.messages.verbs import SetBatching
from bus.tensors import BadTensor, fit, from_array, to_array
from bus.values import Ragged, flatten, from_list
from infaas.answers import Answer
from infaas.errors import BadInput, InfaasError
from infaas.tables import layout, picture
from services.core.catalog import Catalog
from services.gateway.edge import GatewayService, failure_from, wait_until
from services.gateway.errors import BadRequest, RequestFailed
from services.gateway.http.access import check_app
from services.gateway.json_checks import fitted, json_fault, read_object, sized
from services.gateway.registration import MODEL_FILE, FileSource, ModelFiles, ModelRegistration, optional
from services.shell.http.messages import HttpRequest, HttpRoute, JsonReply
from services.shell.runtime.runtime import unix_now

if TYPE_CHECKING:
    from bus.tensors import Array

NPY = b"\x93NUMPY"


def tensor_of(body: bytes, spec: TensorSpec) -> dict[str, Any]:
    """The tensor of one item, or of several from an array with one more axis. Blocks. Raises RequestFailed."""
    if not body:
        raise BadRequest("the body is empty: send an image, a .npy file, or the bytes of the input's array")
    size = SIZES[spec.datatype]
    if body.startswith(NPY):
        return _plain(_loaded(body), spec)
    if size and -1 not in spec.shape and len(body) == size * math.prod(spec.shape):
        return {"datatype": spec.datatype, "shape": [1, *spec.shape], "data": body}
    if body.lstrip()[:1] == b"[":
        return _plain(_listed(body, spec), spec)
    try:
        layout(spec)
    except BadInput as error:
        text = f"{spec.name} {spec.datatype}{spec.shape} is no image: send a .npy file, a JSON list, or the bytes of its array"
        raise BadRequest(text) from error
    try:
        return _plain(picture(body, spec), spec)
    except BadInput as error:
        raise BadRequest(str(error)) from error


def _plain(values: "Array", spec: TensorSpec) -> dict[str, Any]:
    if values.ndim == len(spec.shape):
        values = values[None]
    try:
        tensor = from_array(fit(values, spec, "body"))
    except BadTensor as error:
        raise BadRequest(str(error)) from error
    return {"datatype": tensor.datatype, "shape": tensor.shape, "data": tensor.data}


def _loaded(body: bytes) -> "Array":
    """The array of a .npy file, over the body's own bytes. Its header must fit them."""
    import numpy as np  # noqa: PLC0415  (most gateways do not need numpy)

    file = io.BytesIO(body)
    try:
        version = np.lib.format.read_magic(file)
        readers = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
        shape, columns, dtype = readers[version](file)
    except (ValueError, KeyError, OSError, TypeError, SyntaxError, RecursionError, MemoryError) as error:
        raise BadRequest("the .npy file cannot be read: its header is broken; write it with numpy.save") from error
    data = memoryview(body)[file.tell() :]
    if dtype.hasobject or any(axis < 0 for axis in shape) or math.prod(shape) * dtype.itemsize != len(data):
        raise BadRequest("the .npy file cannot be read: it holds objects, or not as many numbers as it says")
    if not len(data):
        raise BadRequest("the .npy file holds no numbers")
    values: Array = np.frombuffer(data, dtype)
    return values.reshape(shape, order="F" if columns else "C")


def _listed(body: bytes, spec: TensorSpec) -> "Array":
    sized(body)
    try:
        found = msgspec.json.decode(body, type=list[Any])
        if spec.datatype != "BYTES":
            return to_array(found, "body")
        return to_array(Tensor(**from_list("BYTES", *flatten(found), "body")), "body")
    except DECODE_ERRORS as error:
        raise BadRequest(json_fault(error, body)) from error
    except (Ragged, BadTensor) as error:
        what = "texts" if spec.datatype == "BYTES" else "numbers"
        raise BadRequest(f"the body is no list of {what}: {error}") from error


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
_of_model: Any = defstruct(
    "_of_model", optional("version", "latency_ms", "default_output"), bases=(ModelFiles,), frozen=True, kw_only=True
)


class RafiqiModel(_of_model, frozen=True, kw_only=True):  # type: ignore[misc, call-arg]  # made of the message's fields
    """A model to register, as an application of its name."""

    model: Annotated[str | FileSource, MODEL_FILE]


class RafiqiModels(Struct, frozen=True):
    """The body of a registration."""

    models: Annotated[
        dict[str, Any],
        'By name: `model` and `validation`, each a file as {"URL": ...} or {"blob": base64}, and `labels`.',
    ]


_BATCHING = fields_of(BatchingFields)


class Tuning(Struct, frozen=True):
    """What /change_params may say: `quanta` in ms, `batchSize` in items; of one model, or of all that there are."""

    quanta: Annotated[float | None, _BATCHING["quantum_ms"].rule, _BATCHING["quantum_ms"].meaning] = None
    batchSize: Annotated[int | None, _BATCHING["batch"].rule, _BATCHING["batch"].meaning] = None  # noqa: N815
    model_name: str | None = None


class RafiqiApi(Struct, eq=False):
    """The endpoints."""

    service: GatewayService
    registration: ModelRegistration
    _decoding: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(MAX_DECODED))

    # -- models

    async def register(self, request: HttpRequest) -> JsonReply:
        """Register each model, with an application of the same name. The reply comes when all are measured."""
        models = fitted(read_object(sized(request.body)), RafiqiModels).models
        if not models:
            raise BadRequest('models: must be an object {"name": {"model": {"URL" or "blob"}, "validation": ...}}')
        wanted = {name: fitted(given, RafiqiModel, f"models.{name}") for name, given in models.items()}
        failed: dict[str, RequestFailed] = {}
        for name, one in wanted.items():
            try:
                done = await self.registration.register(name, name, one.version, one, one.model, f"models.{name}.")
                await wait_until(lambda done=done: self._known(done.model, done.version))  # type: ignore[misc]
            except (RequestFailed, InfaasError) as error:
                failed[name] = failure_from(error)
        return self._all_models(failed)

    def _all_models(self, failed: dict[str, RequestFailed]) -> JsonReply:
        """What was done for several models, and the models that there are. failed: by model."""
        reply = {
            "success": not failed,
            "error": "; ".join(f"{name}: {failure.message}" for name, failure in failed.items()),
            "allModels": sorted({record.model for record in self.service.catalog.models}),
        }
        return JsonReply(reply, next(iter(failed.values())).status if failed else 200)

    def _known(self, model: str, version: str | None) -> bool:
        return self.service.catalog.model(model, version) is not None

    async def listed(self, _request: HttpRequest) -> JsonReply:
        catalog = self.service.catalog
        records = sorted(catalog.models, key=lambda record: (record.model, record.created))
        return JsonReply([self._described(record) for record in records])

    def _described(self, record: ModelRecord) -> dict[str, Any]:
        variants = self.service.catalog.variants_at(record.model, record.version)
        return {
            "name": record.model,
            "version": record.version,
            "path": f"{self.service.subjects.artifacts_bucket}/{record.source}",
            "size": max((round(variant.profile.memory_mb * 1e6) for variant in variants), default=0),
            "format": record.format,
            "variants": [variant.variant for variant in variants],
            "labels": len(record.labels),
        }

    async def change_params(self, request: HttpRequest) -> JsonReply:
        """Batch by threshold, with this quantum and this largest batch: one model, or all that there are. The next batches are so."""
        wish = fitted(request.query_params, Tuning, strict=False)
        name = wish.model_name
        if wish.quanta is wish.batchSize is None:
            raise BadRequest("nothing to change: give quanta and batchSize, or one of them")
        catalog = self.service.catalog
        known = {record.model for record in catalog.models}
        if name is not None and name not in known:
            raise _unknown_model(name, catalog)
        if not known:
            raise RequestFailed(None, "there is no model: POST /register registers one", code="unknown_model")
        failed: dict[str, RequestFailed] = {}
        for model in sorted(known) if name is None else [name]:
            try:
                await self.service.command(
                    SetBatching(model=model, policy="threshold", quantum_ms=wish.quanta, batch=wish.batchSize)
                )
            except InfaasError as error:
                failed[model] = failure_from(error)
        return self._all_models(failed)

    # -- queries

    async def classify(self, request: HttpRequest) -> JsonReply:
        name = request.query_params.get("model_name", "")
        if not name:
            raise BadRequest("model_name is missing: POST /classify?model_name=NAME")
        unread = [one for one in request.query_params if one != "model_name"]
        if unread:
            raise BadRequest(
                f"{unread[0][:80]}: classify reads model_name only; POST /v2/models/NAME/infer takes requirements"
            )
        app, spec = self._found(name)
        check_app(request.only, app)
        body = request.body
        async with self._decoding:
            tensor = await asyncio.to_thread(tensor_of, body, spec)
        requirements: dict[str, Any] = {
            "deadline": unix_now() + CLASSIFY_TIMEOUT_S,
            **({} if app is not None else {"model": name}),
        }
        traceparent = request.header(b"traceparent")
        try:
            answer = await self.service.query(
                app,
                {spec.name: tensor},
                requirements,
                timeout=CLASSIFY_TIMEOUT_S,
                traceparent=traceparent,
                protocol="rafiqi",
            )
        except RequestFailed as failure:
            if failure.code != "deadline":
                raise
            text = f"no answer within {CLASSIFY_TIMEOUT_S:g} s: {failure.message}"
            raise RequestFailed(500, text, code="deadline") from failure
        found = _predictions(answer, self._labels(app, answer))
        return JsonReply(found[0] if len(found) == 1 else found)

    def _found(self, name: str) -> tuple[str | None, TensorSpec]:
        """The app to query (None: the model of this name) and its input. Raises RequestFailed."""
        catalog = self.service.catalog
        app, model = catalog.app(name), catalog.model(name)
        signature = app.signature if app is not None else model.signature if model is not None else None
        if signature is None:
            raise _unknown_model(name, catalog)
        if len(signature.inputs) != 1:
            raise RequestFailed(None, f"{name} has several inputs: use POST /v2/models/{name}/infer")
        return (None if app is None else name), signature.inputs[0]

    def _labels(self, app: str | None, answer: Answer) -> list[str]:
        catalog = self.service.catalog
        record = catalog.model(answer.model, answer.version)
        whole = None if app is None else catalog.app(app)  # several models, or stages, have answered
        return record.labels if record is not None else [] if whole is None else catalog.classes_of(whole)


def _unknown_model(name: str, catalog: Catalog) -> RequestFailed:
    text = f"there is no model {name[:80]!r}: GET /list names those there are{catalog.meant_model(name)}"
    return RequestFailed(None, text, code="unknown_model")


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


def routes(service: GatewayService, registration: ModelRegistration) -> list[HttpRoute]:
    """All paths of the dialect."""
    serving = RafiqiApi(service, registration)
    return [
        HttpRoute("/register", serving.register, methods=["POST"]),
        HttpRoute("/classify", serving.classify, methods=["POST"]),
        HttpRoute("/list", serving.listed, methods=["GET"]),
        HttpRoute("/change_params", serving.change_params, methods=["GET"]),
    ]

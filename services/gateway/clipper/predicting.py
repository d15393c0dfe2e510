"""POST /<app>/predict and /<app>/update, GET /metrics: what Clipper's query front end offers."""

import itertools
import secrets
import time
from typing import Any

from starlette.requests import Request
from starlette.responses import PlainTextResponse

from bus.messages.catalog import AppRecord
from infaas.answers import Answer
from infaas.errors import InfaasError, Refused
from services.gateway.clipper.bodies import field, read, version
from services.gateway.clipper.counts import Counts
from services.gateway.clipper.inputs import WrongInput, items_of, tensors_of
from services.gateway.clipper.problems import JSON, PROCESSING, REQUEST, ClipperProblem, refused
from services.gateway.door import Door, problem_of
from services.gateway.http.reply import Json
from services.gateway.http.wire import json_body

_UPDATE = '{"uid": string, "input": [double] | [int] | [string] | [byte] | [float], "label": double}'


class Predicting:
    """The endpoints. Query ids grow from where chance has put them, so that several gateways' do not meet."""

    def __init__(self, door: Door) -> None:
        self._door = door
        self._ids = itertools.count(secrets.randbits(52))
        self.counts = Counts()

    async def predict(self, request: Request) -> Json:
        began = time.perf_counter()
        app = self._app(request)
        body = read(await json_body(request))
        try:
            items, batch = items_of(body)
            tensors = tensors_of(app, items)
        except WrongInput as error:
            raise ClipperProblem(JSON, f"Error parsing JSON: {error}") from error
        ids = [next(self._ids) for _ in items]
        needs: dict[str, Any] = {"id": str(ids[0])}
        wanted = version(body, "version", needed=False)
        if wanted is not None:
            needs["version"] = wanted
        answer = await self._door.ask(
            app.app, tensors, needs, traceparent=request.headers.get("traceparent"), protocol="clipper"
        )
        if isinstance(answer, Refused):
            raise refused(answer)
        micros = (time.perf_counter() - began) * 1e6
        self.counts.add(app.app, len(items), micros, default=bool(answer.default))
        replies = [
            {"query_id": one, "output": output, **_told(answer)}
            for one, output in zip(ids, _outputs(answer, app, len(items)), strict=True)
        ]
        return Json({"batch_predictions": replies} if batch else replies[0])

    async def update(self, request: Request) -> PlainTextResponse:
        app = self._app(request)
        body = read(await json_body(request), _UPDATE)
        user = field(body, "uid", (str, int), needed=False)
        query = field(body, "query_id", (int, str), needed=False)
        label = field(body, "label", (int, float, str, list))
        tensors = None
        if query is None:
            try:
                tensors = tensors_of(app, [field(body, "input", (int, float, str, list))])
            except WrongInput as error:
                raise ClipperProblem(JSON, f"Error parsing JSON: {error}") from error
        try:
            await self._door.client.feedback(
                app.app,
                label,
                id=None if query is None else str(query),
                inputs=tensors,
                context=None if user is None else str(user),
            )
        except Refused as refusal:
            raise refused(refusal, REQUEST) from refusal
        except InfaasError as error:
            raise problem_of(error) from error
        return PlainTextResponse("Feedback received? 1")

    async def metrics(self, request: Request) -> Json:
        del request
        return Json(self.counts.report())

    def _app(self, request: Request) -> AppRecord:
        name: str = request.path_params["app"]
        found = self._door.catalog.app(name)
        if found is None:
            raise ClipperProblem(REQUEST, f"there is no application {name[:80]!r}", 404, code="unknown_app")
        return found


def _told(answer: Answer) -> dict[str, Any]:
    """What Clipper says of an answer beside its output, and what it could not know."""
    if answer.default:
        return {"default": True, "default_explanation": answer.reason or "no answer came in time"}
    return {"default": False, "model": answer.model, "version": answer.version, "variant": answer.variant}


def _outputs(answer: Answer, app: AppRecord, items: int) -> list[Any]:
    """One output an item: of a model with several, a map of their names."""
    if answer.default and app.default_output is not None:
        return [app.default_output] * items
    arrays = {name: array.tolist() for name, array in answer.outputs.items()}
    if any(len(values) != items for values in arrays.values()):
        raise ClipperProblem(PROCESSING, "the model gave another number of outputs than inputs", 500, code="internal")
    if len(arrays) == 1:
        [values] = arrays.values()
        return list(values)
    return [{name: values[at] for name, values in arrays.items()} for at in range(items)]

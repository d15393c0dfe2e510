"""/admin/*: Clipper's management of applications, links, models and versions, by the verbs of `infaas.admin`."""

import json
from collections.abc import Awaitable, Callable
from typing import Any, get_origin

import msgspec
from msgspec import NODEFAULT
from starlette.requests import Request
from starlette.responses import PlainTextResponse

from bus.codec import explain
from bus.fields import Field
from bus.messages.verbs import (
    AddApp,
    AdminVerb,
    DeleteApp,
    DeleteVersion,
    DeployPipeline,
    LinkModel,
    SetBatching,
    SetPipeline,
    SetSelection,
    SetTarget,
    SetVersion,
    UnlinkModel,
    body_of,
)
from bus.subjects import WITHOUT_APP
from infaas.errors import InfaasError, Refused
from services.core.batching import LARGEST_BATCH
from services.core.catalog import Catalog
from services.gateway.clipper import bodies
from services.gateway.clipper.bodies import (
    PROCESSING_ERROR,
    REQUEST_ERROR,
    ClipperError,
    clipper_refusal,
    field,
    read_object,
    read_version,
)
from services.gateway.edge import GatewayService, wait_until
from services.gateway.errors import failure_of
from services.gateway.http.bodies import JsonReply, json_body
from services.gateway.registration import (
    VALIDATION_MISSING,
    FileSource,
    ModelRegistration,
    RegistrationRequest,
    file_source,
)

SUCCESS = "Success!"
# Verbs that Clipper has none like. Each has a path of its name.
OWN: tuple[type[AdminVerb], ...] = (SetTarget, SetSelection, SetBatching, SetPipeline, DeployPipeline)
Body = dict[str, Any]


class ClipperAdminApi:
    """The endpoints. Clipper's clients check the status; the body says more."""

    def __init__(self, service: GatewayService, registration: ModelRegistration) -> None:
        self._service = service
        self._registration = registration

    # -- applications

    async def add_app(self, request: Request) -> PlainTextResponse:
        body = await _body(request, "name", "input_type", "default_output", "latency_slo_micros")
        micros = field(body, "latency_slo_micros", (int, float))
        fields = {
            "app": field(body, "name", str),
            "input_type": field(body, "input_type", str),
            "default_output": _parsed(body.get("default_output")),
            "latency_ms": _milliseconds(micros),
        }
        return await self._change(AddApp(**{name: value for name, value in fields.items() if value is not None}))

    async def delete_app(self, request: Request) -> PlainTextResponse:
        return await self._change(DeleteApp(app=field(await _body(request, "name"), "name", str)))

    async def add_model_links(self, request: Request) -> PlainTextResponse:
        """Link all models or none, as far as errors can be found before the first link."""
        app, models = self._links(await _body(request, "app_name", "model_names"))
        for model in models:
            if self._service.catalog.model(model) is None:
                raise ClipperError(REQUEST_ERROR, f"there is no model {model[:80]!r}: add_model registers one")
        for model in models:
            await self._change(LinkModel(app=app, model=model))
        return PlainTextResponse(SUCCESS)

    async def delete_model_links(self, request: Request) -> PlainTextResponse:
        app, models = self._links(await _body(request, "app_name", "model_names"))
        found = self._service.catalog.app(app)
        for model in models:
            if found is not None and model not in found.links:
                raise ClipperError(REQUEST_ERROR, f"application {app} does not link {model[:80]!r}")
        for model in models:
            await self._change(UnlinkModel(app=app, model=model))
        return PlainTextResponse(SUCCESS)

    def _links(self, body: Body) -> tuple[str, list[str]]:
        models = field(body, "model_names", list)
        if not models or not all(isinstance(model, str) for model in models):
            raise ClipperError(REQUEST_ERROR, "model_names: must be a list of at least one name")
        return field(body, "app_name", str), models

    # -- models

    async def add_model(self, request: Request) -> PlainTextResponse:
        """Register a version without an application. It is served once an application links it."""
        body = await _body(
            request,
            "model_name",
            "model_version",
            "labels",
            "input_type",
            "container_name",
            "model_data_path",
            "batch_size",
            "model",
            "validation",
            "format",
            "metric",
            "inputs_key",
            "labels_key",
            "task",
        )
        batch = field(body, "batch_size", int, needed=False)
        if batch not in (None, -1) and not 1 <= batch <= LARGEST_BATCH:
            raise ClipperError(
                REQUEST_ERROR, f"batch_size: must be from 1 to {LARGEST_BATCH}, or -1: as large as deadlines allow"
            )
        path = field(body, "model_data_path", str, needed=False)
        source = file_source(body["model"], "model") if "model" in body else FileSource("model_data_path", url=path)
        if source.url is None and source.blob is None:
            raise ClipperError(REQUEST_ERROR, 'model_data_path: must be a URL; or give model as {"blob": base64}')
        if "validation" not in body:
            raise ClipperError(REQUEST_ERROR, VALIDATION_MISSING)
        labels = field(body, "labels", list, needed=False) or []
        if not all(isinstance(label, str) for label in labels):
            raise ClipperError(REQUEST_ERROR, "labels: must be a list of texts")
        more = {"version": read_version(body, "model_version", needed=False)}
        for name in ("metric", "inputs_key", "labels_key", "task"):
            if (value := field(body, name, str, needed=False)) is not None:
                more[name] = value
        wanted = RegistrationRequest(
            app=WITHOUT_APP,
            model=field(body, "model_name", str),
            source=source,
            validation=file_source(body["validation"], "validation"),
            labels=tuple(labels),
            format=field(body, "format", str, needed=False),
            more=more,
        )
        try:
            done = await self._registration.register(wanted)
        except Refused as error:
            raise clipper_refusal(error, REQUEST_ERROR) from error
        await wait_until(lambda: self._service.catalog.model(done.model, done.version) is not None)
        if batch not in (None, -1):
            await self._change(SetBatching(model=done.model, policy="fixed", batch=batch))
        return PlainTextResponse(SUCCESS)

    async def delete_versioned_model(self, request: Request) -> PlainTextResponse:
        body = await _body(request, "model_name", "model_version")
        model, version = field(body, "model_name", str), read_version(body, "model_version")
        return await self._change(DeleteVersion(model=model, version=str(version)))

    async def set_model_version(self, request: Request) -> PlainTextResponse:
        """Set the version in every application that links the model."""
        body = await _body(request, "model_name", "model_version")
        model, wanted = field(body, "model_name", str), read_version(body, "model_version")
        catalog = self._service.catalog
        record = catalog.model(model, wanted)
        if record is None:
            raise ClipperError(REQUEST_ERROR, f"there is no version {wanted} of a model {model[:80]!r}")
        apps = sorted(catalog.apps_linking(model))
        if not apps:
            raise ClipperError(
                REQUEST_ERROR, f"no application links model {model}: link it first, the newest version serves then"
            )
        for app in apps:  # none is switched where one would be refused
            known = catalog.app(app)
            difference = None if known is None else catalog.misfit(known, record)
            if difference is not None:
                raise ClipperError(REQUEST_ERROR, f"version {wanted} does not fit application {app}: {difference}")
        for app in apps:
            await self._change(SetVersion(app=app, model=model, version=record.version))
        return PlainTextResponse(SUCCESS)

    def own(self, kind: type[AdminVerb]) -> Callable[[Request], Awaitable[PlainTextResponse]]:
        """The endpoint of a verb of ours, which takes the verb's own fields."""

        async def change(request: Request) -> PlainTextResponse:
            fields = fields_called(kind)
            body = await _body(request, *fields)
            sent = {name: _value(body, called, one) for called, (name, one) in fields.items()}
            given = {name: value for name, value in sent.items() if value is not None}
            try:
                wanted = msgspec.convert(given, kind)
            except msgspec.ValidationError as error:
                raise ClipperError(REQUEST_ERROR, explain(error)) from error
            return await self._change(wanted)

        return change

    # -- descriptions

    async def get_all_applications(self, request: Request) -> JsonReply:
        body = await _body(request, "verbose")
        apps = sorted(self._service.catalog.apps, key=lambda app: app.app)
        return JsonReply([bodies.describe_app(app) if _verbose(body) else app.app for app in apps])

    async def get_application(self, request: Request) -> JsonReply:
        app = self._service.catalog.app(field(await _body(request, "name"), "name", str))
        return JsonReply({} if app is None else bodies.describe_app(app))

    async def get_linked_models(self, request: Request) -> JsonReply:
        name = field(await _body(request, "app_name"), "app_name", str)
        app = self._service.catalog.app(name)
        if app is None:
            raise ClipperError(REQUEST_ERROR, f"there is no application {name[:80]!r}")
        return JsonReply(sorted(app.links))

    async def get_all_models(self, request: Request) -> JsonReply:
        body = await _body(request, "verbose")
        catalog = self._service.catalog
        found = bodies.all_models(catalog)
        if not _verbose(body):
            return JsonReply([bodies.model_id(one) for one in found])
        loaded = await self._containers()
        return JsonReply([bodies.describe_model(one, catalog, loaded) for one in found])

    async def get_model(self, request: Request) -> JsonReply:
        body = await _body(request, "model_name", "model_version")
        catalog = self._service.catalog
        found = catalog.model(field(body, "model_name", str), read_version(body, "model_version"))
        return JsonReply({} if found is None else bodies.describe_model(found, catalog, await self._containers()))

    async def get_all_containers(self, request: Request) -> JsonReply:
        body = await _body(request, "verbose")
        found = await self._containers()
        if _verbose(body):
            return JsonReply(found)
        return JsonReply([f"{one['model_id']}:{one['model_replica_id']}" for one in found])

    async def get_container(self, request: Request) -> JsonReply:
        body = await _body(request, "model_name", "model_version", "replica_id")
        wanted = f"{field(body, 'model_name', str)}:{read_version(body, 'model_version')}"
        number = field(body, "replica_id", int)
        match = [
            one for one in await self._containers() if (one["model_id"], one["model_replica_id"]) == (wanted, number)
        ]
        return JsonReply(match[0] if match else {})

    async def get_state(self, request: Request) -> JsonReply:
        """What feedback has taught about the models of an application, for all users or for one."""
        body = await _body(request, "app_name", "uid")
        name, user = field(body, "app_name", str), field(body, "uid", (str, int), needed=False)
        if self._service.catalog.app(name) is None:
            raise ClipperError(REQUEST_ERROR, f"there is no application {name[:80]!r}")
        try:
            found = await self._service.client.selection(name, context=None if user is None else str(user))
        except Refused as error:
            raise clipper_refusal(error) from error
        except InfaasError as error:
            raise failure_of(error) from error
        return JsonReply(found)

    async def ping(self, request: Request) -> PlainTextResponse:
        del request
        return PlainTextResponse("PONG")

    # -- helpers

    async def _containers(self) -> list[dict[str, Any]]:
        try:
            return bodies.list_containers(self._service.catalog, await self._service.client.workers())
        except Refused as error:
            raise clipper_refusal(error) from error
        except InfaasError as error:
            raise failure_of(error) from error

    async def _change(self, change: AdminVerb) -> PlainTextResponse:
        try:
            done = await self._service.command(change)
        except Refused as error:
            raise clipper_refusal(error, PROCESSING_ERROR if error.code == "internal" else REQUEST_ERROR) from error
        await wait_until(lambda: _visible(change, self._service.catalog))
        return PlainTextResponse("\n".join(filter(None, [SUCCESS, done.get("note")])))


def fields_called(kind: type[AdminVerb]) -> dict[str, tuple[str, Field]]:
    """The fields of a verb by what a body calls them: an app that the verb needs is its `name`, as in Clipper."""
    fields = body_of(kind).items()
    return {"name" if name == "app" and one.default is NODEFAULT else name: (name, one) for name, one in fields}


def _value(body: Body, name: str, of: Field) -> Any:
    """What a body says of a field of a verb; None: nothing. Raises ClipperError."""
    kind = get_origin(of.type) or of.type
    plain = (str, int, bool, list)
    wanted: Any = {float: (int, float), Any: (*plain, float, dict)}.get(kind, kind if kind in plain else dict)
    value = field(body, name, wanted, needed=of.default is NODEFAULT)
    if of.type == list[str] and not all(isinstance(item, str) for item in value or ()):
        raise ClipperError(REQUEST_ERROR, f"{name}: must be a list of names")
    return value


def _visible(change: AdminVerb, catalog: Catalog) -> bool:
    """Whether the catalogue shows a change."""
    app = catalog.app(getattr(change, "app", None) or "")
    match change:
        case SetBatching():
            return True  # the catalogue does not show it
        case DeleteVersion():
            return catalog.model(change.model, change.version) is None
        case DeleteApp():
            return app is None
    if app is None:
        return False
    match change:
        case SetPipeline():
            return app.pipeline == change.graph
        case DeployPipeline():
            return (app.plan is None) == (change.plan is None)
        case SetVersion():
            return app.links.get(change.model) == change.version
        case SetTarget():
            return app.slo_target == change.slo_target
        case SetSelection():
            return app.selection == change.selection
        case LinkModel() | UnlinkModel():
            return (change.model in app.links) == isinstance(change, LinkModel)
    return True


async def _body(request: Request, *reads: str) -> Body:
    """The verb's fields. Raises ClipperError where one is none that it reads."""
    text = await json_body(request)
    body = read_object(text, "an object with this verb's fields") if text else {}
    unread = [name for name in body if name not in reads]
    if unread:
        raise ClipperError(REQUEST_ERROR, f"{unread[0][:80]}: this verb does not read it; it reads {', '.join(reads)}")
    return body


def _milliseconds(micros: float) -> float:
    """Raises ClipperError: JSON's whole numbers may be larger than any floating-point number."""
    try:
        return micros / 1000.0
    except OverflowError as error:
        raise ClipperError(REQUEST_ERROR, "latency_slo_micros: must be a number of microseconds above 0") from error


def _verbose(body: Body) -> bool:
    return bool(field(body, "verbose", bool, needed=False))


def _parsed(value: Any) -> Any:
    """The default output as JSON: Clipper's clients send it as a text."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value

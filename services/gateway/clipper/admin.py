"""/admin/*: Clipper's management of applications, links, models and versions, by the verbs of `infaas.admin`."""

import json
from collections.abc import Awaitable, Callable, Iterator, Sequence
from inspect import signature
from typing import Annotated, Any, get_type_hints

from msgspec import NODEFAULT, UNSET, Struct, defstruct
from msgspec.structs import asdict

from bus.fields import Checked, Fault, Number, choice, hints_of
from bus.messages.catalog import LARGEST_BATCH
from bus.messages.verbs import (
    DEFAULT_OUTPUT,
    INPUT_TYPES,
    AddApp,
    AdminVerb,
    App,
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
from services.core.catalog import Catalog
from services.gateway.clipper.bodies import (
    ClipperApplication,
    ClipperContainer,
    ClipperModel,
    User,
    VersionOrNone,
    all_models,
    describe_app,
    describe_model,
    list_containers,
    model_id,
)
from services.gateway.edge import GatewayService, wait_until
from services.gateway.errors import BadRequest, RequestFailed
from services.gateway.json_checks import fitted, read_object, sized
from services.gateway.registration import MODEL_FILE, FileSource, ModelFiles, ModelRegistration
from services.shell.http.messages import HttpRequest, JsonReply, TextReply

SUCCESS = "Success!"
# Verbs that Clipper has none like. Each has a path of its name.
OWN: tuple[type[AdminVerb], ...] = (SetTarget, SetSelection, SetBatching, SetPipeline, DeployPipeline)
Endpoint = Callable[[HttpRequest], Awaitable[TextReply | JsonReply]]


Version = Annotated[str | int, "Version of the model."]
ModelName = Annotated[str, "Name of the model."]
ModelNames = Annotated[list[str], "Names of models, at least one."]
AppName = Annotated[str, "Name of the application."]
InputType = Annotated[str, choice(*INPUT_TYPES), "Type of an item of the application's inputs."]
Objective = Annotated[float, Number(above=0), "The application's latency objective, in microseconds."]
DefaultOutput = Annotated[Any, DEFAULT_OUTPUT]
Verbose = Annotated[bool, "All about them instead of their names."]


class NewModel(ModelFiles, Checked, frozen=True, kw_only=True):
    """A version of a model to register."""

    model_name: ModelName
    model_version: VersionOrNone = None
    model: Annotated[str | FileSource | None, MODEL_FILE] = None
    model_data_path: Annotated[str | None, "A URL, in place of `model`."] = None
    batch_size: Annotated[
        int | None, Number(-1, LARGEST_BATCH), "Size of every batch; -1: as large as deadlines allow."
    ] = None
    input_type: Annotated[Any, "Ignored: the model says it."] = None
    container_name: Annotated[Any, "Ignored."] = None

    def conflicts(self) -> Iterator[Fault]:
        if self.batch_size == 0:
            yield Fault("batch_size", f"must be from 1 to {LARGEST_BATCH}, or -1: as large as deadlines allow")
        if self.model is None and self.model_data_path is None:
            yield Fault("model_data_path", 'must be a URL; or give model as {"blob": base64}')


class ClipperAdminApi(Struct, eq=False):
    """What each verb does. Its parameters are the fields of its body; a text is the reply itself, of which Clipper's clients check the status."""

    service: GatewayService
    registration: ModelRegistration

    # -- applications

    async def add_app(
        self, name: App, input_type: InputType, latency_slo_micros: Objective, default_output: DefaultOutput = None
    ) -> str:
        """A new application."""
        default = _parsed(default_output)
        return await self._change(
            AddApp(
                app=name,
                input_type=input_type,
                latency_ms=latency_slo_micros / 1000.0,
                default_output=UNSET if default is None else default,
            )
        )

    async def delete_app(self, name: AppName) -> str:
        """Delete an application; its models stay."""
        return await self._change(DeleteApp(app=name))

    async def add_model_links(self, app_name: AppName, model_names: ModelNames) -> str:
        """Let an application serve models, in their newest versions. All are linked or none, as far as errors can be found before."""
        for model in model_names:
            if self.service.catalog.model(model) is None:
                near = self.service.catalog.meant_model(model)
                raise RequestFailed(None, f"there is no model {model[:80]!r}: add_model registers one{near}")
        return await self._changes([LinkModel(app=app_name, model=model) for model in model_names])

    async def delete_model_links(self, app_name: AppName, model_names: ModelNames) -> str:
        """Stop an application from serving these models."""
        found = self.service.catalog.app(app_name)
        for model in model_names:
            if found is not None and model not in found.links:
                raise RequestFailed(
                    None,
                    f"application {app_name} does not link {model[:80]!r}; it links {', '.join(sorted(found.links)) or 'none'}",
                )
        return await self._changes([UnlinkModel(app=app_name, model=model) for model in model_names])

    # -- models

    async def add_model(self, body: NewModel) -> str:
        """Register a version of a model and measure it, without an application; replies when that is done."""
        version = None if body.model_version is None else str(body.model_version)
        source = body.model or body.model_data_path
        done = await self.registration.register(WITHOUT_APP, body.model_name, version, body, source)
        await wait_until(lambda: self.service.catalog.model(done.model, done.version) is not None)
        if body.batch_size in (None, -1):
            return SUCCESS
        return await self._change(SetBatching(model=done.model, policy="fixed", batch=body.batch_size))

    async def delete_versioned_model(self, model_name: ModelName, model_version: Version) -> str:
        """Delete a version that no application serves."""
        return await self._change(DeleteVersion(model=model_name, version=str(model_version)))

    async def set_model_version(self, model_name: ModelName, model_version: Version) -> str:
        """Let every application that links the model serve this version."""
        model, wanted = model_name, str(model_version)
        catalog = self.service.catalog
        record = catalog.model(model, wanted)
        if record is None:
            others = ", ".join(sorted(catalog.versions(model))) or f"none{catalog.meant_model(model)}"
            raise RequestFailed(None, f"there is no version {wanted} of a model {model[:80]!r}: there is {others}")
        apps = sorted(catalog.apps_linking(model))
        if not apps:
            raise RequestFailed(
                None, f"no application links model {model}: link it first, the newest version serves then"
            )
        for app in apps:  # none is switched where one would be refused
            known = catalog.app(app)
            difference = None if known is None else catalog.misfit(known, record)
            if difference is not None:
                raise RequestFailed(None, f"version {wanted} does not fit application {app}: {difference}")
        return await self._changes([SetVersion(app=app, model=model, version=record.version) for app in apps])

    # -- descriptions

    async def get_all_applications(self, verbose: Verbose = False) -> list[str] | list[ClipperApplication]:
        """Their names, or all about them."""
        apps = sorted(self.service.catalog.apps, key=lambda app: app.app)
        return [describe_app(app) for app in apps] if verbose else [app.app for app in apps]

    async def get_application(self, name: AppName) -> ClipperApplication | dict[str, str]:
        """One of them; an empty object where there is none."""
        app = self.service.catalog.app(name)
        return {} if app is None else describe_app(app)

    async def get_linked_models(self, app_name: AppName) -> list[str]:
        """What an application serves."""
        return sorted(self._linking(app_name))

    async def get_all_models(self, verbose: Verbose = False) -> list[str] | list[ClipperModel]:
        """`model:version` of each, or all about them."""
        catalog = self.service.catalog
        found = all_models(catalog)
        if not verbose:
            return [model_id(one) for one in found]
        loaded = await self._containers()
        return [describe_model(one, catalog, loaded) for one in found]

    async def get_model(self, model_name: ModelName, model_version: Version) -> ClipperModel | dict[str, str]:
        """One version; an empty object where there is none."""
        catalog = self.service.catalog
        found = catalog.model(model_name, str(model_version))
        return {} if found is None else describe_model(found, catalog, await self._containers())

    async def get_all_containers(self, verbose: Verbose = False) -> list[str] | list[ClipperContainer]:
        """The loaded instances."""
        found = await self._containers()
        return found if verbose else [f"{one.model_id}:{one.model_replica_id}" for one in found]

    async def get_container(
        self, model_name: ModelName, model_version: Version, replica_id: Annotated[int, "Number of the replica."]
    ) -> ClipperContainer | dict[str, str]:
        """One of them; an empty object where there is none."""
        wanted = (model_name, str(model_version), replica_id)
        found = await self._containers()
        return next((one for one in found if (one.model_name, one.model_version, one.model_replica_id) == wanted), {})

    async def get_state(self, app_name: AppName, uid: User = None) -> list[dict[str, Any]]:
        """What feedback has taught about the models of an application, for all users or for one; empty without a policy."""
        self._linking(app_name)
        return await self.service.client.selection(app_name, context=None if uid is None else str(uid))

    # -- helpers

    def endpoint(self, verb: str) -> Endpoint:
        """The endpoint of a verb of Clipper's."""
        work = getattr(self, verb)
        form = form_of(verb)

        async def answer(request: HttpRequest) -> TextReply | JsonReply:
            body = fitted(read_object(sized(request.body)), form)
            found = await (work(body) if form is NewModel else work(**asdict(body)))
            return TextReply(found) if isinstance(found, str) else JsonReply(found)

        return answer

    def own(self, kind: type[AdminVerb]) -> Endpoint:
        """The endpoint of a verb of ours, which takes the verb's own fields."""
        form = verb_body(kind)

        async def answer(request: HttpRequest) -> TextReply:
            body = fitted(read_object(sized(request.body)), form)
            names = zip(kind.__struct_fields__, kind.__struct_encode_fields__, strict=True)
            change = kind(**{name: getattr(body, called(encoded, kind)) for name, encoded in names})
            return TextReply(await self._change(change))

        return answer

    def _linking(self, name: str) -> dict[str, str]:
        app = self.service.catalog.app(name)
        if app is None:
            raise RequestFailed(None, no_application(name, self.service.catalog))
        return app.links

    async def _containers(self) -> list[ClipperContainer]:
        return list_containers(self.service.catalog, await self.service.client.workers())

    async def _changes(self, changes: Sequence[AdminVerb]) -> str:
        if not changes:
            raise BadRequest("model_names: must be a list of at least one name")
        for change in changes:
            await self._change(change)
        return SUCCESS

    async def _change(self, change: AdminVerb) -> str:
        done = await self.service.command(change)
        await wait_until(lambda: _visible(change, self.service.catalog))
        return "\n".join(filter(None, [SUCCESS, done.get("note")]))


def body_of_method(work: Callable[..., Any]) -> type[Struct]:
    """The body of a verb of Clipper's: the parameters of the method that carries it out."""
    hints = get_type_hints(work, include_extras=True)
    parameters = [one for one in signature(work).parameters.values() if one.name != "self"]
    fields: list[Any] = [
        (one.name, hints[one.name]) if one.default is one.empty else (one.name, hints[one.name], one.default)
        for one in parameters
    ]
    return defstruct(f"{work.__name__}_body".title().replace("_", ""), fields, frozen=True, kw_only=True)


def verb_body(kind: type[AdminVerb]) -> type[Struct]:
    """The body of a verb of ours: its fields, but an app that it needs is its `name`, as in Clipper."""
    hints = hints_of(kind)
    fields: list[Any] = []
    for name, one in body_of(kind).items():
        needed = one.default is NODEFAULT
        fields.append((called(name, kind), hints[one.name]) if needed else (name, hints[one.name], one.default))
    return defstruct(f"{kind.__name__}Body", fields, frozen=True, kw_only=True)


def called(name: str, kind: type[AdminVerb]) -> str:
    """What a body calls this field of a verb."""
    return "name" if name == "app" and body_of(kind)[name].default is NODEFAULT else name


def form_of(verb: str) -> type[Struct]:
    """The body of a verb of Clipper's."""
    return NewModel if verb == "add_model" else body_of_method(getattr(ClipperAdminApi, verb))


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
            return all(getattr(app, name) == value for name, value in change.given.items())
        case SetSelection():
            return app.selection == change.selection
        case LinkModel() | UnlinkModel():
            return (change.model in app.links) == isinstance(change, LinkModel)
    return True


def no_application(name: str, catalog: Catalog) -> str:
    """That there is none of this name."""
    return f"there is no application {name[:80]!r}: add_app makes one{catalog.meant_app(name)}"


def _parsed(value: Any) -> Any:
    """The default output as JSON: Clipper's clients send it as a text."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value

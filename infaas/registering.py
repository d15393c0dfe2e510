"""The client's side of a registration: upload model and validation set, request the registration, follow it to its end."""

import asyncio
import hashlib
import logging
import secrets
import tempfile
import zipfile
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import msgspec

from bus.codec import encode
from bus.fields import meant
from bus.messages.catalog import AGREEMENT
from bus.messages.public import (
    ContainerReport,
    Register,
    RegistrationAccepted,
    RegistrationCancelled,
    RegistrationStatus,
)
from bus.messages.work import ContainerPlace, PlaceContainer
from bus.port import Bus, BusError, Forbidden
from bus.subjects import WITHOUT_APP, Subjects
from infaas.errors import BadInput, InfaasError, NotConnected, Refused, Timeout, denied
from infaas.following import Follower, asked, read, started
from infaas.queries import check_name

if TYPE_CHECKING:
    from numpy import ndarray

    Array = ndarray[Any, Any]
    Arrays = tuple[Array | dict[str, Array], Array | None]

log = logging.getLogger(__name__)

ENDINGS = {".onnx": "onnx", ".pt2": "pt2", ".pt": "torchscript", ".torchscript": "torchscript"}
PICKLES = (".pkl", ".pickle", ".joblib")
INPUTS_KEY = "x"  # default
QUIET_S = 5.0  # without a status; then the last one is requested
REGISTRAR = "registrar"  # who answers
OVER = ("done", "failed", "cancelled")
LISTED_S = 3.0  # within which a dispatcher lists new variants
REMOTE = "remote"  # format of a file that names a model on a remote engine

OnProgress = Callable[[RegistrationStatus], None]
Say = Callable[[str], None]
ListVariants = Callable[..., Awaitable[list[dict[str, Any]]]]  # app, model, version: whose


async def register(
    bus: Bus,
    subjects: Subjects,
    model_file: str | Path,
    *,
    app: str,
    model: str | None = None,
    validation: "str | Path | Arrays",
    on_progress: OnProgress | None = None,
    say: Say | None = None,
    format: str | None = None,
    metric: str | None = None,
    labels: Sequence[str] = (),
    groups: Any = None,
    before: Any = None,
    after: Any = None,
    timeout: float | None = None,
    **stated: Any,
) -> RegistrationStatus:
    """Register a trained model and wait until its variants are built and measured, or the registration fails.

    model_file: .onnx (with the files of its weights beside it, if it has any), .pt2 or TorchScript, or the URL of a model on a remote
    engine (docs/remote.md). format: needed only if the file's name does not tell it. validation: an .npz with inputs (first axis: items)
    under inputs_key, or under the model's own input names, and labels under labels_key; or inputs (an array, or arrays by name) and
    labels, or None. model: its name, unique in the cluster; default: the app's. metric: one of `METRICS` (bus/messages/catalog.py), or
    FILE.py:FUNCTION; None: the labels tell it, and without labels it is agreement. groups: for ndcg, of each sample the list that it is
    ranked in. labels: names of the classes, in the order of the scores. before, after:
    functions of your own around the model, FILE.py:FUNCTION or MODULE:FUNCTION (docs/registering.md). stated: further fields of `Register` (bus/messages/public.py): version, task,
    latency_ms, slo_target, accuracy, default_output, inputs_key, labels_key, contended, contexts, allow_nan; and dry_run, with which the
    status says what would be registered. timeout: seconds for the whole registration. on_progress gets every status. say: the model is tried here on the first
    item, and `say` gets what was understood, line by line, before anything is sent. Returns the last status. Its `state` is "done" (with
    `variants`, and `failures` of those that could not be built) or "failed" (with a `reason`) or "cancelled". Raises BadInput, Refused,
    NotConnected, Timeout.
    """
    from infaas.folders import whole_onnx  # noqa: PLC0415  (numpy takes long to import)
    from infaas.samples import functions_of, validation_file  # noqa: PLC0415

    _check_options(stated)
    url = str(model_file) if str(model_file).startswith(("http://", "https://")) else None
    path = Path(model_file)
    request = Register(
        app=app,
        model=named_after(app) if model is None else model,
        format=REMOTE if url is not None else format or _format(path),
        object="",
        validation="",
        metric=metric or "",
        labels=list(labels),
        functions=functions_of(before, after),
        **stated,
        registration=f"r-{secrets.token_hex(8)}",
    )
    if url is None:
        _check_file(path, "the model file")
    try:
        async with asyncio.timeout(timeout):
            with tempfile.TemporaryDirectory(prefix="infaas-") as directory:
                if url is not None:
                    path = Path(directory) / "engine.json"
                    path.write_bytes(msgspec.json.encode({"url": url}))
                elif request.format == "onnx":
                    path = await asyncio.to_thread(whole_onnx, path, Path(directory))
                if not isinstance(validation, tuple):
                    _check_validation(Path(validation), request)
                saved, request = await asyncio.to_thread(
                    validation_file, path, validation, request, Path(directory), say, groups
                )
                files = {"model": path, "validation": saved}
                return await _run(bus, subjects, files, request, on_progress)
    except InfaasError:  # some of them are TimeoutErrors as well
        raise
    except (FileNotFoundError, IsADirectoryError, PermissionError) as error:
        raise BadInput(
            f"{error.filename or path} cannot be read: {error.strerror}; leave it there until it is registered"
        ) from error
    except TimeoutError:
        raise Timeout(f"registration {request.registration} has not ended after {timeout} s; it continues") from None
    except Forbidden as error:
        raise denied(subjects.register()) from error
    except BusError as error:
        raise NotConnected(str(error)) from error


def _check_options(stated: Mapping[str, Any]) -> None:
    if unknown := sorted(stated.keys() - set(Register.__struct_fields__)):
        raise TypeError(f"register has no option {unknown[0]}{meant(unknown[0], Register.__struct_fields__)}")


def named_after(app: str) -> str:
    """The name that a model gets if its owner gives none: the app's. Raises BadInput."""
    if app == WITHOUT_APP:
        raise BadInput("model: a model without an app needs a name; give one")
    return app


async def measure_again(
    bus: Bus,
    subjects: Subjects,
    model: Mapping[str, Any],
    app: str,
    samples: Path,
    labels_key: str,
    on_progress: OnProgress,
    report: ContainerReport | None = None,
) -> RegistrationStatus:
    """Register the file of a registered version again, on these samples. model: as it is listed. report: what an owner's process was found to reach, whose
    version stays; then samples is their distribution. Raises Refused, NotConnected, Timeout, BusError.
    """
    request = Register(
        app=app,
        model=model["model"],
        format=model["format"],
        object="registered",
        validation="",
        labels_key=labels_key,
        registration=f"r-{secrets.token_hex(8)}",
        remeasures=model["version"],
        container=report,
    )
    return await _run(bus, subjects, {"validation": samples}, request, on_progress)


async def _run(
    bus: Bus, subjects: Subjects, files: Mapping[str, Path], request: Register, on_progress: OnProgress | None
) -> RegistrationStatus:
    registration = request.registration or ""
    progress = on_progress or (lambda _status: None)
    uploads = await bus.object_store(subjects.uploads_bucket)
    keys = {f"{registration}.{what}": path for what, path in files.items()}
    object_ = f"{registration}.model" if "model" in files else request.object
    request = msgspec.structs.replace(request, object=object_, validation=f"{registration}.validation")
    started = RegistrationStatus(registration=registration, state="accepted", app=request.app, model=request.model)
    async with _follower(bus, subjects, request, progress) as follower:
        try:
            for key, path in keys.items():
                before = _state(path)
                size = before[0] / 1e6
                progress(msgspec.structs.replace(started, step=f"uploading {path.name} ({size:.1f} MB)"))
                await uploads.put(key, path)
                if _state(path) != before:
                    _refuse_changed(path)
            await _request(bus, subjects, request)
        except BaseException:
            for key in keys:
                with suppress(BusError):
                    await uploads.delete(key)
            raise
        return await follower.end(OVER, accepted=True)


def _refuse_changed(path: Path) -> NoReturn:
    raise BadInput(f"{path} changed while it was uploaded: register it again once it is whole")


def _state(path: Path) -> tuple[int, int]:
    found = path.stat()
    return found.st_size, found.st_mtime_ns


def _follower(bus: Bus, subjects: Subjects, request: Register, progress: OnProgress) -> Follower[RegistrationStatus]:
    subject = subjects.registration(request.registration or "")
    return Follower(bus, subject, RegistrationStatus, REGISTRAR, progress, QUIET_S)


async def register_container(
    bus: Bus, subjects: Subjects, request: Register, reference: bytes, distribution: bytes, on_progress: OnProgress
) -> RegistrationStatus:
    """Register a user's own process, which has measured itself. reference: what further processes of this version must agree with.
    distribution: of its validation set, whose digest the request has; empty: none.

    Raises Refused, NotConnected, Timeout, BusError.
    """
    digest = hashlib.sha256(reference).hexdigest()
    artifacts = await bus.object_store(subjects.artifacts_bucket, create=False)
    for content in filter(None, (reference, distribution)):
        if not await artifacts.exists(key := hashlib.sha256(content).hexdigest()):
            await artifacts.put(key, content)
    request = msgspec.structs.replace(request, object=digest, registration=f"r-{secrets.token_hex(8)}")
    async with _follower(bus, subjects, request, on_progress) as follower:
        await _request(bus, subjects, request)
        return await follower.end(OVER, accepted=True)


async def place_of_container(bus: Bus, subjects: Subjects, question: PlaceContainer) -> ContainerPlace:
    """Whether a user's own process is a new version, or a replica of which variant. Raises Refused, NotConnected, Timeout, BusError."""
    return read(ContainerPlace, await started(bus, subjects.registrar("container"), encode(question), REGISTRAR))


async def _request(bus: Bus, subjects: Subjects, request: Register) -> None:
    """Request the registration. Returns when the registrar has accepted it."""
    try:
        read(RegistrationAccepted, await started(bus, subjects.register(), encode(request), REGISTRAR))
    except Timeout:  # it may have been accepted, and the reply lost
        if await last_status(bus, subjects, request.registration or "") is None:
            raise


async def last_status(bus: Bus, subjects: Subjects, registration: str) -> RegistrationStatus | None:
    """The last status of a registration; None if no registration has this id. Raises NotConnected."""
    try:
        return await asked(bus, subjects.registration(registration), RegistrationStatus, REGISTRAR)
    except Refused:
        return None


async def cancel(bus: Bus, subjects: Subjects, registration: str) -> None:
    """Cancel a registration, or dismiss a failed one. Raises Refused if it has ended otherwise or is unknown, and NotConnected."""
    await asked(bus, subjects.registration_cancel(registration), RegistrationCancelled, REGISTRAR)


def _format(path: Path) -> str:
    if path.suffix.lower() in PICKLES:
        raise BadInput(
            f"{path.name} is a pickle, which runs code when it is opened, so it is not taken. In Python, where you trust it: "
            f"import infaas, joblib; model = joblib.load({path.name!r}); infaas.register(model, x, y, app='...')"
        )
    try:
        return ENDINGS[path.suffix.lower()]
    except KeyError:
        known = ", ".join(ENDINGS)
        raise BadInput(
            f"format: the name {path.name} does not end in {known}; convert the model to ONNX, or give the format"
        ) from None


def _check_file(path: Path, what: str) -> None:
    if not path.is_file():
        raise BadInput(f"{what} {path} does not exist, or is no file")
    if path.stat().st_size == 0:
        raise BadInput(f"{what} {path} is empty")


def _check_validation(path: Path, request: Register) -> None:
    """Find mistakes before the upload. The worker checks the arrays themselves."""
    _check_file(path, "the validation set")
    try:
        with zipfile.ZipFile(path) as archive:
            found = [name.removesuffix(".npy") for name in archive.namelist()]
    except (zipfile.BadZipFile, OSError) as error:
        raise BadInput(f"the validation set {path} is no .npz file; make one with numpy.savez") from error
    if request.labels_key not in found and request.metric != AGREEMENT:
        raise BadInput(
            f"labels_key: {path.name} holds no {request.labels_key!r}, only {', '.join(found)}; name the labels, or measure without any "
            "by --metric agreement"
        )
    if request.labels_key == request.inputs_key:
        raise BadInput(f"labels_key: {request.labels_key!r} holds the inputs; name the labels of {path.name}")
    # Other arrays may have the names of the model's inputs, unless a name was given for them.
    if request.inputs_key not in found and (request.inputs_key != INPUTS_KEY or len(found) == 1):
        raise BadInput(
            f"inputs_key: {path.name} holds no {request.inputs_key!r}, only {', '.join(found)}; name the inputs"
        )


# -- a model as a Python object


def announce(bus: Bus, subjects: Subjects, model: Any, app: str) -> None:
    """Have a worker import torch while a module is exported here: it takes as long."""
    from infaas.conversion import kind_of  # noqa: PLC0415  (numpy takes long to import)

    if kind_of(model) == "torch":
        bus.publish(subjects.register(), encode(Register(app=app, model=app, format="pt2", object="", validation="")))


async def register_model(
    upload: Callable[..., Awaitable[RegistrationStatus]],
    variants: ListVariants,
    model: Any,
    x: Any,
    y: Any,
    /,
    *,
    app: str,
    name: str | None = None,
    metric: str | None = None,
    say: Say | None = None,
    labels: Sequence[str] = (),
    allow_nan: bool = False,
    dynamic_shapes: Any = None,
    before: Any = None,
    after: Any = None,
    **options: Any,
) -> dict[str, Any]:
    """Convert a model (see `conversion.convert`), register it, and return what `infaas register --json` prints.

    upload, variants: the client's `register` of files, and `variants`. say: gets what was understood, before anything is uploaded.
    options: as for `register`. Raises BadInput, and what `register` raises.
    """
    _check_options({name: one for name, one in options.items() if name not in ("on_progress", "timeout", "groups")})
    from infaas.conversion import check_given, convert  # noqa: PLC0415  (numpy takes long to import)
    from infaas.samples import functions_of, made_here, own_metric, raw_samples  # noqa: PLC0415
    from infaas.trial import understood  # noqa: PLC0415

    if "validation" in options or "model" in options:
        wrong = "validation" if "validation" in options else "model"
        raise BadInput(f"{wrong}: is for files; with x and y, name the model by name= and leave validation out")
    if app != WITHOUT_APP:
        check_name(app, "app")
    if name is not None:
        check_name(name, "name")
    check_given(model, x, y, metric, options)
    known, own = own_metric(metric)
    functions, raw, inside, theirs = functions_of(before, after), None, x, False
    if functions is not None:
        theirs = bool(functions.after)  # labels are of what comes out in the end
        if functions.before:
            raw = raw_samples(x)
            parts = await asyncio.to_thread(made_here, functions, "before", raw)
            arrays = max(parts, key=lambda one: len(one.places)).arrays
            inside = next(iter(arrays.values())) if len(arrays) == 1 else arrays
            theirs = theirs or len(parts) > 1
    with tempfile.TemporaryDirectory(prefix="infaas-") as directory:
        converted = await asyncio.to_thread(
            convert,
            model,
            inside,
            None if theirs else y,
            Path(directory),
            None if theirs else known,
            names=labels,
            allow_nan=allow_nan,
            dynamic_shapes=dynamic_shapes,
            apart=raw is not None,
        )
        inputs = raw or converted.inputs
        given = y if theirs else None if converted.metric == AGREEMENT else converted.labels
        if converted.metric == "ndcg" and options.get("groups") is None:
            options["groups"] = [0] * len(x)  # a ranker of one list
        if say is not None and functions is None:
            lines = understood(
                converted.note,
                inputs,
                converted.labels,
                converted.classes,
                converted.metric,
                converted.trial,
                converted.path.stat().st_size,
                options.get("task"),
            )
            for line in lines:
                say(line)
        status = await upload(
            converted.path,
            app=app,
            model=name,
            validation=(next(iter(inputs.values())) if len(inputs) == 1 else inputs, given),
            metric=metric if own or theirs else converted.metric,
            labels=labels if theirs else converted.classes,
            allow_nan=allow_nan,
            columns=converted.columns if raw is None else [],
            before=before,
            after=after,
            say=None if functions is None else say,
            **options,
        )
    return await document_of(variants, status)


# -- what the command and `infaas.register` print and return


async def document_of(variants: ListVariants, status: RegistrationStatus) -> dict[str, Any]:
    """What `infaas register --json` prints: the status, and the variants with their listed figures."""
    document = status_document(status)
    return document if status.dry_run else {**document, "variants": await _figures(variants, status)}


def status_document(status: RegistrationStatus) -> dict[str, Any]:
    """A status as plain maps, variants by their names."""
    plain: dict[str, Any] = msgspec.to_builtins(status)
    inspected = ("dry_run", "accuracy", "samples") if status.dry_run else ()
    return {
        **{key: plain[key] for key in ("registration", "state", "app", "model", "version", "reason")},
        "variants": [{"variant": name} for name in status.variants],
        "failures": plain["failures"],
        **{key: plain[key] for key in inspected},
        **(plain["signature"] or {} if inspected else {}),
    }


async def _figures(variants: ListVariants, status: RegistrationStatus) -> list[dict[str, Any]]:
    """The listed figures of the new variants; only their names if no dispatcher lists them in time."""
    loop = asyncio.get_running_loop()
    until = loop.time() + LISTED_S
    while True:
        found: dict[str, dict[str, Any]] = {}
        try:
            app = None if status.app == WITHOUT_APP else status.app
            items = await variants(app=app, model=status.model, version=status.version)
            found = {item["variant"]: item for item in items}
        except Refused:  # the dispatcher does not know the app yet
            pass
        except InfaasError as error:
            log.warning("the figures cannot be listed now (try `infaas variants`): %s", error)
            until = 0.0
        if found.keys() >= set(status.variants) or loop.time() > until:
            return [found.get(name, {"variant": name}) for name in status.variants]
        await asyncio.sleep(0.1)

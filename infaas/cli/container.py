"""`infaas container`: a user's own Python class, in a process of its own, serves as a variant (docs/containers.md).

This process becomes a worker with one device of a kind of its own, and runs that worker's monitor and executor. The class runs in a child
process. It is inspected and measured from here; the registrar writes what was found into the catalogue.
"""

import asyncio
import os
import re
import secrets
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from cyclopts import Parameter
from msgspec.structs import replace

from bus.messages.catalog import METRICS, VariantRecord
from bus.messages.public import Register
from bus.messages.work import ContainerPlace, PlaceContainer
from bus.port import Bus
from bus.subjects import Subjects, valid_name
from infaas.cli.options import DataDir, Json, Whole, json_or_text, options_class, options_of
from infaas.cli.output import fail, print_json, progress, show, usage
from infaas.cli.register import OF_ANY, lines_of, render_dry_run
from infaas.errors import BadInput, Refused, RegistrationFailed
from infaas.registering import place_of_container, register_container
from services.core.catalog import signature_difference
from services.core.placement import Device, container_kind

if TYPE_CHECKING:
    from services.core.settings import Settings
    from services.executor.backends.container import UserProcess
    from services.executor.workshop.sandbox.protocol import ValidationFile
    from services.executor.workshop.tasks.container import InspectedContainer
    from services.shell.runtime.runtime import Runtime

TARGET = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*\Z")
CONTAINER = "container"
MOST_BATCH = 1024
USUAL_BATCH = 64
APPEARS_S = 5.0  # s in which a version appears that another container registers at the same time
MOST_BYTES = 2**30  # of an unpacked validation set
ContainerOptions: Any = options_class("ContainerOptions", options_of(Register, *OF_ANY))
NO_OPTIONS = ContainerOptions()


def container(
    target: str,
    /,
    *,
    app: str,
    model: str | None = None,
    validation: Path,
    version: str | None = None,
    metric: str | None = None,
    default_output: str | None = None,
    labels: Path | None = None,
    max_batch: Whole | None = None,
    dry_run: Annotated[bool, Parameter(negative="")] = False,
    stated: ContainerOptions = NO_OPTIONS,
    config: Path | None = None,
    data_dir: DataDir = None,
    json: Json = False,
) -> int:
    """Serve a Python class of your own as a variant of a model, until Ctrl-C.

    The class has a method `predict_batch(inputs)`: from arrays by name to arrays by name, the first axis of each counts items. It runs in a
    process of its own, is measured on the validation set, and is chosen like any other variant. The same command once more, here or on another
    machine, adds a replica.

    Example: `infaas container model:Digits --app digits --model mine --validation validation.npz`

    Parameters
    ----------
    target
        The class as MODULE:CLASS, looked up in the working directory first. An object with this method, or a function, will do.
    app
        The app that the model serves. An app's first registration fixes the inputs and outputs of all its models.
    model
        Name of the model, unique in the cluster. Default: the app's.
    validation
        An .npz file with inputs (first axis: items) and their labels. Accuracy is measured on them. Several inputs: arrays named KEY.NAME.
    version
        Name of this version. Default: the newest that containers of this model have, else the next number.
    metric
        How outputs are scored against the labels, as of `infaas register`; agreement, without labels. Default: top1.
    default_output
        What the app answers for an item if no model can answer in time, as JSON.
    labels
        A text file with the names of the classes, one a line, in the order of the model's scores.
    max_batch
        Items of a batch at most. Default: 64.
    dry_run
        Inspect and measure the class here, print what would be registered, and end. Needs no system.
    config
        Settings file (TOML), as of `infaas run`. Environment variables INFAAS_SECTION__FIELD override it.

    """
    target = target.replace(".py:", ":")  # as other functions of one's own are named
    if not TARGET.match(target):
        usage(f"{target}: write MODULE:CLASS, as `model:Digits` for the class Digits in model.py")
    model = model or app
    for option, name in (("--app", app), ("--model", model), ("--version", version or "x")):
        if not valid_name(name):
            usage(f"{option} {name}: must be 1 to 64 letters, digits, - or _, a letter or digit first")
    most = USUAL_BATCH if max_batch is None else max_batch
    if not 1 <= most <= MOST_BATCH:
        usage(f"--max-batch {max_batch}: must be 1 to {MOST_BATCH}")
    if metric is not None and metric not in METRICS:
        usage(f"--metric {metric}: must be one of {', '.join(METRICS)}")
    if not validation.is_file():
        usage(f"--validation {validation}: there is no such file")
    from services.executor.backends.base import BackendError  # noqa: PLC0415
    from services.executor.backends.container import UserProcess  # noqa: PLC0415
    from services.executor.workshop.sandbox.protocol import UploadRejected, ValidationFile  # noqa: PLC0415

    file = ValidationFile(
        path=str(validation),
        inputs_key=stated.inputs_key,
        labels_key=stated.labels_key,
        metric=metric or "top1",
        most_bytes=MOST_BYTES,
    )
    request = Register(
        app=app,
        model=model,
        format=CONTAINER,
        object="",
        validation="",
        version=version,
        metric=metric or "top1",
        default_output=None if default_output is None else json_or_text(default_output),
        **asdict(stated),
        labels=[] if labels is None else lines_of(labels),
    )
    process = UserProcess(target, Path.cwd())
    try:
        progress(f"starting {target}")
        process.open()
        if dry_run:
            return _dry_run(process, file, request, most, json)
        from infaas.cli.run import settings_to_join  # noqa: PLC0415

        settings = settings_to_join(config, data_dir, os.environ)
        joined = asyncio.run(_join(settings, process, file, request, metric, max_batch))
        return _serve(settings, process, joined, json)
    except RegistrationFailed as failed:
        fail(str(failed))
    except (BackendError, UploadRejected) as error:
        fail(f"{target}: {error}")
    finally:
        process.close()


def _dry_run(process: "UserProcess", file: "ValidationFile", request: Register, max_batch: int, json: bool) -> int:
    from services.executor.workshop.tasks.container import InspectedContainer  # noqa: PLC0415

    inspected = InspectedContainer(process, file, None, max_batch)
    report = inspected.report(progress)
    document = {
        "dry_run": True,
        "app": request.app,
        "model": request.model,
        "version": request.version,
        "accuracy": report.accuracy,
        "samples": len(inspected.data),
        **msgspec.to_builtins(report.signature),
        "max_batch": report.max_batch,
        "alone": report.alone,
        "latency_ms": {str(row.batch): row.p50_ms for row in report.profile.rows},
        "memory_mb": report.profile.memory_mb,
        "saturation_qps": report.profile.saturation_qps,
    }
    show(document, json, render_dry_run)
    return 0


# -- into the catalogue


class Joined(msgspec.Struct, frozen=True):
    """The variant that this process serves. replica: it was registered before. agreement: with the first process of its version."""

    app: str
    variant: VariantRecord
    replica: bool
    agreement: float


async def _join(
    settings: "Settings",
    process: "UserProcess",
    file: "ValidationFile",
    request: Register,
    metric: str | None,
    max_batch: int | None,
) -> Joined:
    """Register the process, or find that it is one more of a registered version. Raises InfaasError, UploadRejected.

    metric, max_batch: None: not given.
    """
    from bus.natsbus import NatsBus  # noqa: PLC0415
    from services.executor.workshop.tasks.container import InspectedContainer  # noqa: PLC0415
    from services.shell.settings import login_of  # noqa: PLC0415

    bus = await NatsBus.connect(settings.bus.url, name=CONTAINER, **login_of(settings.bus).options())
    try:
        subjects = Subjects(settings.prefix)
        question = PlaceContainer(request=request, metric=metric)
        place = await place_of_container(bus, subjects, question)
        # In threads: the connection's pings are answered meanwhile.
        inspected = await asyncio.to_thread(
            InspectedContainer, process, file, place.signature, max_batch or USUAL_BATCH
        )
        if place.variant is None:
            request = replace(request, container=await asyncio.to_thread(inspected.report, progress))
            try:
                return await _register(bus, subjects, replace(request, version=place.version), inspected)
            except Refused:
                # Perhaps another one of these registers just now. Or the version was deleted: then there is a next one.
                place = await _registered(bus, subjects, question) or place
                if place.variant is None and request.version is not None:
                    raise
            if place.variant is None:
                return await _register(bus, subjects, replace(request, version=None), inspected)
        return await _replica(bus, subjects, request.app, inspected, place, max_batch)
    finally:
        await bus.close()


async def _register(bus: Bus, subjects: Subjects, request: Register, inspected: "InspectedContainer") -> Joined:
    reference = await asyncio.to_thread(inspected.reference)
    status = await register_container(bus, subjects, request, reference, inspected.distribution, lambda _: None)
    if status.state != "done":
        raise RegistrationFailed(status)
    done = Register(
        app=request.app, model=request.model, format=CONTAINER, object="", validation="", version=status.version
    )
    place = await _registered(bus, subjects, PlaceContainer(request=done))
    if place is None or place.variant is None:
        raise BadInput(f"version {status.version} of model {request.model} was deleted just now")
    return Joined(request.app, place.variant, replica=False, agreement=1.0)


async def _registered(bus: Bus, subjects: Subjects, question: PlaceContainer) -> ContainerPlace | None:
    """The place once it is that of a registered variant; None: it does not become so. Raises Refused.

    The records of a version come one after the other, and the registrar that answers may see them a little later.
    """
    end = asyncio.get_running_loop().time() + APPEARS_S
    while True:
        refused = None
        try:
            place = await place_of_container(bus, subjects, question)
            if place.variant is not None:
                return place
        except Refused as error:
            refused = error
        if asyncio.get_running_loop().time() > end:
            if refused is not None:
                raise refused
            return None
        await asyncio.sleep(0.2)


async def _replica(
    bus: Bus,
    subjects: Subjects,
    app: str,
    inspected: "InspectedContainer",
    place: ContainerPlace,
    max_batch: int | None,
) -> Joined:
    """One more process of a version that is there: it must be alike. Raises BadInput."""
    variant = place.variant
    assert variant is not None, "a replica is of a variant"
    named = f"version {variant.version} of model {variant.model}"
    if max_batch is not None and inspected.max_batch != variant.max_batch:
        has = f"--max-batch: {named} has {variant.max_batch} and not {inspected.max_batch}"
        raise BadInput(f"{has}; a replica changes nothing: leave it out, or give another --version")
    difference = signature_difference(variant.signature, inspected.signature)
    if difference is not None:
        difference = difference.replace("the app's", "its").replace("the model's", "those of this class")
        raise BadInput(f"version: {named} is another class: {difference}; give another --version")
    artifacts = await bus.object_store(subjects.artifacts_bucket, create=False)
    agreement = await asyncio.to_thread(inspected.agreement, await artifacts.get(place.reference))
    if agreement < place.agreement:
        raise BadInput(
            f"version: {named} is another class: this one gives the same answers to {agreement:.0%} of its inputs, "
            f"and a replica to at least {place.agreement:.0%}; give another --version"
        )
    return Joined(app, variant, replica=True, agreement=agreement)


# -- serving


def _serve(settings: "Settings", process: "UserProcess", joined: Joined, json: bool) -> int:
    """Be a worker until SIGTERM or Ctrl-C; then drain."""
    from services.executor.__main__ import wire_container as wire_executor  # noqa: PLC0415
    from services.jobs.runner.__main__ import wire as wire_runner  # noqa: PLC0415
    from services.monitor.__main__ import wire_container as wire_monitor  # noqa: PLC0415
    from services.shell.host.worker import drain  # noqa: PLC0415
    from services.shell.runtime.serve import serve  # noqa: PLC0415

    variant = joined.variant
    process.signature = variant.signature
    worker = f"{CONTAINER}-{variant.model[:40]}-{secrets.token_hex(4)}"
    ours = replace(settings.worker, name=worker, kind=CONTAINER, hardware=CONTAINER)
    metrics = replace(settings.metrics, enabled=False)
    settings = replace(settings, worker=ours, metrics=metrics)
    memory_mb = max(1.0, variant.profile.memory_mb) / settings.monitor.memory_share
    device = Device(
        name=CONTAINER, kind=container_kind(variant.model, variant.version), cores=1, memory_mb=1.001 * memory_mb
    )
    said = _once(lambda: _say(joined, worker, json))

    async def wire(settings: "Settings", bus: Bus) -> "list[Runtime]":
        # The monitor stops first and says that it leaves, so that nobody sends anything more.
        own = [wire_executor(settings, bus, device, process, said), wire_monitor(settings, bus, device, variant)]
        return [*own, *await wire_runner(settings, bus)]

    async def end(bus: Bus) -> None:
        await drain(bus, Subjects(settings.prefix), worker, settings.worker.drain_s)

    return serve(CONTAINER, settings, wire, end)


def _once(act: Callable[[], None]) -> Callable[[], None]:
    left = [act]
    return lambda: left.pop()() if left else None


def _say(joined: Joined, worker: str, json: bool) -> None:
    variant = joined.variant
    if json:
        shown = {name: getattr(variant, name) for name in ("model", "version", "variant", "accuracy", "max_batch")}
        joins = {"app": joined.app, "worker": worker, "replica": joined.replica, "agreement": joined.agreement}
        print_json(shown | joins)
        return
    what = "one more replica of" if joined.replica else "serving"
    print(
        f"{what} {variant.model} version {variant.version} for app {joined.app}: variant {variant.variant} on worker "
        f"{worker}; Ctrl-C ends it",
        flush=True,
    )

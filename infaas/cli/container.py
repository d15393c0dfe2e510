"""`infaas container`: a user's own Python class, in a process of its own, serves as a variant (docs/containers.md).

This process becomes a worker with one device of a kind of its own, and runs that worker's monitor and executor. The class runs in a child
process. It is inspected and measured from here; the registrar writes what was found into the catalogue.
"""

import asyncio
import os
import re
import secrets
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, TypeVar

import msgspec
from cyclopts import Parameter

from bus.codec import decode
from bus.messages.catalog import AppRecord, ModelRecord, VariantRecord
from bus.messages.public import ContainerReport, Register
from bus.port import Bus, KeyValue, NotFound
from bus.subjects import Subjects, valid_name
from infaas.cli.options import DataDir, Json, Whole, json_or_text
from infaas.cli.output import fail, print_json, progress, show, usage
from infaas.cli.register import lines_of, render_dry_run
from infaas.errors import BadInput, NotConnected, Refused, RegistrationFailed
from infaas.registering import START_S, register_container, signature_document
from services.core.catalog import app_key, signature_difference, variant_key
from services.core.placement import Device, container_kind

if TYPE_CHECKING:
    from services.core.settings import Settings
    from services.executor.backends.container import UserProcess
    from services.executor.workshop.sandbox.protocol import ValidationFile
    from services.executor.workshop.tasks.container import InspectedContainer
    from services.shell.runtime.runtime import Runtime

T = TypeVar("T")

TARGET = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*\Z")
CONTAINER = "container"
MOST_BATCH = 1024
USUAL_BATCH = 64
APPEARS_S = 5.0  # s in which a version appears that another container registers at the same time
MOST_BYTES = 2**30  # of an unpacked validation set


def container(
    target: str,
    /,
    *,
    app: str,
    model: str | None = None,
    validation: Path,
    inputs_key: str = "x",
    labels_key: str = "y",
    version: str | None = None,
    task: str | None = None,
    metric: Literal["top1", "top5", "mae", "rmse"] | None = None,
    latency_ms: float | None = None,
    slo_target: float | None = None,
    accuracy: Literal["own", "any"] | None = None,
    default_output: str | None = None,
    labels: Path | None = None,
    max_batch: Whole | None = None,
    dry_run: Annotated[bool, Parameter(negative="")] = False,
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
        An .npz file with inputs (first axis: items) and their labels. Accuracy is measured on them.
    inputs_key
        The array of inputs in the .npz file. Several inputs: arrays named KEY.NAME.
    labels_key
        The array of labels in the .npz file.
    version
        Name of this version. Default: the newest that containers of this model have, else the next number.
    task
        What the model is for, in your own words.
    metric
        How outputs are scored against the labels. Default: top1. An error e of mae or rmse counts as the accuracy 1 / (1 + e).
    latency_ms
        The app's default latency objective, in milliseconds.
    slo_target
        The share of the app's queries to be answered in time, above 0 and below 1. Default: what the app has.
    accuracy
        What a query gets that states no accuracy: own, a variant at most 0.5 points below its model, or any. Default: what the app has, at
        first own.
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
    if not TARGET.match(target):
        usage(f"{target}: write MODULE:CLASS, as `model:Digits` for the class Digits in model.py")
    model = model or app
    for option, name in (("--app", app), ("--model", model), ("--version", version or "x")):
        if not valid_name(name):
            usage(f"{option} {name}: must be 1 to 64 letters, digits, - or _, a letter or digit first")
    most = USUAL_BATCH if max_batch is None else max_batch
    if not 1 <= most <= MOST_BATCH:
        usage(f"--max-batch {max_batch}: must be 1 to {MOST_BATCH}")
    if not validation.is_file():
        usage(f"--validation {validation}: there is no such file")
    from services.executor.backends.base import BackendError  # noqa: PLC0415
    from services.executor.backends.container import UserProcess  # noqa: PLC0415
    from services.executor.workshop.sandbox.protocol import UploadRejected, ValidationFile  # noqa: PLC0415

    file = ValidationFile(
        path=str(validation),
        inputs_key=inputs_key,
        labels_key=labels_key,
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
        task=task,
        metric=metric or "top1",
        default_output=None if default_output is None else json_or_text(default_output),
        latency_ms=latency_ms,
        slo_target=slo_target,
        accuracy=accuracy,
        inputs_key=inputs_key,
        labels_key=labels_key,
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
        given = {name for name, value in (("metric", metric), ("max_batch", max_batch)) if value is not None}
        joined = asyncio.run(_join(settings, process, file, request, most, given))
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
        **signature_document(report.signature),
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
    max_batch: int,
    given: Collection[str],
) -> Joined:
    """Register the process, or find that it is one more of a registered version. Raises InfaasError, UploadRejected.

    given: of the options with a default, those that were not left out.
    """
    from bus.natsbus import NatsBus  # noqa: PLC0415
    from services.executor.workshop.tasks.container import InspectedContainer  # noqa: PLC0415
    from services.shell.settings import login_of  # noqa: PLC0415

    bus = await NatsBus.connect(settings.bus.url, name=CONTAINER, **login_of(settings.bus).options())
    try:
        subjects = Subjects(settings.prefix)
        catalogue = ContainerCatalogue(await _bucket(bus, subjects.catalog_bucket))
        app = await catalogue.app(request.app)
        signature = None if app is None else app.signature
        # In threads: the connection's pings are answered meanwhile.
        inspected = await asyncio.to_thread(InspectedContainer, process, file, signature, max_batch)
        entry = Entry(bus, subjects, catalogue, settings, request, inspected, given)
        return await entry.find()
    finally:
        await bus.close()


async def _bucket(bus: Bus, name: str) -> KeyValue:
    """The bucket; of a system that is still starting, as soon as its registrar has made it. Raises NotConnected."""
    end = asyncio.get_running_loop().time() + START_S
    while True:
        try:
            return await bus.key_value(name, create=False)
        except NotFound:
            if asyncio.get_running_loop().time() > end:
                raise NotConnected("no registrar has run yet: is the system up? `infaas doctor` says more") from None
            await asyncio.sleep(0.2)


class ContainerCatalogue:
    """Reads single records of the catalogue bucket."""

    def __init__(self, bucket: KeyValue) -> None:
        self._bucket = bucket

    async def app(self, name: str) -> AppRecord | None:
        return await self._get(app_key(name), AppRecord)

    async def versions(self, model: str) -> list[ModelRecord]:
        """All versions of a model, the oldest first."""
        found = [await self._get(key, ModelRecord) for key in await self._keys(f"model.{model}.")]
        return sorted((record for record in found if record is not None), key=lambda record: record.created)

    async def variant(self, model: str, version: str) -> VariantRecord | None:
        """The variant of a container's version."""
        for key in await self._keys(variant_key("")):
            record = await self._get(key, VariantRecord)
            if record is not None and (record.model, record.version, record.framework) == (model, version, CONTAINER):
                return record
        return None

    async def _keys(self, prefix: str) -> list[str]:
        return [key for key in await self._bucket.keys() if key.startswith(prefix)]

    async def _get(self, key: str, kind: type[T]) -> T | None:
        try:
            return decode(kind, (await self._bucket.get(key)).value or b"")
        except NotFound:
            return None


@dataclass(slots=True, eq=False)
class Entry:
    """Finds the place of an inspected process in the catalogue."""

    bus: Bus
    subjects: Subjects
    catalogue: ContainerCatalogue
    settings: "Settings"
    request: Register
    inspected: "InspectedContainer"
    given: Collection[str]

    async def find(self) -> Joined:
        """Join a version that is there; else register one. Raises InfaasError."""
        from services.registrar.policy import next_version  # noqa: PLC0415

        known = await self.catalogue.versions(self.request.model)
        version = self.request.version or next(
            (record.version for record in reversed(known) if record.format == CONTAINER),
            str(next_version(record.version for record in known)),
        )
        record = next((record for record in known if record.version == version), None)
        if record is not None:
            return await self._replica(record)
        report = await asyncio.to_thread(self.inspected.report, progress)
        try:
            return await self._register(report, version)
        except Refused as refused:
            if refused.field != "version":
                raise
            # Another one of these registers just now, or the version was deleted.
            record = await self._appearing(version)
            if record is not None:
                return await self._replica(record)
            if self.request.version is not None:
                raise
        return await self._register(report, None)

    async def _register(self, report: ContainerReport, version: str | None) -> Joined:
        reference = await asyncio.to_thread(self.inspected.reference)
        request = msgspec.structs.replace(self.request, version=version, container=report)
        status = await register_container(self.bus, self.subjects, request, reference, lambda _: None)
        if status.state != "done":
            raise RegistrationFailed(status)
        variant = await self.catalogue.variant(request.model, status.version or "")
        if variant is None:
            raise BadInput(f"version {status.version} of model {request.model} was deleted just now")
        return Joined(request.app, variant, replica=False, agreement=1.0)

    async def _appearing(self, version: str) -> ModelRecord | None:
        end = asyncio.get_running_loop().time() + APPEARS_S
        while asyncio.get_running_loop().time() < end:
            for record in await self.catalogue.versions(self.request.model):
                if record.version == version:
                    return record
            await asyncio.sleep(0.2)
        return None

    async def _replica(self, record: ModelRecord) -> Joined:
        """One more process of a version that is there: it must be alike."""
        named = f"version {record.version} of model {record.model}"
        variant = await self.catalogue.variant(record.model, record.version) if record.format == CONTAINER else None
        if variant is None:
            raise BadInput(f"version: {named} is a registered file, and no container; give another --version")
        app = await self.catalogue.app(self.request.app)
        if app is None or record.model not in app.links:
            link = f"infaas admin link-model {self.request.app} --model {record.model} --version {record.version}"
            raise BadInput(f"app: {named} is registered, but not for app {self.request.app}; link it with `{link}`")
        wrong = without_effect(self.request, self.given, self.inspected.max_batch, record, app, variant)
        if wrong:
            raise BadInput(f"{wrong[0]}; a replica changes nothing: leave it out, or give another --version")
        difference = signature_difference(record.signature, self.inspected.signature)
        if difference is not None:
            difference = difference.replace("the app's", "its").replace("the model's", "those of this class")
            raise BadInput(f"version: {named} is another class: {difference}; give another --version")
        artifacts = await self.bus.object_store(self.subjects.artifacts_bucket, create=False)
        reference = await artifacts.get(record.source)
        agreement = await asyncio.to_thread(self.inspected.agreement, reference)
        least = self.settings.registrar.agreement
        if agreement < least:
            raise BadInput(
                f"version: {named} is another class: this one gives the same answers to {agreement:.0%} of its inputs, "
                f"and a replica to at least {least:.0%}; give another --version"
            )
        return Joined(self.request.app, variant, replica=True, agreement=agreement)


def without_effect(
    asked: Register,
    given: Collection[str],
    max_batch: int,
    record: ModelRecord,
    app: AppRecord,
    variant: VariantRecord,
) -> list[str]:
    """Options of a replica that say something else than what is registered, which one more process does not change.

    given: of the options with a default, those that were not left out. max_batch: of the inspected class.
    """
    named, of_app = f"version {record.version} of model {record.model}", f"app {app.app}"
    return [
        f"--{option}: {whose} has {kept!r} and not {wanted!r}"
        for option, wanted, kept, whose in (
            ("task", asked.task, record.task, named),
            ("metric", asked.metric if "metric" in given else None, record.metric, named),
            ("labels", asked.labels or None, record.labels, named),
            ("max-batch", max_batch if "max_batch" in given else None, variant.max_batch, named),
            ("latency-ms", asked.latency_ms, app.latency_ms, of_app),
            ("slo-target", asked.slo_target, app.slo_target, of_app),
            ("default-output", asked.default_output, app.default_output, of_app),
            ("accuracy", asked.accuracy, app.accuracy, of_app),
        )
        if wanted is not None and wanted != kept
    ]


# -- serving


def _serve(settings: "Settings", process: "UserProcess", joined: Joined, json: bool) -> int:
    """Be a worker until SIGTERM or Ctrl-C; then drain."""
    from services.executor.__main__ import wire_container as wire_executor  # noqa: PLC0415
    from services.monitor.__main__ import wire_container as wire_monitor  # noqa: PLC0415
    from services.shell.host.worker import drain  # noqa: PLC0415
    from services.shell.runtime.serve import serve  # noqa: PLC0415

    variant = joined.variant
    process.signature = variant.signature
    worker = f"{CONTAINER}-{variant.model[:40]}-{secrets.token_hex(4)}"
    ours = msgspec.structs.replace(settings.worker, name=worker, kind=CONTAINER, hardware=CONTAINER)
    metrics = msgspec.structs.replace(settings.metrics, enabled=False)
    settings = msgspec.structs.replace(settings, worker=ours, metrics=metrics)
    memory_mb = max(1.0, variant.profile.memory_mb) / settings.monitor.memory_share
    device = Device(
        name=CONTAINER,
        kind=container_kind(variant.model, variant.version),
        cores=1,
        memory_mb=1.001 * memory_mb,
    )
    said = _once(lambda: _say(joined, worker, json))

    async def wire(settings: "Settings", bus: Bus) -> "list[Runtime]":
        # The monitor stops first and says that it leaves, so that nobody sends anything more.
        return [
            wire_executor(settings, bus, device, process, said),
            wire_monitor(settings, bus, device, variant),
        ]

    async def end(bus: Bus) -> None:
        await drain(bus, Subjects(settings.prefix), worker, settings.worker.drain_s)

    return serve(CONTAINER, settings, wire, end)


def _once(act: Callable[[], None]) -> Callable[[], None]:
    left = [act]
    return lambda: left.pop()() if left else None


def _say(joined: Joined, worker: str, json: bool) -> None:
    variant = joined.variant
    document = {
        "app": joined.app,
        "model": variant.model,
        "version": variant.version,
        "variant": variant.variant,
        "worker": worker,
        "accuracy": variant.accuracy,
        "max_batch": variant.max_batch,
        "replica": joined.replica,
        "agreement": joined.agreement,
    }
    if json:
        print_json(document)
        return
    what = "one more replica of" if joined.replica else "serving"
    print(
        f"{what} {variant.model} version {variant.version} for app {joined.app}: variant {variant.variant} on worker "
        f"{worker}; Ctrl-C ends it",
        flush=True,
    )

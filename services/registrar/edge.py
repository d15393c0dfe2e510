"""The registrar's edge: compare-and-set writes into the catalogue and status buckets, and the removal of uploads."""

import asyncio
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from time import time
from typing import Any, NamedTuple, TypeVar

from msgspec.structs import replace

from bus.codec import decode, encode
from bus.messages.catalog import AppRecord, ModelRecord, VariantRecord
from bus.messages.public import Error
from bus.messages.verbs import (
    DeleteApp,
    DeleteVersion,
    Prune,
    ReleaseVariant,
    ResetSelection,
    SetBatching,
    SetReplicas,
    SetSelection,
    UnlinkModel,
)
from bus.messages.work import ArtifactsKept
from bus.port import Bus, KeyValue, KeyValueEntry, NotFound, ObjectStore, WrongRevision, together
from bus.subjects import Subjects
from services.core.batching import batching_key
from services.core.catalog import (
    Catalog,
    app_key,
    counted_key,
    key_of,
    model_key,
    quality_key,
    selection_key,
    variant_key,
)
from services.core.placement import quarantined_at
from services.core.release import KEY
from services.core.requests import TakeOver
from services.core.settings import QualitySettings
from services.core.settings.fields import DAY
from services.registrar.changes import AMENDMENTS, amend, note_of
from services.registrar.commands import (
    AddVariants,
    AlreadyTaken,
    ChangeSimulated,
    ClaimRegistration,
    ContextsDeleted,
    Finish,
    MarkCancelled,
    Noted,
    Pruned,
    PutFigures,
    PutRecords,
    PutStatus,
    RefitPlan,
    RegistrationClaimed,
    RegistrationRecord,
    ReleaseMoved,
    error_of,
)
from services.registrar.releases import stamped
from services.shell.policies import try_policy

TOGETHER = 500  # deletions under way: a server with sync_interval "always" writes those that wait with one sync
DELETED = b"deleted"  # value of a reservation that never ends: the version was deleted
LARGE_KEPT_S = 600.0  # of inputs and outputs that are too large for a message; they are fetched soon or never
UPLOADS_KEPT_S = 24 * 3600.0  # of uploads that nobody registered, and of those that the registrar does not remove

_Message = TypeVar("_Message")


class Amended(NamedTuple):
    """An app's record has been changed. note: as `note_of`. moved: its release has changed."""

    note: str
    moved: ReleaseMoved | None

    @classmethod
    def of(cls, before: AppRecord | None, after: AppRecord | None, note: str) -> "Amended":
        release, was = (None if one is None else one.release for one in (after, before))
        moved = after is not None and release is not None and release != was
        return cls(note, ReleaseMoved(after.app, release) if moved and after and release else None)


@dataclass(eq=False)
class RegistrarEdge:
    """Carries out the commands of services/registrar/commands.py. `await RegistrarEdge.open(bus, subjects)` makes one."""

    catalog: KeyValue
    status: KeyValue
    control: KeyValue
    contexts: KeyValue
    payloads: KeyValue
    uploads: ObjectStore
    artifacts: ObjectStore

    def __post_init__(self) -> None:
        self._prune_due = False  # a registration was under way
        self._commands: dict[type, Callable[[Any], Any]] = {
            ClaimRegistration: self._claim,
            TakeOver: self._take_over,
            MarkCancelled: self._mark_cancelled,
            PutStatus: self._put_status,
            **dict.fromkeys(AMENDMENTS, self._change_app),
            SetSelection: self._set_selection,
            SetReplicas: self._set_replicas,
            DeleteApp: self._delete_app,
            ReleaseVariant: self._release_variant,
            ResetSelection: self._reset_selection,
            SetBatching: self._set_batching,
            DeleteVersion: self._delete_version,
            Prune: self._prune,
            PutRecords: self._put_records,
            AddVariants: self._add_variants,
            ChangeSimulated: self._change_simulated,
            PutFigures: self._put_figures,
            Finish: self._finish,
        }

    @classmethod
    async def open(cls, bus: Bus, subjects: Subjects, quality: QualitySettings) -> "RegistrarEdge":
        """Open or make the buckets, also those that only other services use, which may not make them; raises BusError."""
        age, size = quality.payload_days * DAY, int(quality.payload_mb * 2**20)
        values = (subjects.catalog_bucket, subjects.status_bucket, subjects.control_bucket, subjects.selection_bucket)
        objects = {
            subjects.uploads_bucket: UPLOADS_KEPT_S,
            subjects.artifacts_bucket: 0.0,
            subjects.inputs_bucket: LARGE_KEPT_S,
            subjects.outputs_bucket: LARGE_KEPT_S,
        }
        kept, payloads, stored = await asyncio.gather(
            asyncio.gather(*map(bus.key_value, values)),
            bus.key_value(subjects.payloads_bucket, max_age_s=age, max_bytes=size),
            asyncio.gather(*(bus.object_store(bucket, max_age_s=age) for bucket, age in objects.items())),
        )
        catalog, status, control, contexts = kept
        return cls(catalog, status, control, contexts, payloads, *stored[:2])

    async def perform(self, command: Any) -> Any:
        return await self._commands[type(command)](command)

    # -- unfinished registrations

    async def _claim(self, command: ClaimRegistration) -> RegistrationClaimed | AlreadyTaken:
        record = command.record
        key = f"work.{record.registration}"
        try:
            await self.status.create(key, encode(record))
        except WrongRevision:
            kept = await _get(self.status, key, RegistrationRecord)
            if kept is not None and (kept.registrar, kept.created) != (record.registrar, record.created):
                return AlreadyTaken("registration")
        if record.extends:
            return RegistrationClaimed(record)  # it extends a version that is registered
        version = await self._reserve(record, command.next_version)
        if version is None:
            await self.status.delete(key)
            return AlreadyTaken("version")
        return RegistrationClaimed(await self._change_record(key, version=version))

    async def _reserve(self, record: RegistrationRecord, first: int) -> str | None:
        """Reserve the version asked for, or the next free number; None when it is reserved or registered already."""
        model, wanted = record.request.model, record.request.version
        number = first
        while True:
            version = wanted or str(number)
            free = await self._reserve_version(model, version, record.registration)
            if free and await _get(self.catalog, model_key(model, version), ModelRecord) is not None:
                await self.status.delete(_reservation(model, version))
                free = False
            if free:
                return version
            if wanted is not None:
                return None
            number += 1

    async def _reserve_version(self, model: str, version: str, registration: str) -> bool:
        try:
            await self.status.create(_reservation(model, version), registration.encode())
        except WrongRevision:
            try:
                return (await self.status.get(_reservation(model, version))).value == registration.encode()
            except NotFound:
                return await self._reserve_version(model, version, registration)
        return True

    async def _take_over(self, command: TakeOver) -> RegistrationRecord | None:
        key = f"work.{command.work}"
        try:
            entry = await self.status.get(key)
            record = decode(RegistrationRecord, entry.value or b"")
            if record.registrar != command.previous:
                return None
            taken = replace(record, registrar=command.owner)
            await self.status.update(key, encode(taken), entry.revision)
        except (NotFound, WrongRevision):
            return None
        return taken

    async def _mark_cancelled(self, command: MarkCancelled) -> Error | None:
        try:
            await self._change_record(f"work.{command.registration}", cancelled=True)
        except NotFound:
            text = f"registration: {command.registration} is not under way any more"
            return error_of(text)
        return None

    async def _change_record(self, key: str, **changes: Any) -> RegistrationRecord:
        """Change these fields of a kept record, whatever else is changed meanwhile; raises NotFound."""
        while True:
            entry = await self.status.get(key)
            changed = replace(decode(RegistrationRecord, entry.value or b""), **changes)
            with suppress(WrongRevision):
                await self.status.update(key, encode(changed), entry.revision)
                return changed

    async def _put_status(self, command: PutStatus) -> None:
        key = f"registration.{command.registration}"
        await (self.status.put(key, encode(command.status)) if command.status else self.status.delete(key))

    async def _finish(self, command: Finish) -> Pruned | None:
        """The record goes last: as long as it is there, what failed is tried again."""
        for upload in command.uploads:
            await self.uploads.delete(upload)
        reservation = _reservation(command.model, command.version)
        if command.withdraw:
            await self._withdraw(command.registration, command.model, command.version)
        with suppress(NotFound):
            if (await self.status.get(reservation)).value == command.registration.encode():
                await self.status.delete(reservation)
        if command.forget:
            await self.status.delete(f"registration.{command.registration}")
        await self.status.delete(f"work.{command.registration}")
        return await self._prune(Prune()) if self._prune_due else None

    # -- files

    async def _prune(self, command: Prune) -> Pruned:
        """What is there is listed first: a registration that needs one of these files is under way then, or has written its records.

        One that begins later takes longer to find a file there than this to delete it.
        """
        there, at = await self.artifacts.sizes(), time()
        under_way = len(await self.status.keys("work"))
        self._prune_due = bool(under_way) and not command.dry_run
        if self._prune_due:
            return Pruned(f"{under_way} registrations are under way: files are deleted when these have ended")
        catalog = await self._read()
        if catalog.unreadable:
            return Pruned("nothing was deleted: the catalogue has records that this release cannot read")
        kept = {file for one in catalog.variants for file in (one.artifact, one.distribution) if file}
        kept |= {file for one in catalog.models for file in (one.source, one.validation)}
        unused = there.keys() - kept
        size = f"{len(unused)} files, {sum(there[key] for key in unused) / 2**20:.1f} MB"
        if command.dry_run:
            return Pruned(f"{size} would be deleted")
        for key in unused:
            await self.artifacts.delete(key)
        return Pruned(f"{size} were deleted", ArtifactsKept(artifacts=sorted(kept), time=at))

    # -- quarantine

    async def _released(self, variants: Collection[str], worker: str | None = None) -> bool:
        """Delete the variants' keys; the monitors of the workers watch them. Returns whether there was one."""
        at = {key: where for key in await self.control.keys() if (where := quarantined_at(key)) is not None}
        found = [key for key, (on, variant) in at.items() if variant in variants and worker in (None, on)]
        for key in found:
            await self.control.delete(key)
        return bool(found)

    async def _release_variant(self, command: ReleaseVariant) -> Error | None:
        if await self._released({command.variant}, command.worker):
            return None
        where_not = f"on worker {command.worker}" if command.worker else "on any worker"
        return error_of(f"variant: {command.variant} is not quarantined {where_not}")

    # -- batching

    async def _set_batching(self, command: SetBatching) -> None:
        """Executors watch these keys."""
        key = batching_key(*command.scope)
        if command.rule is not None:
            await self.control.put(key, encode(command.rule))
        else:
            await self.control.delete(key)

    async def _put_figures(self, command: PutFigures) -> None:
        await self.control.put(f"{KEY}{command.app}", encode(command.figures))

    # -- catalogue

    async def _change_app(self, command: Any) -> Error | Noted | ReleaseMoved | None:
        done = await self._amend(command)
        if isinstance(done, Error):
            return done
        notes = [done.note]
        if AMENDMENTS[type(command)].refits:
            notes += await self._refit_plans(command.app)
        note = "; ".join(filter(None, notes))
        if done.moved is not None:
            return replace(done.moved, note=note)
        return Noted(note) if note else None

    async def _set_selection(self, command: SetSelection) -> Error | Noted | ReleaseMoved | None:
        own = command.policy
        why = await try_policy(own) if own is not None and ":" in own else ""
        if why:
            where = "the folder of its module must be on PYTHONPATH, here and where dispatchers run"
            return error_of(f"policy: {own} cannot be loaded: {why}; {where}")
        return await self._change_app(command)

    async def _set_replicas(self, command: SetReplicas) -> Error | None:
        """Without an app, in all that link the model."""
        apps = [command.app] if command.app is not None else []
        if command.app is None and command.model is not None:
            apps = sorted((await self._read("app")).apps_linking(command.model))
        for app in apps:
            done = await self._amend(replace(command, app=app))
            if isinstance(done, Error):
                return done
        return None

    async def _delete_app(self, command: DeleteApp) -> Error | ContextsDeleted:
        done = await self._amend(command)
        if isinstance(done, Error):
            return done
        await self._set_batching(SetBatching(app=command.app))
        await self.control.delete(f"{KEY}{command.app}")
        await _delete_all(self.payloads, command.app)
        return await self._reset_selection(ResetSelection(app=command.app))

    async def _refit_plans(self, app: str) -> list[str]:
        """What serves has changed, so plans of pipelines that have this app as a stage may name variants that do not serve.

        Returns what became of them.
        """
        notes = []
        for record in (await self._read("app")).apps:
            stages = record.pipeline.vertices if record.pipeline is not None and record.plan is not None else ()
            if any(vertex.app == app for vertex in stages):
                done = await self._amend(RefitPlan(app=record.app))
                notes += [done.note] if isinstance(done, Amended) else []
        return notes

    async def _read(self, under: str = "") -> Catalog:
        """The records that are in the bucket now. A watch may lag behind what an operator has just changed."""
        found = Catalog()
        for entry in await self.catalog.entries(under):
            found.apply(entry.key, entry.value)
        return found

    async def _reset_selection(self, command: ResetSelection) -> ContextsDeleted:
        """An app may have very many contexts; what a time limit leaves is deleted when the command is repeated."""
        app = command.app
        if command.context is not None:
            key = selection_key(app, command.context)
            for one in (key, counted_key(key)):
                await self.contexts.delete(one)
            return ContextsDeleted(app, key)
        await self.catalog.delete(quality_key(app))  # what labels said
        await _delete_all(self.contexts, app)
        return ContextsDeleted(app)

    async def _amend(self, change: Any) -> Error | Amended:
        """Read, change and write an app's record, again and again until nobody else has written in between."""
        key, reads = app_key(change.app), AMENDMENTS[type(change)].reads
        while True:
            catalog = Catalog() if reads is None else await self._read(reads)
            entry: KeyValueEntry | None = None
            before: AppRecord | None = None
            try:
                entry = await self.catalog.get(key)
                before = decode(AppRecord, entry.value or b"")
            except NotFound:
                pass
            after = amend(before, change, catalog)
            if isinstance(after, Error):
                return after
            after = None if after is None else stamped(before, after, time())
            try:
                if after is None:
                    await self.catalog.delete(key)
                elif entry is None:
                    await self.catalog.create(key, encode(replace(after, created=time())))
                elif after != before:
                    await self.catalog.update(key, encode(after), entry.revision)
            except WrongRevision:
                continue
            return Amended.of(before, after, note_of(before, after, change, catalog))

    async def _delete_version(self, command: DeleteVersion) -> Error | Pruned:
        """Delete the model's record first: without it nobody sees its variants. The version stays reserved for ever."""
        model, version = command.model, command.version
        named = f"version {version} of model {model}"
        keys = await self.catalog.keys()
        for key in keys:
            app = await _get(self.catalog, key, AppRecord) if key.startswith(app_key("")) else None
            if app is not None and app.serves(model, version):
                remedy = "set another version there, or unlink the model, first"
                if app.releasing is not None and app.releasing.model == model:
                    remedy = "end its release first, by infaas.admin.promote-release or infaas.admin.abort-release"
                return error_of(f"version: app {app.app} serves {named}; {remedy}")
        await self.status.put(_reservation(model, version), DELETED)
        await self.catalog.delete(model_key(model, version))
        gone = set()
        for key in keys:
            if key.startswith(variant_key("")):
                record = await _get(self.catalog, key, VariantRecord)
                if record is not None and (model, version) in ((record.model, record.version), *record.versions):
                    await self.catalog.delete(key)
                    await self.control.delete(batching_key("variant", record.variant))
                    gone.add(record.variant)
        await self._released(gone)
        return await self._prune(Prune())

    async def _withdraw(self, registration: str, model: str, version: str) -> None:
        """Delete what a cancelled registration has written already, unless a pipeline or ensemble has begun to use it."""
        kept = await _get(self.catalog, model_key(model, version), ModelRecord)
        if kept is None or kept.registration != registration:
            return
        for app in (await self._read("app")).apps:
            if app.links.get(model) == version:
                alone = len(app.links) == 1 and app.created >= kept.created  # it was made for this model
                await (
                    self._delete_app(DeleteApp(app=app.app))
                    if alone
                    else self._amend(UnlinkModel(app=app.app, model=model))
                )
        await self._delete_version(DeleteVersion(model=model, version=version))

    async def _put_records(self, command: PutRecords) -> Error | None:
        model = command.model
        kept = await _get(self.catalog, key_of(model), ModelRecord)
        if kept is not None and kept.registration != model.registration:
            return error_of(f"version: version {model.version} of model {model.model} is registered already")
        if command.link is not None:
            record = await _get(self.catalog, app_key(command.link.app), AppRecord)
            refused = amend(record, command.link, await self._read("model"))
            if isinstance(refused, Error):
                return refused
        records: list[VariantRecord | ModelRecord] = [*command.variants, model]
        for written in records:
            await self.catalog.put(key_of(written), encode(written))
        refusal = "" if command.link is None else await self._amend(command.link)
        if isinstance(refusal, Error):  # a moment ago another registration fixed the app's signature
            for written in reversed(records):
                await self.catalog.delete(key_of(written))
            return refusal
        if command.link is not None:
            await self._refit_plans(command.link.app)
        return None

    async def _add_variants(self, command: AddVariants) -> Error | None:
        if await _get(self.catalog, model_key(command.model, command.version), ModelRecord) is None:
            text = f"model: version {command.version} of model {command.model} is not registered any more"
            return error_of(text, "unknown_model")
        if command.distribution:
            await self.artifacts.put(command.variants[0].distribution, await self.uploads.get(command.distribution))
        for record in command.variants:
            await self.catalog.put(key_of(record), encode(record))
        return None

    async def _change_simulated(self, command: ChangeSimulated) -> None:
        for record in command.add:
            with suppress(WrongRevision):  # another registrar wrote the same
                await self.catalog.create(key_of(record), encode(record))
        for variant in command.drop:
            await self.catalog.delete(variant_key(variant))
        await self._released(command.drop)


def _reservation(model: str, version: str) -> str:
    """Key of the reservation of a version: by a registration under way, or for ever because it was deleted."""
    return f"version.{model}.{version}"


async def _delete_all(bucket: KeyValue, under: str) -> None:
    await together(bucket.delete, await bucket.keys(under), TOGETHER)


async def _get(bucket: KeyValue, key: str, message: type[_Message]) -> _Message | None:
    try:
        entry = await bucket.get(key)
    except NotFound:
        return None
    return decode(message, entry.value or b"")

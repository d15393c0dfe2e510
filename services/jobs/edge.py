"""The coordinator's edge: keeps jobs in their bucket, queues chunks, takes parts from their bucket, moves inputs and outputs.

s3:// needs boto3, which finds the credentials. That part follows boto3's documentation and has never run: no S3 was at hand.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import msgspec

from bus.codec import decode, encode
from bus.messages.jobs import OVER, Chunk, JobRecord, Part
from bus.messages.public import Error, ObjectRef
from bus.port import Bus, KeyValue, KeyValueEntry, NotFound, ObjectStore, StreamSpec, WrongRevision, together
from bus.subjects import Subjects
from services.core.requests import TakeOver
from services.jobs.commands import (
    Abandon,
    Accept,
    Assemble,
    Assembled,
    Broken,
    CancelResult,
    ChunkRange,
    Conclude,
    Feed,
    ForgetJob,
    JobRoute,
    Keep,
    MarkJobCancelled,
    ParsedUrl,
    Read,
    Resume,
    Resumed,
    WasRead,
)
from services.jobs.files import BadFile, JobFiles, named
from services.jobs.formats import BadJobInput

PARTS_KEPT_S = 24 * 3600.0  # of parts whose job nobody carries on
INLINE = 2**20  # bytes of a chunk above which it goes through the object store
QUEUE_BYTES = 2**30
AT_ONCE = 8  # objects fetched or deleted concurrently


def stream(subjects: Subjects) -> StreamSpec:
    """The work queue of chunks."""
    return StreamSpec(subjects.job_stream, (subjects.job_chunks(),), "work", QUEUE_BYTES)


def part_key(job: str, number: int) -> str:
    return f"{job}/{number}"


class JobsEdge:
    """Carries out the commands of services/jobs/commands.py. `await JobsEdge.open(...)` makes one."""

    def __init__(self, bus: Bus, subjects: Subjects, records: KeyValue, files: JobFiles, chunk_bytes: int) -> None:
        self._bus = bus
        self._subjects = subjects
        self._records = records
        self._files = files
        self._chunk_bytes = chunk_bytes
        self._revisions: dict[str, int] = {}
        self._parts: ObjectStore | None = None
        self._commands: dict[type, Callable[[Any], Awaitable[Any]]] = {
            Accept: self._accept,
            Read: self._read,
            Feed: self._feed,
            Resume: self._resume,
            Assemble: self._assemble,
            Keep: self._keep,
            Conclude: self._conclude,
            Abandon: self._abandon,
            MarkJobCancelled: self._cancel,
            TakeOver: self._take_over,
            ForgetJob: self._forget,
        }

    @classmethod
    async def open(cls, bus: Bus, subjects: Subjects, files: JobFiles, chunk_bytes: int) -> "JobsEdge":
        """Open the jobs bucket. Raises BusError."""
        return cls(bus, subjects, await bus.key_value(subjects.jobs_bucket), files, chunk_bytes)

    async def perform(self, command: Any) -> Any:
        return await self._commands[type(command)](command)

    async def _store(self) -> ObjectStore:
        """The bucket of parts. The first job makes it, and the queue of chunks."""
        if self._parts is None:
            await self._bus.ensure_stream(stream(self._subjects))
            self._parts = await self._bus.object_store(self._subjects.parts_bucket, max_age_s=PARTS_KEPT_S)
        return self._parts

    # -- accepting

    async def _accept(self, command: Accept) -> Error | None:
        route = command.route
        try:
            await self._check(route)
        except BadFile as error:
            return Error(code="forbidden" if error.forbidden else "bad_request", message=str(error))
        except (BadJobInput, OSError) as error:
            return Error(code="bad_request", message=named(error, "input"))
        try:
            self._revisions[route.job] = await self._records.create(route.job, encode(command.record))
        except WrongRevision:
            kept = await self._records.get(route.job)
            if decode(JobRecord, kept.value or b"") != command.record:
                return Error(code="bad_request", message="job: this id is in use already; give another one, or none")
            self._revisions[route.job] = kept.revision
        return None

    async def _check(self, route: JobRoute) -> None:
        """Whether the input can be read and the output be written. Raises BadFile, BadJobInput, OSError."""
        for place, field in ((route.source, "input"), (route.target, "output")):
            if place.scheme == "s3" and s3_missing():
                raise BadFile(f"{field}: {s3_missing()}")
        if route.source.scheme == "file":
            await asyncio.to_thread(self._files.check_source, route)
        elif not await self._exists(route.source):
            raise BadFile(f"input: there is no object {route.source.key} in the bucket {route.source.bucket}")
        if route.target.scheme == "file":
            await asyncio.to_thread(self._files.files.check_target, route.target.path)
        elif await self._exists(route.target):
            raise BadFile(
                f"output: the object {route.target.key} is in {route.target.bucket} already: choose another key"
            )

    async def _exists(self, place: ParsedUrl) -> bool:
        if place.scheme == "s3":
            return await asyncio.to_thread(s3_exists, place.bucket, place.key)
        try:
            return await (await self._bus.object_store(place.bucket, create=False)).exists(place.key)
        except NotFound:
            return False

    async def _fetch(self, route: JobRoute) -> None:
        """Copy a remote input to this machine, unless it is here already."""
        place, path = route.source, self._files.spooled(route, "in")
        if path.exists():
            return
        if place.scheme == "nats":
            await (await self._bus.object_store(place.bucket, create=False)).get_to(place.key, path)
        else:
            part = path.with_suffix(".fetching")
            await asyncio.to_thread(s3_transfer, "download_file", place.bucket, place.key, str(part))
            part.replace(path)

    async def _read(self, command: Read) -> WasRead | Broken:
        if command.route.source.scheme != "file":
            try:
                await self._fetch(command.route)
            except (NotFound, OSError) as error:
                return Broken(named(error, "input"))
        return await asyncio.to_thread(self._files.read, command.route)

    # -- chunks and parts

    async def _feed(self, command: Feed) -> list[ChunkRange] | Broken:
        store = await self._store()
        if command.route.source.scheme != "file":
            await self._fetch(command.route)
        found = await asyncio.to_thread(self._files.cut, command, self._chunk_bytes)
        if isinstance(found, Broken):
            return found
        job = command.route.job
        for chunk_range, inputs in found:
            if chunk_range.number in command.skip:
                continue
            body = encode({"inputs": msgspec.Raw(inputs)})
            if len(body) > min(INLINE, self._bus.max_payload // 2):
                key = f"{part_key(job, chunk_range.number)}.in"
                await store.put(key, inputs)
                body = encode({"inputs_ref": ObjectRef(self._subjects.parts_bucket, key)})
            chunk = Chunk(
                job, chunk_range.number, chunk_range.first, chunk_range.items, msgspec.Raw(body), command.generation
            )
            name = f"{job}.{chunk_range.number}.{command.generation}"
            await self._bus.publish_durable(self._subjects.job_chunks(job), encode(chunk), name)
        return [chunk_range for chunk_range, _ in found]

    async def _resume(self, command: Resume) -> Resumed:
        written = await asyncio.to_thread(self._files.written, command.route, command.checkpoint)
        return Resumed(written, await self._numbers(command.route.job))

    async def _numbers(self, job: str) -> frozenset[int]:
        start = f"{job}/"
        keys = [key.removeprefix(start) for key in await (await self._store()).keys() if key.startswith(start)]
        return frozenset(int(key) for key in keys if key.isdecimal())

    async def _assemble(self, command: Assemble) -> Assembled | Broken:
        store = await self._store()
        job = command.route.job

        async def get(chunk_range: ChunkRange) -> Part:
            return decode(Part, await store.get(part_key(job, chunk_range.number)))

        try:
            parts = await together(get, command.chunks, AT_ONCE)
        except NotFound as error:
            return Broken(f"output: a part of it is gone: {error}")
        return await asyncio.to_thread(
            self._files.append, command.route, command.total, command.checkpoint, command.chunks, parts
        )

    async def _drop(self, job: str, numbers: Iterable[int]) -> None:
        store = await self._store()

        async def drop(number: int) -> None:
            await store.delete(part_key(job, number))
            await store.delete(f"{part_key(job, number)}.in")

        await together(drop, list(numbers), AT_ONCE)

    # -- ends

    async def _conclude(self, command: Conclude) -> Broken | None:
        route, place = command.route, command.route.target
        path = self._files.spooled(route, "out")
        repeated = path.exists()  # an earlier attempt came so far, and may have stored the object
        try:
            await asyncio.to_thread(self._files.finish, route)
            if place.scheme != "file":
                if not repeated and await self._exists(place):
                    return Broken(f"output: the object {place.key} is in {place.bucket} meanwhile")
                if place.scheme == "nats":
                    create = place.bucket != self._subjects.uploads_bucket
                    await (await self._bus.object_store(place.bucket, create=create)).put(place.key, path)
                else:
                    await asyncio.to_thread(s3_transfer, "upload_file", str(path), place.bucket, place.key)
            await self._discard(route)
        except (BadFile, OSError) as error:
            return Broken(named(error, "output"))
        return None

    async def _abandon(self, command: Abandon) -> str:
        route = command.route
        kept = await asyncio.to_thread(self._files.set_aside, route, command.checkpoint) if command.keep else ""
        await self._discard(route)
        await self._drop(route.job, await self._numbers(route.job))
        return kept

    async def _discard(self, route: JobRoute) -> None:
        """Delete the job's copies, and its input if that was uploaded for it. Outputs in the bucket of uploads expire."""
        await asyncio.to_thread(self._files.discard, route)
        if route.source.bucket == self._subjects.uploads_bucket and route.source.scheme == "nats":
            with suppress(NotFound):
                await (await self._bus.object_store(route.source.bucket, create=False)).delete(route.source.key)

    # -- records

    async def _keep(self, command: Keep) -> bool:
        job = command.record.status.job
        try:
            revision = await self._records.update(job, encode(command.record), self._revisions.get(job, 0))
        except WrongRevision:
            entry = await self._entry(job)
            if entry is None or decode(JobRecord, entry.value or b"") != command.record:
                return False
            revision = entry.revision  # it was written, only the answer got lost
        self._revisions[job] = revision
        if command.drop:
            await self._drop(job, command.drop)
        return True

    async def _cancel(self, command: MarkJobCancelled) -> CancelResult:
        while True:
            entry = await self._entry(command.job)
            if entry is None:
                text = f"job: there is none with the id {command.job}"
                return CancelResult(error=Error(code="bad_request", message=text))
            record = decode(JobRecord, entry.value or b"")
            if record.status.state == "cancelled":
                return CancelResult(record)
            if record.status.state in OVER:
                text = f"job: {command.job} is {record.status.state} already"
                return CancelResult(error=Error(code="bad_request", message=text))
            status = msgspec.structs.replace(
                record.status, state="cancelled", step="", reason="cancelled", finished=command.now
            )
            record = msgspec.structs.replace(record, status=status)
            try:
                await self._records.update(command.job, encode(record), entry.revision)
            except WrongRevision:
                continue
            return CancelResult(record)

    async def _take_over(self, command: TakeOver) -> JobRecord | None:
        entry = await self._entry(command.work)
        if entry is None:
            return None
        record = decode(JobRecord, entry.value or b"")
        if record.owner != command.previous or record.status.state in OVER:
            return None
        record = msgspec.structs.replace(record, owner=command.owner)
        try:
            revision = await self._records.update(command.work, encode(record), entry.revision)
        except WrongRevision:
            return None
        self._revisions[command.work] = revision
        return record

    async def _forget(self, command: ForgetJob) -> None:
        await self._records.delete(command.job)
        self._revisions.pop(command.job, None)

    async def _entry(self, job: str) -> KeyValueEntry | None:
        try:
            return await self._records.get(job)
        except NotFound:
            return None


# -- s3://


def s3_missing() -> str:
    """Why s3:// cannot be used here; empty when it can."""
    return "" if find_spec("boto3") is not None else "s3:// needs the package boto3, which is not installed here"


def _s3_client() -> Any:
    return import_module("boto3").client("s3")


def s3_exists(bucket: str, key: str) -> bool:
    """Whether the object is there; raises OSError when that cannot be told."""
    errors = import_module("botocore.exceptions")
    try:
        _s3_client().head_object(Bucket=bucket, Key=key)
    except errors.ClientError as error:
        if error.response.get("Error", {}).get("Code") in ("404", "NoSuchKey", "NotFound"):
            return False
        raise OSError(f"S3 says: {error}") from error
    except errors.BotoCoreError as error:
        raise OSError(f"S3 cannot be reached: {error}") from error
    return True


def s3_transfer(what: str, *arguments: str) -> None:
    """boto3's `download_file` or `upload_file`, in pieces; raises OSError."""
    errors = import_module("botocore.exceptions")
    try:
        getattr(_s3_client(), what)(*arguments)
    except (errors.ClientError, errors.BotoCoreError) as error:
        raise OSError(f"S3 says: {error}") from error

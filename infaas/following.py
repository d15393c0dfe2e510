"""Work that goes on in the system, seen by its client: a registration or an offline job, asked for, followed to its end, cancelled."""

import asyncio
import hashlib
import secrets
import tempfile
from collections.abc import Awaitable, Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, Protocol, Self, TypeVar

from bus.codec import BadMessage, decode, encode
from bus.messages.jobs import OVER, JobAccepted, JobCancelled, JobStatus, SubmitJob, uploads_of
from bus.port import (
    Bus,
    BusError,
    Delivery,
    Forbidden,
    NoResponders,
    NotFound,
    ObjectStore,
    RequestTimeout,
    Subscription,
)
from bus.subjects import Subjects
from infaas.answers import refusal
from infaas.errors import BadInput, InfaasError, NotConnected, Refused, Timeout, denied
from infaas.inputs import as_arrays, read_input
from infaas.queries import encode_inputs

REPLY_S = 10.0  # for one reply
START_S = 10.0  # for a service that is still starting
GONE_S = 120.0  # without an answer; then the client gives up
PAUSE_S = 0.2  # between two tries


class Status(Protocol):
    """The status of some work."""

    @property
    def state(self) -> str: ...


T = TypeVar("T")
S = TypeVar("S", bound=Status)


async def started(bus: Bus, subject: str, body: bytes, who: str) -> Delivery:
    """The reply to a request, also of a service that is still starting. who: answers such requests. Raises NotConnected, Timeout, BusError."""
    loop = asyncio.get_running_loop()
    until = loop.time() + START_S
    while True:
        try:
            return await bus.request(subject, body, REPLY_S)
        except NoResponders:
            if loop.time() > until:
                raise nobody(who) from None
            await asyncio.sleep(PAUSE_S)
        except RequestTimeout:
            raise Timeout(f"no {who} answered within {REPLY_S:g} s") from None


def nobody(who: str) -> NotConnected:
    """That no such service answers."""
    return NotConnected(f"no {who} answers: is the system up? `infaas doctor` says more")


async def asked(bus: Bus, subject: str, message: type[T], who: str) -> T:
    """The reply to an empty request, as for a status or a cancellation. Raises Refused and NotConnected."""
    try:
        return read(message, await bus.request(subject, b"", REPLY_S))
    except (NoResponders, RequestTimeout):
        raise nobody(who) from None
    except Forbidden as error:
        raise denied(subject) from error
    except BusError as error:
        raise NotConnected(str(error)) from error


def read(message: type[T], reply: Delivery) -> T:
    """A reply that is such a message, or a refusal, which is raised."""
    refused = refusal(reply.data)
    if refused is not None:
        raise refused
    try:
        return decode(message, reply.data)
    except BadMessage as error:
        raise InfaasError(f"the reply cannot be understood: {error}") from error


@dataclass(eq=False, slots=True)
class Follower(Generic[S]):
    """Receives all statuses of some work, published on its subject. Requests the last one if none came for `quiet_s` seconds."""

    bus: Bus
    subject: str
    status: type[S]
    who: str
    on_progress: Callable[[S], None]
    quiet_s: float
    _statuses: asyncio.Queue[S] = field(default_factory=asyncio.Queue)
    _subscription: Subscription | None = None

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    async def open(self) -> None:
        self._subscription = await self.bus.subscribe(self.subject, self._received)
        await self.bus.flush()

    async def close(self) -> None:
        if self._subscription is not None:
            with suppress(BusError):
                await self._subscription.drain()

    def _received(self, delivery: Delivery) -> None:
        if not delivery.status and not delivery.reply:  # requests for the status arrive here too
            with suppress(BadMessage):
                self._statuses.put_nowait(decode(self.status, delivery.data))

    async def end(self, over: Collection[str], *, accepted: bool) -> S:
        """The last status, whose state is one of `over`. Raises NotConnected if nobody answers for GONE_S seconds.

        accepted: the work was accepted just now; a service that has taken over may not know it yet. Else the first status is requested at
        once, and Refused is raised if there is no such work.
        """
        loop = asyncio.get_running_loop()
        last_reply, quiet = loop.time(), self.quiet_s if accepted else 0.0
        while True:
            try:
                async with asyncio.timeout(quiet):
                    last = await self._statuses.get()
            except TimeoutError:
                try:
                    last = await asked(self.bus, self.subject, self.status, self.who)
                except (NotConnected, Refused) as error:
                    if loop.time() - last_reply > GONE_S or (isinstance(error, Refused) and not accepted):
                        raise
                    await asyncio.sleep(PAUSE_S)
                    continue
            quiet, last_reply = self.quiet_s, loop.time()
            self.on_progress(last)
            if last.state in over:
                return last


# -- offline jobs

QUIET_S = 2.0  # without a status; then the last one is requested
COORDINATOR = "coordinator of offline jobs"  # who answers

OnProgress = Callable[[JobStatus], None]


def url_of(location: str) -> str:
    """The URL itself, or the file:// URL of a path of this machine."""
    if "://" in location:
        return location
    return Path(location).absolute().as_uri()


def new_id() -> str:
    """An id for a job whose owner gives none."""
    return f"j-{secrets.token_hex(8)}"


async def submit(
    bus: Bus, subjects: Subjects, app: str, source: str, target: str, *, job: str | None = None, **wishes: Any
) -> str:
    """Submit a job. Returns its id when the system has stored it. The same job may be sent again under its id. wishes: further fields of `SubmitJob`.

    Raises Refused, NotConnected, Timeout.
    """
    job = job or new_id()
    request = SubmitJob(input=url_of(source), output=url_of(target), job=job, **wishes)
    try:
        return read(JobAccepted, await started(bus, subjects.job(app), encode(request), COORDINATOR)).job
    except BusError as error:
        raise NotConnected(str(error)) from error


ENDINGS = (".npy", ".jsonl", ".ndjson", ".msgpack", ".mpk")  # of what jobs read and write
OBJECT = 2**22  # bytes of the items in one object of a MessagePack stream
OBJECT_ITEMS = 1024


class Jobs:
    """Offline jobs of one client. Input and output as their owner has them become URLs for the system: those in `place` stay there, others go
    through its bucket.
    """

    def __init__(self, bus: Bus, subjects: Subjects, place: Path | None) -> None:
        self._bus = bus
        self._subjects = subjects
        self._bucket = subjects.uploads_bucket
        self._place = None if place is None else place.resolve()
        self._uploads = f"nats://{self._bucket}/"
        self._awaited: dict[str, Path] = {}  # by job: where its output goes once it is done

    async def submit(
        self, app: str, input: Any, output: Any, job: str | None, fitted: Callable[[Any], Awaitable[Any]], **wishes: Any
    ) -> str:
        """As the function `submit`, whose errors it raises, and BadInput. fitted: inputs as the app takes them."""
        job = job or new_id()
        target, source = self._target(app, job, output), ""
        try:
            source = await self._source(app, job, input, fitted)
            return await submit(self._bus, self._subjects, app, source, target, job=job, **wishes)
        except BaseException as error:
            self._awaited.pop(job, None)
            if isinstance(error, InfaasError) and source.startswith(self._uploads):  # an input that no job reads
                with suppress(BusError):
                    await (await self._store()).delete(source.removeprefix(self._uploads))
            raise

    async def status(self, job: str) -> JobStatus:
        """The job's last status. Raises Refused if no job has this id, and NotConnected."""
        return await asked(self._bus, self._subjects.job_status(job), JobStatus, COORDINATOR)

    async def cancel(self, job: str) -> None:
        """Stop the job. Raises Refused if it has ended or is unknown, and NotConnected."""
        await asked(self._bus, self._subjects.job_cancel(job), JobCancelled, COORDINATOR)
        self._awaited.pop(job, None)

    async def wait(self, job: str, on_progress: OnProgress | None = None, timeout: float | None = None) -> JobStatus:
        """Follow a job until it is done, failed or cancelled, and save an output that is awaited. Returns its last status, even if it failed.

        on_progress gets every status. timeout: seconds to wait; the job itself continues. Raises Refused if there is no such job, Timeout,
        NotConnected if no coordinator answers for GONE_S seconds, and BadInput.
        """
        subject = self._subjects.job_status(job)
        follower = Follower(self._bus, subject, JobStatus, COORDINATOR, on_progress or (lambda _status: None), QUIET_S)
        try:
            # an app's client may not subscribe, since the job may be another's; it requests the status
            with suppress(Forbidden):
                await follower.open()
            async with asyncio.timeout(timeout):
                status = await follower.end(OVER, accepted=False)
        except InfaasError:  # some of them are TimeoutErrors as well
            raise
        except TimeoutError:
            raise Timeout(f"job {job} has not ended after {timeout} s; it continues") from None
        except BusError as error:
            raise NotConnected(str(error)) from error
        finally:
            await follower.close()
        path = self._awaited.pop(job, None)
        if path is not None and status.state == "done":
            await self.save(status, path)
        return status

    def _stays(self, path: Path) -> bool:
        return self._place is not None and path.resolve().is_relative_to(self._place)

    def _target(self, app: str, job: str, given: Any) -> str:
        """Where the system writes the output. A file of one's own is awaited from now on. Raises BadInput."""
        if not isinstance(given, (str, Path)):
            raise BadInput(f"output: must be a path or a URL, not {given!r}")
        path = Path(given)
        if "://" in str(given) or self._stays(path):
            return url_of(str(given))
        if path.suffix.lower() not in ENDINGS:
            raise BadInput(f"output: {path} must end in one of {', '.join(ENDINGS)}: the ending says the format")
        _check_free(path)
        if rival := next((one for one, other in self._awaited.items() if other == path.resolve() and one != job), ""):
            raise BadInput(f"output: job {rival} writes to {path}: choose another name, or wait for that job")
        self._awaited[job] = path.resolve()
        return f"{self._uploads}{uploads_of(app)}{job}{path.suffix.lower()}"

    async def _source(self, app: str, job: str, given: Any, fitted: Callable[[Any], Awaitable[Any]]) -> str:
        """Where the system reads the input, which is uploaded if need be. fitted: inputs as the app takes them. Raises BadInput, Refused."""
        path = Path(given) if isinstance(given, (str, Path)) else None
        if path is not None and ("://" in str(given) or (self._stays(path) and path.suffix.lower() in ENDINGS)):
            return url_of(str(given))
        with tempfile.TemporaryDirectory() as directory:
            if path is None or path.suffix.lower() not in ENDINGS:
                inputs = await fitted(given if path is None else read_input(path))
                path = Path(directory) / "items.msgpack"
                await asyncio.to_thread(write_items, inputs, path)
            try:
                with path.open("rb") as file:
                    digest = await asyncio.to_thread(hashlib.file_digest, file, "sha256")
                key = f"{uploads_of(app)}{job}-{digest.hexdigest()[:16]}{path.suffix.lower()}"
                await (await self._store()).put(key, path)
            except OSError as error:
                raise BadInput(f"input: cannot read {path}: {error.strerror or error}") from error
        return self._uploads + key

    async def save(self, status: JobStatus, path: Path) -> None:
        """Write the output of a job that is done to a file. Raises BadInput."""
        if status.state != "done":
            raise BadInput(
                f"job {status.job} is {status.state}: it has no output yet"
                if status.state not in OVER
                else f"job {status.job} {status.state}: it has no output"
            )
        scheme, _, place = status.output.partition("://")
        bucket, _, key = place.partition("/")
        if scheme != "nats":
            raise BadInput(f"the output of job {status.job} is in {status.output}, not in a bucket of the system")
        _check_free(path)
        try:
            await (await self._store(bucket)).get_to(key, path)
            self._awaited.pop(status.job, None)
        except NotFound:
            raise BadInput(
                f"the output of job {status.job} is gone: the system keeps one for a day; submit the job again"
            ) from None
        except OSError as error:
            raise BadInput(f"output: cannot write {path}: {error.strerror or error}") from error

    async def _store(self, bucket: str = "") -> ObjectStore:
        try:
            return await self._bus.object_store(bucket or self._bucket, create=False)
        except Forbidden as error:
            raise Refused(
                "forbidden", "the credentials allow no files of one's own: use nats://bucket/key in a bucket of yours"
            ) from error
        except BusError as error:
            raise NotConnected(f"the bucket for the job's files cannot be opened: {error}") from error


def _check_free(path: Path) -> None:
    if path.exists():
        raise BadInput(f"output: {path} exists already: remove it, or choose another name")
    if not path.absolute().parent.is_dir():
        raise BadInput(f"output: there is no directory {path.absolute().parent}: make it first")


def write_items(inputs: Any, path: Path) -> None:
    """Inputs as a query takes them, as the stream of MessagePack objects that a job reads. Raises BadInput."""
    arrays = as_arrays(inputs)
    columns = arrays if isinstance(arrays, Mapping) else {"": arrays}
    lengths = {len(array) if array.ndim else 0 for array in columns.values()}
    if len(lengths) != 1 or 0 in lengths:
        raise BadInput("input: all inputs need the same number of items, at least one")
    (items,) = lengths
    size = sum(array.nbytes for array in columns.values())
    step = max(1, min(OBJECT_ITEMS, OBJECT * items // max(1, size)))
    with path.open("wb") as file:
        for at in range(0, items, step):
            part = {name: array[at : at + step] for name, array in columns.items()}
            file.write(encode_inputs(part if isinstance(arrays, Mapping) else part[""]))

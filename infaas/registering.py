"""The client's side of a registration: upload model and validation set, request the registration, follow it to its end."""

import asyncio
import hashlib
import secrets
import tempfile
import zipfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from bus.codec import BadMessage, decode, encode
from bus.messages.public import Refusal, Register, RegistrationAccepted, RegistrationStatus
from bus.port import Bus, BusError, Delivery, Forbidden, NoResponders, ObjectStore, RequestTimeout
from bus.subjects import Subjects
from infaas.errors import BadInput, InfaasError, NotConnected, Refused, Timeout, denied

if TYPE_CHECKING:
    from numpy import ndarray

    Arrays = tuple[ndarray[Any, Any], ndarray[Any, Any]]

FORMATS = {".onnx": "onnx", ".pt2": "pt2", ".pt": "torchscript", ".torchscript": "torchscript"}
REPLY_S = 10.0  # for one reply
START_S = 10.0  # for a registrar that is still starting
QUIET_S = 5.0  # without a status; then the last one is requested
GONE_S = 120.0  # without a registrar; then the client gives up
OVER = ("done", "failed")
REMOTE = "remote"  # format of a file that names a model on a remote engine

OnProgress = Callable[[RegistrationStatus], None]


async def register(
    bus: Bus,
    subjects: Subjects,
    model_file: str | Path,
    *,
    app: str,
    model: str,
    validation: "str | Path | Arrays",
    on_progress: OnProgress | None = None,
    format: str | None = None,
    version: str | None = None,
    task: str | None = None,
    metric: str = "top1",
    latency_ms: float | None = None,
    slo_target: float | None = None,
    default_output: Any = None,
    inputs_key: str = "x",
    labels_key: str = "y",
    labels: Sequence[str] = (),
    dry_run: bool = False,
    contended: bool = False,
    timeout: float | None = None,
) -> RegistrationStatus:
    """Register a trained model and wait until its variants are built and measured, or the registration fails.

    model_file: .onnx, .pt2 or TorchScript, or the URL of a model on a remote engine (docs/remote.md). format: needed only if the file's name does not tell it. validation: an .npz with inputs
    (first axis: items) under inputs_key and labels under labels_key, or the two arrays. version: default: the next number. metric:
    top1, top5, mae or rmse. labels: names of the classes, in the order of the scores. latency_ms: the app's default latency objective.
    slo_target: the share of the app's queries to be answered in time, above 0 and below 1; None: the app keeps what it has. dry_run: inspect the model and keep
    nothing; the status then says what would be registered. contended: measure latencies beside further instances of the variant that compute all the time. timeout: seconds for the whole
    registration. on_progress gets every status. Returns the last status. Its `state` is "done" (with
    `variants`, and `failures` of those that could not be built) or "failed" (with a `reason`). Raises BadInput, Refused, NotConnected,
    Timeout.
    """
    url = str(model_file) if str(model_file).startswith(("http://", "https://")) else None
    path = Path(model_file)
    request = Register(
        app=app,
        model=model,
        format=REMOTE if url is not None else format or _format(path),
        object="",
        validation="",
        version=version,
        task=task,
        metric=metric,
        default_output=default_output,
        latency_ms=latency_ms,
        slo_target=slo_target,
        inputs_key=inputs_key,
        labels_key=labels_key,
        labels=list(labels),
        dry_run=dry_run,
        contended=contended,
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
                if isinstance(validation, tuple):
                    saved = Path(directory) / "validation.npz"
                    await asyncio.to_thread(_save, saved, validation, request)
                else:
                    saved = Path(validation)
                return await _run(bus, subjects, path, saved, request, on_progress)
    except InfaasError:  # some of them are TimeoutErrors as well
        raise
    except TimeoutError:
        raise Timeout(f"registration {request.registration} has not ended after {timeout} s; it continues") from None
    except Forbidden as error:
        raise denied(subjects.register()) from error
    except BusError as error:
        raise NotConnected(str(error)) from error


async def _run(
    bus: Bus, subjects: Subjects, model: Path, validation: Path, request: Register, on_progress: OnProgress | None
) -> RegistrationStatus:
    _check_validation(validation, request)
    registration = request.registration or ""
    progress = on_progress or (lambda _status: None)
    uploads = await bus.object_store(subjects.uploads_bucket)
    keys = {f"{registration}.model": model, f"{registration}.validation": validation}
    request = msgspec.structs.replace(request, object=f"{registration}.model", validation=f"{registration}.validation")
    started = RegistrationStatus(registration=registration, state="accepted", app=request.app, model=request.model)
    try:
        for key, path in keys.items():
            size = path.stat().st_size / 1e6
            progress(msgspec.structs.replace(started, step=f"uploading {path.name} ({size:.1f} MB)"))
            await uploads.put(key, path)
        follower = await _begun(bus, subjects, request, progress)
    except BaseException:
        await _remove(uploads, list(keys))
        raise
    try:
        return await follower.end()
    finally:
        await follower.close()


async def _begun(bus: Bus, subjects: Subjects, request: Register, progress: OnProgress) -> "Follower":
    """Request the registration; returns what follows it."""
    follower = Follower(bus, subjects.registration(request.registration or ""), progress)
    await follower.open()
    try:
        await _request(bus, subjects, request)
    except BaseException:
        await follower.close()
        raise
    return follower


async def register_container(
    bus: Bus, subjects: Subjects, request: Register, reference: bytes, on_progress: OnProgress
) -> RegistrationStatus:
    """Register a user's own process, which has measured itself. reference: what further processes of this version must agree with.

    Raises Refused, NotConnected, Timeout, BusError.
    """
    digest = hashlib.sha256(reference).hexdigest()
    artifacts = await bus.object_store(subjects.artifacts_bucket, create=False)
    if not await artifacts.exists(digest):
        await artifacts.put(digest, reference)
    request = msgspec.structs.replace(request, object=digest, registration=f"r-{secrets.token_hex(8)}")
    follower = await _begun(bus, subjects, request, on_progress)
    try:
        return await follower.end()
    finally:
        await follower.close()


async def _request(bus: Bus, subjects: Subjects, request: Register) -> None:
    """Request the registration. Returns when the registrar has accepted it."""
    body = encode(request)
    loop = asyncio.get_running_loop()
    until = loop.time() + START_S
    while True:
        try:
            reply = await bus.request(subjects.register(), body, REPLY_S)
            break
        except NoResponders:
            if loop.time() > until:
                raise NotConnected("no registrar answers: is the system up? `infaas doctor` says more") from None
            await asyncio.sleep(0.2)
        except RequestTimeout:
            if await last_status(bus, subjects, request.registration or "") is not None:
                return  # it was accepted, but the reply was lost
            raise Timeout(f"no registrar answered within {REPLY_S:g} s") from None
    _accepted(reply)


def _accepted(reply: Delivery) -> None:
    with suppress(BadMessage):
        decode(RegistrationAccepted, reply.data)
        return
    raise _refused(reply)


def _refused(reply: Delivery) -> InfaasError:
    try:
        error = decode(Refusal, reply.data).error
    except BadMessage as bad:
        return InfaasError(f"the registrar's reply cannot be understood: {bad}")
    return Refused(error.code, error.message, retry_after_ms=error.retry_after_ms or None)


async def last_status(bus: Bus, subjects: Subjects, registration: str) -> RegistrationStatus | None:
    """The last status of a registration; None if no registration has this id. Raises NotConnected."""
    try:
        reply = await bus.request(subjects.registration(registration), b"", REPLY_S)
    except (NoResponders, RequestTimeout):
        raise NotConnected("no registrar answers: is the system up? `infaas doctor` says more") from None
    try:
        return decode(RegistrationStatus, reply.data)
    except BadMessage:
        return None


class Follower:
    """Receives all statuses of one registration. Requests the last one if none came for some time."""

    def __init__(self, bus: Bus, subject: str, on_progress: OnProgress, quiet_s: float = QUIET_S) -> None:
        self._bus = bus
        self._quiet = quiet_s
        self._subject = subject
        self._on_progress = on_progress
        self._statuses: asyncio.Queue[RegistrationStatus] = asyncio.Queue()

    async def open(self) -> None:
        self._subscription = await self._bus.subscribe(self._subject, self._received)
        await self._bus.flush()

    async def close(self) -> None:
        with suppress(BusError):
            await self._subscription.drain()

    def _received(self, delivery: Delivery) -> None:
        if not delivery.status and not delivery.reply:  # requests for the status arrive here too
            with suppress(BadMessage):
                self._statuses.put_nowait(decode(RegistrationStatus, delivery.data))

    async def end(self) -> RegistrationStatus:
        """The last status. Raises NotConnected if no registrar answers for GONE_S seconds."""
        loop = asyncio.get_running_loop()
        last_reply = loop.time()
        while True:
            try:
                async with asyncio.timeout(self._quiet):
                    status = await self._statuses.get()
            except TimeoutError:
                requested = await self._request()
                if requested is None:
                    if loop.time() - last_reply > GONE_S:
                        raise NotConnected(f"no registrar has answered for {GONE_S:g} s") from None
                    continue
                status = requested
            last_reply = loop.time()
            self._on_progress(status)
            if status.state in OVER:
                return status

    async def _request(self) -> RegistrationStatus | None:
        with suppress(BusError, BadMessage):
            return decode(RegistrationStatus, (await self._bus.request(self._subject, b"", REPLY_S)).data)
        return None


async def _remove(uploads: ObjectStore, keys: list[str]) -> None:
    for key in keys:
        with suppress(BusError):
            await uploads.delete(key)


def _format(path: Path) -> str:
    try:
        return FORMATS[path.suffix.lower()]
    except KeyError:
        known = ", ".join(FORMATS)
        raise BadInput(f"format: the name {path.name} does not end in {known}; give the format") from None


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
        raise BadInput(f"the validation set {path} is no .npz file ({error}); make one with numpy.savez") from error
    for field in ("inputs_key", "labels_key"):
        if getattr(request, field) not in found:
            raise BadInput(f"{field}: {path.name} holds no {getattr(request, field)!r}, only {', '.join(found)}")


def _save(path: Path, arrays: "Arrays", request: Register) -> None:
    import numpy as np  # noqa: PLC0415  (a validation file needs no numpy)

    try:
        inputs, labels = (np.asarray(array) for array in arrays)
    except (TypeError, ValueError) as error:
        raise BadInput(f"validation: must be two arrays, inputs and labels ({error})") from error
    if inputs.dtype.hasobject or labels.dtype.hasobject:
        raise BadInput("validation: arrays of Python objects cannot be sent; make them numbers")
    np.savez(path, allow_pickle=False, **{request.inputs_key: inputs, request.labels_key: labels})

"""The client's side of offline jobs: submit one, follow it to its end, cancel it."""

import asyncio
import secrets
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from bus.codec import BadMessage, decode, encode
from bus.messages.jobs import OVER, JobAccepted, JobCancelled, JobStatus, SubmitJob
from bus.port import Bus, BusError, Delivery, Forbidden, NoResponders, RequestTimeout
from bus.subjects import Subjects
from infaas.answers import refusal
from infaas.errors import InfaasError, NotConnected, Timeout

REPLY_S = 10.0  # for one reply
START_S = 10.0  # for a coordinator that is still starting
QUIET_S = 2.0  # without a status; then the last one is requested
GONE_S = 120.0  # without a coordinator; then the client gives up

T = TypeVar("T")
OnProgress = Callable[[JobStatus], None]
NOT_RUNNING = "no coordinator of offline jobs answers: is the system up? `infaas doctor` says more"


def url_of(location: str) -> str:
    """The URL itself, or the file:// URL of a path of this machine."""
    if "://" in location:
        return location
    return Path(location).absolute().as_uri()


async def submit(
    bus: Bus,
    subjects: Subjects,
    app: str,
    source: str,
    target: str,
    *,
    accuracy: float | None = None,
    model: str | None = None,
    variant: str | None = None,
    job: str | None = None,
) -> str:
    """Submit a job. Returns its id when the system has stored it. The same job may be sent again under its id.

    Raises Refused, NotConnected, Timeout.
    """
    request = SubmitJob(
        input=url_of(source),
        output=url_of(target),
        accuracy=accuracy,
        model=model,
        variant=variant,
        job=job or f"j-{secrets.token_hex(8)}",
    )
    loop = asyncio.get_running_loop()
    until = loop.time() + START_S
    while True:
        try:
            reply = await bus.request(subjects.job(app), encode(request), REPLY_S)
            return _read(JobAccepted, reply).job
        except NoResponders:
            if loop.time() > until:
                raise NotConnected(NOT_RUNNING) from None
        except RequestTimeout:
            if loop.time() > until:
                raise Timeout(f"no reply to the job within {START_S:g} s") from None
        except BusError as error:
            raise NotConnected(str(error)) from error
        await asyncio.sleep(0.2)


async def status(bus: Bus, subjects: Subjects, job: str) -> JobStatus:
    """The job's last status. Raises Refused if no job has this id, and NotConnected."""
    return _read(JobStatus, await _request(bus, subjects.job_status(job)))


async def cancel(bus: Bus, subjects: Subjects, job: str) -> None:
    """Stop the job. Raises Refused if it has ended or is unknown, and NotConnected."""
    _read(JobCancelled, await _request(bus, subjects.job_cancel(job)))


async def wait(
    bus: Bus, subjects: Subjects, job: str, on_progress: OnProgress | None = None, timeout: float | None = None
) -> JobStatus:
    """Follow a job until it is done, failed or cancelled. Returns its last status, even if it failed.

    on_progress gets every status. timeout: seconds to wait; the job itself continues. Raises Refused if there is no such job, Timeout,
    and NotConnected if no coordinator answers for GONE_S seconds.
    """
    statuses: asyncio.Queue[JobStatus] = asyncio.Queue()

    def received(delivery: Delivery) -> None:
        if not delivery.status and not delivery.reply:  # requests for the status arrive here too
            with suppress(BadMessage):
                statuses.put_nowait(decode(JobStatus, delivery.data))

    subscription = None
    try:
        with suppress(
            Forbidden
        ):  # the client of an app may not subscribe, since the job may be another app's; it requests the status
            subscription = await bus.subscribe(subjects.job_status(job), received)
        await bus.flush()
        async with asyncio.timeout(timeout):
            return await _end(bus, subjects, job, statuses, on_progress or (lambda _status: None))
    except InfaasError:  # some of them are TimeoutErrors as well
        raise
    except TimeoutError:
        raise Timeout(f"job {job} has not ended after {timeout} s; it continues") from None
    except BusError as error:
        raise NotConnected(str(error)) from error
    finally:
        with suppress(BusError):
            if subscription is not None:
                await subscription.drain()


async def _end(
    bus: Bus, subjects: Subjects, job: str, statuses: asyncio.Queue[JobStatus], on_progress: OnProgress
) -> JobStatus:
    loop = asyncio.get_running_loop()
    last_reply = loop.time()
    quiet = 0.0  # the first status is requested at once
    while True:
        try:
            async with asyncio.timeout(quiet):
                last = await statuses.get()
        except TimeoutError:
            try:
                last = await status(bus, subjects, job)
            except NotConnected:
                if loop.time() - last_reply > GONE_S:
                    raise
                await asyncio.sleep(0.2)
                continue
        quiet, last_reply = QUIET_S, loop.time()
        on_progress(last)
        if last.state in OVER:
            return last


async def _request(bus: Bus, subject: str) -> Delivery:
    try:
        return await bus.request(subject, b"", REPLY_S)
    except (NoResponders, RequestTimeout):
        raise NotConnected(NOT_RUNNING) from None
    except BusError as error:
        raise NotConnected(str(error)) from error


def _read(message: type[T], reply: Delivery) -> T:
    refused = refusal(reply.data)
    if refused is not None:
        raise refused
    try:
        return decode(message, reply.data)
    except BadMessage as error:
        raise InfaasError(f"the reply cannot be understood: {error}") from error

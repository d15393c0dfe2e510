"""The client's side of offline jobs: hand one in, follow it to its end, look, cancel."""

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

ASK_S = 10.0  # for one reply
START_S = 10.0  # for a coordinator that is only just starting
QUIET_S = 2.0  # without news, after which the last status is asked for
GONE_S = 120.0  # without a coordinator, after which nobody is waited for any longer

T = TypeVar("T")
OnProgress = Callable[[JobStatus], None]
NOBODY = "nobody answers for offline jobs: is the system up? `infaas doctor` says more"


def url_of(place: str) -> str:
    """A URL as it is; a path of this machine as a file:// URL."""
    if "://" in place:
        return place
    return Path(place).absolute().as_uri()


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
    """Hand in a job; returns its id once it is kept. Sending the same job again under its id is harmless.

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
            reply = await bus.request(subjects.job(app), encode(request), ASK_S)
            return _read(JobAccepted, reply).job
        except NoResponders:
            if loop.time() > until:
                raise NotConnected(NOBODY) from None
        except RequestTimeout:
            if loop.time() > until:
                raise Timeout(f"no reply to the job within {START_S:g} s") from None
        except BusError as error:
            raise NotConnected(str(error)) from error
        await asyncio.sleep(0.2)


async def status(bus: Bus, subjects: Subjects, job: str) -> JobStatus:
    """The job's last status. Raises Refused when there is none with this id, NotConnected."""
    return _read(JobStatus, await _ask(bus, subjects.job_status(job)))


async def cancel(bus: Bus, subjects: Subjects, job: str) -> None:
    """Nothing more of the job is computed. Raises Refused when it has ended or is not known, NotConnected."""
    _read(JobCancelled, await _ask(bus, subjects.job_cancel(job)))


async def wait(
    bus: Bus, subjects: Subjects, job: str, on_progress: OnProgress | None = None, timeout: float | None = None
) -> JobStatus:
    """Follow a job until it is done, failed or cancelled; returns its last status, also where it failed.

    on_progress gets every status on the way. timeout: seconds to wait here; the job goes on. Raises Refused when there is no
    such job, Timeout, NotConnected when nobody has answered for a long time.
    """
    news: asyncio.Queue[JobStatus] = asyncio.Queue()

    def heard(delivery: Delivery) -> None:
        if not delivery.status and not delivery.reply:  # requests for the status come by here as well
            with suppress(BadMessage):
                news.put_nowait(decode(JobStatus, delivery.data))

    subscription = None
    try:
        with suppress(Forbidden):  # an app's client hears no job's news, since they might be another's: it asks
            subscription = await bus.subscribe(subjects.job_status(job), heard)
        await bus.flush()
        async with asyncio.timeout(timeout):
            return await _end(bus, subjects, job, news, on_progress or (lambda _status: None))
    except InfaasError:  # some of them are TimeoutErrors, too
        raise
    except TimeoutError:
        raise Timeout(f"job {job} has not ended after {timeout} s; it goes on") from None
    except BusError as error:
        raise NotConnected(str(error)) from error
    finally:
        with suppress(BusError):
            if subscription is not None:
                await subscription.drain()


async def _end(bus: Bus, subjects: Subjects, job: str, news: asyncio.Queue[JobStatus], tell: OnProgress) -> JobStatus:
    loop = asyncio.get_running_loop()
    heard = loop.time()
    quiet = 0.0  # the first status is asked for
    while True:
        try:
            async with asyncio.timeout(quiet):
                last = await news.get()
        except TimeoutError:
            try:
                last = await status(bus, subjects, job)
            except NotConnected:
                if loop.time() - heard > GONE_S:
                    raise
                await asyncio.sleep(0.2)
                continue
        quiet, heard = QUIET_S, loop.time()
        tell(last)
        if last.state in OVER:
            return last


async def _ask(bus: Bus, subject: str) -> Delivery:
    try:
        return await bus.request(subject, b"", ASK_S)
    except (NoResponders, RequestTimeout):
        raise NotConnected(NOBODY) from None
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

"""The client's side of offline jobs: submit one, follow it to its end, cancel it."""

import asyncio
import secrets
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from bus.codec import encode
from bus.messages.jobs import OVER, JobAccepted, JobCancelled, JobStatus, SubmitJob
from bus.port import Bus, BusError, Forbidden
from bus.subjects import Subjects
from infaas.errors import InfaasError, NotConnected, Timeout
from infaas.following import Follower, asked, read, started

QUIET_S = 2.0  # without a status; then the last one is requested
COORDINATOR = "coordinator of offline jobs"  # who answers

OnProgress = Callable[[JobStatus], None]


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
    try:
        return read(JobAccepted, await started(bus, subjects.job(app), encode(request), COORDINATOR)).job
    except BusError as error:
        raise NotConnected(str(error)) from error


async def status(bus: Bus, subjects: Subjects, job: str) -> JobStatus:
    """The job's last status. Raises Refused if no job has this id, and NotConnected."""
    return await asked(bus, subjects.job_status(job), JobStatus, COORDINATOR)


async def cancel(bus: Bus, subjects: Subjects, job: str) -> None:
    """Stop the job. Raises Refused if it has ended or is unknown, and NotConnected."""
    await asked(bus, subjects.job_cancel(job), JobCancelled, COORDINATOR)


async def wait(
    bus: Bus, subjects: Subjects, job: str, on_progress: OnProgress | None = None, timeout: float | None = None
) -> JobStatus:
    """Follow a job until it is done, failed or cancelled. Returns its last status, even if it failed.

    on_progress gets every status. timeout: seconds to wait; the job itself continues. Raises Refused if there is no such job, Timeout,
    and NotConnected if no coordinator answers for GONE_S seconds.
    """
    follower = Follower(
        bus, subjects.job_status(job), JobStatus, COORDINATOR, on_progress or (lambda _status: None), QUIET_S
    )
    try:
        with suppress(
            Forbidden
        ):  # an app's client may not subscribe, since the job may be another's; it requests the status
            await follower.open()
        async with asyncio.timeout(timeout):
            return await follower.end(OVER, accepted=False)
    except InfaasError:  # some of them are TimeoutErrors as well
        raise
    except TimeoutError:
        raise Timeout(f"job {job} has not ended after {timeout} s; it continues") from None
    except BusError as error:
        raise NotConnected(str(error)) from error
    finally:
        await follower.close()

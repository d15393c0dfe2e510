"""The untrusted child: one job from standard input, frames to standard output, nothing else. Started by `cage.py`."""

import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from bus.codec import decode, encode
from services.executor.backends.base import plain
from services.executor.workshop.jobs import (
    Build,
    Frame,
    Inspect,
    Job,
    Measure,
    Order,
    Refusal,
    Refused,
    Step,
    Survey,
    Surveyed,
)
from services.executor.workshop.lockdown import lock_down


def main() -> int:
    """Do the job; the exit code is 0 once the last frame is written, also when it says why not."""
    order = decode(Order, sys.stdin.buffer.read())
    channel = _take_stdout()
    scratch = Path(order.job.scratch)
    os.chdir(scratch)
    tempfile.tempdir = str(scratch)
    job = order.job
    missing = lock_down(order.limits, scratch, _uploads(job))
    if missing:
        print(f"sandbox without {', '.join(missing)}", file=sys.stderr)
    tell = _teller(channel)
    try:
        _work(order, tell)
    except Refusal as refusal:
        tell(Refused(reason=str(refusal)))
    except MemoryError:
        tell(Refused(reason=f"the model needs more than the {order.limits.memory_bytes >> 20} MB of memory allowed"))
    except Exception as error:
        tell(Refused(reason=f"the model could not be processed: {plain(error)}"))
    return 0


def _work(order: Order, tell: Callable[[Frame], None]) -> None:
    job = order.job
    # Each job imports only what it needs: a profile must not carry the quantiser's memory.
    if isinstance(job, Inspect):
        from services.executor.workshop.inspection import inspect  # noqa: PLC0415

        tell(inspect(job, tell))
    elif isinstance(job, Build):
        from services.executor.workshop.building import build  # noqa: PLC0415

        build(job, tell)
    elif isinstance(job, Measure):
        from services.executor.workshop.profiling import profile  # noqa: PLC0415

        tell(profile(job, tell))
    elif isinstance(job, Survey):
        from services.executor.backends import names_for, survey  # noqa: PLC0415

        tell(Step(step=f"looking at {job.device}"))
        tell(Surveyed(frameworks=survey(job.device, names_for(job.hardware))))


def _uploads(job: Job) -> tuple[str, ...]:
    """The files of this job that somebody else made."""
    if isinstance(job, Survey):
        return ()
    return (job.data.path,) if isinstance(job, Measure) else (job.data.path, job.model)


def _take_stdout() -> BinaryIO:
    """Keep the real standard output for frames; whatever libraries print goes to standard error."""
    channel = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    return channel


def _teller(channel: BinaryIO) -> Callable[[Frame], None]:
    def tell(frame: Frame) -> None:
        body = encode(frame)
        channel.write(len(body).to_bytes(4, "big") + body)

    return tell


if __name__ == "__main__":
    sys.exit(main())

"""`infaas submit`, `jobs` and `cancel`: offline jobs, which read a file, compute on spare capacity and write a file."""

import asyncio
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from cyclopts import Parameter

from bus.messages.jobs import OVER
from infaas.cli.options import DataDir, Json, Wide
from infaas.cli.output import Column, fail, number, print_json, print_table, progress_bars, show, usage, when
from infaas.connecting import with_client
from infaas.inputs import STDIN, read_input
from infaas.queries import check_name

if TYPE_CHECKING:
    from bus.messages.jobs import JobStatus
    from infaas.client import Client
    from infaas.following import OnProgress

Seconds = Annotated[float | None, Parameter(help="Longest wait in seconds. The job itself continues.")]


def submit(
    app: str,
    *,
    input: str,
    output: str,
    accuracy: float | None = None,
    metric: str | None = None,
    model: str | None = None,
    variant: str | None = None,
    id: str | None = None,
    wait: bool = False,
    timeout: Seconds = None,
    data_dir: DataDir = None,
    json: Json = False,
) -> int:
    """Submit an offline job: every item of the input is computed, and the outputs are written in the same order.

    Prints the job's id at once. Offline jobs run when online queries leave capacity. Without `--wait`, the output of a file that was uploaded
    stays with the system for a day: `infaas jobs ID --output FILE` fetches it.

    Example: `infaas submit digits --input pictures.npy --output scores.npy --wait`

    Parameters
    ----------
    app
        The app whose models compute the job.
    input
        A .npy, .jsonl or .msgpack file of this machine, which is uploaded, or what `infaas query --input` takes; or a URL nats://bucket/key,
        s3://bucket/key or file:///path, of the system's machine and below a directory that the setting jobs.roots allows.
    output
        The file for the outputs, .npy, .jsonl or .msgpack, or such a URL. It must not exist yet.
    accuracy
        Least accuracy, 0 to 1. The cheapest variant that reaches it computes the job.
    metric
        Metric that the accuracy is stated in, where models are measured by another one than top1, top5 or agreement.
    model
        Use only this model.
    variant
        Use only this variant.
    id
        Your own id for the job.
    wait
        Wait until the job ends, and show its progress.

    """
    _check_timeout(wait, timeout)
    source = read_input(STDIN) if input == STDIN else input

    async def run(client: "Client") -> "str | JobStatus":
        stated = {"metric": metric}
        job = await client.submit(
            app, source, output, accuracy=accuracy, model=model, variant=variant, job=id, measure=stated
        )
        if not wait:
            return job
        with _progress() as on_progress:
            return await client.wait_job(job, on_progress=on_progress, timeout=timeout)

    result = with_client(data_dir, run)
    if isinstance(result, str):
        show({"job": result}, json, lambda document: print(document["job"]))
        return 0
    return _end(result, json)


def _check_timeout(wait: bool, timeout: float | None) -> None:
    if timeout is not None and not wait:
        usage("--timeout: nothing is waited for: add --wait, or leave it out")


def jobs(
    id: str | None = None,
    /,
    *,
    wait: bool = False,
    timeout: Seconds = None,
    app: str | None = None,
    output: Path | None = None,
    data_dir: DataDir = None,
    wide: Wide = False,
    json: Json = False,
) -> int:
    """List the offline jobs, or show one. With `--wait`, follow them to their end.

    Exits 1 if a job that was waited for failed or was cancelled.

    Example: `infaas jobs --wait`

    Parameters
    ----------
    id
        Show only this job.
    wait
        Wait until the job, or every unfinished job, is done, failed or cancelled.
    app
        Show only the jobs of this app.
    output
        Write the output of this job, which stayed with the system, to this file.

    """
    _check_timeout(wait, timeout)
    if output is not None and id is None:
        usage("--output: name the job whose output it is: infaas jobs ID --output FILE")
    if id is not None and app is not None:
        usage("--app: a job has one app: leave the option out, or the id")

    async def run(client: "Client") -> "list[dict[str, Any]] | JobStatus":
        if id is None:
            items = await client.jobs(app=app)
            if not wait:
                return items
            names = [item["job"] for item in items if item["state"] not in OVER]
            with _progress() as on_progress:
                waits = [client.wait_job(name, on_progress=on_progress, timeout=timeout) for name in names]
                return [_document(status) for status in await asyncio.gather(*waits)]
        if wait:
            with _progress() as on_progress:
                status = await client.wait_job(id, on_progress=on_progress, timeout=timeout)
        else:
            status = await client.job(id)
        if output is not None and (status.state == "done" or not wait):
            await client.save_output(id, output)
        return status

    result = with_client(data_dir, run)
    if isinstance(result, list):
        empty = "no unfinished jobs" if wait else "no jobs: `infaas submit` makes one"
        show({"items": result}, json, lambda document: _table(document["items"], empty, wide))
        unsuccessful = [item["job"] for item in result if wait and item["state"] != "done"]
        if unsuccessful:
            fail(f"not done: {', '.join(unsuccessful)}")
        return 0
    if wait:
        return _end(result, json)
    show(_document(result), json, _render)
    return 0


def cancel(id: str, /, *, data_dir: DataDir = None, json: Json = False) -> int:
    """Cancel an offline job or a registration: its work stops, and what it has made so far is deleted. A failed registration leaves the lists.

    Parameters
    ----------
    id
        Id of the job or registration; `infaas jobs` and `infaas registrations --wide` list them.

    """

    async def run(client: "Client") -> str:
        from infaas.registering import last_status  # noqa: PLC0415  (the lists need none of it)

        check_name(id, "id")
        if (last := await last_status(client.bus, client.subjects, id)) is not None:
            await client.cancel_registration(id)
            return "failed registration" if last.state == "failed" else "registration"
        if id not in {item["job"] for item in await client.jobs()}:
            fail(f"there is no job and no registration {id}: `infaas jobs` and `infaas registrations` list them")
        await client.cancel_job(id)
        return "job"

    kind = with_client(data_dir, run)
    failed = kind.startswith("failed")
    told = f"{'dismissed' if failed else 'cancelled'} {kind} {id}"
    show({kind.removeprefix("failed "): id, "cancelled": not failed}, json, lambda _: print(told))
    return 0


def _end(status: "JobStatus", as_json: bool) -> int:
    """Print a job that has ended."""
    if as_json:
        print_json(_document(status))
    if status.state != "done":
        fail(f"job {status.job} {status.state}: {status.reason or 'no reason was given'}")
    if not as_json:
        _render(_document(status))
    return 0


def _document(status: "JobStatus") -> dict[str, Any]:
    return msgspec.structs.asdict(status)


def _table(items: list[dict[str, Any]], empty: str, wide: bool) -> None:
    columns = (
        Column("job", "job"),
        Column("app", "app"),
        Column("state", "state"),
        Column("done", "done"),
        Column("of", "total"),
        Column("failed", "failed", rank=1),
        Column("charged\nUS$", "cost", rank=1),
        Column("created", lambda item: when(item.get("created"), "%Y-%m-%d %H:%M:%S"), rank=2),
        Column("output", "output", rank=3),
        Column("", lambda item: item.get("reason") or item.get("step")),
    )
    print_table(items, columns, empty, wide=wide)


def _render(document: Mapping[str, Any]) -> None:
    of = "" if document["total"] is None else f" of {document['total']}"
    print(f"job        {document['job']} (app {document['app']})")
    print(f"state      {document['state']}: {document['reason'] or document['step'] or '-'}")
    print(f"items      {document['done']}{of}, {document['failed']} failed")
    print(f"from       {document['input']}\nto         {document['output']}")
    print(f"computed   by {', '.join(document['variants']) or 'no variant yet'}")
    print(f"charged    US$ {number(document['cost'])}")
    if document["started"] and document["finished"]:
        print(f"took       {number(document['finished'] - document['started'])} s")


@contextmanager
def _progress() -> "Iterator[OnProgress]":
    """Shows progress on stderr: a bar for each job on a terminal, else one line for each change of state."""
    with progress_bars() as shown:

        def update(status: "JobStatus") -> None:
            detail = status.reason or status.step
            line = f"{status.job} {status.state}{': ' * bool(detail)}{detail}"
            counts = f"{status.done}/{'?' if status.total is None else status.total}"
            text = f"{counts} {status.job} {status.state} {status.step}".strip()
            shown(text, status.done, status.total, what=status.job, line=line, key=re.sub(r"\d+", "", line))

        yield update

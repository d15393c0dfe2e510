"""`infaas submit|jobs|cancel`: offline jobs, from a file or an object to another, computed on spare capacity."""

import asyncio
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from infaas.cli.options import DataDir, Json
from infaas.cli.output import fail, print_json, progress, show, usage
from infaas.cli.table import Column, number, print_table
from infaas.connecting import connect

if TYPE_CHECKING:
    from bus.messages.jobs import JobStatus
    from infaas.jobs import OnProgress

Seconds = Annotated[float | None, Parameter(help="Seconds to wait at most; the job goes on.")]


def submit(
    *,
    app: str,
    input: str,
    output: str,
    accuracy: float | None = None,
    model: str | None = None,
    variant: str | None = None,
    id: str | None = None,
    wait: bool = False,
    timeout: Seconds = None,
    data_dir: DataDir = None,
    json: Json = False,
) -> int:
    """Hand in an offline job: every item of the input is computed, the outputs are written in the same order.

    Prints the job's id at once. Offline jobs run while workers have nothing more urgent to do.

    Parameters
    ----------
    app
        The application whose models compute it.
    input
        URL of a .npy, .jsonl or .msgpack file: file:// below a directory that the system allows, nats://bucket/key, s3://bucket/key;
        or a path of this machine.
    output
        The same for the outputs; it must not exist yet.
    accuracy
        At least, 0 to 1. The cheapest variant that reaches it computes the job.
    model
        Only this model.
    variant
        Only this variant.
    id
        An id of your own for the job.
    wait
        Follow the job to its end.

    """

    async def run() -> "str | JobStatus":
        async with connect(data_dir=data_dir) as client:
            job = await client.submit(app, input, output, accuracy=accuracy, model=model, variant=variant, job=id)
            if not wait:
                return job
            with _progress() as on_progress:
                return await client.wait_job(job, on_progress=on_progress, timeout=timeout)

    result = asyncio.run(run())
    if isinstance(result, str):
        show({"job": result}, json, lambda document: print(document["job"]))
        return 0
    return _end(result, json)


def jobs(
    id: str | None = None,
    /,
    *,
    wait: bool = False,
    timeout: Seconds = None,
    app: str | None = None,
    data_dir: DataDir = None,
    json: Json = False,
) -> int:
    """List the offline jobs, or show one; with --wait follow it to its end.

    Exits 1 when a job that was waited for did not end well.

    Parameters
    ----------
    id
        Only this job.
    wait
        Follow it until it is done, failed or cancelled.
    app
        Only the jobs of this app.

    """
    if wait and id is None:
        usage("name the job to wait for: infaas jobs ID --wait")

    async def run() -> "list[dict[str, Any]] | JobStatus":
        async with connect(data_dir=data_dir) as client:
            if id is None:
                return await client.jobs(app=app)
            if not wait:
                return await client.job(id)
            with _progress() as on_progress:
                return await client.wait_job(id, on_progress=on_progress, timeout=timeout)

    result = asyncio.run(run())
    if isinstance(result, list):
        show({"items": result}, json, lambda document: _table(document["items"]))
        return 0
    if wait:
        return _end(result, json)
    show(_document(result), json, _render)
    return 0


def cancel(id: str, /, *, data_dir: DataDir = None, json: Json = False) -> int:
    """Cancel an offline job: nothing more of it is computed, and what was written of its output goes.

    Parameters
    ----------
    id
        The job.

    """

    async def run() -> None:
        async with connect(data_dir=data_dir) as client:
            await client.cancel_job(id)

    asyncio.run(run())
    show({"job": id, "cancelled": True}, json, lambda document: print(f"cancelled {document['job']}"))
    return 0


def _end(status: "JobStatus", as_json: bool) -> int:
    """The end of a job that was waited for."""
    if as_json:
        print_json(_document(status))
    if status.state != "done":
        fail(f"job {status.job} {status.state}: {status.reason or 'no reason was given'}")
    if not as_json:
        _render(_document(status))
    return 0


def _document(status: "JobStatus") -> dict[str, Any]:
    return {field: getattr(status, field) for field in status.__struct_fields__}


def _table(items: list[dict[str, Any]]) -> None:
    columns = (
        Column("job", "job"),
        Column("app", "app"),
        Column("state", "state"),
        Column("done", "done"),
        Column("of", "total"),
        Column("failed", "failed"),
        Column("US$", "cost"),
        Column("created", lambda item: _when(item.get("created"))),
        Column("output", "output"),
        Column("", lambda item: item.get("reason") or item.get("step")),
    )
    print_table(items, columns, "no jobs: `infaas submit` hands one in")


def _render(document: Mapping[str, Any]) -> None:
    of = "" if document["total"] is None else f" of {document['total']}"
    print(f"job        {document['job']} (app {document['app']})")
    print(f"state      {document['state']}: {document['reason'] or document['step'] or 'nothing more to do'}")
    print(f"items      {document['done']}{of}, {document['failed']} failed")
    print(f"from       {document['input']}\nto         {document['output']}")
    print(f"computed   by {', '.join(document['variants']) or 'nobody yet'}")
    print(f"cost       US$ {number(document['cost'])}")
    if document["started"] and document["finished"]:
        print(f"took       {number(document['finished'] - document['started'])} s")


def _when(seconds: float | None) -> str | None:
    return None if not seconds else datetime.fromtimestamp(seconds, UTC).astimezone().strftime("%Y-%m-%d %H:%M:%S")


@contextmanager
def _progress() -> "Iterator[OnProgress]":
    """A bar on a terminal, else a line a change of state; always on stderr."""
    from rich.console import Console  # noqa: PLC0415  (after the arguments have been understood)
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn  # noqa: PLC0415

    console = Console(stderr=True)
    if not console.is_terminal:
        last = ""

        def line(status: "JobStatus") -> None:
            nonlocal last
            if status.state != last:
                last = status.state
                progress(f"{status.state}: {status.reason or status.step}")

        yield line
        return
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}", markup=False))
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=None)
        yield lambda status: bar.update(
            task, completed=status.done, total=status.total, description=f"{status.state} {status.step}".strip()
        )

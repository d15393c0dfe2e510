"""`infaas bench`: send load to a running system and measure its answers at the client."""

import asyncio
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from cyclopts import Parameter
from cyclopts.validators import Number

from bus.messages.catalog import TensorSpec
from infaas.cli.load_options import CLOSED, NO_LOAD, LoadOptions
from infaas.cli.options import NO_NEEDS, DataDir, Json, NeedOptions, Whole
from infaas.cli.output import FAILED, fail, number, progress, refusal_line, show, usage
from infaas.client import Client
from infaas.connecting import connect
from infaas.errors import Refused

if TYPE_CHECKING:
    import numpy as np

    from infaas.loadgen import Generator, LoadReport
    from infaas.queries import Prepared

_DISTINCT = 64  # different queries, sent in turn
_CHUNK = 4096  # arrivals drawn at once; more would block the event loop too long
_UPLOADS_LAST_S = 500.0  # for so long, large inputs stay in the object store
_LEAST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 2.0  # between tries
_TOLD_EVERY_S = 0.5
_FIRST_ANSWER_S = 60.0  # until the first answer; a variant may have to be loaded
_TEMPORARY = ("deadline", "overloaded")  # refusals after which another try may succeed


def bench(
    app: Annotated[list[str], Parameter(negative="")],
    *,
    input: Path | None = None,
    input_key: str | None = None,
    items: Annotated[Whole, Parameter(validator=Number(gte=1, lte=65_536))] = 1,
    load: LoadOptions = NO_LOAD,
    seconds: Annotated[float, Parameter(validator=Number(gt=0, lte=3600))] = 10.0,
    warmup: Annotated[float, Parameter(validator=Number(gte=0, lte=600))] = 1.0,
    seed: Annotated[Whole, Parameter(validator=Number(gte=0))] = 0,
    needs: NeedOptions = NO_NEEDS,
    data_dir: DataDir = None,
    json: Json = False,
) -> int:
    """Send load to a running system and print throughput, latency, the share in time, accuracy and cost as the client sees them.

    A closed loop keeps a fixed number of queries in flight. An open loop sends each query when it is due, however slow the answers
    are; latency counts from the due time. Both wait for a first answer before they start. Exits 1 if no query was answered.

    Example: `infaas bench digits --rate 200 --latency-ms 50`

    Parameters
    ----------
    app
        The app to query. Give it several times to spread the load over several apps.
    input
        A .npy or .npz file; its items are sent in turn. `-` reads such a file, or JSON, from standard input. Default: random items of each app's shape.
    input_key
        The array of the .npz file to send.
    items
        Items in each query.
    seconds
        Seconds to measure.
    warmup
        Seconds before the measurement in which queries are sent but not counted.
    seed
        Seed of the arrivals and the random inputs.

    """
    apps = tuple(app)
    if len(set(apps)) < len(apps):
        usage("--app: an app is named twice: name each once, and set its share with --shares")
    if input_key is not None and input is None:
        usage("--input-key: names an array of a file: give the file with --input")
    import numpy as np  # noqa: PLC0415  (commands that are not used cost nothing)
    import uvloop  # noqa: PLC0415

    from infaas.inputs import as_arrays, in_turn, read_input  # noqa: PLC0415

    rng = np.random.default_rng(seed)
    kind, spec, shares = load.spec(apps, seconds + warmup)
    given = in_turn(as_arrays(read_input(input, key=input_key)), items, _DISTINCT) if input is not None else []

    async def work() -> "LoadReport":
        from infaas.loadgen import Generator, in_shares  # noqa: PLC0415
        from services.simulation.workload import arrivals  # noqa: PLC0415

        async with connect(data_dir=data_dir) as client:
            prepared = {
                name: [
                    await client.prepare(name, x, **needs.to_needs())
                    for x in given or await _random(client, name, items, rng)
                ]
                for name in apps
            }
            if any(queries[0].upload for queries in prepared.values()) and seconds + warmup > _UPLOADS_LAST_S:
                fail(f"--seconds: inputs this large expire in the object store: measure at most {_UPLOADS_LAST_S:g} s")
            for queries in prepared.values():
                await _until_answered(client, queries[0])
            generator = Generator(client, prepared, items=items, warmup=warmup)
            progress(f"sending for {seconds + warmup:g} s: {kind}")
            with _progress(generator, seconds):
                if spec is None:
                    return await generator.closed(load.closed or CLOSED, seconds + warmup, in_shares(shares, rng))
                return await generator.open(arrivals(spec, seconds + warmup, rng, chunk=_CHUNK), seconds + warmup, kind)

    try:
        report = uvloop.run(work())
    except Refused as refused:
        fail(refusal_line(refused))
    show(msgspec.to_builtins(report), json, lambda _: _render(report))
    return 0 if report.answered else FAILED


async def _random(client: Client, app: str, items: int, rng: "np.random.Generator") -> list[Any]:
    """Random inputs of at most 64 different queries."""
    from infaas.inputs import in_turn, random_items  # noqa: PLC0415

    found = await client.apps(app=app)
    if not found:
        fail(f"unknown_app: no app {app!r}; `infaas apps` lists them")
    if not found[0].get("inputs"):
        fail(f"app {app} has no input signature yet: register a model, or give an --input file")
    return in_turn(
        random_items(msgspec.convert(found[0]["inputs"], list[TensorSpec]), items * _DISTINCT, rng), items, _DISTINCT
    )


async def _until_answered(client: Client, prepared: "Prepared") -> None:
    """Send the query until it is answered. Raises Refused if another try would not help."""
    end = time.monotonic() + _FIRST_ANSWER_S
    while True:
        answer = await client.ask(prepared, raise_refused=False)
        if not isinstance(answer, Refused):
            return
        if answer.code not in _TEMPORARY:
            raise answer
        if time.monotonic() > end:
            progress(f"no answer within {_FIRST_ANSWER_S:g} s ({refusal_line(answer)}); measuring anyway")
            return
        await asyncio.sleep(min(max((answer.retry_after_ms or 0) / 1000, _LEAST_PAUSE_S), _LONGEST_PAUSE_S))


@contextmanager
def _progress(generator: "Generator", seconds: float) -> "Iterator[None]":
    """Shows on a terminal, twice a second, what was answered so far."""
    if not sys.stderr.isatty():
        yield
        return

    async def tell() -> None:
        while True:
            await asyncio.sleep(_TOLD_EVERY_S)
            print(f"\r\x1b[K{so_far(generator, seconds)}", end="", file=sys.stderr, flush=True)

    telling = asyncio.get_running_loop().create_task(tell())
    try:
        yield
    finally:
        telling.cancel()
        print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def so_far(generator: "Generator", seconds: float) -> str:
    """One line of progress. seconds: of the measurement."""
    ran, sent, answered, in_time = generator.so_far()
    if ran <= 0:
        return "warming up"
    reached = f", {in_time / sent:.2%} in time" if sent else ""
    return f"{min(ran, seconds):.0f} of {seconds:g} s: {answered / ran:,.0f} answers/s, {answered:,} of {sent:,} answered{reached}"


def _render(report: "LoadReport") -> None:
    def shown(value: float | None, unit: str = "") -> str:
        return "-" if value is None else f"{number(value)}{unit}"

    limit = f" within {number(report.latency_ms)} ms" if report.latency_ms is not None else ""
    print(f"load          {report.mode}, {number(report.seconds)} s")
    print(
        f"queries       {report.offered:,}: {report.answered:,} answered, {report.refused:,} refused, {report.failed:,} failed"
    )
    print(f"throughput    {shown(report.throughput_qps)} answers/s")
    print(
        f"latency       p50 {shown(report.p50_ms)}, p95 {shown(report.p95_ms)}, p99 {shown(report.p99_ms)},"
        f" max {shown(report.max_ms)} ms"
    )
    print(f"in time       {report.slo_attainment:.2%} of all queries answered{limit}")
    if len(report.apps) > 1:
        for name, app in report.apps.items():
            print(f"{'':13} {name}: {app.slo_attainment:.2%} of {app.offered:,}, p99 {shown(app.p99_ms)} ms")
    print(f"accuracy      {shown(report.effective_accuracy)} effective (mean of the answers in time)")
    print(f"charged       US$ {shown(report.cost_per_1000)} per 1,000 queries")
    for title, counts in (
        ("answered by", report.variants),
        ("missed", report.missed),
        ("refusals", report.refusals),
        ("failures", report.failures),
    ):
        for name, count in counts.items():
            print(f"{title:13} {name}: {count:,}")
            title = ""
    if report.late_send_max_ms is not None:
        print(f"generator     sent p99 {shown(report.late_send_p99_ms)}, max {shown(report.late_send_max_ms)} ms late")
    if report.resent:
        print(f"sent again    {report.resent:,}")

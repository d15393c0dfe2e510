"""`infaas bench`: load on a running system, measured at the client."""

import asyncio
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
from cyclopts import Parameter
from cyclopts.validators import Number

from infaas.cli.needs import NO_NEEDS, NeedOptions, told
from infaas.cli.options import DataDir, Json
from infaas.cli.output import FAILED, fail, progress, show, usage
from infaas.cli.table import number
from infaas.client import Client
from infaas.connecting import connect
from infaas.errors import Refused

if TYPE_CHECKING:
    import numpy as np

    from infaas.arrivals import Times
    from infaas.loadgen import Report
    from infaas.queries import Prepared

_DISTINCT = 64  # different queries, sent in turn
_CLOSED = 16  # queries under way, when nothing else is asked
_UPLOADS_LIVE = 500.0  # s that large inputs surely stay in the object store
_PAUSE, _LONGEST_PAUSE = 0.05, 2.0  # s between tries
_WAKE = 60.0  # s for the first answer: what it needs may have to be loaded
_PASSING = ("deadline", "overloaded")  # refusals that another try may not get


def bench(
    *,
    app: str,
    input: Path | None = None,
    input_key: str | None = None,
    items: Annotated[int, Parameter(validator=Number(gte=1, lte=65_536))] = 1,
    closed: Annotated[int | None, Parameter(validator=Number(gte=1, lte=10_000))] = None,
    rate: Annotated[float | None, Parameter(validator=Number(gt=0, lte=200_000))] = None,
    arrivals: Literal["poisson", "gamma", "uniform"] = "poisson",
    cv: Annotated[float, Parameter(validator=Number(gt=0, lte=100))] = 1.0,
    trace: Path | None = None,
    seconds: Annotated[float, Parameter(validator=Number(gt=0, lte=3600))] = 10.0,
    warmup: Annotated[float, Parameter(validator=Number(gte=0, lte=600))] = 1.0,
    seed: int = 0,
    needs: NeedOptions = NO_NEEDS,
    data_dir: DataDir = None,
    json: Json = False,
) -> int:
    """Put load on a running system and print what its clients saw.

    Closed loop: so many queries always under way. Open loop: queries set out when they are due, whatever the answers do, and
    their latency counts from then. Both wait for a first answer before they start. Exits 1 when nothing was answered.

    Parameters
    ----------
    app
        The application to query.
    input
        A .npy or .npz file whose items are sent in turn. Left out: random ones of the app's shape.
    input_key
        Which array of the .npz file to send.
    items
        Items in each query.
    closed
        Queries under way in a closed loop; 16 when neither this nor a rate nor a trace is given.
    rate
        Queries a second of an open loop; with a trace, the mean rate that it is scaled to.
    arrivals
        How the gaps of an open loop are spread.
    cv
        Standard deviation / mean of gamma gaps.
    trace
        File with a count of queries for each second, one a line (may be .gz).
    seconds
        How long to measure.
    warmup
        Seconds before that whose queries are sent but not counted.
    seed
        Of the arrivals and the random inputs.

    """
    if closed is not None and (rate is not None or trace is not None):
        usage("--closed is another kind of load than --rate and --trace: give one of them")
    import numpy as np  # noqa: PLC0415  (commands that are not used cost nothing)
    import uvloop  # noqa: PLC0415

    rng = np.random.default_rng(seed)
    kind, times = _arrivals(closed, rate, arrivals, cv, trace, seconds + warmup, rng)

    async def work() -> "Report":
        from infaas.loadgen import Generator  # noqa: PLC0415

        async with connect(data_dir=data_dir) as client:
            queries = await _queries(client, app, input, input_key, items, rng)
            prepared = [await client.prepare(app, x, **needs.to_needs()) for x in queries]
            if prepared[0].upload is not None and seconds + warmup > _UPLOADS_LIVE:
                fail(f"inputs this large expire in the object store: measure at most {_UPLOADS_LIVE:g} s")
            await _wake(client, prepared[0])
            generator = Generator(client, prepared, items=items, warmup=warmup)
            progress(f"sending for {seconds + warmup:g} s: {kind}")
            if times is None:
                return await generator.closed(closed or _CLOSED, seconds + warmup)
            return await generator.open(times, seconds + warmup, kind)

    try:
        report = uvloop.run(work())
    except Refused as refused:
        fail(told(refused))
    show(msgspec.to_builtins(report), json, lambda _: _render(report))
    return 0 if report.answered else FAILED


def _arrivals(
    closed: int | None,
    rate: float | None,
    arrivals: Literal["poisson", "gamma", "uniform"],
    cv: float,
    trace: Path | None,
    seconds: float,
    rng: "np.random.Generator",
) -> "tuple[str, Times | None]":
    from infaas.arrivals import read_counts, renewal, replay  # noqa: PLC0415

    if trace is not None:
        return trace.name, replay(read_counts(trace), rng, seconds=seconds, rate=rate)
    if rate is not None:
        return f"gamma with CV {cv:g}" if arrivals == "gamma" else arrivals, renewal(arrivals, rate, seconds, rng, cv)
    return f"closed loop of {closed or _CLOSED}", None


async def _queries(
    client: Client, app: str, input: Path | None, key: str | None, items: int, rng: "np.random.Generator"
) -> list[Any]:
    """The inputs of up to 64 different queries."""
    from infaas.inputs import in_turn, random_items, read_file  # noqa: PLC0415

    if input is not None:
        return in_turn(read_file(input, key=key), items, _DISTINCT)
    found = await client.apps(app=app)
    if not found:
        fail(f"unknown_app: no app {app!r}; `infaas apps` lists them")
    if not found[0].get("inputs"):
        fail(f"app {app} has no input signature yet: give an --input file")
    return in_turn(random_items(found[0]["inputs"], items * _DISTINCT, rng), items, _DISTINCT)


async def _wake(client: Client, prepared: "Prepared") -> None:
    """Ask until there is a first answer. Raises Refused where asking again would not help."""
    end = time.monotonic() + _WAKE
    while True:
        answer = await client.ask(prepared, raise_refused=False)
        if not isinstance(answer, Refused):
            return
        if answer.code not in _PASSING:
            raise answer
        if time.monotonic() > end:
            progress(f"no answer within {_WAKE:g} s ({told(answer)}); measuring nevertheless")
            return
        await asyncio.sleep(min(max((answer.retry_after_ms or 0) / 1000, _PAUSE), _LONGEST_PAUSE))


def _render(report: "Report") -> None:
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
    print(f"attainment    {report.slo_attainment:.2%} of all queries answered{limit}")
    print(f"accuracy      {shown(report.effective_accuracy)} effective (mean of the answers in time)")
    print(f"cost          US$ {shown(report.cost_per_1000)} per 1,000")
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

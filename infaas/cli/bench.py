"""`infaas bench`: send load to a running system and measure its answers at the client."""

import asyncio
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
from cyclopts import Parameter
from cyclopts.validators import Number

from bus.messages.catalog import TensorSpec
from infaas.cli.options import NO_NEEDS, DataDir, Json, NeedOptions, Whole
from infaas.cli.output import FAILED, fail, number, progress, refusal_line, show, usage
from infaas.client import Client
from infaas.connecting import connect
from infaas.errors import Refused

if TYPE_CHECKING:
    import numpy as np

    from infaas.loadgen import Generator, LoadReport
    from infaas.queries import Prepared
    from services.simulation.scenario.model import WorkloadSpec

CLOSED = 16  # queries in flight by default
MOST_QPS = 200_000.0
Kind = Literal["poisson", "gamma", "uniform", "mmpp"]


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class LoadOptions:
    """How queries are spread over time and apps."""

    closed: Annotated[
        Whole | None,
        Parameter(
            validator=Number(gte=1, lte=10_000),
            help="Closed loop with so many queries in flight. Default: 16, if no option asks for an open loop.",
        ),
    ] = None
    rate: Annotated[
        float | None,
        Parameter(
            validator=Number(gt=0, lte=MOST_QPS),
            help="Open loop with so many queries/s. With --trace: the mean rate that the trace is scaled to.",
        ),
    ] = None
    rate_points: Annotated[
        str | None,
        Parameter(
            help='Rate that changes: "0:4,60:80" is 4 queries/s at second 0 and 80 at second 60, linear between them.'
        ),
    ] = None
    arrivals: Annotated[Kind | None, Parameter(help="Distribution of the gaps of an open loop. Default: poisson.")] = (
        None
    )
    cv: Annotated[
        float | None,
        Parameter(
            validator=Number(gt=0, lte=100),
            help="Coefficient of variation of the gaps (standard deviation / mean), for --arrivals gamma.",
        ),
    ] = None
    rates: Annotated[str | None, Parameter(help='Queries/s in each state of an MMPP, as "4,80".')] = None
    dwell: Annotated[str | None, Parameter(help='Mean seconds in each state of an MMPP, as "30,5".')] = None
    trace: Annotated[Path | None, Parameter(help="File with one count of queries a line (may be .gz).")] = None
    seconds_per_line: Annotated[
        float | None,
        Parameter(validator=Number(gt=0, lte=86_400), help="Seconds that one line of the trace covers. Default: 1."),
    ] = None
    range_qps: Annotated[
        str | None, Parameter(help='Queries/s for the lowest and the highest line of the trace, as "10:1000".')
    ] = None
    times: Annotated[Path | None, Parameter(help="File with one arrival time a line, in seconds (may be .gz).")] = None
    shares: Annotated[
        str | None,
        Parameter(
            help='Share of each app: "0.8,0.2", "zipf" or "zipf:1.1" (the first app is the most popular). Default: equal shares.'
        ),
    ] = None

    def spec(self, apps: tuple[str, ...], seconds: float) -> "tuple[str, WorkloadSpec | None, tuple[float, ...]]":
        """The load's name, its arrivals during `seconds` (None: a closed loop), and each app's share.

        Ends the command (bad usage) if options contradict each other; the text names the option.
        """
        from infaas.loadgen import MAX_QUERIES  # noqa: PLC0415
        from services.simulation.workload import mean_rate, peak_rate  # noqa: PLC0415

        self._one_kind()
        shares = self._shares(len(apps))
        name, load = self._open(apps, shares, seconds)
        if load is not None:
            mean = mean_rate(load, seconds)
            if mean <= 0:
                usage(f"{self._source()}: no query would be sent in {seconds:g} s")
            if mean * seconds > MAX_QUERIES:
                usage(
                    f"{self._source()}: more than {MAX_QUERIES:,} queries in {seconds:g} s: shorten it or lower the rate"
                )
            if peak_rate(load, seconds) > MOST_QPS:
                usage(f"{self._source()}: the peak is above {MOST_QPS:,.0f} queries/s: lower the rate")
        return name, load, shares

    def _one_kind(self) -> None:
        sources = {
            "--closed": self.closed,
            "--times": self.times,
            "--rates": self.rates or self.dwell,
            "--rate-points": self.rate_points,
            "--trace": self.trace,
            "--rate": self.rate,
        }
        given = [name for name, value in sources.items() if value is not None]
        if len(given) > 1 and given != ["--trace", "--rate"]:
            usage(f"{given[0]} and {' and '.join(given[1:])} are different kinds of load: give one of them")
        rated = self.rate is not None or self.rate_points is not None
        trace = self.trace is not None
        if self.arrivals == "mmpp" and not (self.rates and self.dwell):
            usage("--arrivals mmpp needs --rates and --dwell, such as --rates 4,80 --dwell 30,5")
        if (self.rates or self.dwell) and self.arrivals != "mmpp":
            usage("--rates and --dwell describe an MMPP: add --arrivals mmpp")
        if self.arrivals not in (None, "mmpp") and (trace or not rated):
            usage(f"--arrivals {self.arrivals} needs --rate or --rate-points, and no trace or times")
        if self.arrivals == "gamma" and self.cv is None:
            usage("--arrivals gamma needs --cv, such as --cv 4 for bursts (1 is poisson)")
        if self.cv is not None and self.arrivals != "gamma":
            usage("--cv describes gamma gaps: add --arrivals gamma")
        if self.range_qps is not None and (not trace or self.rate is not None):
            usage("--range-qps scales a --trace: give --trace, and leave out --rate")
        if self.seconds_per_line is not None and not trace:
            usage("--seconds-per-line describes a --trace: give --trace")

    def _source(self) -> str:
        """The option that sets the rate."""
        for name in ("trace", "times", "rates", "rate_points"):
            if getattr(self, name) is not None:
                return f"--{name.replace('_', '-')}"
        return "--rate"

    def _open(
        self, apps: tuple[str, ...], shares: tuple[float, ...], seconds: float
    ) -> "tuple[str, WorkloadSpec | None]":
        from services.simulation.scenario.model import WorkloadSpec  # noqa: PLC0415

        if self.trace is not None:
            return self._traced(self.trace, apps, shares, seconds)
        if self.times is not None:
            from services.simulation.workload import WorkloadError, read_times  # noqa: PLC0415

            try:
                return self.times.name, WorkloadSpec(
                    apps=apps, shares=shares, arrivals="times", times=read_times(self.times)
                )
            except WorkloadError as error:
                usage(f"--times: {error}")
        if self.rates is not None and self.dwell is not None:
            rates, dwell = _numbers("--rates", self.rates), _numbers("--dwell", self.dwell)
            if len(rates) != len(dwell):
                usage(f"--dwell: {len(dwell)} stays for {len(rates)} rates: give one for each")
            if min(dwell) <= 0:
                usage("--dwell: a stay must last more than 0 s")
            load = WorkloadSpec(apps=apps, shares=shares, arrivals="mmpp", rates=rates, dwell_s=dwell)
            return f"mmpp with {self.rates} queries/s for {self.dwell} s", load
        if self.rate_points is not None:
            points = tuple(_pair("--rate-points", text, "0:4,60:80") for text in self.rate_points.split(","))
            if list(points) != sorted(points, key=lambda point: point[0]):
                usage(f"--rate-points: {self.rate_points!r}: sort the points, earliest second first")
        elif self.rate is not None:
            points = ((0.0, self.rate),)
        else:
            return f"closed loop of {self.closed or CLOSED}", None
        kind = self.arrivals or "poisson"
        if self.cv is None:
            return kind, WorkloadSpec(apps=apps, shares=shares, arrivals=kind, rate=points)
        return f"gamma with CV {self.cv:g}", WorkloadSpec(
            apps=apps, shares=shares, arrivals=kind, rate=points, cv=self.cv
        )

    def _traced(
        self, path: Path, apps: tuple[str, ...], shares: tuple[float, ...], seconds: float
    ) -> "tuple[str, WorkloadSpec]":
        from services.simulation.scenario.model import WorkloadSpec  # noqa: PLC0415
        from services.simulation.workload import WorkloadError, read_counts  # noqa: PLC0415

        try:
            counts = read_counts(path)
        except WorkloadError as error:
            usage(f"--trace: {error}")
        width = self.seconds_per_line or 1.0
        if self.rate is not None:
            # The mean is over the lines that are sent, not over the whole file.
            sent = counts[: int(-(-seconds // width))].mean()
            counts = counts * (self.rate * width / sent) if sent > 0 else counts
        span = None if self.range_qps is None else _pair("--range-qps", self.range_qps, "10:1000")
        if span is not None and span[0] > span[1]:
            usage(f"--range-qps: {self.range_qps!r}: the lower rate comes first, such as 10:1000")
        return path.name, WorkloadSpec(
            apps=apps, shares=shares, arrivals="trace", counts=counts, seconds_per_line=width, range_qps=span
        )

    def _shares(self, apps: int) -> tuple[float, ...]:
        from services.simulation.workload import zipf  # noqa: PLC0415

        if self.shares is None:
            return (1 / apps,) * apps
        if self.shares == "zipf" or self.shares.startswith("zipf:"):
            exponents = _numbers("--shares", self.shares[5:] or "1")
            if len(exponents) != 1:
                usage(f"--shares: {self.shares!r}: write one exponent, such as zipf:1.1")
            return zipf(apps, exponents[0])
        given = _numbers("--shares", self.shares)
        if len(given) != apps:
            usage(f"--shares: {len(given)} shares for {apps} apps: give one for each --app")
        if abs(sum(given) - 1) > 1e-6:
            usage(f"--shares: they add up to {sum(given):g}, not to 1")
        return given


NO_LOAD = LoadOptions()


def _numbers(option: str, text: str) -> tuple[float, ...]:
    """Numbers of at least 0, separated by commas; ends the command if the text is anything else."""
    numbers = _split(text, ",")
    if not numbers:
        usage(f"{option}: {text!r}: write numbers of at least 0, separated by commas")
    return numbers


def _pair(option: str, text: str, example: str) -> tuple[float, float]:
    numbers = _split(text, ":")
    if len(numbers) != 2:
        usage(f"{option}: {text!r}: write two numbers of at least 0, separated by a colon, such as {example}")
    return numbers[0], numbers[1]


def _split(text: str, mark: str) -> tuple[float, ...]:
    """Numbers of at least 0; empty if the text is anything else."""
    try:
        numbers = tuple(float(part) for part in text.split(mark))
    except ValueError:
        return ()
    return numbers if all(0 <= number < float("inf") for number in numbers) else ()


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

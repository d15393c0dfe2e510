"""`infaas bench`: send load to a running system and measure its answers at the client."""

import asyncio
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

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
    from services.core.toml import Location
    from services.simulation.scenario.model import WorkloadSpec

T = TypeVar("T")
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
        from services.simulation.scenario.loads import shares_of  # noqa: PLC0415
        from services.simulation.scenario.model import WorkloadSpec  # noqa: PLC0415
        from services.simulation.workload import mean_rate, peak_rate  # noqa: PLC0415

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
        shares = self._checked("shares", lambda at: shares_of(self._shares(), at, len(apps)))
        if self.closed is not None or not (
            given or self.arrivals or self.cv or self.range_qps or self.seconds_per_line
        ):
            return f"closed loop of {self.closed or CLOSED}", None, shares
        name, load = self._open(WorkloadSpec(apps=apps, shares=shares), seconds)
        source = given[0] if given else "--rate"
        mean = mean_rate(load, seconds)
        if mean <= 0:
            usage(f"{source}: no query would be sent in {seconds:g} s")
        if mean * seconds > MAX_QUERIES:
            usage(f"{source}: more than {MAX_QUERIES:,} queries in {seconds:g} s: shorten it or lower the rate")
        if peak_rate(load, seconds) > MOST_QPS:
            usage(f"{source}: the peak is above {MOST_QPS:,.0f} queries/s: lower the rate")
        return name, load, shares

    def _open(self, load: "WorkloadSpec", seconds: float) -> "tuple[str, WorkloadSpec]":
        """The load with its arrivals, as a [[load]] block of a scenario states them, and its name."""
        from services.core.toml import struct_at  # noqa: PLC0415
        from services.simulation.scenario.loads import LoadBlock, timed  # noqa: PLC0415

        file = self.trace or self.times
        kind = "trace" if self.trace else "times" if self.times else "mmpp" if self.rates or self.dwell else None
        if kind is not None and self.arrivals not in (None, kind):
            usage(f"--arrivals {self.arrivals} is another kind of load than --{'rates' if kind == 'mmpp' else kind}")
        kind = kind or self.arrivals or "poisson"
        stated: dict[str, Any] = {
            "arrivals": kind,
            "rate": None if self.trace else self.rate,
            "cv": self.cv,
            "rates": self.rates and _numbers("--rates", self.rates),
            "dwell_s": self.dwell and _numbers("--dwell", self.dwell),
            "file": file and str(file),
            "seconds_per_line": self.seconds_per_line,
            "range_qps": self.range_qps and _pair("--range-qps", self.range_qps, "10:1000"),
        }
        if self.rate_points is not None:
            stated["rate"] = [_pair("--rate-points", text, "0:4,60:80") for text in self.rate_points.split(",")]
        if self.trace is not None and self.rate is not None and self.range_qps is not None:
            usage("--range-qps: says another scale than --rate: leave one of them out")
        block = {key: value for key, value in stated.items() if value is not None}
        load = self._checked("", lambda at: timed(load, struct_at(block, at, LoadBlock), at, Path()))
        if load.counts is not None and self.rate is not None:
            # The mean is over the lines that are sent, not over the whole file.
            sent = load.counts[: int(-(-seconds // load.seconds_per_line))].mean()
            if sent > 0:
                load = msgspec.structs.replace(load, counts=load.counts * (self.rate * load.seconds_per_line / sent))
        names = {
            "mmpp": f"mmpp with {self.rates} queries/s for {self.dwell} s", "gamma": f"gamma with CV {self.cv or 0:g}"
        }  # fmt: skip
        return (names.get(kind, kind) if file is None else file.name), load

    def _shares(self) -> Any:
        """The shares, as a [[load]] block states them."""
        if self.shares is None or self.shares == "zipf":
            return self.shares
        if not self.shares.startswith("zipf:"):
            return list(_numbers("--shares", self.shares))
        from services.simulation.scenario.loads import ZipfShares  # noqa: PLC0415

        exponents = _numbers("--shares", self.shares[5:])
        if len(exponents) != 1:
            usage(f"--shares: {self.shares!r}: write one exponent, such as zipf:1.1")
        return ZipfShares(exponents[0])

    def _checked(self, key: str, read: "Callable[[Location], T]") -> T:
        """What is read of a [[load]] block. Ends the command if that is refused, with the option of the key."""
        from services.core.toml import Location, TomlError  # noqa: PLC0415

        try:
            return read(Location("", key))
        except TomlError as error:
            at, reason = error.wrong[0]
            key = at.key.partition("[")[0]
            rate = "rate" if self.rate_points is None else "rate-points"
            file = "times" if self.trace is None else "trace"
            option = {"rate": rate, "file": file, "dwell_s": "dwell"}.get(key, key.replace("_", "-"))
            usage(f"--{option}: {reason}")


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

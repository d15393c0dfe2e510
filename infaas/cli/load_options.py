"""The load of `infaas bench` as options: a closed loop, or an open one with the same arrivals as in a scenario file."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter
from cyclopts.validators import Number

from infaas.cli.options import Whole
from infaas.cli.output import usage

if TYPE_CHECKING:
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

"""How good forecasts of demand are: `python benches/forecast.py [--traces FOLDER] [--days 5 6 7] [--only NAME ...] [--forecasters NAME ...]`.

Every 2 s a forecaster is asked for quantiles of the rate then and of its peak until then, 2 to 60 s ahead. A cell is the pinball loss as a
multiple of that of `last` (geometric mean over the loads of a group), and the share of moments at which the demand was within the quantile.
Loads: days of Twitter events with a minute as a second (Poisson arrivals of 2 to 225/s) and two hours in real time, each also with the
days before it as history; an hour of Azure's LLM invocations; a step, a drift, and MMPP. Constants were set on the days 1 to 4.
"""

import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import rig
from numpy.typing import NDArray

from benches.scoreboard.scenarios import AZURE, DAY_S, REAL, TRACES, TWITTER, azure, seconds
from services.core.forecast.forecasters import FORECASTERS, make_forecaster

Floats = NDArray[np.float64]

SHARES = (0.5, 0.9, 0.99)
HORIZONS = (2, 5, 10, 30, 60)  # s
EVERY = 2  # s between two questions
WARM = 60  # s before the first
KINDS = ("quantile", "peak")
MINUTES = 1440  # in a day


class Load:
    """A rate for every second. before: rates of earlier `bin_s` that end where the load begins."""

    def __init__(self, group: str, rates: Floats, before: Floats | None = None, bin_s: float = 60.0) -> None:
        self.group, self.rates = group, rates
        self.day_s = MINUTES * bin_s
        self.start = 0.0 if before is None else len(before) * bin_s
        self.history = [] if before is None else [(bin_s * (n + 1), float(rate)) for n, rate in enumerate(before)]


def compressed(day: Floats, share: float, seed: int) -> Floats:
    """A day with a minute as a second: Poisson arrivals of 5 to 500/s times the share."""
    minutes = day.reshape(-1, 60).sum(axis=1)
    rates = 5.0 + 495.0 * (minutes - minutes.min()) / (minutes.max() - minutes.min())
    return np.random.default_rng(seed).poisson(share * rates).astype(float)


def of_twitter(folder: Path, numbers: Sequence[int]) -> Iterator[Load]:
    days = np.array(seconds(folder), dtype=float).reshape(-1, DAY_S)
    for number in numbers:
        day, earlier = days[number - 1], days[: number - 1]
        for share in (0.45, 0.07, 0.03):
            yield Load("minute", compressed(day, share, number))
        yield Load("real", day[REAL])
        if number > 1:
            before = np.concatenate([compressed(one, 0.2, 90 + i) for i, one in enumerate(earlier)])
            yield Load("minute, history", compressed(day, 0.2, number), before, 1.0)
            minutes = np.concatenate([earlier.reshape(-1), day[: REAL.start]]).reshape(-1, 60).mean(axis=1)
            yield Load("real, history", day[REAL], minutes)


def of_azure(folder: Path) -> Iterator[Load]:
    yield Load("azure", np.bincount(np.array(azure(folder)).astype(int)).astype(float))


def synthetic() -> Iterator[Load]:
    random = np.random.default_rng(5)
    yield Load("step", random.poisson(np.where(np.arange(1200) < 600, 10.0, 200.0)).astype(float))
    yield Load("drift", random.poisson(np.linspace(20.0, 200.0, 1800)).astype(float))
    state, rates = 0, list[float]()
    while len(rates) < 1800:
        rates += [(30.0, 150.0)[state]] * int(1 + random.exponential((60.0, 15.0)[state]))
        state = 1 - state
    yield Load("mmpp", random.poisson(rates[:1800]).astype(float))


def loads(folder: Path, days: Sequence[int]) -> Iterator[Load]:
    for name, make in ((TWITTER, partial(of_twitter, numbers=days)), (AZURE, of_azure)):
        if (folder / name).exists():
            yield from make(folder)
        else:
            print(f"left out: there is no {folder / name}; --traces names the folder that has it")
    yield from synthetic()


def asked(load: Load, name: str) -> tuple[Floats, Floats, float]:
    """Answers (kinds, horizons, shares, moments), what came (kinds, horizons, moments), and µs of an observation."""
    forecaster = make_forecaster(name, day_s=load.day_s)
    forecaster.seed(load.history, load.start)
    moments = np.arange(WARM, len(load.rates) - max(HORIZONS), EVERY)
    found = np.zeros((2, len(HORIZONS), len(SHARES), len(moments)))
    spent, number = 0.0, 0
    for second, rate in enumerate(load.rates):
        began = time.perf_counter()
        forecaster.observe(load.start + second + 1.0, float(rate))
        spent += time.perf_counter() - began
        if number < len(moments) and second == moments[number]:
            for kind, question in enumerate((forecaster.quantile, forecaster.peak)):
                for place, ahead in enumerate(HORIZONS):
                    found[kind, place, :, number] = [question(float(ahead), share) for share in SHARES]
            number += 1
    came = np.zeros((2, len(HORIZONS), len(moments)))
    for place, ahead in enumerate(HORIZONS):
        came[0, place] = load.rates[moments + ahead]
        came[1, place] = np.lib.stride_tricks.sliding_window_view(load.rates[1:], ahead).max(axis=1)[moments]
    return found, came, 1e6 * spent / len(load.rates)


def judged(load: Load, name: str) -> tuple[Floats, Floats, float]:
    """Mean pinball losses and shares of moments within, both (kinds, horizons, shares), and µs of an observation."""
    found, came, spent = asked(load, name)
    over = came[:, :, None, :] - found
    shares = np.array(SHARES)[None, None, :, None]
    losses = np.maximum(shares * over, (shares - 1.0) * over)
    return losses.mean(axis=3), (over <= 0.0).mean(axis=3), spent


def main() -> None:
    parser = rig.parser(__doc__)
    parser.add_argument("--traces", type=Path, default=TRACES)
    parser.add_argument("--days", type=int, nargs="+", default=[5, 6, 7], help="of the Twitter trace")
    parser.add_argument("--only", nargs="+", default=[], help="groups of loads, such as real")
    parser.add_argument("--forecasters", nargs="+", default=[name for name in FORECASTERS if name != "last"])
    options = parser.parse_args()
    results: dict[tuple[str, str], list[tuple[Floats, Floats]]] = {}
    spent: dict[str, list[float]] = {}
    for load in loads(options.traces, options.days):
        if options.only and load.group not in options.only:
            continue
        base = judged(load, "last")[0]
        for name in options.forecasters:
            losses, within, us = judged(load, name)
            results.setdefault((load.group, name), []).append((np.log(losses / base), within))
            spent.setdefault(name, []).append(us)
    print(f"{'loss : last (share within)':41}" + "".join(f"{f'{ahead} s':>14}" for ahead in HORIZONS))
    for (group, name), found in results.items():
        ratios, within = (np.mean([one[part] for one in found], axis=0) for part in (0, 1))
        for kind, word in enumerate(KINDS):
            for place, share in enumerate(SHARES):
                cells = zip(np.exp(ratios[kind, :, place]), within[kind, :, place], strict=True)
                print(f"{group:16}{name:16}{word:5.5}{share:4g}" + "".join(f"{r:6.2f} ({w:.3f})" for r, w in cells))
    print("µs an observation: " + ", ".join(f"{name} {np.median(us):.0f}" for name, us in spent.items()))


if __name__ == "__main__":
    main()

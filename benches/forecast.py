"""How good forecasts of demand are: `python benches/forecast.py [--traces FOLDER] [--only NAME ...] [--forecasters NAME ...]`.

Every 2 s each forecaster is asked for the quantiles 0.5, 0.9 and 0.99 of the rate and of its peak, 2 to 60 s ahead. A cell is the pinball
loss as a multiple of that of `last`, and the share of the moments at which the demand was within the quantile. Loads: days of Twitter events with a minute as a
second (Poisson arrivals of 2 to 225/s) and in real time (two hours), Azure's LLM invocations, and synthetic ones: a step, a drift, MMPP.
"earlier days": with history.
"""

import csv
import gzip
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import rig  # noqa: F401  (makes the packages importable)
from numpy.typing import NDArray

from services.core.forecast.base import DAY
from services.core.forecast.forecasters import make_forecaster

Rates = NDArray[np.float64]

SHARES = (0.5, 0.9, 0.99, 0.999)
HORIZONS = (2, 5, 10, 30, 60)
EVERY = 2  # s between two questions
WARM = 60  # s before the first
KINDS = ("quantile", "peak")
TWITTER, AZURE = "twitter_per_second_days01-07.txt.gz", "AzureLLMInferenceTrace_conv.csv"


class Load:
    """A rate for every second. history: minutes of earlier days as (end, rate); the load begins at `start`."""

    def __init__(
        self,
        name: str,
        rates: Rates,
        *,
        day_s: float = DAY,
        start: float = 0.0,
        before: Rates | None = None,
        bin_s: float = 60.0,
    ) -> None:
        self.name, self.rates, self.day_s, self.start = name, rates, day_s, start
        self.history = (
            []
            if before is None
            else [(start - (len(before) - 1 - i) * bin_s, float(rate)) for i, rate in enumerate(before)]
        )


def compressed(day: Rates, share: float, seed: int) -> Rates:
    """A day with a minute as a second: Poisson arrivals of 5 to 500/s times the share."""
    minutes = day.reshape(-1, 60).sum(axis=1)
    rates = 5.0 + 495.0 * (minutes - minutes.min()) / (minutes.max() - minutes.min())
    return np.random.default_rng(seed).poisson(share * rates).astype(float)


def of_traces(folder: Path) -> Iterator[Load]:
    with gzip.open(folder / TWITTER, "rt") as file:
        days = np.array(file.read().split(), dtype=float).reshape(-1, 86400)
    for number, day in enumerate(days, 1):
        for share in (0.45, 0.07, 0.03):
            yield Load(f"minute-{number}-{share:g}", compressed(day, share, number))
        if number > 2:
            before = np.concatenate([compressed(earlier, 0.2, 90 + i) for i, earlier in enumerate(days[: number - 1])])
            yield Load(
                f"seeded-{number}",
                compressed(day, 0.2, number),
                day_s=1440.0,
                start=1440.0 * (number - 1),
                before=before,
                bin_s=1.0,
            )
        yield Load(f"real-{number}", day[36000:43200])
        if number > 2:
            minutes = days[: number - 1].reshape(-1, 60).mean(axis=1)
            minutes = np.append(minutes, day[:36000].reshape(-1, 60).mean(axis=1))
            yield Load(f"realseeded-{number}", day[36000:43200], start=DAY * (number - 1) + 36000, before=minutes)
    with open(folder / AZURE, newline="") as file:
        times = [datetime.fromisoformat(row["TIMESTAMP"][:26]).timestamp() for row in csv.DictReader(file)]
    yield Load("azure", np.bincount((np.array(times) - min(times)).astype(int)).astype(float))


def synthetic() -> Iterator[Load]:
    random = np.random.default_rng(5)
    yield Load("step", random.poisson(np.where(np.arange(1200) < 600, 10.0, 200.0)).astype(float))
    yield Load("drift", random.poisson(np.linspace(20.0, 200.0, 1800)).astype(float))
    state, rates = 0, []
    while len(rates) < 1800:
        rates += [(30.0, 150.0)[state]] * int(1 + random.exponential((60.0, 15.0)[state]))
        state = 1 - state
    yield Load("mmpp", random.poisson(rates[:1800]).astype(float))


def asked(load: Load, name: str, options: dict[str, Any]) -> tuple[NDArray[np.float64], NDArray[np.float64], float]:
    """Answers and truth: (kinds, horizons, shares, moments) and (kinds, horizons, moments). And µs of an observation."""
    forecaster = make_forecaster(name, day_s=load.day_s, **options)
    forecaster.seed(load.history, load.start)
    moments = range(WARM, len(load.rates) - max(HORIZONS), EVERY)
    found = np.zeros((2, len(HORIZONS), len(SHARES), len(moments)))
    spent, number = 0.0, 0
    for second, rate in enumerate(load.rates):
        began = time.perf_counter()
        forecaster.observe(load.start + second + 1.0, rate)
        spent += time.perf_counter() - began
        if number < len(moments) and second == moments[number]:
            for kind, question in enumerate((forecaster.quantile, forecaster.peak)):
                for place, ahead in enumerate(HORIZONS):
                    found[kind, place, :, number] = [question(ahead, share) for share in SHARES]
            number += 1
    at = np.array(moments)
    truth = np.zeros((2, len(HORIZONS), len(moments)))
    for place, ahead in enumerate(HORIZONS):
        truth[0, place] = load.rates[at + ahead]
        truth[1, place] = np.lib.stride_tricks.sliding_window_view(load.rates[1:], ahead).max(axis=1)[at]
    return found, truth, 1e6 * spent / len(load.rates)


def judged(load: Load, name: str, **options: Any) -> tuple[NDArray[np.float64], NDArray[np.float64], float]:
    """Mean pinball losses and shares covered: both (kinds, horizons, shares). And µs of an observation."""
    found, truth, spent = asked(load, name, options)
    over = truth[:, :, None, :] - found
    shares = np.array(SHARES)[None, None, :, None]
    loss = np.maximum(shares * over, (shares - 1.0) * over)
    return loss.mean(axis=3), (over <= 0.0).mean(axis=3), spent

"""A synthetic day of queries with the shape of a social network's: a slow daily wave, and plateaus of 4 to 5 times the usual rate.

The papers' figures replay a day of Twitter, which may not be passed on; this has its statistics and none of its data.

`python benches/paper/lookalike.py` writes traces/lookalike-day.txt, the same for a seed: the count of every tenth second of the
day. At 0.1 s a line the day takes 864 s, each line at the rate of its moment, and the noise is that of single seconds.
"""

import argparse
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

DAY = 86_400  # s
SLOT = 7200  # s; one plateau begins in each
BASE, WAVE, TOP = 46.0, 34.0, 8.5  # queries/s at night, what the day adds, the hour of the wave's top
HEIGHT = (150.0, 200.0)  # queries/s that a plateau adds
RISE, HOLD, FALL = (20.0, 60.0), (120.0, 480.0), (90.0, 300.0)  # s
NOISE = 1.1  # variance / mean of the counts of seconds at one rate
OUT = Path(__file__).parent / "traces" / "lookalike-day.txt"


def rates(rng: np.random.Generator) -> NDArray[np.float64]:
    """Queries/s in each second of a day, without noise."""
    second = np.arange(DAY)
    rate = BASE + WAVE * ((1 + np.cos(2 * np.pi * (second / 3600 - TOP) / 24)) / 2) ** 3
    for slot in range(0, DAY, SLOT):
        height, rise, hold, fall = (low + (high - low) * rng.random() for low, high in (HEIGHT, RISE, HOLD, FALL))
        start = slot + (SLOT - rise - hold - fall) * rng.random()
        ends = np.cumsum([start, rise, hold, fall])
        rate += height * np.interp(second, ends, [0, 1, 1, 0])
    return rate


def counts(seed: int) -> NDArray[np.int64]:
    """Queries in each second of the day."""
    rng = np.random.default_rng(seed)
    rate = rates(rng)
    # Sums of uniform numbers rather than Poisson ones: no library's next version draws them differently.
    noise = rng.random((DAY, 12)).sum(axis=1) - 6
    return np.maximum(np.rint(rate + np.sqrt(NOISE * rate) * noise), 0).astype(np.int64)


def text(seed: int, every: int) -> str:
    """The file: what it is, then a count a line."""
    kept = counts(seed)[::every]
    head = (
        f"# A synthetic day, no recording, written by benches/paper/lookalike.py --seed {seed} --every {every}.",
        f"# Compressed: of each {every} seconds of the day the first is kept; a line is the count of queries in that second.",
        f"# To replay the day in {len(kept) / every:g} s: seconds_per_line = {1 / every:g}, and range_qps for the rates wanted.",
    )
    return "\n".join([*head, *map(str, kept.tolist())]) + "\n"


def main() -> None:
    """Write the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--every", type=int, default=10, help="seconds of the day for each line")
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args()
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(text(options.seed, options.every))


if __name__ == "__main__":
    main()

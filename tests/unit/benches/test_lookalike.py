"""The synthetic day that shipped scenarios replay."""

import sys
from pathlib import Path

import numpy as np

from services.simulation.workload import read_counts

sys.path.insert(0, str(Path(__file__).parents[3] / "benches"))

from paper.lookalike import DAY, OUT, counts, text


def test_the_shipped_file_is_what_the_program_writes_for_its_seed() -> None:
    assert OUT.read_text() == text(1, 10)
    assert OUT.stat().st_size < 100_000
    assert read_counts(OUT).tolist() == counts(1)[::10].tolist()
    assert text(1, 10) != text(2, 10)
    assert len(counts(2)) == DAY


def test_a_slow_wave_carries_plateaus_of_4_to_5_times_the_usual_rate() -> None:
    day = counts(1)
    minutes = day.reshape(-1, 60).mean(axis=1)
    usual = np.median(minutes)
    assert 4 < day.max() / day.mean() < 5.5
    assert 0.5 < day.std() / day.mean() < 0.75
    edges = np.diff(np.concatenate([[0], minutes > 2 * usual, [0]]).astype(int))
    lengths = np.flatnonzero(edges == -1) - np.flatnonzero(edges == 1)
    assert len(lengths) == 12
    assert lengths.min() >= 3
    assert lengths.max() <= 15
    tops = [
        minutes[start : start + n].max() / usual for start, n in zip(np.flatnonzero(edges == 1), lengths, strict=True)
    ]
    assert 4 <= np.median(tops) <= 5
    calm = [np.median(minutes[hour * 60 : hour * 60 + 60]) for hour in range(24)]
    assert 7 <= np.argmax(calm) <= 9
    assert 1.5 < max(calm) / min(calm) < 2.2


def test_seconds_are_as_noisy_as_single_queries_make_them() -> None:
    within = counts(1).reshape(-1, 60)
    assert 1.0 < np.median(within.var(axis=1) / within.mean(axis=1)) < 1.2

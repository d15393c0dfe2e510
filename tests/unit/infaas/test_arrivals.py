import gzip

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from infaas.arrivals import from_counts, read_counts, renewal, replay
from infaas.errors import BadInput


@given(
    kind=st.sampled_from(["poisson", "gamma", "uniform"]),
    rate=st.floats(0.1, 500),
    seconds=st.floats(0.01, 20),
    cv=st.floats(0.1, 8),
    seed=st.integers(0, 2**32),
)
def test_arrivals_ascend_within_the_time(kind, rate, seconds, cv, seed):
    times = renewal(kind, rate, seconds, np.random.default_rng(seed), cv)
    assert (np.diff(times) >= 0).all()
    assert times.size == 0 or (times[0] >= 0 and times[-1] < seconds)


@pytest.mark.parametrize(("kind", "cv"), [("poisson", 1.0), ("gamma", 0.5), ("gamma", 4.0)])
def test_rate_and_spread_are_as_asked(kind, cv):
    gaps = np.diff(renewal(kind, 100, 2000, np.random.default_rng(1), cv))
    assert 1 / gaps.mean() == pytest.approx(100, rel=0.05)
    assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.05)


def test_uniform_gaps_are_equal():
    assert renewal("uniform", 4, 1, np.random.default_rng(0)).tolist() == [0, 0.25, 0.5, 0.75]


def test_one_seed_one_load():
    first, second = (renewal("gamma", 50, 10, np.random.default_rng(7), 2.0) for _ in range(2))
    assert first.tolist() == second.tolist()


@given(st.lists(st.integers(0, 20), min_size=1, max_size=30), st.integers(0, 2**32))
def test_a_trace_gives_each_line_its_count(counts, seed):
    times = from_counts(np.array(counts), 2.0, np.random.default_rng(seed))
    assert np.bincount((times // 2.0).astype(int), minlength=len(counts)).tolist() == counts


def test_a_trace_can_be_rescaled():
    counts = np.array([10, 30] * 500)
    times = replay(counts, np.random.default_rng(3), seconds=1000, rate=5.0)
    assert len(times) / 1000 == pytest.approx(5, rel=0.05)
    per_second = np.bincount(times.astype(int), minlength=1000)
    assert per_second[1::2].sum() / per_second[::2].sum() == pytest.approx(3, rel=0.1)
    assert len(replay(counts, np.random.default_rng(3), seconds=2)) == 40


def test_trace_files(tmp_path):
    (tmp_path / "t.txt").write_text("3\n0\n\n5\n")
    (tmp_path / "t.txt.gz").write_bytes(gzip.compress(b"3\n0\n5\n"))
    assert read_counts(tmp_path / "t.txt").tolist() == [3, 0, 5]
    assert read_counts(tmp_path / "t.txt.gz").tolist() == [3, 0, 5]
    for content, says in (
        (b"1\nx\n", "line 2"),
        (b"-1\n", "line 1"),
        (b"", "no arrivals"),
        (b"0\n", "no arrivals"),
        (b"\xff", "cannot read"),
    ):
        (tmp_path / "bad").write_bytes(content)
        with pytest.raises(BadInput, match=says):
            read_counts(tmp_path / "bad")
    with pytest.raises(BadInput, match="No such file"):
        read_counts(tmp_path / "none")


@pytest.mark.parametrize(
    ("rate", "seconds", "cv"), [(0, 1, 1), (-1, 1, 1), (1, 0, 1), (float("nan"), 1, 1), (1e6, 1e6, 1), (1, 1, 0)]
)
def test_loads_that_make_no_sense_are_refused(rate, seconds, cv):
    with pytest.raises(BadInput):
        renewal("gamma", rate, seconds, np.random.default_rng(0), cv)

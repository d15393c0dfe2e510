"""Arrivals: as many as asked, spread as asked, in order, and the same however they are cut into chunks."""

import gzip

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from services.simulation import workload
from services.simulation.scenario.model import WorkloadSpec
from services.simulation.workload import (
    Rates,
    WorkloadError,
    arrivals,
    at_once,
    mean_rate,
    peak_rate,
    read_counts,
    read_times,
    timed,
    zipf,
)
from tests.support.data.examples import examples


def spec(**fields):
    apps = tuple(f"a{number}" for number in range(len(fields.get("shares", (1.0,)))))
    return WorkloadSpec(**{"apps": apps, "shares": (1.0,), **fields})


def drawn(duration, seed=1, **fields):
    return at_once(spec(**fields), duration, np.random.default_rng(seed))[0]


RATES = ((0, 4), (10, 4), (10, 90), (15, 60), (22, 0), (30, 0), (31, 20))

_amount = st.one_of(st.just(0.0), st.floats(0.01, 200))
_points = st.lists(st.tuples(st.floats(0, 12), _amount), min_size=1, max_size=6).map(lambda p: tuple(sorted(p)))
_rated = st.builds(
    lambda arrivals, rate, cv: {"arrivals": arrivals, "rate": rate, "cv": cv},
    st.sampled_from(["poisson", "gamma", "uniform"]),
    _points,
    st.floats(0.1, 8),
)
_mmpp = st.lists(st.tuples(_amount, st.floats(0.001, 5)), min_size=1, max_size=4).map(
    lambda pairs: {"arrivals": "mmpp", "rates": tuple(p[0] for p in pairs), "dwell_s": tuple(p[1] for p in pairs)}
)
_trace = st.builds(
    lambda counts, width, range_qps: {
        "arrivals": "trace",
        "counts": np.array(counts, np.float64),
        "seconds_per_line": width,
        "range_qps": range_qps,
    },
    st.lists(st.one_of(st.integers(0, 60), st.floats(0, 20)), min_size=1, max_size=30),
    st.sampled_from([0.1, 1.0, 0.7]),
    st.sampled_from([None, (0.0, 50.0), (3.0, 3.0), (10.0, 400.0)]),
)
_given = st.lists(st.floats(0, 20), max_size=40).map(lambda t: {"arrivals": "times", "times": np.array(sorted(t))})
_loads = st.one_of(_rated, _mmpp, _trace, _given)


@given(fields=_loads, duration=st.floats(0.01, 15), shares=st.integers(1, 4).map(zipf), seed=st.integers(0, 2**32))
def test_times_rise_within_the_duration_and_ask_apps_that_there_are(fields, duration, shares, seed):
    load = spec(**fields, shares=shares)
    last = 0.0
    for times, apps in arrivals(load, duration, np.random.default_rng(seed), chunk=50):
        assert times.dtype == np.float64
        assert len(times) == len(apps) > 0
        assert times[0] >= last
        assert (np.diff(times) >= 0).all()
        assert times[-1] < duration
        assert apps.min() >= 0
        assert apps.max() < len(shares)
        last = times[-1]
    assert peak_rate(load, duration) >= 0
    assert mean_rate(load, duration) >= 0
    if load.arrivals not in ("mmpp", "times"):
        assert mean_rate(load, duration) <= peak_rate(load, duration) * (1 + 1e-9)


@settings(max_examples=examples(50))
@given(fields=_loads, chunks=st.tuples(st.integers(1, 40), st.integers(41, 5000)), seed=st.integers(0, 2**32))
def test_the_chunks_size_changes_nothing(fields, chunks, seed):
    load = spec(**fields, shares=(0.5, 0.2, 0.3))
    first, second = (
        [np.concatenate([part[which] for part in [(np.empty(0), np.empty(0)), *parts]]).tolist() for which in (0, 1)]
        for parts in (list(arrivals(load, 9.0, np.random.default_rng(seed), chunk=chunk)) for chunk in chunks)
    )
    assert first == second


@given(fields=_loads, seed=st.integers(0, 2**32))
def test_one_seed_one_load(fields, seed):
    load = spec(**fields)
    first, second = (at_once(load, 5.0, np.random.default_rng(seed)) for _ in range(2))
    assert first[0].tolist() == second[0].tolist()
    assert first[1].tolist() == second[1].tolist()


def test_processes_begin_as_in_the_long_run_and_generators_go_on() -> None:
    rng = np.random.default_rng(3)
    load = spec(rate=((0, 20),))
    assert at_once(load, 5, rng)[0].tolist() != at_once(load, 5, rng)[0].tolist()
    # 30 arrivals a run: a process that began with a whole gap would be off by (cv² - 1) / 2, here by 25 %.
    numbers = [len(drawn(3, seed, arrivals="gamma", cv=4.0, rate=((0, 10),))) for seed in range(1500)]
    assert np.mean(numbers) == pytest.approx(30, rel=0.05)
    numbers = [len(drawn(0.1, seed, arrivals="mmpp", rates=(0, 1000), dwell_s=(9, 1))) for seed in range(2000)]
    assert np.mean(numbers) == pytest.approx(10, rel=0.1)


@pytest.mark.parametrize(
    ("kind", "cv"), [("poisson", 1.0), ("gamma", 0.2), ("gamma", 0.5), ("gamma", 1.0), ("gamma", 2.0), ("gamma", 4.0)]
)
def test_rate_and_spread_are_within_3_percent(kind, cv):
    times = drawn(10_000, arrivals=kind, cv=cv, rate=((0, 50),))
    gaps = np.diff(times)
    assert len(times) / 10_000 == pytest.approx(50, rel=0.03)
    assert gaps.mean() == pytest.approx(1 / 50, rel=0.03)
    assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.03)


def test_uniform_gaps_are_equal_and_fractions_of_a_trace_are_rounded_at_random() -> None:
    assert drawn(1, arrivals="uniform", rate=((0, 4),)).tolist() == [0, 0.25, 0.5, 0.75]
    assert np.diff(drawn(100, arrivals="uniform", rate=((0, 7),))) == pytest.approx(np.full(699, 1 / 7))
    times = drawn(20_000, arrivals="trace", counts=np.full(20_000, 0.3))
    assert len(times) / 20_000 == pytest.approx(0.3, rel=0.03)


@pytest.mark.parametrize(("kind", "cv"), [("poisson", 1.0), ("gamma", 3.0), ("gamma", 0.3), ("uniform", 0.0)])
def test_a_changing_rate_is_followed_and_gaps_keep_their_spread(kind, cv):
    runs = 400 if cv else 1
    scale = 50 if cv else 2000
    rate = tuple((second, scale / 50 * queries) for second, queries in RATES)
    parts = [drawn(40, seed, arrivals=kind, cv=cv or 1.0, rate=rate) for seed in range(runs)]
    times = np.concatenate(parts)
    wanted = {
        (0, 10): 40,
        (10, 12.5): (90 + 75) / 2 * 2.5,
        (12.5, 15): (75 + 60) / 2 * 2.5,
        (15, 22): 60 / 2 * 7,
        (22, 30): 0,
        (30, 31): 20 / 2,
        (31, 40): 20 * 9,
    }
    for (start, end), queries in wanted.items():
        number = queries * runs * scale / 50
        found = ((times >= start) & (times < end)).sum()
        assert found == pytest.approx(number, abs=4 * cv * number**0.5 + (number > 0))
    at = np.linspace(0, 40, 400_001)
    qps = np.interp(at, *zip(*[(s + 1e-9 * n, r) for n, (s, r) in enumerate(rate)], strict=True))
    passed = np.concatenate([[0], np.cumsum((qps[1:] + qps[:-1]) / 2 * np.diff(at))])
    gaps = np.concatenate([np.diff(np.interp(part, at, passed)) for part in parts])
    assert gaps.std() / gaps.mean() == pytest.approx(cv, abs=0.03 * max(cv, 1))


def test_a_modulated_process_has_its_mean_and_its_states():
    load = spec(arrivals="mmpp", rates=(2, 200), dwell_s=(3, 0.5))
    times = at_once(load, 30_000, np.random.default_rng(2))[0]
    assert mean_rate(load, 100) == pytest.approx((2 * 3 + 200 * 0.5) / 3.5)
    assert peak_rate(load, 100) == 200
    assert len(times) / 30_000 == pytest.approx(mean_rate(load, 30_000), rel=0.03)
    # The index of dispersion of counts in the long run: 1 + 2 v / (mean x total switching rate), v the rate's variance.
    share = 0.5 / 3.5
    wanted = 1 + 2 * (share * (1 - share) * 198**2) / (mean_rate(load, 1) * (1 / 3 + 1 / 0.5))
    counts = np.histogram(times, np.arange(0, 30_001, 60))[0]
    assert counts.var() / counts.mean() == pytest.approx(wanted, rel=0.2)


def test_three_states_take_their_shares_of_time():
    load = spec(arrivals="mmpp", rates=(0, 10, 1000), dwell_s=(1, 2, 1))
    times = at_once(load, 10_000, np.random.default_rng(5))[0]
    assert len(times) / 10_000 == pytest.approx(255, rel=0.03)
    counts = np.histogram(times, np.arange(0, 10_000, 0.1))[0]
    assert (counts > 30).mean() == pytest.approx(0.25, abs=0.03)


@given(st.lists(st.integers(0, 20), min_size=1, max_size=30), st.integers(0, 2**32))
def test_a_trace_gives_each_line_its_count(counts, seed):
    times = drawn(1000, seed, arrivals="trace", counts=np.array(counts, np.float64), seconds_per_line=2.0)
    assert np.bincount((times // 2.0).astype(int), minlength=len(counts)).tolist() == counts


def test_a_line_with_millions_comes_in_parts():
    load = spec(arrivals="trace", counts=np.array([1, 2.5e6, 3]), seconds_per_line=2.0)
    parts = [times for times, _ in arrivals(load, 10, np.random.default_rng(1))]
    assert max(map(len, parts)) <= 2**20
    counts = np.histogram(np.concatenate(parts), [0, 2, 3, 4, 6])[0]
    assert counts.tolist() == [1, pytest.approx(1.25e6, rel=0.01), pytest.approx(1.25e6, rel=0.01), 3]
    assert counts.sum() == 2_500_004


def test_a_trace_is_mapped_to_a_range():
    counts = np.array([40, 10, 25] * 20, np.float64)
    load = spec(arrivals="trace", counts=counts, seconds_per_line=10.0, range_qps=(20.0, 200.0))
    times = at_once(load, 600, np.random.default_rng(4))[0]
    found = np.histogram(times, np.arange(0, 601, 10))[0].reshape(20, 3).mean(axis=0) / 10
    assert found.tolist() == [pytest.approx(qps, rel=0.03) for qps in (200, 20, 110)]
    assert peak_rate(load, 600) == 200
    assert mean_rate(load, 600) == pytest.approx(110)
    assert mean_rate(load, 15) == pytest.approx((200 * 10 + 20 * 5) / 15)
    assert peak_rate(spec(arrivals="trace", counts=np.ones(5), range_qps=(1, 7)), 5) == 7


def test_a_short_trace_ends_the_load():
    trace = {"arrivals": "trace", "counts": np.full(4, 50.0)}
    for load in (spec(**trace), spec(**trace, range_qps=(50.0, 50.0))):
        times = at_once(load, 16, np.random.default_rng(1))[0]
        assert 3.5 < times.max() < 4
        assert mean_rate(load, 16) == pytest.approx(50 / 4)
    times = drawn(10, arrivals="times", times=np.array([0, 0.5, 0.5, 3, 10, 11]))
    assert times.tolist() == [0, 0.5, 0.5, 3]


def test_rates_of_given_times_and_pieces_count_the_duration_only() -> None:
    load = spec(arrivals="times", times=np.array([0.1, 0.2, 0.9, 1.0, 5.5, 30]))
    assert mean_rate(load, 10) == 0.5
    assert peak_rate(load, 10) == 3
    assert peak_rate(load, 0.5) == 4
    load = spec(rate=RATES)
    assert peak_rate(load, 40) == 90
    assert peak_rate(load, 10) == 4
    assert mean_rate(load, 12.5) == pytest.approx((40 + (90 + 75) / 2 * 2.5) / 12.5)
    assert mean_rate(spec(rate=((5, 10), (15, 30))), 10) == pytest.approx((50 + 5 * 15) / 10)


def test_popularity():
    assert zipf(3) == (pytest.approx(6 / 11), pytest.approx(3 / 11), pytest.approx(2 / 11))
    assert zipf(4, 0.0) == (0.25,) * 4
    assert sum(zipf(22, 1.3)) == pytest.approx(1, abs=1e-12)
    shares = zipf(5)
    _, apps = at_once(spec(rate=((0, 1000),), shares=shares), 100, np.random.default_rng(1))
    assert np.bincount(apps) / len(apps) == pytest.approx(np.array(shares), rel=0.03)


def test_memory_is_bounded_by_the_chunk():
    load = spec(rate=((0, 50_000),), shares=zipf(3))
    sizes = [(len(times), len(apps)) for times, apps in arrivals(load, 20, np.random.default_rng(1))]
    assert max(sizes) <= (workload.CHUNK, workload.CHUNK)
    assert sum(size for size, _ in sizes) == pytest.approx(1e6, rel=0.01)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({}, "rate needs a point"),
        ({"rate": ((0, -1),)}, "rate must be at least 0"),
        ({"rate": ((0, float("nan")),)}, "rate must be at least 0"),
        ({"rate": ((0, 1), (-1, 2))}, "rising seconds"),
        ({"rate": ((0, 1),), "arrivals": "gamma", "cv": 0.0}, "cv must be above 0"),
        ({"rate": ((0, 1),), "shares": (0.5, 0.4)}, "add up to 1, not 0.9"),
        ({"rate": ((0, 1),), "apps": ()}, "one share for each app"),
        ({"arrivals": "mmpp", "rates": (1,), "dwell_s": ()}, "one dwell_s for each"),
        ({"arrivals": "mmpp", "rates": (1, 2), "dwell_s": (1, 0)}, "dwell_s must be above 0"),
        ({"arrivals": "mmpp", "rates": (1, -2), "dwell_s": (1, 1)}, "rates must be at least 0"),
        ({"arrivals": "trace"}, "needs counts"),
        ({"arrivals": "trace", "counts": np.ones(3), "seconds_per_line": 0.0}, "seconds_per_line"),
        ({"arrivals": "trace", "counts": np.ones(3), "range_qps": (5.0, 1.0)}, "the lower first"),
        ({"arrivals": "times"}, "need times"),
    ],
)
def test_loads_that_make_no_sense_are_refused(fields, reason):
    for use in (mean_rate, peak_rate, lambda load, seconds: arrivals(load, seconds, np.random.default_rng(0))):
        with pytest.raises(WorkloadError, match=reason):
            use(spec(**fields), 10.0)


@pytest.mark.parametrize("duration", [0.0, -1.0, float("inf"), float("nan")])
def test_a_load_has_a_duration(duration):
    with pytest.raises(WorkloadError, match="duration must be above 0"):
        arrivals(spec(rate=((0, 1),)), duration, np.random.default_rng(0))


# -- Files of recorded loads.


@pytest.mark.parametrize("name", ["plain.txt", "packed.txt.gz"])
@pytest.mark.parametrize(("read", "values"), [(read_counts, [3, 0, 12]), (read_times, [0, 0.25, 1e3])])
def test_lines_are_read_with_comments_and_blank_lines_between(tmp_path, name, read, values):
    text = "# about this file\n" + "\n\n".join(f" {value} " for value in values) + "\r\n"
    path = tmp_path / name
    path.write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
    found = read(path)
    assert found.dtype == np.float64
    assert found.tolist() == values


@pytest.mark.parametrize(
    ("read", "text", "reason"),
    [
        (read_counts, b"1\n\n-4\n", "line 3: '-4' is no count"),
        (read_counts, b"1\n2.5\n", "line 2: '2.5' is no count"),
        (read_counts, "1\n²\n".encode(), "line 2: '²' is no count"),
        (read_counts, b"1\n99999999999999999999\n", "line 2: '9{20}' is no count"),
        (read_counts, b"1 2 3\n", "line 1: '1 2 3' is no count"),
        (read_counts, b"", "no arrivals"),
        (read_counts, b"# 5\n0\n0\n", "no arrivals"),
        (read_counts, b"\xff\xfe\n", "cannot read"),
        (read_times, b"0.5\nnan\n", "line 2: 'nan' is no time"),
        (read_times, b"0.5\ninf\n", "line 2: 'inf' is no time"),
        (read_times, b"-1\n", "line 1: '-1' is no time"),
        (read_times, b"soon\n", "line 1: 'soon' is no time"),
        (read_times, b"2\n\n1.5\n", "line 3: 1.5 comes after 2: sort"),
        (read_times, b"\n# 1\n", "no arrivals"),
    ],
)
def test_a_bad_file_is_refused_with_its_name_and_line(tmp_path, read, text, reason):
    path = tmp_path / "bad.txt"
    path.write_bytes(text)
    with pytest.raises(WorkloadError, match=reason) as raised:
        read(path)
    assert str(path) in str(raised.value)


@pytest.mark.parametrize("read", [read_counts, read_times])
def test_a_file_that_cannot_be_opened_or_unpacked_is_refused(tmp_path, read):
    whole = gzip.compress(b"1\n1\n" * 100)
    (tmp_path / "cut.gz").write_bytes(whole[:-9])
    (tmp_path / "spoilt.gz").write_bytes(whole[:12] + b"\xff\xff\xff" + whole[15:])
    (tmp_path / "plain.gz").write_bytes(b"1\n2\n")
    for name in ("missing.txt", "cut.gz", "spoilt.gz", "plain.gz", "", "/dev/zero"):
        with pytest.raises(WorkloadError, match="cannot read the trace"):
            read(tmp_path / name)


# -- Rates in pieces: the integral and its inverse.
_rate = st.one_of(st.just(0.0), st.floats(1e-3, 1e5))


@st.composite
def _rates(draw):
    lengths = draw(st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=8))
    pairs = [(draw(_rate), draw(_rate)) for _ in lengths]
    borders = draw(st.floats(0, 100)) + np.concatenate([[0.0], np.cumsum(lengths)])
    first, last = np.array(pairs).T
    before = draw(st.floats(0, 1e6))
    return borders, first, last, before, Rates(borders[:-1], borders[1:], first, last, before)


@given(_rates(), st.lists(st.floats(0, 1), min_size=1, max_size=50))
def test_a_time_is_reached_when_the_integral_says(made, shares):
    borders, first, last, before, rates = made
    assume(rates.expected > 1e-6 * rates.until)  # else there is no number between before and until
    passed = np.minimum(before + rates.expected * np.sort(np.array(shares)), np.nextafter(rates.until, 0))
    times = rates.when(passed)
    assert (times >= borders[0]).all()
    assert (times < borders[-1]).all()
    pieces = np.concatenate([[0.0], np.cumsum(np.diff(borders) * (first + last) / 2)])
    at = np.searchsorted(borders, times, "right") - 1
    inside = (times - borders[at]) / np.diff(borders)[at]
    integral = pieces[at] + np.diff(borders)[at] * (first[at] * inside + (last - first)[at] * inside**2 / 2)
    assert before + integral == pytest.approx(passed, rel=1e-7, abs=1e-7)


def test_pieces_end_within_their_borders_or_the_duration() -> None:
    # The last operational time before a border would, rounded, be at the border, or behind it.
    for end in np.random.default_rng(1).random(2000) + 0.5:
        rates = Rates(np.array([0.3]), np.array([end]), np.array([7.0]), np.array([7.0]))
        if end > 0.3:
            assert rates.when(np.array([np.nextafter(rates.until, 0)]))[0] < end
    assert Rates.stairs(np.array([1.0, 2.0, 4.0]), 0.5, 10).expected == pytest.approx(3.5)
    assert Rates.stairs(np.array([1.0, 2.0, 4.0]), 0.5, 1.25).expected == pytest.approx(2.5)


def test_points_are_joined_and_cut_at_the_duration():
    rates = Rates.through([(2, 10), (4, 30), (4, 0), (9, 5)], 6.5)
    assert rates.expected == pytest.approx(2 * 10 + 2 * 20 + 2.5**2 / 2)
    assert rates.when(np.array([0, 20, 59.999999])).tolist() == [0, 2, pytest.approx(4)]
    assert rates.last[-1] == pytest.approx(2.5)
    assert Rates.through([(5, 10)], 3).expected == pytest.approx(30)
    assert Rates.through([(0, 10), (1, 10)], 3).expected == pytest.approx(30)


def test_neighbouring_arrivals_are_not_turned_round_by_rounding():
    rates = Rates(np.array([0.0]), np.array([1.7]), np.array([3.0]), np.array([7.0]))
    near = [np.random.default_rng(0).random(2000) * 0.9 * rates.expected]
    for _ in range(5):
        near.append(np.nextafter(near[-1], np.inf))
    passed = np.append(np.sort(np.concatenate(near)), rates.until)
    assert (np.diff(rates.when(passed[:-1])) < 0).any(), "nothing to be put right: this test shows nothing"
    whole = np.concatenate(list(timed(iter([rates]), iter([passed]))))
    single = np.concatenate(list(timed(iter([rates]), iter(passed.reshape(-1, 1)))))
    assert (np.diff(whole) >= 0).all()
    assert single.tolist() == whole.tolist()

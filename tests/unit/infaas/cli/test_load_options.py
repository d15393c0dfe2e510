"""The options of `infaas bench` that say what is sent."""

import numpy as np
import pytest

from infaas.cli import main
from infaas.cli.load_options import CLOSED, LoadOptions
from services.simulation.workload import at_once, mean_rate, peak_rate, zipf

ONE = ("a",)


def test_left_out_it_is_a_closed_loop():
    assert LoadOptions().spec(ONE, 5) == (f"closed loop of {CLOSED}", None, (1.0,))
    assert LoadOptions(closed=3, shares="zipf").spec(("a", "b"), 5) == ("closed loop of 3", None, zipf(2))


@pytest.mark.parametrize(
    ("options", "name", "mean", "peak"),
    [
        ({"rate": 30.0}, "poisson", 30, 30),
        ({"rate": 30.0, "arrivals": "uniform"}, "uniform", 30, 30),
        ({"rate": 30.0, "arrivals": "gamma", "cv": 2.5}, "gamma with CV 2.5", 30, 30),
        ({"rate_points": "0:4, 10:4, 10:80,20:40"}, "poisson", (40 + 600) / 20, 80),
        ({"rate_points": "0:20", "arrivals": "gamma", "cv": 1.0}, "gamma with CV 1", 20, 20),
        ({"arrivals": "mmpp", "rates": "10,100", "dwell": "2,1"}, "mmpp with 10,100 queries/s for 2,1 s", 40, 100),
    ],
)
def test_an_open_loop_is_a_load_as_in_a_scenario(options, name, mean, peak):
    told, load, shares = LoadOptions(**options).spec(ONE, 20)
    assert (told, shares) == (name, (1.0,))
    assert mean_rate(load, 20) == pytest.approx(mean)
    assert peak_rate(load, 20) == pytest.approx(peak)


def test_traces_are_scaled_to_a_mean_or_a_range(tmp_path):
    path = tmp_path / "t.txt"
    path.write_text("# counts\n10\n30\n20\n500\n")
    told, load, _ = LoadOptions(trace=path).spec(ONE, 3)
    assert (told, len(at_once(load, 3, np.random.default_rng(0))[0])) == ("t.txt", 60)
    load = LoadOptions(trace=path, rate=5.0, seconds_per_line=10.0).spec(ONE, 30)[1]
    assert mean_rate(load, 30) == pytest.approx(5)
    assert peak_rate(load, 30) == pytest.approx(7.5)
    load = LoadOptions(trace=path, range_qps="1:50", seconds_per_line=0.5).spec(ONE, 2)[1]
    assert (peak_rate(load, 2), load.range_qps) == (50, (1, 50))


def test_given_times_are_taken(tmp_path):
    (tmp_path / "t.txt").write_text("0.5\n1\n7\n")
    told, load, _ = LoadOptions(times=tmp_path / "t.txt").spec(ONE, 5)
    assert told == "t.txt"
    assert at_once(load, 5, np.random.default_rng(0))[0].tolist() == [0.5, 1]


@pytest.mark.parametrize(
    ("shares", "wanted"),
    [(None, (1 / 3,) * 3), ("zipf", zipf(3)), ("zipf:2", zipf(3, 2)), ("0.7,0.2,0.1", (0.7, 0.2, 0.1))],
)
def test_apps_have_shares(shares, wanted):
    _, load, found = LoadOptions(rate=1.0, shares=shares).spec(("a", "b", "c"), 5)
    assert load.shares == found == wanted
    assert load.apps == ("a", "b", "c")


BAD = [
    (["--closed", "4", "--rate", "5"], "--closed and --rate are different kinds of load"),
    (["--closed", "4", "--trace", "{good}"], "--closed and --trace are different kinds of load"),
    (["--rate", "5", "--rate-points", "0:1"], "--rate-points and --rate are different kinds of load"),
    (["--times", "{good}", "--trace", "{good}"], "--times and --trace are different kinds of load"),
    (["--arrivals", "mmpp", "--rates", "1,2"], "--arrivals mmpp needs --rates and --dwell"),
    (["--rates", "1,2", "--dwell", "1,2"], "add --arrivals mmpp"),
    (["--arrivals", "mmpp", "--rates", "1,2", "--dwell", "1"], "--dwell: 1 stays for 2 rates"),
    (["--arrivals", "mmpp", "--rates", "1,2", "--dwell", "1,0"], "--dwell: a stay must last more than 0 s"),
    (["--arrivals", "mmpp", "--rates", "1,-2", "--dwell", "1,1"], "--rates: '1,-2': write numbers of at least 0"),
    (["--arrivals", "mmpp", "--rates", "0,0", "--dwell", "1,1"], "--rates: no query would be sent"),
    (["--arrivals", "mmpp", "--rates", "1,1e9", "--dwell", "1e9,1"], "--rates: the peak is above 200,000 queries/s"),
    (["--arrivals", "gamma"], "--arrivals gamma needs --rate"),
    (["--arrivals", "uniform", "--trace", "{good}"], "--arrivals uniform needs --rate"),
    (["--arrivals", "gamma", "--rate", "5"], "--arrivals gamma needs --cv"),
    (["--seed", "1.5"], "--seed: must be a whole number, not '1.5'"),
    (["--seed", "-1"], "for --seed. Must be >= 0"),
    (["--closed", "2.5"], "--closed: must be a whole number, not '2.5'"),
    (["--items", "1.5"], "--items: must be a whole number, not '1.5'"),
    (["--priority", "1.5"], "--priority: must be a whole number, not '1.5'"),
    (["--priority", "0"], '"0" for --priority. must be at least 1 and at most 9'),
    (["--priority", "10"], '"10" for --priority. must be at least 1 and at most 9'),
    (["--cv", "2", "--rate", "5"], "--cv describes gamma gaps"),
    (["--rate-points", "0:4,60"], "--rate-points: '60': write two numbers of at least 0, separated by a colon"),
    (["--rate-points", "0:4,nan:5"], "--rate-points: 'nan:5'"),
    (["--rate-points", "5:4,0:5"], "--rate-points: '5:4,0:5': sort the points"),
    (["--rate-points", "0:0"], "--rate-points: no query would be sent in 11 s"),
    (["--range-qps", "1:5"], "--range-qps scales a --trace"),
    (["--range-qps", "1:5", "--rate", "3", "--trace", "{good}"], "--range-qps scales a --trace"),
    (["--range-qps", "5:1", "--trace", "{good}"], "--range-qps: '5:1': the lower rate comes first"),
    (["--range-qps", "5", "--trace", "{good}"], "--range-qps: '5': write two numbers"),
    (["--seconds-per-line", "2"], "--seconds-per-line describes a --trace"),
    (["--trace", "{bad}"], "--trace: {bad}, line 2: 'x' is no count of queries"),
    (["--times", "{bad}"], "--times: {bad}, line 2: 'x' is no time"),
    (["--trace", "nowhere.txt"], "--trace: cannot read the trace nowhere.txt: No such file"),
    (["--rate", "100000", "--seconds", "3000"], "--rate: more than 20,000,000 queries in 3001 s"),
    (["--app", "b", "--shares", "0.5,0.4"], "--shares: they add up to 0.9"),
    (["--app", "b", "--shares", "1"], "--shares: 1 shares for 2 apps"),
    (["--shares", "zipf:x"], "--shares: 'x'"),
    (["--shares", "zipf:1,2"], "--shares: 'zipf:1,2': write one exponent"),
    (["--app", "a"], "--app: an app is named twice"),
]


@pytest.mark.parametrize(("arguments", "reason"), BAD)
def test_bad_usage_names_the_option_in_one_line(arguments, reason, tmp_path, capsys):
    files = {"good": tmp_path / "good.txt", "bad": tmp_path / "bad.txt"}
    files["good"].write_text("1\n2\n")
    files["bad"].write_text("1\nx\n")
    assert main(["bench", "--app", "a", *(argument.format(**files) for argument in arguments)]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.count("\n") == 1
    assert reason.format(**files) in said.err

"""The pure parts of benches/fluctuating.py: the load's shape, what is chosen for baselines, and who is charged with what."""

import sys
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

sys.path.insert(0, str(Path(__file__).parents[3] / "benches"))

from proof.choices import Chosen, choose, parse
from proof.load import Sent
from proof.records import Action, Charge, Move, Records
from proof.shape import FLUCTUATING, arrivals, compressed, rate_at
from proof.table import compared, table
from proof.timeline import counts, figures, line, money, most

CPU, CHIP, GPU = "m-v1-ort-fp32-t1-b8", "m-v1-siminferentia-fp32-t1-b8", "m-v1-simgpu-fp32-t1-b8"
HARDWARE = {CPU: "cpu", CHIP: "simulated inferentia", GPU: "simulated gpu"}


# -- the load


def test_the_load_has_two_peaks_where_the_paper_has_them() -> None:
    found = rate_at(FLUCTUATING, np.array([0, 59, 60.5, 75, 89, 120, 149, 165, 200, 240]))
    assert found.tolist() == [4, 4, 42, 80, 80, 4, 4, 80, 4, 4]


def test_compressed_time_keeps_the_rates() -> None:
    assert compressed(FLUCTUATING, 3.0)[-1] == (80, 4)
    assert rate_at(compressed(FLUCTUATING, 3.0), np.array([25.0, 40.0])).tolist() == [80, 4]


def test_arrivals_follow_the_rate_and_the_seed() -> None:
    times = arrivals(FLUCTUATING, 5)
    assert np.array_equal(times, arrivals(FLUCTUATING, 5))
    assert not np.array_equal(times, arrivals(FLUCTUATING, 6))
    assert (np.diff(times) >= 0).all()
    assert 0 <= times[0] <= times[-1] < 240
    for start, end, rate in ((0, 60, 4), (61, 90, 80), (91, 150, 4), (151, 180, 80)):
        wanted = rate * (end - start)
        assert abs(((times >= start) & (times < end)).sum() - wanted) < 5 * wanted**0.5


# -- choices


def variant(name: str, rate: float, price: float, latency_ms: float) -> dict[str, object]:
    return {
        "variant": name,
        "hardware": HARDWARE[name].removeprefix("simulated "),
        "accuracy": 0.98,
        "latency_ms": latency_ms,
        "saturation_qps": rate,
        "price_per_hour": price,
        "threads": 1,
    }


VARIANTS = [variant(CPU, 23.0, 0.048, 43.0), variant(CHIP, 290.0, 0.09, 12.0), variant(GPU, 2000.0, 0.3, 2.0)]


@pytest.mark.parametrize(
    ("policy", "cores", "chosen"),
    [
        ("infaas", 2, None),
        ("static", 2, Chosen(CHIP, 1)),
        ("static@gpu", 2, Chosen(GPU, 1)),
        ("static@cpu", 8, Chosen(CPU, 4)),
        ("replicate", 2, Chosen(CPU, 1)),
        ("replicate@inferentia", 2, Chosen(CHIP, 1)),
    ],
)
def test_a_developer_chooses_what_carries_the_peak_at_least_cost(
    policy: str, cores: int, chosen: Chosen | None
) -> None:
    assert choose(parse(policy), VARIANTS, 80.0, latency_ms=250.0, accuracy=0.95, cores=cores) == chosen


@pytest.mark.parametrize(
    ("policy", "latency_ms", "accuracy"),
    [("static@cpu", 250.0, 0.9), ("static", 250.0, 0.99), ("replicate", 50.0, 0.9)],
)
def test_what_nothing_can_meet_is_said(policy: str, latency_ms: float, accuracy: float) -> None:
    with pytest.raises(ValueError, match=f"{policy}: no variant"):
        choose(parse(policy), VARIANTS, 80.0, latency_ms=latency_ms, accuracy=accuracy, cores=2)


@pytest.mark.parametrize("text", ["", "sm+", "infaas@gpu"])
def test_an_unknown_policy_is_refused_with_what_there_is(text: str) -> None:
    with pytest.raises(ValueError, match="use infaas, static or replicate"):
        parse(text)


# -- what happened


def move(at: float, instance: str, name: str, state: str) -> Move:
    return Move(at, instance, name, state, "")


MOVES = [
    move(-3.0, "a", CPU, "Loading"),
    move(-2.0, "a", CPU, "Active"),
    move(4.0, "b", CHIP, "Loading"),
    move(5.0, "a", CPU, "Overloaded"),
    move(8.0, "b", CHIP, "Active"),
    move(9.0, "a", CPU, "Inactive"),
    move(12.0, "c", CHIP, "Loading"),
]


def test_instances_are_counted_in_the_state_that_they_are_in() -> None:
    found = counts(MOVES, np.array([0.0, 4.5, 6.0, 8.5, 10.0]))
    assert found[CPU] == {"Loading": [0] * 5, "Active": [1, 1, 0, 0, 0], "Overloaded": [0, 0, 1, 1, 0]}
    assert found[CHIP]["Loading"] == [0, 1, 1, 0, 0]
    assert found[CHIP]["Active"] == [0, 0, 0, 1, 1]


def test_the_highest_numbers_are_those_of_the_load_alone() -> None:
    assert most(MOVES, 10.0) == {CPU: 1, CHIP: 1}
    assert most(MOVES, 12.0) == {CPU: 1, CHIP: 2}
    assert most(MOVES, 3.0) == {CPU: 1}


def test_money_is_counted_within_the_load_alone() -> None:
    charges = [
        Charge(0.5, 1.0, CPU, 4.0),  # half of it before the load
        Charge(0.5, 1.0, "", 6.0),
        Charge(5.0, 1.0, CPU, 1.0),
        Charge(11.0, 2.0, "", 2.0),  # half of it after the load
        Charge(20.0, 1.0, CPU, 100.0),
    ]
    assert money(charges, 10.0) == (pytest.approx(3.0), pytest.approx(7.0))


SENT = [
    Sent(0.5, 0.1, 0.0, variant=CPU, hardware="cpu", accuracy=0.9, right=True),
    Sent(1.5, 0.3, 0.0, variant=CPU, hardware="cpu", accuracy=0.9, right=False),
    Sent(1.6, 0.01, 0.0, code="overloaded"),
    Sent(2.5, 0.02, 0.0, variant=CHIP, hardware="inferentia", simulated=True, accuracy=0.8),
    Sent(2.6, 5.0, 0.0, code="failed"),
]
RECORDS = Records(
    moves=MOVES,
    charges=[Charge(1.0, 1.0, CPU, 0.001), Charge(1.0, 1.0, "", 0.009)],
    actions=[
        Action(-1.0, "dispatcher", "load", CPU, 1, "", None, None),
        Action(4.0, "model", "upgrade", CHIP, 1, "", "ilp", 1.0),
    ],
    hardware=HARDWARE,
    outcomes={},
)


def test_every_query_ends_in_one_column() -> None:
    found = figures(SENT, RECORDS, 10.0, 0.25)
    assert (found.queries, found.in_time, found.late, found.refused, found.failed) == (5, 2, 1, 1, 1)
    assert found.violation_ratio == pytest.approx(0.6)
    assert found.accuracy == pytest.approx(0.85)
    assert (found.real, found.right) == (2, 0.5)
    assert (found.cost, found.bill) == (pytest.approx(0.001), pytest.approx(0.01))
    assert found.actions == {"upgrade": 1}


def test_the_time_line_counts_queries_when_they_should_have_been_sent() -> None:
    found = line(SENT, RECORDS, 4.0, 0.25, 1.0)
    assert found.offered == [1, 2, 2, 0]
    assert found.in_time == [1, 0, 1, 0]
    assert found.late == [0, 1, 0, 0]
    assert found.refused == [0, 1, 1, 0]
    assert found.cost_rate == pytest.approx([3.6, 0, 0, 0])
    assert found.bill_rate == pytest.approx([36.0, 0, 0, 0])


def test_the_table_says_what_is_simulated_and_how_policies_compare() -> None:
    ours = figures(SENT, RECORDS, 10.0, 0.25)
    dear = replace(ours, cost=2 * ours.cost, violation_ratio=0.0)
    text = table({"infaas": ours, "static": dear}, HARDWARE)
    assert "1 × simulated inferentia fp32 t1 b8" in text
    assert "60.0%" in text
    assert len({row.count("|") for row in text.splitlines()}) == 1
    static = compared({"infaas": ours, "static": dear}).splitlines()[-1]
    assert [cell.strip() for cell in static.strip("|").split("|")] == ["static", "0.50", "—", "1.00"]
    assert compared({"static": ours}) == ""

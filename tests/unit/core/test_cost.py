"""Prices, predicted latencies and what a query owes."""

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bus.messages.catalog import Profile, ProfileRow, VariantRecord
from services.core import cost
from services.core.placement import container_kind
from services.core.settings import PriceSettings
from services.shell.prices import load_prices
from services.shell.settings import SettingsError
from tests.support.data.events import device, variant_record
from tests.support.simulated.fleet import variant

PRICES = {"cpu": 0.048, "gpu": 3.06, "inferentia": 0.0905}


def row(batch: int, ms: float, length: int | None = None) -> ProfileRow:
    return ProfileRow(batch=batch, p50_ms=ms, p99_ms=ms * 1.2, cpu_ms=ms, wall_over_cpu=1.0, length=length)


ROWS = (row(1, 2.0), row(2, 3.0), row(8, 9.0))


def varied(rows: Sequence[ProfileRow] = ROWS, memory_mb: float = 100.0, **fields: Any) -> VariantRecord:
    """What the tests vary of a variant record."""
    profile = Profile(rows=list(rows), load_ms=50.0, memory_mb=memory_mb, saturation_qps=500.0)
    return variant_record(**({"max_batch": 8, "profile": profile} | fields))


def test_an_instance_costs_its_larger_share_and_never_more_than_its_device() -> None:
    one = cost.instance_price_per_s(varied(threads=1), PRICES, 2, 8000.0)
    two = cost.instance_price_per_s(varied(threads=2), PRICES, 2, 8000.0)
    assert one == pytest.approx(0.048 / 3600)
    assert two == pytest.approx(0.096 / 3600)
    price = cost.instance_price_per_s(varied(memory_mb=6000.0), PRICES, 2, 8000.0)
    assert price == pytest.approx(0.75 * 0.096 / 3600)
    price = cost.instance_price_per_s(varied(threads=16, memory_mb=1e6), PRICES, 2, 8000.0)
    assert price == pytest.approx(0.096 / 3600)
    price = cost.instance_price_per_s(varied(hardware="gpu", memory_mb=4000.0), PRICES, 1, 16000.0)
    assert price == pytest.approx(0.25 * 3.06 / 3600)
    with pytest.raises(cost.UnknownPrice, match=r"prices\.per_hour\.tpu"):
        cost.price_per_hour("tpu", PRICES)


def test_latency_is_linear_between_rows_and_never_faster_by_noise() -> None:
    record = varied()
    assert [cost.latency_ms(record, n) for n in (1, 2, 5, 8, 16)] == pytest.approx([2.0, 3.0, 6.0, 9.0, 17.0])
    for rows in ([row(4, 8.0)], [row(4, 8.0), row(4, 8.0)]):
        assert cost.latency_ms(rows, 6) == pytest.approx(12.0)
    assert cost.latency_ms([row(4, 7.0), row(8, 9.0)], 1) == pytest.approx(7.0)
    assert cost.latency_ms([row(1, 5.0), row(2, 4.0), row(4, 8.0)], 2) == pytest.approx(5.0)
    rows = [row(1, 2.0, 16), row(1, 6.0, 64)]
    assert [cost.latency_ms(rows, 1, length) for length in (8, 16, 17, 64, 128, None)] == pytest.approx(
        [2.0, 2.0, 6.0, 6.0, 12.0, 6.0]
    )


@given(st.lists(st.floats(0.97, 1.03), min_size=3, max_size=3))
def test_the_line_beyond_the_measured_batches_is_within_a_tenth(noise: list[float]) -> None:
    """A model that takes 10 + b ms, known at 1, 4 and 8 items to 3 %."""
    rows = [row(n, (10.0 + n) * factor) for n, factor in zip((1, 4, 8), noise, strict=True)]
    assert cost.latency_ms(rows, 16) == pytest.approx(26.0, rel=0.1)
    table = cost.LatencyTable(varied(rows=rows, max_batch=16))
    assert table.seconds(16) == pytest.approx(0.026, rel=0.1)
    assert table.seconds(32) == pytest.approx(2 * table.seconds(16))  # two batches


@given(st.lists(st.floats(0.001, 1e4), min_size=1, max_size=8), st.integers(0, 500))
def test_beyond_the_measured_batches_latency_never_falls(figures: list[float], more: int) -> None:
    rows = [row(2**power, ms) for power, ms in enumerate(figures)]
    beyond = cost.latency_ms(rows, rows[-1].batch + more)
    assert beyond >= max(figures)
    assert cost.latency_ms(rows, rows[-1].batch + more + 1) >= beyond


@pytest.mark.parametrize(("rows", "batch", "words"), [([], 1, "no measured rows"), ([row(1, 1.0)], 0, "at least 1")])
def test_what_cannot_be_predicted_says_why(rows: list[ProfileRow], batch: int, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        cost.latency_ms(rows, batch)


def test_items_cost_less_in_batches_never_nothing_and_fit_no_negative_budget() -> None:
    record = varied()
    handling = cost.HANDLING_MS / 1000
    assert cost.cost_per_1000(record, 0.01, 1) == pytest.approx(0.01 * (0.002 + handling) * 1000)
    assert cost.cost_per_1000(record, 0.01, 8) == pytest.approx(0.01 * (0.009 + handling) * 1000 / 8)
    # What its queries will owe includes what the executor does around the model.
    record = varied(rows=[row(1, 0.005), row(64, 0.1)], max_batch=64)
    assert cost.cost_per_1000(record, 0.01, 1) > 10 * 0.01 * 0.005
    assert cost.cost_per_1000(record, 0.01, 64) < cost.cost_per_1000(record, 0.01, 1) / 20
    assert cost.LatencyTable(varied()).largest_batch_within(-1.0) == 0
    assert cost.load_seconds(varied()) == pytest.approx(0.05 + cost.LOADING_S)


rows_of_a_profile = st.lists(
    st.tuples(st.integers(1, 128), st.floats(0.001, 1e4)), min_size=1, max_size=8, unique_by=lambda pair: pair[0]
).map(lambda pairs: [row(batch, ms) for batch, ms in pairs])


@given(rows_of_a_profile, st.integers(1, 128))
def test_the_table_agrees_with_the_function_and_rises(rows: list[ProfileRow], max_batch: int) -> None:
    record = varied(rows=rows, max_batch=max_batch)
    table = cost.LatencyTable(record)
    seconds = [table.seconds(n) for n in range(1, max_batch + 1)]
    assert seconds == pytest.approx([cost.latency_ms(record, n) / 1000 for n in range(1, max_batch + 1)])
    assert seconds == sorted(seconds)


@given(rows_of_a_profile, st.integers(1, 128), st.floats(0, 20))
def test_the_largest_batch_within_fits_and_one_more_does_not(
    rows: list[ProfileRow], max_batch: int, budget: float
) -> None:
    table = cost.LatencyTable(varied(rows=rows, max_batch=max_batch))
    n = table.largest_batch_within(budget)
    assert 0 <= n <= max_batch
    if n:
        assert table.seconds(n) <= budget
    if n < max_batch:
        assert table.seconds(n + 1) > budget


@given(st.lists(st.integers(1, 64), min_size=1, max_size=20), st.floats(0, 1), st.floats(0, 100))
def test_queries_of_a_batch_pay_for_it_exactly_once(items: list[int], price: float, busy: float) -> None:
    total = sum(items)
    assert sum(cost.query_cost(price, busy, total, n) for n in items) == pytest.approx(price * busy)


@pytest.mark.parametrize(("length", "bucket"), [(1, 16), (16, 16), (17, 64), (64, 64), (65, 80), (80, 80), (200, 208)])
def test_lengths_are_rounded_up_to_what_was_measured(length: int, bucket: int) -> None:
    assert cost.bucket_of(length, [16, 64]) == bucket


def test_users_processes_and_remote_engines_have_prices_of_their_own() -> None:
    kind = container_kind("m", "1")
    assert cost.price_per_hour(kind, PRICES) == 0.048
    assert cost.price_per_hour(kind, PRICES | {kind: 1.0}) == 1.0
    with pytest.raises(cost.UnknownPrice):
        cost.price_per_hour(kind, {})
    record = varied(hardware=kind)
    assert cost.instance_price_per_s(record, PRICES, 1, 1e6) == pytest.approx(0.048 / 3600.0)
    record = varied(hardware="remote", memory_mb=0.0)
    assert cost.instance_price_per_s(record, {"remote": 3.6}, 64, 0.0) == pytest.approx(0.001)
    devices = [device(kind, price_per_hour=price) for kind, price in (("cpu", 0.1), ("remote", 3.6), ("gpu", 1.0))]
    assert cost.machine_price(devices) == pytest.approx(1.1)
    assert load_prices(PriceSettings()) == {"cpu": 0.048, "gpu": 3.06, "inferentia": 0.0905, "remote": 0.0}
    assert load_prices(PriceSettings(per_hour={"cpu": 0.1, "tpu": 1.0}))["cpu"] == 0.1
    with pytest.raises(SettingsError, match=r"prices\.per_hour\.cpu"):
        load_prices(PriceSettings(per_hour={"cpu": -1.0}))


@given(st.lists(st.floats(0.01, 50.0), min_size=4, max_size=4), st.integers(1, 40))
def test_no_batch_charges_a_query_more_than_was_predicted(p50: list[float], items: int) -> None:
    """Whichever others are in its batch, and where a large batch takes long for each item."""
    rows = [
        ProfileRow(batch=b, p50_ms=ms, p99_ms=ms, cpu_ms=ms, wall_over_cpu=1.0)
        for b, ms in zip((1, 2, 4, 8), p50, strict=True)
    ]
    table = cost.LatencyTable(
        variant(max_batch=8, profile=Profile(rows=rows, load_ms=1.0, memory_mb=1.0, saturation_qps=1.0))
    )
    most, handling = table.charged_seconds(items), cost.HANDLING_MS / 1000.0
    for batch in range(items, 9):
        assert cost.query_cost(1.0, table.by_size[batch] + handling, batch, items) <= most * (1 + 1e-9)
    full, rest = divmod(items, 8)
    if full:
        alone = full * (table.by_size[8] + handling) + (table.by_size[rest] + handling if rest else 0.0)
        assert most >= alone * (1 - 1e-9)

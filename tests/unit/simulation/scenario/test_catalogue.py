"""Variants, apps, machines and prices as a scenario's file has them."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bus.codec import encode
from bus.messages.catalog import BatchingRule
from services.core.catalog import Catalog, key_of
from services.core.cost import LatencyTable, instance_price_per_s, price_per_hour
from services.simulation.scenario.catalogue import ServingVariant, link
from tests.support.data.examples import examples
from tests.support.data.scenario_files import SOUND, changed, read
from tests.support.simulated.fleet import variant


def only(tmp_path, *changes, name="A"):
    """The variant of this name after some changes."""
    return next(one for one in read(tmp_path, changed(*changes)).variants if one.variant == name)


def of_speed(tmp_path, **says):
    """Variant A with this profile and no other figures of speed."""
    return only(tmp_path, ("variant.0.latency_ms", ...), ("variant.0.saturation_qps", ...), *((f"variant.0.{k}", v) for k, v in says.items()))  # fmt: skip


def test_a_table_of_batches_is_linear_between_its_points(tmp_path):
    found = of_speed(tmp_path, batch_latency_ms={"1": 15.0, "9": 31.0}, max_batch=18)
    table = LatencyTable(found)
    assert [1000 * table.seconds(n) for n in (1, 5, 9, 18)] == pytest.approx([15, 23, 31, 49])
    assert found.profile.saturation_qps == pytest.approx(18 / 0.049)
    assert of_speed(tmp_path, batch_latency_ms={"1": 15.0, "9": 31.0}).max_batch == 9
    assert of_speed(tmp_path, batch_latency_ms={"1": 15.0, "9": 31.0}, max_batch=4).profile.saturation_qps == pytest.approx(4 / 0.021)  # fmt: skip


def test_a_line_of_batches_holds_for_every_size(tmp_path):
    found = of_speed(tmp_path, base_ms=2.0, per_item_ms=0.5, max_batch=32)
    table = LatencyTable(found)
    assert [1000 * table.seconds(n) for n in (1, 7, 32)] == pytest.approx([2.5, 5.5, 18])
    assert found.profile.saturation_qps == pytest.approx(32 / 0.018)
    assert of_speed(tmp_path, base_ms=2.0).max_batch == 1


@pytest.mark.parametrize("says", [{"batch_latency_ms": {"1": 15.0, "9": 31.0}}, {"base_ms": 2.0, "per_item_ms": 0.5}])
def test_the_planning_file_s_latency_means_nothing_beside_a_table_or_a_line(tmp_path, says):
    assert of_speed(tmp_path, latency_ms=777, **says) == of_speed(tmp_path, **says)


@pytest.mark.parametrize(("latency", "qps", "batch"), [(200, 5, 1), (20, 100, 2), (15, 800, 12), (200, 4, 1)])
def test_one_latency_and_a_throughput_say_how_large_a_batch_is(tmp_path, latency, qps, batch):
    found = of_speed(tmp_path, latency_ms=latency, saturation_qps=qps)
    assert (found.max_batch, found.profile.saturation_qps) == (batch, qps)
    assert LatencyTable(found).seconds(batch) == pytest.approx(latency / 1000)
    assert of_speed(tmp_path, latency_ms=latency).profile.saturation_qps == pytest.approx(1000 / latency)


def test_records_are_simulated_and_say_what_the_block_says(tmp_path):
    found = only(tmp_path, ("variant.0.load_s", 1.5), ("variant.0.cost_per_s", 2.0))
    assert (found.simulated, found.hardware, found.threads, found.accuracy) == (True, "cpu", 4, 0.7)
    assert (found.profile.load_ms, found.profile.memory_mb, found.price_per_s) == (1500.0, 1024.0, 2.0)
    assert found.profile.provenance == "synthetic"


def test_prices_of_instances_are_shares_of_devices_where_memory_says_how_many_fit(tmp_path):
    scenario = read(tmp_path, changed())
    a, b = sorted(scenario.variants, key=lambda one: one.variant)
    assert instance_price_per_s(a, scenario.prices, 8, 32 * 1024) == pytest.approx(0.2 / 3600)
    assert instance_price_per_s(b, scenario.prices, 1, 16 * 1024) == pytest.approx(2.66 * 1.3 / 16 / 3600)
    whole = only(tmp_path, ("variant.1.memory_gb", ...), name="B")  # nothing says how many fit: a whole device
    assert whole.price_per_s == pytest.approx(2.66 / 3600)
    metered = only(tmp_path, ("cost", {"meter": "memory", "per_gb_s": {"cpu": 0.1, "gpu": 0.5}}), name="B")
    assert metered.price_per_s == pytest.approx(0.65)


def test_devices_of_a_machine(tmp_path):
    many = ("worker.2", {"kind": "m", "devices": {"gpu": 2, "inferentia": 1, "tpu": 1}, "resources": {"gpu_memory_gb": 16, "cpu_cores": 4}, "price_per_hour": 9.0})  # fmt: skip
    scenario = read(tmp_path, changed(many))
    spec = scenario.policies[0].machines[2]
    assert [(d.name, d.kind, d.cores, d.memory_mb, d.simulated) for d in spec.devices] == [
        ("cpu", "cpu", 4, 1e7, True), ("gpu", "gpu", 1, 16384.0, True), ("gpu1", "gpu", 1, 16384.0, True),
        ("inferentia", "inferentia", 4, 1e7, True), ("tpu", "tpu", 1, 1e7, True),
    ]  # fmt: skip
    assert (spec.start, spec.minimum, spec.maximum) == (0, 0, 0)
    assert [(one.start, one.minimum, one.maximum) for one in scenario.policies[0].machines[:2]] == [
        (2, 1, 4),
        (1, 1, 3),
    ]


MIXED = {"cpu": {"cpu": 8}, "gpu": {"gpu": 1, "cpu": 4}, "both": {"gpu": 2, "inferentia": 1, "cpu": 2}}


@given(
    st.lists(st.sampled_from(sorted(MIXED)), min_size=1, unique=True),
    st.floats(0.5, 2.0),
)
@settings(deadline=None, max_examples=examples(30))
def test_devices_add_up_to_their_machine(tmp_path_factory, kinds, factor):
    price = {"cpu": 0.4, "gpu": 3.26, "both": 7.0}
    workers = [
        {"kind": kind, "devices": MIXED[kind], "price_per_hour": price[kind] * factor, "start": 1} for kind in kinds
    ]
    tree = changed(("worker", workers), ("variant", [SOUND["variant"][0] | {"app": ["faces", "cars"], "uses": {}}]))
    scenario = read(tmp_path_factory.mktemp("s"), tree)
    for spec in scenario.policies[0].machines:
        total = sum(price_per_hour(d.kind, scenario.prices, d.cores) for d in spec.devices)
        assert total == pytest.approx(spec.price_per_hour)


def test_machines_without_a_price_cost_what_the_list_says(tmp_path):
    scenario = read(tmp_path, changed(("worker.0.price_per_hour", ...), ("worker.1.price_per_hour", ...)))
    assert [one.price_per_hour for one in scenario.policies[0].machines] == pytest.approx([8 * 0.048, 3.06 + 8 * 0.048])


@given(st.lists(st.tuples(st.sampled_from("mn"), st.sets(st.sampled_from("abcd"), min_size=1)), min_size=1, max_size=8))
@settings(deadline=None, max_examples=examples(100))
def test_every_app_is_served_by_its_variants_and_no_others(given_to):
    entries = [
        ServingVariant(variant(f"v{i}", model=model), frozenset(apps)) for i, (model, apps) in enumerate(given_to)
    ]
    linked = link(entries)
    assert {model for model, _ in linked.models} >= {model for model, _ in given_to}
    served = {
        app: {v.variant for v in linked.variants if links.get(v.model) == v.version}
        for app, links in linked.links.items()
    }
    wanted = {app: {e.record.variant for e in entries if app in e.apps} for e in entries for app in e.apps}
    assert served == wanted


def test_the_catalogue_of_a_scenario_serves_each_app(tmp_path):
    scenario = read(tmp_path, changed())
    catalog = Catalog()
    for record in (*scenario.variants, *scenario.models, *scenario.apps):
        catalog.apply(key_of(record), encode(record))
    assert not catalog.unreadable
    assert {app.app: {one.variant for one in catalog.variants_of(app.app)} for app in scenario.apps} == {
        "faces": {"A", "B"},
        "cars": {"B"},
    }


def test_an_app_may_have_a_target_of_its_own(tmp_path):
    scenario = read(tmp_path, changed(("app.0.slo_target", 0.999)))
    assert {app.app: app.slo_target for app in scenario.apps} == {"faces": 0.999, "cars": None}


def test_batching_is_stated_by_an_app_or_a_variant(tmp_path):
    scenario = read(
        tmp_path,
        changed(("app.0.batching", "aimd"), ("variant.1.batching", {"policy": "delayed", "wait_ms": 2, "batch": 1})),
    )
    assert scenario.batching == {
        "batching.app.faces": BatchingRule(policy="aimd"),
        "batching.variant.B": BatchingRule(policy="delayed", wait_ms=2.0, batch=1),
    }


def test_apps_come_from_the_variants_where_no_block_names_any(tmp_path):
    scenario = read(tmp_path, changed(("app", [])))
    assert {name: (needs.latency_ms, needs.accuracy) for name, needs in scenario.needs.items()} == {
        "cars": (None, None),
        "faces": (None, None),
    }

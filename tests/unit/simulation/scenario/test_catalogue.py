"""Variants, apps, machines and prices as a scenario's file has them."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bus.messages.catalog import BatchingRule
from bus.messages.public import Requirements
from services.core.cost import LatencyTable, instance_price_per_s, price_per_hour
from services.simulation.scenario.catalogue import ServingVariant, link
from services.simulation.scenario.model import FaultSpec, JobSpec, WorkloadSpec
from tests.support.data.events import catalog_of
from tests.support.data.examples import examples
from tests.support.data.small_scenarios import SOUND, changed, read
from tests.support.simulated.fleet import variant


def only(tmp_path, *changes, name="A"):
    """The variant of this name after some changes."""
    return next(one for one in read(tmp_path, changed(*changes)).variants if one.variant == name)


def of_speed(tmp_path, **says):
    """Variant A with this profile and no other figures of speed."""
    return only(tmp_path, ("variant.0.latency_ms", ...), ("variant.0.saturation_qps", ...), *((f"variant.0.{k}", v) for k, v in says.items()))  # fmt: skip


def test_batches_are_tables_or_lines(tmp_path) -> None:
    found = of_speed(tmp_path, batch_latency_ms={"1": 15.0, "9": 31.0}, max_batch=18)
    table = LatencyTable(found)
    assert [1000 * table.seconds(n) for n in (1, 5, 9, 18)] == pytest.approx([15, 23, 31, 49])
    assert found.profile.saturation_qps == pytest.approx(18 / 0.049)
    assert of_speed(tmp_path, batch_latency_ms={"1": 15.0, "9": 31.0}).max_batch == 9
    assert of_speed(tmp_path, batch_latency_ms={"1": 15.0, "9": 31.0}, max_batch=4).profile.saturation_qps == pytest.approx(4 / 0.021)  # fmt: skip
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


def test_records_machines_and_apps_are_as_the_blocks_and_lists_say(tmp_path) -> None:
    found = only(tmp_path, ("variant.0.load_s", 1.5), ("variant.0.cost_per_s", 2.0))
    assert (found.simulated, found.hardware, found.threads, found.accuracy) == (True, "cpu", 4, 0.7)
    assert (found.profile.load_ms, found.profile.memory_mb, found.price_per_s) == (1500.0, 1024.0, 2.0)
    assert found.profile.provenance == "synthetic"
    scenario = read(tmp_path, changed(("worker.0.price_per_hour", ...), ("worker.1.price_per_hour", ...)))
    assert [one.price_per_hour for one in scenario.policies[0].machines] == pytest.approx([8 * 0.048, 3.06 + 8 * 0.048])
    scenario = read(tmp_path, changed(("app.0.slo_target", 0.999)))
    assert {app.app: app.slo_target for app in scenario.apps} == {"faces": 0.999, "cars": None}


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
    catalog = catalog_of(*scenario.variants, *scenario.models, *scenario.apps)
    assert not catalog.unreadable
    assert {app.app: {one.variant for one in catalog.variants_of(app.app)} for app in scenario.apps} == {
        "faces": {"A", "B"},
        "cars": {"B"},
    }


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


# -- Loads, offline work, faults and what is counted, as a scenario's file has them.


def load(tmp_path, **says):
    return read(tmp_path, changed(("load", [says]))).loads[0]


def test_rates_are_numbers_or_points_and_loads_may_ask_for_more(tmp_path) -> None:
    assert load(tmp_path, app="cars", rate=10) == WorkloadSpec(apps=("cars",), shares=(1.0,), rate=((0.0, 10.0),))
    assert load(tmp_path, app="cars", rate=[[0, 4], [60, 0.5]]).rate == ((0.0, 4.0), (60.0, 0.5))
    assert load(tmp_path, app="cars", rate=1, arrivals="gamma", cv=4).cv == 4.0
    found = load(tmp_path, app="cars", arrivals="mmpp", rates=[1, 9], dwell_s=[5, 2])
    assert (found.rates, found.dwell_s) == ((1.0, 9.0), (5.0, 2.0))
    assert load(tmp_path, app="cars", rate=1).needs is None
    found = load(tmp_path, app="cars", rate=1, accuracy=0.7, items=4)
    assert (found.needs, found.items) == (Requirements(latency_ms=100.0, accuracy=0.7), 4)  # 100 ms: what cars asks for
    found = load(tmp_path, apps=["faces", "cars"], rate=1, latency_ms=50)
    assert found.needs == Requirements(latency_ms=50.0)


@pytest.mark.parametrize(
    ("shares", "wanted"),
    [
        ("zipf", (2 / 3, 1 / 3)),
        ({"zipf": 2}, (0.8, 0.2)),
        ({"zipf": 0}, (0.5, 0.5)),
        ([0.8, 0.2], (0.8, 0.2)),
        (None, (0.5, 0.5)),
    ],
)
def test_shares_of_a_stream(tmp_path, shares, wanted):
    found = load(tmp_path, apps=["faces", "cars"], rate=1, **({} if shares is None else {"shares": shares}))
    assert found.apps == ("faces", "cars")
    assert found.shares == pytest.approx(wanted)


def test_traces_are_read_from_beside_the_file(tmp_path):
    (tmp_path / "t").mkdir()
    (tmp_path / "t/counts.txt").write_text("3\n0\n12\n")
    (tmp_path / "t/times.txt").write_text("0.5\n1.5\n")
    found = load(tmp_path, app="cars", arrivals="trace", file="t/counts.txt", seconds_per_line=2, range_qps=[10, 1000])
    assert (found.counts.tolist(), found.seconds_per_line, found.range_qps) == ([3, 0, 12], 2.0, (10.0, 1000.0))
    found = load(tmp_path, app="cars", arrivals="times", file=str(tmp_path / "t/times.txt"))
    assert found.times.tolist() == [0.5, 1.5]


@pytest.mark.parametrize("worker", ["cpu-0", "cpu-3", "cpu-7-1", "gpu-12-34"])
def test_faults_befall_workers_that_some_policy_has_or_may_order(tmp_path, worker):
    four = {"name": "four", "base": "infaas", "start": {"cpu": 4}}
    fault = {"kind": "worker-dies", "at_s": 6, "worker": worker}
    assert read(tmp_path, changed(("policy", [four]), ("fault", [fault]))).faults[0].worker == worker


@pytest.mark.parametrize(
    "process",
    ["d-0", "vm-0", "vm-1", "jobs-0", "cpu-0", "cpu-0/cpu", "monitor-cpu-0", "model-gpu-1-2", "offline-cpu-0"],
)
def test_faults_befall_processes(tmp_path, process):
    fault = {"kind": "process-dies", "at_s": 6, "process": process}
    (found,) = read(tmp_path, changed(("fault", [fault]))).faults
    assert found == FaultSpec(kind="process-dies", at_s=6.0, process=process, delay_s=0.5)


@pytest.mark.parametrize(
    "fault",
    [
        {"kind": "link-clogged", "until_s": 9.0, "process": "d-0", "direction": "in"},
        {"kind": "link-lost", "until_s": 9.0, "process": "clients"},
        {"kind": "worker-joins", "hardware": "gpu", "worker": "gpu-9"},
        {"kind": "clock-off", "worker": "cpu-0", "delay_s": -5.0},
        {"kind": "load-hangs", "until_s": 9.0, "hardware": "gpu"},
        {"kind": "profile-wrong", "factor": 2.0},
        {"kind": "boot-twice", "hardware": "gpu", "delay_s": 2.0},
        {"kind": "query-resent", "app": "cars", "delay_s": 0.2},
        {"kind": "query-cancelled", "app": "cars", "delay_s": 0.2},
        {"kind": "labels-late", "app": "cars", "delay_s": 2.0},
        {"kind": "change", "what": "setting", "app": "cars", "factor": 4.0},
        {"kind": "change", "what": "model-deleted", "model": "resnet50"},
    ],
    ids=lambda fault: fault["kind"],
)
def test_faults_have_what_their_block_says(tmp_path, fault):
    (found,) = read(tmp_path, changed(("fault", [{"at_s": 6.0, **fault}]))).faults
    assert found == FaultSpec(at_s=6.0, **fault)


def test_work_faults_and_meters(tmp_path):
    scenario = read(
        tmp_path,
        changed(
            ("job", [{"app": "faces", "at_s": 5, "inputs": 500}]),
            ("fault", [
                {"kind": "worker-dies", "at_s": 6, "hardware": "gpu"},
                {"kind": "device-slow", "at_s": 6, "until_s": 9, "worker": "cpu-0", "factor": 3},
            ]),
            ("interference", {"gpu": 0.5}),
            ("cost", {"meter": "memory", "per_gb_s": {"cpu": 0.031, "gpu": 0.498}}),
            ("scenario.objective", "accuracy"),
        ),
    )  # fmt: skip
    assert scenario.jobs == (JobSpec(app="faces", at_s=5.0, inputs=500),)
    assert scenario.faults == (
        FaultSpec(kind="worker-dies", at_s=6.0, hardware="gpu"),
        FaultSpec(kind="device-slow", at_s=6.0, until_s=9.0, worker="cpu-0", factor=3.0),
    )
    assert scenario.interference == {"gpu": 0.5}
    assert (scenario.cost.meter, scenario.cost.per_gb_s) == ("memory", {"cpu": 0.031, "gpu": 0.498})
    assert scenario.objective == "accuracy"

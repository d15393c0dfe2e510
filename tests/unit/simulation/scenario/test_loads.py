"""Loads, offline work, faults and what is counted, as a scenario's file has them."""

import pytest

from bus.messages.public import Requirements
from services.simulation.scenario.model import FaultSpec, JobSpec, WorkloadSpec
from tests.support.data.scenario_files import changed, read


def load(tmp_path, **says):
    return read(tmp_path, changed(("load", [says]))).loads[0]


def test_a_rate_is_a_number_or_points(tmp_path):
    assert load(tmp_path, app="cars", rate=10) == WorkloadSpec(apps=("cars",), shares=(1.0,), rate=((0.0, 10.0),))
    assert load(tmp_path, app="cars", rate=[[0, 4], [60, 0.5]]).rate == ((0.0, 4.0), (60.0, 0.5))
    assert load(tmp_path, app="cars", rate=1, arrivals="gamma", cv=4).cv == 4.0
    found = load(tmp_path, app="cars", arrivals="mmpp", rates=[1, 9], dwell_s=[5, 2])
    assert (found.rates, found.dwell_s) == ((1.0, 9.0), (5.0, 2.0))


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
    assert found.counts is not None
    assert (found.counts.tolist(), found.seconds_per_line, found.range_qps) == ([3, 0, 12], 2.0, (10.0, 1000.0))
    found = load(tmp_path, app="cars", arrivals="times", file=str(tmp_path / "t/times.txt"))
    assert found.times is not None
    assert found.times.tolist() == [0.5, 1.5]


def test_queries_of_a_load_may_ask_for_more_than_their_app(tmp_path):
    assert load(tmp_path, app="cars", rate=1).needs is None
    found = load(tmp_path, app="cars", rate=1, accuracy=0.7, items=4)
    assert (found.needs, found.items) == (Requirements(latency_ms=100.0, accuracy=0.7), 4)  # 100 ms: what cars asks for
    found = load(tmp_path, apps=["faces", "cars"], rate=1, latency_ms=50)
    assert found.needs == Requirements(latency_ms=50.0)


@pytest.mark.parametrize("worker", ["cpu-0", "cpu-3", "cpu-7-1", "gpu-12-34"])
def test_faults_befall_workers_that_some_policy_has_or_may_order(tmp_path, worker):
    four = {"name": "four", "base": "infaas", "start": {"cpu": 4}}
    fault = {"kind": "worker-dies", "at_s": 6, "worker": worker}
    assert read(tmp_path, changed(("policy", [four]), ("fault", [fault]))).faults[0].worker == worker


@pytest.mark.parametrize(
    "process",
    [
        "d-0",
        "vm-0",
        "vm-1",
        "jobs-0",
        "cpu-0",
        "cpu-0/cpu",
        "monitor-cpu-0",
        "model-gpu-1-2",
        "offline-cpu-0",
    ],
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

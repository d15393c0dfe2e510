"""The metrics page of a whole system: what it says after some queries, and that rules and dashboards name only what is there."""

import json
import os
import re
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import psutil
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as read_openmetrics
from prometheus_client.parser import text_string_to_metric_families

import infaas
from infaas.errors import Refused
from tests.support.servers.processes import eventually
from tests.support.servers.system import APP, Whole
from tools import reference

ROOT = Path(__file__).resolve().parents[2]
SUFFIX = re.compile(r"_(bucket|sum|count)$")
Series = dict[str, list[tuple[dict[str, str], float]]]


def get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=60) as reply:
        return str(reply.read().decode())


def series(page: str) -> Series:
    found: Series = {}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            found.setdefault(sample.name, []).append((sample.labels, sample.value))
    return found


def total(found: Series, name: str, **labels: str) -> float:
    """The sum over all series with these labels."""
    return sum(value for has, value in found.get(name, ()) if labels.items() <= has.items())


@pytest.fixture(scope="module")
def page(system: Whole) -> str:
    """After 20 queries that were answered, one that asks for the impossible, one of an app that does not exist."""
    url = system.metrics
    before = series(get(url))
    with infaas.connect_blocking(system.nats) as client:
        for number in range(20):
            client.query(APP, system.x[number : number + 1])
        for app, needs in ((APP, {"accuracy": 1.0, "cost": 1e-9}), ("nobody", {})):
            with pytest.raises(Refused):
                client.query(app, system.x[:1], **needs)
    more = {
        "infaas_queries_total": 20.0,
        "infaas_client_errors_total": 2.0,
        "infaas_answers_total": 20.0,
        "infaas_batch_items_count": 1.0,
    }

    pages: list[str] = []

    def counted() -> bool:
        """What a process counts is missing while it is slow to say so; what SQL says comes some seconds later."""
        pages.append(get(url))
        now = series(pages[-1])
        ours = [labels for labels, _ in now.get("infaas_slo_attainment_ratio", ()) if labels["app"] == APP]
        return (
            all(total(now, name) >= total(before, name) + growth for name, growth in more.items())
            and all(up for _, up in now["infaas_part_up"])
            and total(now, "infaas_scaling_actions_total", action="load") >= 1
            and total(now, "infaas_instances", state="Active") >= 1
            and total(now, "infaas_controller_leads") == 1  # for a moment nobody does, after a machine stood still
            and total(now, "infaas_bus_connected") == len(now["infaas_bus_connected"])
            and len(ours) == 1
        )

    assert eventually(counted), pages[-1]
    return pages[-1]


def test_what_happened_is_counted(page: str) -> None:
    found = series(page)
    assert total(found, "infaas_queries_total", app=APP, outcome="ok") >= 1
    assert total(found, "infaas_client_errors_total", code="unknown_app") >= 1
    assert total(found, "infaas_queries_total", app="nobody") == 0
    assert total(found, "infaas_client_errors_total", code="unsatisfiable") >= 1
    assert total(found, "infaas_query_latency_seconds_count", app=APP) >= 20
    assert total(found, "infaas_query_cost_dollars_total", app=APP) > 0
    assert total(found, "infaas_decision_seconds_count") >= 1
    assert total(found, "infaas_scaling_actions_total", action="load") >= 1
    assert total(found, "infaas_instances", state="Active") >= 1
    assert total(found, "infaas_device_up", device="cpu", process="monitor-w0") == 1
    assert total(found, "infaas_controller_leads") == 1
    assert total(found, "infaas_bus_connected") == len(found["infaas_bus_connected"]) >= 4
    (attainment,) = [value for labels, value in found["infaas_slo_attainment_ratio"] if labels["app"] == APP]
    assert 0.0 < attainment <= 1.0
    accuracies = [value for labels, value in found["infaas_effective_accuracy_ratio"] if labels["app"] == APP]
    assert all(0.5 < value <= 1.0 for value in accuracies)
    assert {labels["part"] for labels, value in found["infaas_part_up"] if value == 1} >= {
        *("nats", "postgres", "dispatcher-0", "registrar", "executor-w0", "monitor-w0"),
    }


DUTY = 0.7  # of the burner's time
BURN = """
import os, sys, time
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
while os.getppid() == int(sys.argv[1]):
    until = time.monotonic() + 0.02 * float(sys.argv[2])
    while time.monotonic() < until:
        pass
    time.sleep(0.02 * (1.0 - float(sys.argv[2])))
"""


def test_what_a_foreign_process_uses_is_seen(system: Whole) -> None:
    """Beside the operating system's own figures of the same span, since other processes of the machine count, too."""
    url, cores = system.metrics, psutil.cpu_count(logical=True) or 1
    if cores != len(os.sched_getaffinity(0)):
        pytest.skip("this process may use some of the cores only, and the operating system's figures are of all")
    command = [sys.executable, "-c", BURN, str(os.getpid()), str(DUTY)]
    spans: list[dict[str, tuple[float, float]]] = []
    with subprocess.Popen(command) as burner, infaas.connect_blocking(system.nats) as client:
        try:
            process = psutil.Process(burner.pid)
            assert eventually(lambda: process.cpu_times().user > DUTY)  # it computes, and earlier samples are past

            def agreed() -> bool:
                """Over one span; where others' use jumps, as on a busy machine, samples and span differ: another one may agree."""
                used, foreign = [], []
                before, began = executors_cpu(get(url)), time.monotonic()
                burnt = process.cpu_times().user
                psutil.cpu_percent()
                while time.monotonic() - began < 8.0:
                    client.query(APP, system.x[:64])
                    if time.monotonic() - began > 0.5 * (1 + len(used)):
                        found = series(get(url))
                        used.append(total(found, "infaas_device_utilisation_ratio", device="cpu"))
                        foreign.append(total(found, "infaas_device_foreign_use_ratio", device="cpu"))
                machine, seconds = psutil.cpu_percent() / 100.0, time.monotonic() - began
                burnt = (process.cpu_times().user - burnt) / seconds / cores
                own = (executors_cpu(get(url)) - before) / seconds / cores
                mean_used, mean_foreign = sum(used) / len(used), sum(foreign) / len(foreign)
                spans.append({"used": (mean_used, machine), "foreign": (mean_foreign, machine - own)})
                return mean_foreign > burnt - 0.05 and all(abs(told - true) < 0.05 for told, true in spans[-1].values())

            assert eventually(agreed), spans
            devices = [worker["devices"] for worker in client.workers() if worker["worker"] == "w0"]
            ((device,),) = devices
            assert 0.0 < device["foreign_use"] <= device["utilisation"]
        finally:
            burner.kill()


def executors_cpu(page: str) -> float:
    """CPU seconds of the worker's executor since it was started."""
    return total(series(page), "infaas_process_cpu_seconds_total", process="executor-w0")


def test_names_follow_the_conventions(page: str) -> None:
    families = list(text_string_to_metric_families(page))
    assert len({family.name for family in families}) == len(families), "a family stands in one place"
    for family in families:
        assert family.name.startswith("infaas_")
        assert family.documentation
        assert not re.search(r"_(ms|milliseconds|mb|percent)(_|$)", family.name), "base units"
        for sample in family.samples:
            assert "process" in sample.labels
            assert not sample.labels.keys() & {"instance", "job"}, "Prometheus has these itself"
            if family.type == "counter":
                assert sample.name.endswith("_total")
    tool = shutil.which("promtool")
    if tool is not None:
        done = subprocess.run([tool, "check", "metrics"], input=page, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


def test_the_page_is_openmetrics_too(system: Whole, page: str) -> None:
    request = urllib.request.Request(system.metrics, headers={"Accept": "application/openmetrics-text;version=1.0.0"})
    there = {family.name for family in text_string_to_metric_families(page)}

    def lacks() -> set[str]:
        with urllib.request.urlopen(request, timeout=60) as reply:
            return there - {family.name for family in read_openmetrics(reply.read().decode())}

    assert eventually(lambda: not lacks()), lacks()


def named(text: str) -> set[str]:
    """Metrics that a query names."""
    return {SUFFIX.sub("", name) for name in re.findall(r"\binfaas_\w+", text)}


def test_rules_and_dashboard_name_what_there_is(page: str) -> None:
    there = {line.split()[2] for line in page.splitlines() if line.startswith("# TYPE")}
    there.add("infaas_series_left_out")  # only where there is something to tell
    rules = (ROOT / "ops/prometheus/infaas.rules.yml").read_text()
    board = json.loads((ROOT / "ops/grafana/infaas.json").read_text())
    queries = [target["expr"] for panel in board["panels"] for target in panel.get("targets", ())]
    recorded = set(re.findall(r"record: (\S+)", rules))
    assert named(rules) - there == set()
    assert len(named(rules)) > 15
    assert named(" ".join(queries)) - there == set()
    assert {name for query in queries for name in re.findall(r"\binfaas:\w+:\w+", query)} <= recorded
    known = {SUFFIX.sub("", one.name): one.service for one in reference.metrics() if one.service != "engine"}
    documented = set(known)
    assert there - documented == set(), "`make docs` shows every metric"
    here = {name for name, service in known.items() if service != "dashboard"}  # which runs while somebody looks
    assert here - there == set(), "and no others"
    assert named((ROOT / "docs/metrics.md").read_text()) - documented == set()


def test_the_system_tells_that_it_is_ready(system: Whole) -> None:
    base = system.metrics.removesuffix("/metrics")
    pages = {"healthz": {"healthy": True, "missing": []}, "readyz": {"ready": True, "serves": True, "missing": []}}

    def well() -> bool:
        try:
            return all(json.loads(get(f"{base}/{name}")) == page for name, page in pages.items())
        except urllib.error.HTTPError:  # a test before may have had it restart something
            return False

    assert eventually(well)

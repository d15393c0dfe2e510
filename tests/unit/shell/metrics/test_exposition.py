"""Pages of our families, read back as they were meant."""

import json
import os
import signal
import socket
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, generate_latest
from prometheus_client import Histogram as Seconds
from prometheus_client.openmetrics.parser import text_string_to_metric_families as read_openmetrics
from prometheus_client.parser import text_string_to_metric_families as read_text

from bus.messages.events import ClientError, CostEvent, JobEvent, OutcomeEvent, ScalingEvent, WorkerEvent
from bus.messages.jobs import OFFLINE, SYSTEM
from services.core.actor import Changed
from services.core.metric import Histogram, MetricFamily
from services.core.settings import MetricsSettings
from services.shell.host.supervise import Child, Supervisor
from services.shell.host.watch import Missing
from services.shell.http.pages import fetch
from services.shell.metrics import system as system_module
from services.shell.metrics.counts import EventTotals
from services.shell.metrics.exporter import Exporter
from services.shell.metrics.exposition import page, system_page
from services.shell.metrics.system import SystemMetrics, SystemPage
from tests.support.clients.responders import until
from tests.support.data.events import event
from tests.support.servers.nats import free_port

OPENMETRICS = "application/openmetrics-text;version=1.0.0;q=0.6,text/plain;version=0.0.4;q=0.4,*/*;q=0.1"
Found = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def read(text: str, *, openmetrics: bool = False) -> Found:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in (read_openmetrics if openmetrics else read_text)(text)
        for sample in family.samples
    }


def gauge(value: float, **labels: str) -> MetricFamily:
    family = MetricFamily("infaas_g", "gauge", "A gauge.")
    family.add(value, **labels)
    return family


@given(
    st.text(alphabet=st.characters(codec="utf-8")),
    st.floats(allow_nan=False),
)
def test_whatever_a_label_holds_it_is_read_back(label: str, value: float) -> None:
    assert read(page([gauge(value, app=label)]).text) == {("infaas_g", (("app", label),)): value}
    body = system_page([], {"one": page([gauge(value, app=label)]).text}).text
    assert read(body) == {("infaas_g", (("app", label), ("process", "one"))): value}


def test_a_histogram_is_cumulative() -> None:
    histogram = Histogram((1.0, 2.0))
    for value in (0.5, 1.5, 1.5, 9.0):
        histogram.observe(value)
    family = MetricFamily("infaas_h", "histogram", "A histogram.")
    family.add(histogram, app="a")
    family.add(Histogram((1.0,)), app="b")
    found = read(page([family]).text)
    assert found["infaas_h_bucket", (("app", "a"), ("le", "1.0"))] == 1
    assert found["infaas_h_bucket", (("app", "a"), ("le", "2.0"))] == 3
    assert found["infaas_h_bucket", (("app", "a"), ("le", "+Inf"))] == 4
    assert found["infaas_h_count", (("app", "a"),)] == 4
    assert found["infaas_h_sum", (("app", "a"),)] == 12.5
    assert found["infaas_h_count", (("app", "b"),)] == 0


def test_a_page_of_the_library_is_read_and_shown_in_both_formats() -> None:
    """It shows when a series began as a family of its own, which must not meet that of the histogram."""
    registry = CollectorRegistry()
    Seconds("infaas_s", "Seconds.", registry=registry).observe(0.5)
    Counter("infaas_c_total", "A counter.", registry=registry).inc()
    for accept in ("", OPENMETRICS):
        text = system_page([], {"one": generate_latest(registry).decode()}, accept=accept).text
        found = read(text, openmetrics=bool(accept))
        assert found["infaas_s_count", (("process", "one"),)] == found["infaas_c_total", (("process", "one"),)] == 1


def test_series_are_counted_beyond_the_most_and_named_without_samples() -> None:
    family = MetricFamily("infaas_g", "gauge", "A gauge.")
    for number in range(10):
        family.add(number, app=str(number))
    found = read(page([family], most=4).text)
    assert len([name for name, _ in found if name == "infaas_g"]) == 4
    assert found["infaas_series_left_out", (("metric", "infaas_g"),)] == 6
    assert "# TYPE infaas_g gauge" in page([MetricFamily("infaas_g", "gauge", "A gauge.")]).text
    pages = {"other": "<html>not {ours</html>\n", "one": page([gauge(1)]).text}
    assert read(system_page([], pages).text) == {("infaas_g", (("process", "one"),)): 1}
    family = gauge(1, app="a")
    family.add(2, variant="v")
    found = read(page([family]).text)
    assert found == {
        ("infaas_g", (("app", "a"), ("variant", ""))): 1,
        ("infaas_g", (("app", ""), ("variant", "v"))): 2,
    }


def test_pages_of_several_processes_become_one() -> None:
    histogram = MetricFamily("infaas_h", "histogram", "A histogram.")
    histogram.add(Histogram((1.0,)), app="a")
    counter = MetricFamily("infaas_c_total", "counter", "A counter.")
    counter.add(5)
    pages = {"one": page([gauge(1, app="a b"), histogram]).text, 'tw"o': page([gauge(2), histogram, counter]).text}
    body = system_page([counter], pages).text
    found = read(body)
    assert found["infaas_c_total", (("process", "up"),)] == 5
    assert found["infaas_c_total", (("process", 'tw"o'),)] == 5
    assert found["infaas_g", (("app", "a b"), ("process", "one"))] == 1
    assert found["infaas_g", (("process", 'tw"o'),)] == 2
    assert found["infaas_h_count", (("app", "a"), ("process", 'tw"o'))] == 0
    types = [line for line in body.splitlines() if line.startswith("# TYPE")]
    assert sorted(types) == ["# TYPE infaas_c_total counter", "# TYPE infaas_g gauge", "# TYPE infaas_h histogram"]


def test_who_prefers_openmetrics_gets_it() -> None:
    counter = MetricFamily("infaas_c_total", "counter", "A counter.")
    counter.add(5, app="a")
    histogram = MetricFamily("infaas_h", "histogram", "A histogram.")
    histogram.add(Histogram((1.0,)), app="a")
    one = page([counter, histogram, gauge(0.5)], accept=OPENMETRICS)
    assert one.lines.startswith(b"content-type: application/openmetrics-text")
    plain = page([counter, histogram, gauge(0.5)])
    assert plain.lines.startswith(b"content-type: text/plain; version=0.0.4")
    assert read(one.text, openmetrics=True) == read(plain.text)
    whole = system_page([counter], {"one": plain.text}, accept=OPENMETRICS)
    assert whole.lines == one.lines
    assert read(whole.text, openmetrics=True)["infaas_c_total", (("app", "a"), ("process", "one"))] == 5


def test_a_process_that_nobody_asks_does_not_hold_the_library() -> None:
    code = "import sys, services.shell.runtime.serve, services.shell.host.stack; sys.exit('prometheus_client' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# -- What is counted of recorded events.


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def outcome(app: str = "a", outcome: str = "ok", **more: object) -> OutcomeEvent:
    fields = {"variant": "v", "latency_ms": 20.0, "accuracy": 0.9, "cost": 0.5, "policy": "infaas", **more}
    return OutcomeEvent(time=1.0, uid=b"u", id=None, app=app, outcome=outcome, **fields)


def values(tally: EventTotals, name: str) -> dict[tuple[str, ...], float | Histogram]:
    (family,) = (family for family in tally.families() if family.name == name)
    assert isinstance(family, MetricFamily)
    return {tuple(labels.values()): value for labels, value in family.samples}


def test_outcomes() -> None:
    tally = EventTotals(Clock())
    refused = outcome(outcome="refused", variant=None, code="deadline", accuracy=None, cost=0.0)
    gone = outcome(outcome="cancelled", code="cancelled", cost=0.0)  # in no ratio
    tally.fold("outcome", [outcome(), outcome(accuracy=0.7, variant="w"), outcome(outcome="late"), refused, gone])
    ended = {("a", "ok"): 2, ("a", "late"): 1, ("a", "refused"): 1, ("a", "cancelled"): 1}
    assert values(tally, "infaas_queries_total") == ended
    assert values(tally, "infaas_refusals_total") == {("a", "deadline"): 1}
    assert values(tally, "infaas_answers_total") == {("a", "v"): 2, ("a", "w"): 1}
    assert values(tally, "infaas_query_cost_dollars_total") == {("a", "v"): 1.0, ("a", "w"): 0.5}
    assert values(tally, "infaas_slo_attainment_ratio") == {("a",): 0.5}
    assert values(tally, "infaas_effective_accuracy_ratio") == {("a",): 0.8}
    assert values(tally, "infaas_rated_answers_total") == {("a",): 2}
    latency = values(tally, "infaas_query_latency_seconds")["a",]
    assert latency.count == 3  # refusals are no answers


def test_the_ratios_are_of_the_last_minute() -> None:
    clock = Clock()
    tally = EventTotals(clock)
    tally.fold("outcome", [outcome(outcome="late")] * 8)
    for clock.now in range(0, 100, 5):
        tally.fold("outcome", [outcome()])
    assert values(tally, "infaas_slo_attainment_ratio") == {("a",): 1.0}
    clock.now = 300.0
    tally.families()
    clock.now = 400.0
    assert values(tally, "infaas_slo_attainment_ratio") == {}  # nothing was offered
    assert values(tally, "infaas_queries_total") == {("a", "late"): 8, ("a", "ok"): 20}


def test_names_that_anybody_may_invent_make_no_series() -> None:
    tally = EventTotals(Clock(), most=3)
    strange = [outcome(f"x{i}", "refused", code="unknown_app", variant=None) for i in range(1000)]
    tally.fold("outcome", strange)
    assert values(tally, "infaas_queries_total") == {}
    assert values(tally, "infaas_client_errors_total") == {("unknown_app",): 1000}
    tally.fold("outcome", [outcome(f"app{i}", variant=f"v{i}") for i in range(10)])
    queries = values(tally, "infaas_queries_total")
    assert sum(queries.values()) == 10
    assert len(queries) <= 4
    assert len(values(tally, "infaas_answers_total")) <= 4
    assert queries["_other", "ok"] == 7


def test_what_is_deleted_makes_room_for_what_comes() -> None:
    clock = Clock()
    tally = EventTotals(clock, most=3)
    for i in range(10):
        tally.fold("outcome", [outcome(f"app{i}", variant=f"v{i}")])
        for key in (f"app.app{i}", f"variant.v{i}"):
            tally.changed(Changed("infaas-catalog", key, None))
        clock.now += 50.0
    tally.changed(Changed("infaas-catalog", "app.app9", b""))  # it is there again
    clock.now += 50.0
    tally.fold("outcome", [outcome("new", variant="w")])
    assert values(tally, "infaas_queries_total") == {("app9", "ok"): 1, ("new", "ok"): 1}
    assert values(tally, "infaas_answers_total") == {("new", "w"): 1}
    assert values(tally, "infaas_query_latency_seconds").keys() == {("app9",), ("new",)}
    silent = EventTotals(clock)  # of a process that counts nothing
    for i in range(10):
        silent.changed(Changed("infaas-catalog", f"app.app{i}", None))
        clock.now += 50.0
    assert len(silent._gone) <= 2


def test_what_clients_did_wrong_lowers_no_ratio() -> None:
    tally = EventTotals(Clock())
    failed = [
        outcome("a", end, code=code, variant=None)
        for end, code in (("refused", "bad_request"), ("error", "bad_request"), ("refused", "overloaded"))
    ]
    tally.fold("outcome", [outcome("a"), *failed, outcome("a", "default", code="unknown_model")])
    tally.fold("client-error", [event(ClientError, code="bad_request", count=5)])
    assert values(tally, "infaas_client_errors_total") == {("bad_request",): 7}
    assert values(tally, "infaas_refusals_total") == {("a", "overloaded"): 1}
    assert values(tally, "infaas_queries_total") == {("a", "ok"): 1, ("a", "refused"): 1, ("a", "default"): 1}


def test_offline_work_is_no_query() -> None:
    tally = EventTotals(Clock())
    tally.fold("outcome", [outcome(policy=OFFLINE)])
    assert values(tally, "infaas_queries_total") == {}
    assert values(tally, "infaas_offline_chunks_total") == {("ok",): 1}
    tally.fold("outcome", [outcome(policy=OFFLINE, payer=SYSTEM), outcome()])
    assert values(tally, "infaas_queries_total") == {("a", "ok"): 1}, "of a copy and a query of one variant"
    assert values(tally, "infaas_offline_chunks_total") == {("ok",): 1}


def test_the_parts_of_a_query_are_no_queries() -> None:
    tally = EventTotals(Clock())
    parts = [outcome(parent=b"u", stage=f"m{i}", variant=f"m{i}-v1", outcome="ok" if i else "late") for i in range(5)]
    whole = outcome(variant=None, confidence=0.8, missing=1, cost=2.5, accuracy=0.8)
    unsure = outcome(outcome="default", variant=None, confidence=0.4, missing=0, code="confidence", accuracy=None)
    tally.fold("outcome", [*parts[:2], whole, *parts[2:], unsure, outcome(variant=None, missing=0, accuracy=0.6)])
    assert values(tally, "infaas_queries_total") == {("a", "ok"): 2, ("a", "default"): 1}
    assert values(tally, "infaas_parts_total") == {
        ("a", "m0", "m0-v1", "late"): 1,
        **{("a", f"m{i}", f"m{i}-v1", "ok"): 1 for i in range(1, 5)},
    }
    assert values(tally, "infaas_query_cost_dollars_total") == {("a", ""): 3.5}, "parts are in their query's"
    assert values(tally, "infaas_effective_accuracy_ratio") == {("a",): 0.7}
    assert values(tally, "infaas_default_outputs_total") == {("a", "confidence"): 1}
    confidence = values(tally, "infaas_answer_confidence_ratio")["a",]
    assert (confidence.count, confidence.total) == (2, 0.8 + 0.4)


def test_costs_scaling_and_jobs() -> None:
    tally = EventTotals(Clock())
    row = event(CostEvent, worker="w", app="a", variant="v", busy_seconds=2.0, cost=3.0)
    idle = event(CostEvent, worker="w", app=None, model=None, variant=None, busy_seconds=0.0, cost=1.0)
    tally.fold("cost", [row, row, idle])
    assert values(tally, "infaas_cost_dollars_total") == {
        ("w", "cpu", "a", "v", "false"): 6.0,
        ("w", "cpu", "_idle", "_idle", "false"): 1.0,
    }
    assert values(tally, "infaas_busy_seconds_total")["w", "cpu", "a", "v", "false"] == 4.0
    action = event(ScalingEvent, scaler="model", action="evict")
    tally.fold("scaling", [action, action])
    assert values(tally, "infaas_scaling_actions_total") == {("model", "evict"): 2}
    moves = [("Booting", "Ready"), ("Ready", "Ready")]
    changes = [event(WorkerEvent, from_state=old, to_state=new) for old, new in moves]
    tally.fold("worker", changes)
    assert values(tally, "infaas_worker_changes_total") == {("Ready",): 1}
    tally.fold("job", [event(JobEvent, state="running")])
    assert values(tally, "infaas_jobs_ended_total") == {}
    assert values(tally, "infaas_events_total") == {("cost",): 3, ("scaling",): 2, ("worker",): 2, ("job",): 1}


# -- The page of a whole system, and where its processes' pages are.
HOST = "127.0.0.1"


def claims(busy: set[int]) -> tuple[list[int], object]:
    taken: list[int] = []

    def take(port: int) -> bool:
        if port in busy or port in taken:
            return False
        taken.append(port)
        return True

    return taken, take


def hub(port: int, busy: set[int]) -> SystemMetrics:
    _, take = claims(busy)
    return SystemMetrics(MetricsSettings(), port, Supervisor(), take, lambda: 4711)


async def test_ports() -> None:
    off = hub(0, set())
    assert (off.port, off.port_for("a"), await off.open()) == (0, 0, None)
    some = hub(9100, {9102})
    assert [some.port_for(name) for name in ("a", "b", "a", "c")] == [9101, 9103, 9101, 9104]
    some.remove(["a", "never seen"])
    assert [some.port_for(name) for name in ("d", "b", "e")] == [9101, 9103, 9105]


async def test_one_page_of_all_processes_and_the_truth_about_them() -> None:
    async def page(port: int, path: str) -> tuple[int, str]:
        found = await fetch(HOST, port, path, 20.0)
        return found.status, found.text

    supervisor = Supervisor()
    ports = [free_port() for _ in range(3)]
    it = SystemMetrics(MetricsSettings(), ports[0], supervisor, lambda _: True, lambda: ports[1])
    it._next = ports[1]
    assert await it.open() == f"http://{HOST}:{ports[0]}/metrics"
    assert it.port_for("service") == ports[1]
    service = Exporter("service", MetricsSettings(port=ports[1]))
    await service.open()
    supervisor.start(Child("sleeper", lambda: subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])))
    status, text = await page(ports[0], "/metrics")
    assert status == 200
    assert 'infaas_process_info{process="service",service="service"} 1.0\n' in text
    assert 'infaas_part_up{part="sleeper",process="up"} 1.0\n' in text
    assert 'infaas_part_restarts_total{part="sleeper",process="up"} 0.0\n' in text
    assert (await page(ports[0], "/healthz"))[0] == 200

    it.started = True
    status, text = await page(ports[0], "/readyz")
    assert (status, json.loads(text)["missing"]) == (503, ["service: a connection to NATS"])
    it.started = False
    assert "the system: it is starting or stopping" in (await page(ports[0], "/readyz"))[1]
    it.started = True
    await service.close()
    status, text = await page(ports[0], "/healthz")
    assert (status, json.loads(text)["missing"]) == (503, ["service: does not answer"])
    assert (await page(ports[0], "/metrics"))[0] == 200  # what is there is shown all the same
    await supervisor.stop()
    assert "sleeper: does not run" in (await page(ports[0], "/readyz"))[1]
    await it.close()


async def test_what_queries_need_and_the_figure_that_prometheus_reads() -> None:
    async def page(port: int, path: str) -> str:
        return (await fetch(HOST, port, path, 20.0)).text

    supervisor, port = Supervisor(), free_port()
    it = SystemMetrics(MetricsSettings(), port, supervisor, lambda _: True, lambda: port)
    await it.open()
    it.started = True
    system = SystemPage(it.page)
    assert await system.missing() == []
    assert 'infaas_ready{process="up"} 1.0\n' in await page(port, "/metrics")

    def sleeper() -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])

    supervisor.start(Child("history", sleeper, serves=False))
    await supervisor.stop()
    await until(lambda: not supervisor.pids)
    says = json.loads(await page(port, "/readyz"))
    assert says == {"ready": False, "serves": True, "missing": ["history: does not run"]}
    text = await page(port, "/metrics")
    assert 'infaas_ready{process="up"} 0.0\n' in text
    assert 'infaas_part_hangs_total{part="history",process="up"} 0.0\n' in text

    async def told() -> bool:  # an answer is good for those who ask a moment later
        return await system.missing() == [Missing("history: does not run", serves=False)]

    await until(told)
    await it.close()
    assert await SystemPage(it.page).missing() is None


async def test_nobody_waits_for_the_page_of_a_process_that_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system_module, "PATIENCE", 1e6)  # s
    supervisor, port = Supervisor(), free_port()
    with socket.create_server((HOST, 0)) as silent:
        it = SystemMetrics(MetricsSettings(), port, supervisor, lambda _: True, lambda: silent.getsockname()[1])
        await it.open()
        it._next = port + 1_000_000  # no port is near
        it.port_for("stopped")
        command = [sys.executable, "-c", "import time; time.sleep(600)"]
        supervisor.start(Child("stopped", lambda: subprocess.Popen(command), hung=1e9))
        os.kill(supervisor.pids["stopped"], signal.SIGSTOP)
        assert "stopped: silent for" in (await fetch(HOST, port, "/readyz", 240.0)).text
        os.kill(supervisor.pids["stopped"], signal.SIGCONT)
        await supervisor.stop()
        await it.close()

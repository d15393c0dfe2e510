"""Whole systems over HTTP: mistakes are counted once, and a gateway leaves in good order. test_gateway_grpc.py asks with stock clients."""

import json
import signal
import socket
import threading
from pathlib import Path
from typing import Any

import psutil

from tests.support.gateways.gateway_process import gateway
from tests.support.servers.processes import eventually, fetched
from tests.support.servers.system import APP, Whole

GOOD = {"name": "x", "shape": [1, 784], "datatype": "FP32", "data": [0.0] * 784}


def test_what_clients_did_wrong_is_counted_once_wherever_it_was_found(system: Whole) -> None:
    """The gateway finds bad JSON and bad needs, a dispatcher what does not fit the model or does not exist."""
    wrong: list[tuple[str, Any]] = [
        ("/v2/models/never-json/infer", b"{"),
        ("/v2/models/never-needs/infer", {"inputs": [GOOD], "parameters": {"accuracy": "much"}}),
        ("/v2/models/never-there/infer", {"inputs": [GOOD]}),
        ("/v2/models/never-there/infer", {"inputs": [GOOD]}),
        ("/never-clippers/predict", {"input": [0.0] * 784}),
        ("/classify?model_name=never-rafiqis", {}),
    ]
    for path, body in wrong:
        assert fetched(system.gateway + path, body)[0] >= 400
    expected = [
        ("never-clippers", "unknown_app", 1),
        ("never-json", "bad_request", 1),
        ("never-needs", "bad_request", 1),
        ("never-rafiqis", "unknown_model", 1),
        ("never-there", "unknown_app", 2),
    ]
    ours = (
        "SELECT app, code, sum(count) FROM infaas.client_errors WHERE app LIKE 'never-%%' GROUP BY 1, 2 ORDER BY 1, 2"
    )
    assert eventually(lambda: system.rows(ours) == expected), system.rows(ours)
    for view in ("slo_by_app_minutely", "cost_by_app_hourly", "query_outcomes"):
        assert system.rows(f"SELECT count(*) FROM infaas.{view} WHERE app LIKE 'never-%%'") == [(0,)]


def test_the_start_page_links_the_system(system: Whole) -> None:
    found = json.loads(fetched(f"{system.gateway}/")[1])
    assert found["links"]["dashboard"] == system.dashboard
    assert found["apps"][APP] == f"/apps/{APP}"
    assert "infaas_gateway_requests_total" in fetched(f"{system.gateway}/metrics")[1]


def test_a_gateway_that_stops_says_so_first_and_finishes_what_it_has(system: Whole, tmp_path: Path) -> None:
    with gateway(system, tmp_path, drain_s="15") as gate:
        seen: list[int] = []
        refused: list[str] = []
        stop = threading.Event()

        def keep_asking() -> None:
            while not stop.is_set():
                status, text = fetched(f"{gate.url}/v2/models/{APP}/infer", {"inputs": [GOOD]})
                if not status:  # nobody listens any more
                    return
                seen.append(status)
                if status != 200:  # by a system that is too busy
                    refused.append(text)

        asking = threading.Thread(target=keep_asking)
        asking.start()
        assert eventually(lambda: 200 in seen)
        gate.process.send_signal(signal.SIGTERM)
        assert eventually(lambda: fetched(f"{gate.url}/v2/health/ready")[0] == 503)
        assert fetched(f"{gate.url}/v2/health/live")[0] == 200
        assert gate.process.wait(60) == 0
        stop.set()
        asking.join(60)
        assert set(seen) <= {200, 503, 504}, set(seen)
        assert not [body for body in refused if "stopped" in body], "it serves until nobody can ask it any more"


def served_by(port: int, pids: set[int]) -> int:
    """Which of these processes takes a connection."""
    with socket.create_connection(("127.0.0.1", port), 60) as connection:
        connection.sendall(b"GET /v2 HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert connection.recv(100).startswith(b"HTTP/1.1 200")
        ours = connection.getsockname()[1]
        (found,) = [
            pid
            for pid in pids
            for other in psutil.Process(pid).net_connections("tcp")
            if other.raddr and other.raddr.port == ours
        ]
    return found


def test_several_gateways_at_one_address(system: Whole, tmp_path: Path) -> None:
    with gateway(system, tmp_path, reuse_port="true") as one:
        with gateway(system, tmp_path, reuse_port="true", port=str(one.port), grpc_port="0") as two:
            assert two.port == one.port
            assert eventually(lambda: "gateway runs" in two.log.read_text())
            processes = {served_by(one.port, {one.process.pid, two.process.pid}) for _ in range(40)}
            assert processes == {one.process.pid, two.process.pid}
        for _ in range(20):
            assert fetched(f"{one.url}/v2/health/ready")[0] == 200


def test_its_requests_are_counted(system: Whole) -> None:
    def counted() -> bool:
        fetched(f"{system.gateway}/v2/models/{APP}/infer", {"inputs": [GOOD]})
        page = fetched(system.metrics)[1]
        return all(name in page for name in names)

    names = (
        'infaas_gateway_requests_total{process="gateway",protocol="rest",status="200"}',
        "infaas_gateway_queries_total",
    )
    assert eventually(counted)  # a process that is slow to tell is missing meanwhile

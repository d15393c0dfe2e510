"""A gateway that is stopped: what it has taken is answered, idle connections are closed, nobody listens afterwards."""

import http.client
import json
import socket
import threading
from typing import Any

import pytest

from services.gateway.http.server import listen
from tests.echoing import echoing
from tests.processes import eventually

BODY = json.dumps({"inputs": [{"name": "x", "shape": [1, 3], "datatype": "FP32", "data": [1, 2, 3]}]})


def test_what_is_under_way_is_answered_and_idle_connections_are_closed() -> None:
    found: list[tuple[int, Any]] = []
    with echoing() as stage:
        stage.delay = 0.5
        idle = http.client.HTTPConnection("127.0.0.1", stage.port, timeout=20)
        idle.request("GET", "/v2")
        assert idle.getresponse().read()

        def ask() -> None:
            connection = http.client.HTTPConnection("127.0.0.1", stage.port, timeout=20)
            connection.request("POST", "/v2/models/fixed/infer", BODY)
            reply = connection.getresponse()
            found.append((reply.status, json.loads(reply.read())))
            connection.close()

        asking = threading.Thread(target=ask)
        asking.start()
        assert eventually(lambda: bool(stage.heard))
        stage.stop()
        asking.join(20)
        assert [status for status, _ in found] == [200]
        assert found[0][1]["outputs"][0]["data"] == [1, 2, 3]
        assert idle.sock is not None
        idle.sock.settimeout(10)
        assert idle.sock.recv(1) == b""
        idle.close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", stage.port), 5)


def test_a_port_that_is_taken_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(OSError, match=rf"127\.0\.0\.1:{port}.*gateway\.port"):
            listen("127.0.0.1", port, reuse=False)
        with pytest.raises(OSError, match="gateway"):  # the other one has to agree
            listen("127.0.0.1", port, reuse=True)
    with listen("127.0.0.1", 0, reuse=True) as one, listen("127.0.0.1", one.getsockname()[1], reuse=True) as two:
        assert one.getsockname() == two.getsockname()

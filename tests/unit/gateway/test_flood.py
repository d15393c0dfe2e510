"""A real gateway that gets more queries at once than it can pass on within their objective."""

import http.client
import json
from collections import Counter
from contextlib import ExitStack
from typing import Any

import pytest

from tests.support.gateways.echo_gateway import Echoing, echoing
from tests.support.servers.processes import eventually

CLIENTS = 300
DIALECTS = {
    "rest": (
        "/v2/models/fixed/infer",
        {"inputs": [{"name": "x", "shape": [1, 3], "datatype": "FP32", "data": [1, 2, 3]}]},
    ),
    "clipper": ("/fixed/predict", {"input": [1.0, 2.0, 3.0]}),
}


def ask(client: http.client.HTTPConnection, path: str, body: Any) -> tuple[int, Any]:
    client.request("POST", path, json.dumps(body))
    return told(client)


def told(client: http.client.HTTPConnection) -> tuple[int, Any]:
    reply = client.getresponse()
    return reply.status, json.loads(reply.read())


def flood(stage: Echoing, clients: list[http.client.HTTPConnection], path: str, body: Any) -> list[tuple[int, Any]]:
    """One query from each, all of them there before the gateway looks; what they get."""
    with stage.standing_still():
        for client in clients:
            client.request("POST", path, json.dumps(body))
    return [told(client) for client in clients]


@pytest.mark.parametrize("protocol", DIALECTS)
def test_what_cannot_be_passed_on_in_time_is_refused_and_all_else_is_served(protocol: str) -> None:
    path, body = DIALECTS[protocol]
    urgent = body | {"parameters": {"latency_ms": 12}} if protocol == "rest" else body
    with echoing() as stage, ExitStack() as stack:
        service: Any = stage.runtimes[0].edge._service  # type: ignore[union-attr]
        clients = [http.client.HTTPConnection("127.0.0.1", stage.port, timeout=120) for _ in range(CLIENTS)]
        for client in clients:
            stack.callback(client.close)
            client.connect()
        for _ in range(2):
            assert {status for status, _ in flood(stage, clients, path, body)} == {200}, "whatever it takes"
        if protocol == "clipper":
            stage.set_objective("fixed", 12.0)
        found = flood(stage, clients, path, urgent)
        statuses = Counter(status for status, _ in found)
        assert statuses.keys() <= {200, 503}
        assert statuses[503] > 0
        assert (
            service.counts.queries[protocol, "overloaded"] == service.counts.requests[protocol, "503"] == statuses[503]
        )
        box: Any = stage.runtimes[0]._outbox
        assert box.held == statuses[503], "each is an outcome for the history"
        refusals = [reply for status, reply in found if status == 503]
        if protocol == "rest":
            assert {reply["code"] for reply in refusals} == {"overloaded"}
        else:
            assert {reply["error"] for reply in refusals} == {"Query processing error"}
        if protocol == "rest":
            assert {status for status, _ in flood(stage, clients, path, body)} == {200}
        assert eventually(lambda: ask(clients[0], path, urgent)[0] == 200), "alone, it is in nobody's way"

"""Every operation of the gateway's OpenAPI document with generated requests, right and wrong ones (schemathesis)."""

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.errors import Unsatisfiable

schemathesis = pytest.importorskip("schemathesis", reason="schemathesis is not installed (extra dev)")

from tests.support.gateways.abuse import INFER, tensor  # noqa: E402
from tests.support.gateways.gateway_process import Gate, gateway  # noqa: E402
from tests.support.servers.processes import eventually  # noqa: E402
from tests.support.servers.system import Whole  # noqa: E402
from tools.openapi.document import document  # noqa: E402

EXAMPLES = 6  # of each operation, in each mode
GROWTH_MB = 64
SETTINGS = settings(
    deadline=None, database=None, derandomize=True, phases=[Phase.generate], suppress_health_check=list(HealthCheck)
)
VERBS = ["GET", "PUT", "POST", "DELETE", "PATCH", "OPTIONS", "TRACE", "HEAD"]


@pytest.fixture(scope="module")
def gate(system: Whole, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gate]:
    """A gateway; the apps that fuzzing makes are gone afterwards."""
    before = apps(system)
    with gateway(system, tmp_path_factory.mktemp("gateway"), body_timeout_s="10") as found:
        yield found

    def as_before() -> bool:  # a dispatcher hears a moment later of an app that has come or gone
        new = apps(system) - before
        for name in new:
            system.command("admin", "delete-app", "--app", name)
        return not new

    assert eventually(as_before)


def apps(system: Whole) -> set[str]:
    return {item["app"] for item in system.told("apps")}


def check(case: Any, reply: Any) -> None:
    """A reply that the document knows, never a fault of ours."""
    described = case.operation.definition.raw["responses"]
    about = (
        case.method,
        reply.request.url,
        reply.request.body and reply.request.body[:300],
        reply.status_code,
        reply.text[:300],
    )
    assert reply.status_code not in (500, 502), about
    assert str(reply.status_code) in described, about
    if reply.status_code >= 400 and case.method != "HEAD":
        assert reply.headers["content-type"] == ["application/json"], about
        assert isinstance(reply.json()["error"], str), about


def test_every_operation_takes_whatever_comes(gate: Gate) -> None:
    described = document()
    described["servers"] = [{"url": gate.url}]
    schema = schemathesis.openapi.from_dict(described)
    before = gate.resident_mb()
    count = 0
    wrong: dict[str, Any] = {}
    for found in schema.get_all_operations():
        operation = found.ok()
        for mode in schemathesis.GenerationMode:

            @given(case=operation.as_strategy(generation_mode=mode))
            @settings(SETTINGS, max_examples=EXAMPLES)
            def fuzz(case: Any) -> None:
                nonlocal count
                count += 1
                check(case, case.call(base_url=gate.url, timeout=60))

            try:
                fuzz()
            except Unsatisfiable:
                pass  # nothing about this operation can be wrong
            except Exception as error:  # all of them are told, not only the first
                wrong[f"{operation.method} {operation.path} {mode}"] = str(error)[:1500]
    assert wrong == {}, wrong
    assert count > EXAMPLES * len(described["paths"])
    assert gate.resident_mb() - before < GROWTH_MB


async def test_every_path_with_every_verb(gate: Gate) -> None:
    paths = {
        path: {method.upper() for method in methods} | ({"HEAD"} if "get" in methods else set())
        for path, methods in document()["paths"].items()
    }
    filled = {"{app}": "digits", "{model}": "digits", "{version}": "1"}

    for template, methods in paths.items():
        path = template
        for name, value in filled.items():
            path = path.replace(name, value)
        for verb in VERBS:
            if verb in methods:
                continue
            reply = await gate.ask(verb, path)
            assert reply.status == 405, (verb, path, reply)
            assert set(reply.headers["allow"].split(", ")) == methods, (verb, path)
    reply = await gate.ask("POST", INFER, tensor())
    assert reply.status in (200, 503, 504)
    assert gate.alive

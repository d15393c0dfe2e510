"""services/gateway/openapi.json (docs/openapi.json links to it) describes what the gateway serves."""

from pathlib import Path

from bus.memory import MemoryBus
from infaas.client import Client
from services.core.settings import GatewaySettings
from services.gateway.edge import GatewayService
from services.gateway.http.access import Right
from services.gateway.http.app import dialects
from services.gateway.http.checks import right_of
from tests.support.data.documents import references
from tools.openapi.document import document, operations, text
from tools.openapi.operation import ALWAYS, BODY

ROOT = Path(__file__).parents[3]


def routed() -> set[tuple[str, str]]:
    """Path and method of everything that the application serves; HEAD goes with GET."""
    service = GatewayService(GatewaySettings(), Client(MemoryBus()))
    return {
        (route.path, method)
        for dialect in dialects(service)
        for route in dialect.routes
        for method in route.methods or ()
        if method != "HEAD"
    }


def test_the_file_is_current() -> None:
    assert (ROOT / "docs" / "openapi.json").read_text() == text(), "run `python -m tools.openapi`"


def test_every_route_and_reply_is_described() -> None:
    described = {(operation.path, operation.method) for operation in operations()}
    assert described == routed()
    assert len(operations()) == len(described), "one is described twice"
    for path, methods in document()["paths"].items():
        for method, operation in methods.items():
            found = set(map(int, operation["responses"]))
            assert {200, *ALWAYS} <= found, (method, path)
            assert (set(BODY) <= found) == ("requestBody" in operation)
            assert ("{" in path) <= (404 in found), (method, path)


def test_who_may_is_told_as_it_is() -> None:
    for path, methods in document()["paths"].items():
        for method, operation in methods.items():
            right = right_of(path, method.upper())
            told = {Right.NONE: [], Right.QUERY: [{}, {"token": []}], Right.OPERATE: [{"operator": []}]}[right]
            assert operation["security"] == told, (method, path)


def test_references_lead_somewhere_and_operations_have_names_of_their_own() -> None:
    whole = document()
    used = set(references(whole))
    assert used == {f"#/components/schemas/{name}" for name in whole["components"]["schemas"]}
    names = [one["operationId"] for methods in document()["paths"].values() for one in methods.values()]
    assert len(names) == len(set(names))

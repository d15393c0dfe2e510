"""The rights of every way into a gateway: each verb without a token, with a user's, with an operator's, and from pages of other origins."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from infaas.credentials import CredentialStore
from tests.support.clients.responders import until
from tests.support.gateways.abuse import INFER, tensor
from tests.support.gateways.gateway_process import Gate, gateway
from tests.support.servers.system import Whole
from tools.openapi.document import document

USER, OPERATOR = "user-4b825dc642cb6eb9a060e54bf8d69288", "operator-fbee4904d6a0d6e4b1f9e0a2c0e6d1b7"
FILLED = {"{app}": "digits", "{model}": "digits", "{version}": "1"}


@pytest.fixture(scope="module")
def secrets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a file of users' tokens and one of operators'."""
    directory = tmp_path_factory.mktemp("secrets")
    (directory / "users").write_text(f"# who may ask\nann:{USER}\n")
    (directory / "operators").write_text(f"{OPERATOR}\n")
    return directory


@pytest.fixture(scope="module")
def gate(system: Whole, secrets: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gate]:
    """A gateway with tokens in files that variables name."""
    files = {"tokens_file": str(secrets / "users"), "operator_tokens_file": str(secrets / "operators")}
    with gateway(system, tmp_path_factory.mktemp("gateway"), **files) as found:
        yield found


def verbs() -> dict[str, list[tuple[str, str]]]:
    """Methods and paths by the right that they need: open, query, operators."""
    found: dict[str, list[tuple[str, str]]] = {"open": [], "query": [], "operators": []}
    for template, methods in document()["paths"].items():
        path = template
        for name, value in FILLED.items():
            path = path.replace(name, value)
        for method, operation in methods.items():
            security = operation["security"]
            who = "operators" if {"operator": []} in security else "query" if security else "open"
            found[who].append((method.upper(), path))
    return found


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


def test_there_are_verbs_of_every_kind() -> None:
    found = verbs()
    assert set(found["open"]) == {("GET", path) for path in ("/", "/docs", "/v2/health/live", "/v2/health/ready")}
    assert ("POST", INFER) in found["query"]
    assert ("POST", "/register") in found["operators"]
    assert len(found["operators"]) > 10


async def test_every_verb_with_every_token(gate: Gate) -> None:
    expected = {
        "open": {"nobody": 0, "guess": 0, "user": 0, "operator": 0},
        "query": {"nobody": 401, "guess": 401, "user": 0, "operator": 0},
        "operators": {"nobody": 401, "guess": 401, "user": 403, "operator": 0},
    }
    sent = {"nobody": {}, "guess": bearer("guess"), "user": bearer(USER), "operator": bearer(OPERATOR)}
    wrong = {}
    for who, found in verbs().items():
        for method, path in found:
            for name, headers in sent.items():
                reply = await gate.ask(method, path, **headers)
                refused = reply.status if reply.status in (401, 403) else 0
                if refused != expected[who][name]:
                    wrong[method, path, name] = reply
                elif refused == 401:
                    assert reply.headers["www-authenticate"].startswith("Bearer")
    assert wrong == {}


async def test_every_verb_from_elsewhere(gate: Gate) -> None:
    wrong = {}
    for who, found in verbs().items():
        for method, path in found:
            reply = await gate.ask(method, path, Host="evil.example", **bearer(OPERATOR))
            if reply.status != 421:
                wrong[method, path, "host"] = reply
            if method == "GET":
                continue
            for page in ({"Origin": "http://evil.example"}, {"Origin": "null"}, {"Sec_Fetch_Site": "cross-site"}):
                reply = await gate.ask(method, path, **bearer(OPERATOR), **page)
                if reply.status != 403:
                    wrong[who, method, path, str(page)] = reply
    assert wrong == {}


async def test_other_spellings_are_no_way_around(gate: Gate) -> None:
    for path in (
        "/admin/../v2/health/live/../../../admin/add_app",
        "/v2/health/../../admin/add_app",
        "/v2/health/%2e%2e/%2e%2e/admin/add_app",
        "//admin/add_app",
        "/admin//add_app",
        "/%61dmin/add_app",
        "/ADMIN/add_app",
        "/admin/add_app/",
        "/admin/add_app?x=/v2/health/live",
        "/admin%2fadd_app",
    ):
        for headers in ({}, bearer(USER)):
            reply = await gate.ask("POST", path, {"name": "x"}, **headers)
            assert reply.status in (400, 401, 403, 404), (path, reply)
    for headers in (
        {"X_HTTP_Method_Override": "GET"},
        {"X_Original_URL": "/v2/health/live"},
        {"X_Forwarded_For": "127.0.0.1", "X_Forwarded_Host": "localhost"},
        {"Cookie": f"Authorization={OPERATOR}"},
        {"Authorization": f"Basic {OPERATOR}"},
        {"Authorization": OPERATOR},
        {"Proxy_Authorization": f"Bearer {OPERATOR}"},
    ):
        reply = await gate.ask("POST", "/admin/add_app", {"name": "x"}, **headers)
        assert reply.status == 401, (headers, reply)
    reply = await gate.ask("POST", f"/admin/add_app?token={OPERATOR}", {"name": "x"})
    assert reply.status == 401


async def test_a_token_for_an_app_opens_no_other(system: Whole, tmp_path: Path) -> None:
    store = CredentialStore(tmp_path)
    store.begin("infaas")
    of = {app: store.add_token(app, app, None) for app in ("digits", "numbers")}

    (tmp_path / "gateway").mkdir()
    with gateway(system, tmp_path / "gateway", tokens_file=str(tmp_path / "gateway-tokens")) as gate:
        wrong = {}
        for who, found in verbs().items():
            for method, path in found:
                names = who == "query" and "digits" in path
                lists = path in ("/v2", "/v2/models", "/v2/models/stats", "/v2/repository/index", "/openapi.json")
                for app, token in of.items():
                    reply = await gate.ask(method, path, **bearer(token))
                    expected = who != "open" and not lists and not (names and app == "digits")
                    if (reply.status == 403) != expected:
                        wrong[method, path, app] = reply
        assert wrong == {}
        assert (await gate.ask("POST", INFER, tensor(), **bearer(of["digits"]))).status in (200, 503, 504)
        for method, path in (("GET", "/v2/models"), ("POST", "/v2/repository/index")):
            named = {app: json.loads((await gate.ask(method, path, **bearer(token))).body) for app, token in of.items()}
            assert named["numbers"] == []
            assert {one["name"].partition(".")[0] for one in named["digits"]} == {"digits"}
        with grpc.insecure_channel(f"127.0.0.1:{gate.grpc_port}") as channel:
            for app, token in of.items():
                for method, asked in (("ModelMetadata", b"\x0a\x06digits"), ("ModelInfer", b"\x0a\x06digits")):
                    call = channel.unary_unary(f"/inference.GRPCInferenceService/{method}")
                    code = grpc.StatusCode.OK
                    try:
                        call(asked, metadata=[("authorization", f"Bearer {token}")], timeout=60)
                    except grpc.RpcError as error:
                        code = error.code()
                    assert (code is grpc.StatusCode.PERMISSION_DENIED) == (app == "numbers"), (method, app, code)
                index = channel.unary_unary("/inference.GRPCInferenceService/RepositoryIndex")
                found = index(b"", metadata=[("authorization", f"Bearer {token}")], timeout=60)
                assert (b"digits" in found) == (app == "digits")


def test_the_same_by_grpc(gate: Gate) -> None:
    with grpc.insecure_channel(f"127.0.0.1:{gate.grpc_port}") as channel:

        def status(method: str, token: str | None) -> grpc.StatusCode:
            call = channel.unary_unary(f"/inference.GRPCInferenceService/{method}")
            metadata = [("authorization", f"Bearer {token}")] if token else []
            try:
                call(b"", metadata=metadata, timeout=60)
            except grpc.RpcError as error:
                return error.code()
            return grpc.StatusCode.OK

        assert status("ServerLive", None) is grpc.StatusCode.OK
        for method in ("ServerMetadata", "ModelInfer", "ModelMetadata", "RepositoryIndex", "ModelStatistics"):
            for token in (None, "guess"):
                assert status(method, token) is grpc.StatusCode.UNAUTHENTICATED, method
            assert status(method, USER) is not grpc.StatusCode.UNAUTHENTICATED, method
        for method in ("RepositoryModelLoad", "RepositoryModelUnload", "SystemSharedMemoryRegister", "LogSettings"):
            for token in (None, USER, OPERATOR):
                refused = (
                    grpc.StatusCode.UNAUTHENTICATED,
                    grpc.StatusCode.UNIMPLEMENTED,
                    grpc.StatusCode.PERMISSION_DENIED,
                )
                assert status(method, token) in refused, (method, token)


async def test_a_token_that_is_taken_away_stops_working(gate: Gate, secrets: Path) -> None:
    file = secrets / "users"
    before = file.read_text()
    try:
        assert (await gate.ask("GET", "/v2", **bearer(USER))).status == 200
        file.write_text("bob:another-token\n")

        async def gone() -> bool:
            return (await gate.ask("GET", "/v2", **bearer(USER))).status == 401

        await until(gone)
        assert (await gate.ask("GET", "/v2", **bearer("another-token"))).status == 200
    finally:
        file.write_text(before)


async def test_without_tokens_this_machine_manages_and_pages_do_not(system: Whole, tmp_path: Path) -> None:
    with gateway(system, tmp_path, cors_origins="https://page.example") as gate:
        assert (await gate.ask("POST", "/admin/get_all_applications")).status == 200
        assert (await gate.ask("GET", "/admin/ping")).status == 200
        for method, path in verbs()["operators"]:
            for page in (
                {"Origin": "http://evil.example"},
                {"Origin": "https://page.example"},
                {"Sec_Fetch_Site": "cross-site"},
            ):
                assert (await gate.ask(method, path, **page)).status == 403, (method, path, page)
        assert (await gate.ask("POST", INFER, tensor(), Origin="https://page.example")).status in (200, 503, 504)


def test_in_reach_of_others_nobody_manages_without_tokens(system: Whole, tmp_path: Path) -> None:
    async def main(gate: Gate, words: bytes) -> None:
        for method, path in verbs()["operators"]:
            reply = await gate.ask(method, path)
            assert reply.status == 403, (method, path)
            assert words in reply.body
        assert (await gate.ask("GET", "/v2")).status == 200

    with gateway(system, tmp_path, address="0.0.0.0") as gate:
        asyncio.run(main(gate, b"operator_tokens"))
    with gateway(system, tmp_path, admin="false") as gate:
        asyncio.run(main(gate, b"gateway.admin"))

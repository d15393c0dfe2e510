"""services/engine/routes.py: which requests there are, and that nothing else is one."""

import json
from urllib.parse import quote, urlencode

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.engine.routes import Denied, find

NODE = "qbi4c8284dgwj4dr3r7e2mbr0"
FILTERS = '{"label": ["infaas.pool=cpu"]}'

PASSED = {
    ("GET", "/_ping"): "/_ping",
    ("HEAD", "/v1.41/_ping"): "/v1.41/_ping",
    ("GET", "/version"): "/version",
    ("GET", "/v1.24/version"): "/v1.24/version",
    ("GET", "/v1.41/info"): "/v1.41/info",
    ("GET", "/nodes"): "/nodes",
    ("GET", "/nodes?"): "/nodes",
    ("GET", f"/v1.52/nodes?filters={quote(FILTERS)}"): f"/v1.52/nodes?{urlencode({'filters': FILTERS})}",
    ("GET", f"/v1.41/nodes/{NODE}"): f"/v1.41/nodes/{NODE}",
    ("GET", "/nodes/gpu-1.example.org"): "/nodes/gpu-1.example.org",
    ("GET", "/v1.41/tasks?filters=%7B%7D"): "/v1.41/tasks?filters=%7B%7D",
    ("GET", "/v1.41/services?status=true"): "/v1.41/services?status=true",
    ("POST", f"/v1.41/nodes/{NODE}/update?version=14"): f"/v1.41/nodes/{NODE}/update?version=14",
    ("POST", f"/nodes/{NODE}/update?version=0014"): f"/nodes/{NODE}/update?version=14",
}

WRITES = ("POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "CONNECT", "HEAD", "get", "PROPFIND")
READS = ("/version", "/v1.41/info", "/v1.41/nodes", "/tasks", "/services", f"/nodes/{NODE}")

REFUSED = [
    *((method, path) for method in WRITES for path in READS),
    *((method, "/_ping") for method in WRITES if method != "HEAD"),
    *((method, f"/nodes/{NODE}/update?version=14") for method in ("GET", "PUT", "DELETE", "HEAD", "OPTIONS")),
    # What the engine can do besides.
    ("GET", "/containers/json"),
    ("POST", "/v1.41/containers/create"),
    ("POST", "/v1.41/containers/x/exec"),
    ("POST", "/v1.41/containers/x/attach?stream=1"),
    ("GET", "/v1.41/containers/x/attach/ws"),
    ("POST", "/v1.41/services/create"),
    ("POST", "/v1.41/services/x/update?version=1"),
    ("GET", "/v1.41/services/x"),
    ("GET", "/v1.41/services/x/logs"),
    ("GET", "/v1.41/tasks/x"),
    ("GET", "/v1.41/secrets"),
    ("GET", "/v1.41/configs"),
    ("GET", "/v1.41/swarm"),
    ("GET", "/v1.41/swarm/unlockkey"),
    ("POST", "/v1.41/swarm/leave?force=1"),
    ("POST", "/v1.41/swarm/update?version=1"),
    ("DELETE", f"/v1.41/nodes/{NODE}?force=1"),
    ("GET", "/v1.41/events"),
    ("GET", "/v1.41/system/df"),
    ("POST", "/v1.41/images/create?fromImage=x"),
    ("POST", "/v1.41/build"),
    ("GET", "/v1.41/volumes"),
    ("GET", "/v1.41/networks"),
    ("GET", "/v1.41/plugins"),
    ("POST", "/session"),
    ("POST", "/grpc"),
    ("POST", "/v1.41/auth"),
    ("GET", "/"),
    ("GET", ""),
    # Ways to write a path.
    ("GET", "//nodes"),
    ("GET", "/nodes/"),
    ("GET", "/v1.41//nodes"),
    ("GET", "/v1.41/../containers/json"),
    ("GET", "/v1.41/nodes/../containers/json"),
    ("GET", "/v1.41/nodes/.."),
    ("GET", "/v1.41/nodes/."),
    ("GET", "/v1.41/nodes/%2e%2e/containers/json"),
    ("GET", "/v1.41/nodes/x%2f..%2f..%2fcontainers%2fjson"),
    ("GET", "/v1.41/%6eodes"),
    ("GET", "/v1.41/nodes;a=b"),
    ("GET", "/v1.41/nodes\\..\\containers"),
    ("GET", "/v1.41/Nodes"),
    ("GET", "/v1.41/nodes#x"),
    ("GET", "/v1.41/v1.41/nodes"),
    ("GET", "/v2.0/nodes"),
    ("GET", "/v1/nodes"),
    ("GET", "/v1.41.2/nodes"),
    ("GET", "/v1.4¹/nodes"),
    ("GET", "/v1.9999/nodes"),
    ("GET", "/v1.41"),
    ("GET", "v1.41/nodes"),
    ("GET", "http://docker/v1.41/nodes"),
    ("OPTIONS", "*"),
    ("CONNECT", "docker:80"),
    ("POST", f"/v1.41/nodes/{NODE}/update/?version=14"),
    ("POST", f"/v1.41/nodes/{NODE}/../{NODE}/update?version=14"),
    ("POST", "/v1.41/nodes//update?version=14"),
    ("POST", "/v1.41/nodes/update?version=14"),
    ("GET", "/v1.41/nodes/" + "n" * 256),
    # Queries.
    ("GET", "/v1.41/info?a=b"),
    ("GET", "/_ping?a=b"),
    ("GET", "/v1.41/nodes?size=1"),
    ("GET", "/v1.41/nodes?filters"),
    ("GET", "/v1.41/nodes?filters=x"),
    ("GET", "/v1.41/nodes?filters=[]"),
    ("GET", "/v1.41/nodes?filters=%7B%22a%22%3A1%7D"),
    ("GET", "/v1.41/nodes?filters=%7B%22a%22%3A%5B1%5D%7D"),
    ("GET", "/v1.41/nodes?filters=%7B%22a%22%3A%5B%5D%2C%22a%22%3A%5B%5D%7D"),
    ("GET", "/v1.41/nodes?filters=%7B%7D&filters=%7B%7D"),
    ("GET", "/v1.41/nodes?filters=%7B%7D&FILTERS=%7B%7D"),
    ("GET", "/v1.41/nodes?filters=%ff"),
    ("GET", "/v1.41/nodes?filters=" + "[" * 5000),
    ("GET", "/v1.41/nodes?status=true"),
    ("GET", "/v1.41/services?status=maybe"),
    ("GET", "/v1.41/tasks?" + "&".join(f"a{i}=b" for i in range(10))),
    ("GET", f"/v1.41/nodes/{NODE}?version=14"),
    ("POST", f"/v1.41/nodes/{NODE}/update"),
    ("POST", f"/v1.41/nodes/{NODE}/update?version="),
    ("POST", f"/v1.41/nodes/{NODE}/update?version=-1"),
    ("POST", f"/v1.41/nodes/{NODE}/update?version=1e1"),
    ("POST", f"/v1.41/nodes/{NODE}/update?version=%D9%A1"),  # a digit, too, but not one of ours
    ("POST", f"/v1.41/nodes/{NODE}/update?version=14&version=15"),
    ("POST", f"/v1.41/nodes/{NODE}/update?version=14&force=1"),
    ("POST", f"/v1.41/nodes/{NODE}/update?Version=14"),
]


@pytest.mark.parametrize(("asked", "target"), PASSED.items(), ids=lambda found: str(found)[:60])
def test_what_is_let_through(asked: tuple[str, str], target: str) -> None:
    route = find(*asked)
    assert (route.method, route.target) == (asked[0], target)
    assert bool(route.node) == (asked[0] == "POST")
    assert route.free == route.path.endswith(("_ping", "version"))


@pytest.mark.parametrize(("method", "target"), REFUSED, ids=lambda found: found[:60] or "-")
def test_what_is_refused(method: str, target: str) -> None:
    with pytest.raises(Denied) as denied:
        find(method, target)
    assert denied.value.status == 403
    assert str(denied.value)


@given(
    st.sampled_from(["GET", "POST", "HEAD", "DELETE", "PUT"]),
    st.one_of(
        st.text(st.characters(min_codepoint=0x21, max_codepoint=0x7E)).map(lambda rest: "/" + rest),
        st.lists(
            st.sampled_from(
                [
                    *"/.?=&%",
                    "//",
                    "..",
                    "%2e",
                    "/v1.41",
                    "/nodes",
                    "/update",
                    "/info",
                    "/tasks",
                    "/containers",
                    "/x",
                    "version=1",
                ]
            ),
            max_size=8,
        ).map("".join),
    ),
)
def test_whatever_passes_is_one_of_the_few(method: str, target: str) -> None:
    try:
        route = find(method, target)
    except Denied:
        return
    assert ".." not in route.target.split("/")
    assert "//" not in route.target
    assert "%" not in route.path
    assert route.path.split("/")[1] in ("_ping", "version", "info", "nodes", "tasks", "services")
    assert route.method == "GET" or (route.method, route.path) == ("HEAD", "/_ping") or route.path.endswith("/update")


@given(st.dictionaries(st.text(max_size=5), st.lists(st.text(max_size=5), max_size=3), max_size=5))
def test_filters_mean_the_same_to_the_engine(filters: dict[str, list[str]]) -> None:
    route = find("GET", "/v1.41/tasks?" + urlencode({"filters": json.dumps(filters)}))
    again = find("GET", route.target)
    assert again == route

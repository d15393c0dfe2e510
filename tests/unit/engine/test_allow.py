"""services/engine/allow.py: which requests there are, and that nothing else is one."""

import json
from typing import Any
from urllib.parse import quote, urlencode

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from services.engine.allow import (
    OPERATORS,
    VIEWS,
    Denied,
    NotStrict,
    Unexpected,
    allowed_request,
    label_change,
    node,
    strict_json,
    view,
)
from tests.support.servers.docker_engine import ANSWERS, NODE

NODE_ID = "qbi4c8284dgwj4dr3r7e2mbr0"
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
    ("GET", f"/v1.41/nodes/{NODE_ID}"): f"/v1.41/nodes/{NODE_ID}",
    ("GET", "/nodes/gpu-1.example.org"): "/nodes/gpu-1.example.org",
    ("GET", "/v1.41/tasks?filters=%7B%7D"): "/v1.41/tasks?filters=%7B%7D",
    ("GET", "/v1.41/services?status=true"): "/v1.41/services?status=true",
    ("POST", f"/v1.41/nodes/{NODE_ID}/update?version=14"): f"/v1.41/nodes/{NODE_ID}/update?version=14",
    ("POST", f"/nodes/{NODE_ID}/update?version=0014"): f"/nodes/{NODE_ID}/update?version=14",
}

WRITES = ("POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "CONNECT", "HEAD", "get", "PROPFIND")
READS = ("/version", "/v1.41/info", "/v1.41/nodes", "/tasks", "/services", f"/nodes/{NODE_ID}")

REFUSED = [
    *((method, path) for method in WRITES for path in READS),
    *((method, "/_ping") for method in WRITES if method != "HEAD"),
    *((method, f"/nodes/{NODE_ID}/update?version=14") for method in ("GET", "PUT", "DELETE", "HEAD", "OPTIONS")),
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
    ("DELETE", f"/v1.41/nodes/{NODE_ID}?force=1"),
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
    ("POST", f"/v1.41/nodes/{NODE_ID}/update/?version=14"),
    ("POST", f"/v1.41/nodes/{NODE_ID}/../{NODE_ID}/update?version=14"),
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
    ("GET", f"/v1.41/nodes/{NODE_ID}?version=14"),
    ("POST", f"/v1.41/nodes/{NODE_ID}/update"),
    ("POST", f"/v1.41/nodes/{NODE_ID}/update?version="),
    ("POST", f"/v1.41/nodes/{NODE_ID}/update?version=-1"),
    ("POST", f"/v1.41/nodes/{NODE_ID}/update?version=1e1"),
    ("POST", f"/v1.41/nodes/{NODE_ID}/update?version=%D9%A1"),  # a digit, too, but not one of ours
    ("POST", f"/v1.41/nodes/{NODE_ID}/update?version=14&version=15"),
    ("POST", f"/v1.41/nodes/{NODE_ID}/update?version=14&force=1"),
    ("POST", f"/v1.41/nodes/{NODE_ID}/update?Version=14"),
]


@pytest.mark.parametrize(("asked", "target"), PASSED.items(), ids=lambda found: str(found)[:60])
def test_what_is_let_through(asked: tuple[str, str], target: str) -> None:
    route = allowed_request(*asked)
    assert (route.method, route.target) == (asked[0], target)
    assert bool(route.node) == (asked[0] == "POST")
    assert route.free == route.path.endswith(("_ping", "version"))


def test_what_is_refused() -> None:
    for method, target in REFUSED:
        with pytest.raises(Denied) as denied:
            pytest.fail(f"{method} {target} leads to {allowed_request(method, target)}")
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
        route = allowed_request(method, target)
    except Denied:
        return
    assert ".." not in route.target.split("/")
    assert "//" not in route.target
    assert "%" not in route.path
    assert route.path.split("/")[1] in ("_ping", "version", "info", "nodes", "tasks", "services")
    assert route.method == "GET" or (route.method, route.path) == ("HEAD", "/_ping") or route.path.endswith("/update")


@given(st.dictionaries(st.text(max_size=5), st.lists(st.text(max_size=5), max_size=3), max_size=5))
def test_filters_mean_the_same_to_the_engine(filters: dict[str, list[str]]) -> None:
    route = allowed_request("GET", "/v1.41/tasks?" + urlencode({"filters": json.dumps(filters)}))
    assert allowed_request("GET", route.target) == route


# ---- labels `infaas.*` may differ, but for the operator's, and nothing else

OURS = st.from_regex(r"infaas\.[a-z][a-z._-]{0,10}", fullmatch=True).filter(lambda name: name not in OPERATORS)
THEIRS = st.one_of(
    st.sampled_from(sorted(OPERATORS)), st.text(max_size=12).filter(lambda name: not name.startswith("infaas."))
)
VALUES = st.text(st.characters(min_codepoint=0x20, max_codepoint=0x7E), max_size=20)
LABELS = st.dictionaries(st.one_of(OURS, THEIRS), VALUES, max_size=6)
SPECS = st.builds(
    lambda labels, role, availability, more: {"Labels": labels, "Role": role, "Availability": availability, **more},
    LABELS,
    st.sampled_from(["worker", "manager"]),
    st.sampled_from(["active", "pause", "drain"]),
    st.dictionaries(st.sampled_from(["Name", "Later"]), st.one_of(VALUES, st.booleans(), st.lists(st.integers()))),
)
JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.text(max_size=8)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=8), inner, max_size=3)),
    max_leaves=8,
)


def theirs(labels: dict[str, str]) -> dict[str, str]:
    return {name: value for name, value in labels.items() if not ours(name)}


def ours(name: str) -> bool:
    return name.startswith("infaas.") and name not in OPERATORS


@given(SPECS, st.dictionaries(OURS, VALUES, max_size=4), st.data())
def test_our_labels_may_come_change_and_go(present: dict[str, Any], put: dict[str, str], data: st.DataObject) -> None:
    had = [name for name in present["Labels"] if ours(name)]
    gone = set(data.draw(st.lists(st.sampled_from(had), unique=True))) if had else set()
    gone -= put.keys()
    after = {name: value for name, value in present["Labels"].items() if name not in gone} | put
    found = label_change(present, {**present, "Labels": after})
    assert found.spec == {**present, "Labels": after}
    assert found.set == {name: value for name, value in put.items() if present["Labels"].get(name) != value}
    assert set(found.removed) == gone


@given(SPECS, SPECS)
def test_what_passes_differs_in_our_labels_alone(present: dict[str, Any], asked: dict[str, Any]) -> None:
    try:
        found = label_change(present, asked)
    except Denied:
        same = {**present, "Labels": 0} == {**asked, "Labels": 0}
        assert not same or theirs(present["Labels"]) != theirs(asked["Labels"])
        return
    assert {**found.spec, "Labels": 0} == {**present, "Labels": 0}
    assert theirs(found.spec["Labels"]) == theirs(present["Labels"])
    assert found.spec["Labels"] == asked["Labels"]


@given(SPECS, st.text(max_size=8), JSON)
def test_no_field_changes_whatever_it_is_called(present: dict[str, Any], name: str, value: Any) -> None:
    assume(name != "Labels" and present.get(name) != value and value not in ("", None))
    with pytest.raises(Denied):
        label_change(present, {**present, name: value})


@given(SPECS, JSON)
def test_anything_else_is_refused_and_nothing_breaks(present: dict[str, Any], asked: Any) -> None:
    with pytest.raises(Denied):
        label_change(present, asked)


@given(SPECS, THEIRS, VALUES)
def test_labels_of_others_stay(present: dict[str, Any], name: str, value: str) -> None:
    assume(present["Labels"].get(name) != value)
    with pytest.raises(Denied):
        label_change(present, {**present, "Labels": {**present["Labels"], name: value}})


SPEC = {"Labels": {"infaas.worker": "cpu", "rack": "7"}, "Role": "worker", "Availability": "active"}
REFUSED_CHANGES = {
    "the role": {**SPEC, "Role": "manager"},
    "the availability": {**SPEC, "Availability": "drain"},
    "a name": {**SPEC, "Name": "other"},
    "no role": {key: value for key, value in SPEC.items() if key != "Role"},
    "the role in another case": {**SPEC, "role": "manager"},
    "the role in letters that fold": {**SPEC, "Availab\u0131lity": "drain"},
    "labels in another case": {**SPEC, "labels": {"rack": "8"}},
    "labels in letters that fold": {**SPEC, "Label\u017f": {"rack": "8"}},
    "a field that is new": {**SPEC, "Annotations": {"Labels": {}}},
    "another's label": {**SPEC, "Labels": {**SPEC["Labels"], "rack": "8"}},  # type: ignore[dict-item]
    "another's label gone": {**SPEC, "Labels": {"infaas.worker": "cpu"}},
    "all labels gone": {"Role": "worker", "Availability": "active"},
    "almost our label": {**SPEC, "Labels": {**SPEC["Labels"], "infaas": "1"}},  # type: ignore[dict-item]
    "our label in another case": {**SPEC, "Labels": {**SPEC["Labels"], "Infaas.worker": "1"}},  # type: ignore[dict-item]
    "a label without a name": {**SPEC, "Labels": {**SPEC["Labels"], "infaas.": "1"}},  # type: ignore[dict-item]
    "a label with a space": {**SPEC, "Labels": {**SPEC["Labels"], "infaas.a b": "1"}},  # type: ignore[dict-item]
    "a long name": {**SPEC, "Labels": {**SPEC["Labels"], "infaas." + "a" * 121: "1"}},  # type: ignore[dict-item]
    "a long value": {**SPEC, "Labels": {**SPEC["Labels"], "infaas.a": "1" * 257}},  # type: ignore[dict-item]
    "a line break": {**SPEC, "Labels": {**SPEC["Labels"], "infaas.a": "1\n"}},  # type: ignore[dict-item]
    "half a character": {**SPEC, "Labels": {**SPEC["Labels"], "infaas.a": "\ud800"}},  # type: ignore[dict-item]
    "a number": {**SPEC, "Labels": {**SPEC["Labels"], "infaas.a": 1}},  # type: ignore[dict-item]
    "labels that are none": {**SPEC, "Labels": ["infaas.a"]},
    "a list": [SPEC],
    "nothing": None,
}


def test_changes_that_are_refused() -> None:
    for name, asked in REFUSED_CHANGES.items():
        with pytest.raises(Denied) as denied:
            pytest.fail(f"{name}: {label_change(SPEC, asked)}")
        assert denied.value.status == 403


def test_an_empty_field_is_one_that_is_not_there() -> None:
    found = label_change(SPEC, {**SPEC, "Name": "", "Labels": {**SPEC["Labels"], "infaas.a": ""}})  # type: ignore[dict-item]
    assert found.spec == {**SPEC, "Labels": {"infaas.worker": "cpu", "rack": "7", "infaas.a": ""}}
    assert label_change({**SPEC, "Labels": None}, {**SPEC, "Labels": None}).spec["Labels"] == {}


@pytest.mark.parametrize(
    "text",
    [
        b'{"Role": "worker", "Role": "manager"}',
        b'{"Labels": {"infaas.a": "1", "infaas.a": "2"}}',
        b'[{"a": {"b": 1, "b": 1}}]',
        b"{} {}",
        b'{"a": NaN}',
        b'{"a": -Infinity}',
        b"\xff",
        b"\xef\xbb\xbf{}",
        b"{'a': 1}",
        b"",
        b"[" * 60_000,
        b"1" * 5000,
    ],
    ids=lambda text: repr(text[:40]),
)
def test_json_that_could_be_read_in_two_ways_is_not_read(text: bytes) -> None:
    with pytest.raises(NotStrict):
        strict_json(text)


@given(JSON)
def test_other_json_is_read(value: Any) -> None:
    assert strict_json(json.dumps(value).encode()) == value


# -- services/engine/allow.py: what is told of answers that a real engine gave, and what is not.
RECORDED: dict[str, Any] = json.loads(ANSWERS.read_text())
SECRET = (
    "hunter2"  # stands wherever people put passwords: environment, arguments, labels, health check, log options, proxy
)
PLACES = (
    "Env",
    "Args",
    "Command",
    "Secrets",
    "Configs",
    "Mounts",
    "Healthcheck",
    "LogDriver",
    "TLSInfo",
    "PreviousSpec",
)


def keys(found: Any) -> set[str]:
    if isinstance(found, dict):
        return set(found).union(*(keys(value) for value in found.values()))
    return set().union(*(keys(item) for item in found)) if isinstance(found, list) else set()


@pytest.mark.parametrize("path", VIEWS)
def test_no_secret_is_told(path: str) -> None:
    told = view(path)(RECORDED[path])
    assert SECRET not in json.dumps(told)
    assert not keys(told) & set(PLACES)


def test_services_and_the_engine_are_told_without_secrets() -> None:
    for path in ("/info", "/tasks", "/services"):
        assert SECRET in json.dumps(RECORDED[path])
    assert set(PLACES) - keys(RECORDED) == {"Command", "PreviousSpec"}
    (told,) = view("/services")(RECORDED["/services"])
    assert told["Spec"]["Name"] == "worker-cpu"
    assert told["Spec"]["Mode"] == {"Global": {}}
    assert told["Spec"]["Labels"] == {"com.docker.stack.namespace": "infaas", "infaas.kind": "cpu"}
    assert told["Spec"]["TaskTemplate"]["Placement"] == {"Constraints": ["node.labels.infaas.worker == cpu"]}
    info = view("/info")(RECORDED["/info"])
    assert info["Swarm"]["ControlAvailable"] is True
    assert "Cluster" not in info["Swarm"]
    assert view("/version")(RECORDED["/version"])["ApiVersion"] == "1.41"


def test_a_node_is_told_with_the_whole_spec_that_goes_back() -> None:
    (told,) = view("/nodes")(RECORDED["/nodes"])
    assert told["Spec"] == RECORDED["/nodes"][0]["Spec"]
    assert (told["ID"], told["Version"]) == (NODE, {"Index": 14})
    assert told["Description"]["Hostname"] == "n0"
    assert told["Status"]["State"] == "ready"
    assert told["ManagerStatus"]["Leader"] is True
    assert told == node(RECORDED["/nodes"][0]) == view(f"/nodes/{NODE}")(RECORDED["/nodes"][0])


def test_a_task_is_told_with_where_and_how_it_is() -> None:
    (recorded,) = json.loads(json.dumps(RECORDED["/tasks"]))
    recorded["Spec"]["ContainerSpec"]["StopGracePeriod"] = 45 * 10**9
    (told,) = view("/tasks")([recorded])
    assert told["Status"]["State"] == "rejected"
    assert told["DesiredState"] == "ready"
    assert told["NodeID"] == NODE
    assert told["ServiceID"] == RECORDED["/services"][0]["ID"]
    assert told["Spec"]["ContainerSpec"] == {
        "Image": "nowhere.example/infaas:1",
        "StopGracePeriod": 45 * 10**9,  # how long its container may go on after its label went
    }


@pytest.mark.parametrize("path", VIEWS)
def test_what_a_later_engine_adds_stays_with_it(path: str) -> None:
    def grown(found: Any) -> Any:
        if isinstance(found, list):
            return [grown(item) for item in found]
        if not isinstance(found, dict):
            return found
        return {key: grown(value) for key, value in found.items()} | {"Added": {"by": "a later engine"}}

    plain, more = view(path)(RECORDED[path]), view(path)(grown(RECORDED[path]))
    assert (keys(more) - keys(plain)) <= {"Added", "by"}
    for one in more if isinstance(more, list) else [more]:
        assert "Added" not in one
        assert "Added" not in one.get("Swarm", {})
        assert "Added" not in one.get("Description", {})
        assert "Added" not in one.get("Spec", {}) or path == "/nodes"


@pytest.mark.parametrize("found", [None, 1, "text", [1], [None], {"a": 1}, [{"Description": []}]])
def test_what_is_no_answer_is_seen(found: Any) -> None:
    with pytest.raises(Unexpected):
        view("/nodes")(found)
    with pytest.raises(Unexpected):
        view("/services")([{"Spec": 1}])

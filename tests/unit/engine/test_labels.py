"""services/engine/labels.py: labels `infaas.*` may differ, but for the operator's, and nothing else."""

import json
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from services.engine.labels import OPERATORS, change
from services.engine.routes import Denied
from services.engine.strict import NotStrict, loads

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
    found = change(present, {**present, "Labels": after})
    assert found.spec == {**present, "Labels": after}
    assert found.set == {name: value for name, value in put.items() if present["Labels"].get(name) != value}
    assert set(found.removed) == gone


@given(SPECS, SPECS)
def test_what_passes_differs_in_our_labels_alone(present: dict[str, Any], asked: dict[str, Any]) -> None:
    try:
        found = change(present, asked)
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
        change(present, {**present, name: value})


@given(SPECS, JSON)
def test_anything_else_is_refused_and_nothing_breaks(present: dict[str, Any], asked: Any) -> None:
    with pytest.raises(Denied):
        change(present, asked)


@given(SPECS, THEIRS, VALUES)
def test_labels_of_others_stay(present: dict[str, Any], name: str, value: str) -> None:
    assume(present["Labels"].get(name) != value)
    with pytest.raises(Denied):
        change(present, {**present, "Labels": {**present["Labels"], name: value}})


SPEC = {"Labels": {"infaas.worker": "cpu", "rack": "7"}, "Role": "worker", "Availability": "active"}
REFUSED = {
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


@pytest.mark.parametrize("asked", REFUSED.values(), ids=REFUSED.keys())
def test_what_is_refused(asked: Any) -> None:
    with pytest.raises(Denied) as denied:
        change(SPEC, asked)
    assert denied.value.status == 403


def test_an_empty_field_is_one_that_is_not_there() -> None:
    found = change(SPEC, {**SPEC, "Name": "", "Labels": {**SPEC["Labels"], "infaas.a": ""}})  # type: ignore[dict-item]
    assert found.spec == {**SPEC, "Labels": {"infaas.worker": "cpu", "rack": "7", "infaas.a": ""}}
    assert change({**SPEC, "Labels": None}, {**SPEC, "Labels": None}).spec["Labels"] == {}


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
        loads(text)


@given(JSON)
def test_other_json_is_read(value: Any) -> None:
    assert loads(json.dumps(value).encode()) == value

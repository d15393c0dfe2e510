"""`infaas query`: what is printed of an answer."""

import msgpack
import pytest

from infaas.answers import read_answer
from infaas.cli.query import _render, _render_explain
from infaas.errors import Refused
from tests.support.clients.responders import answer


def shown(capsys: pytest.CaptureFixture[str], **fields: object) -> list[str]:
    got = read_answer(msgpack.packb({**answer({"inputs": [[1.0], [2.0]]}), **fields}))
    assert not isinstance(got, Refused)
    _render(got)
    return capsys.readouterr().out.splitlines()


def test_one_variant_and_the_query_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    lines = shown(capsys, query="0f", cached=True)
    assert any(line.startswith("variant    adder-v1 (model") for line in lines)
    assert any(line.startswith("latency") and line.endswith("from the cache") for line in lines)
    assert lines[-1] == "query      0f"
    assert not any(line.startswith(("members", "confidence")) for line in lines)


def test_several_models_are_named_with_their_confidence(capsys: pytest.CaptureFixture[str]) -> None:
    several = {"members": ["a@1", "b@2"], "missing": 1, "confidence": 1 / 3, "confidences": [2 / 3, 1 / 3]}
    lines = shown(capsys, model="", version="", variant="", hardware="", worker="", **several)
    assert "members    a@1, b@2 (1 missing)" in lines
    assert "confidence 0.3333 (0.6667, 0.3333)" in lines
    assert not any(line.startswith(("variant", "ran on")) for line in lines)


def test_an_explanation_shows_members_before_variants(capsys: pytest.CaptureFixture[str]) -> None:
    chosen = {"variant": "a1", "state": "Active", "hardware": "cpu", "why_not": ""}
    row = {
        "member": "a@1",
        "probability": 0.625,
        "weight": None,
        "variant": "a1",
        "why": "one member is asked, by chance",
    }
    _render_explain({"chosen": chosen, "candidates": [chosen], "members": [row]}, wide=True)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["member", "probability", "weight", "variant", "why"]
    assert lines[1].split() == ["a@1", "0.625", "-", "a1", *row["why"].split()]
    assert "the best for its model" in lines[-1]


def test_an_explanation_of_a_pipeline_shows_its_stages_before_their_variants(
    capsys: pytest.CaptureFixture[str],
) -> None:
    first = {"variant": "a1", "state": "Active", "hardware": "cpu", "why_not": "", "stage": "cheap"}
    other = {**first, "variant": "b1", "stage": "dear", "why_not": "accuracy 0.5000 is below 0.8"}
    stage = {
        "vertex": "cheap", "app": "digits", "share_ms": 150.0, "accuracy": None, "when": [], "variant": "a1",
        "planned": False, "waiting": 0, "why": "it is being loaded, and in time",
    }  # fmt: skip
    unmet = {**stage, "vertex": "dear", "accuracy": 0.8, "when": ["cheap: y > 0.5", "x is visited"], "variant": None}
    _render_explain({"chosen": first, "candidates": [first, other], "stages": [stage, unmet]}, wide=True)
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split()[:6] == ["cheap", "digits", "150", "-", "always", "a1"]
    assert "cheap: y > 0.5 or x is visited" in lines[2]
    assert ">= 0.8" in lines[2]
    assert lines[-1].split()[:2] == ["dear", "b1"]
    assert "what its stage would get" in lines[-2]

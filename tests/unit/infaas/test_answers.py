"""Why the chosen variant was chosen, in words."""

import json
from typing import Any

import msgpack
import numpy as np
import pytest

from infaas.answers import Answer, read_answer, read_map, why_chosen
from infaas.errors import InfaasError, Refused
from tests.support.clients.responders import answer, refusal


def read(reply):
    return read_answer(msgpack.packb(reply))


def test_an_answer_gives_arrays_and_all_its_fields():
    got = read(answer({"id": "q", "inputs": [[1, 2], [3, 4]]}, confidence=0.8, missed=["latency"]))
    assert isinstance(got, Answer)
    assert read(answer({}, error=None)).variant == "adder-v1"
    assert got.output.tolist() == [3.0, 7.0]
    assert got.output.dtype == np.float32
    assert (got.id, got.variant, got.batch, got.missed, got.confidence, got.members) == (
        "q",
        "adder-v1",
        2,
        ["latency"],
        0.8,
        None,
    )


def test_outputs_belong_to_the_caller():
    got = read(answer({"inputs": [[1.0]]}))
    got.output[0] = 5
    assert got.outputs["sum"].tolist() == [5.0]


def test_plain_lists_are_tensors_too():
    assert read(answer({}, outputs={"y": [[1, 2]]})).output.tolist() == [[1, 2]]


def test_several_outputs_have_to_be_named():
    got = read(answer({}, outputs={"a": [1.0], "b": [2.0]}))
    assert got.outputs["b"].tolist() == [2.0]
    with pytest.raises(InfaasError, match="a, b"):
        _ = got.output


def test_the_map_is_json_without_what_does_not_apply():
    nan = {"datatype": "FP32", "shape": [1, 2], "data": np.array([[np.nan, 1]], "<f4").tobytes()}
    shown = read(answer({"id": "q"}, outputs={"y": nan}, accuracy=None)).to_map()
    assert json.loads(json.dumps(shown, allow_nan=False))["outputs"] == {"y": [[None, 1.0]]}
    assert shown["accuracy"] is None
    assert "confidence" not in shown
    assert "outputs_ref" not in shown


def test_a_refusal_is_one():
    got = read(refusal("overloaded", "full", retry_after_ms=5))
    assert isinstance(got, Refused)
    assert (got.code, got.retry_after_ms) == ("overloaded", 5)


@pytest.mark.parametrize(
    "reply", [b"", b"\xc1", b"\x93", msgpack.packb([1]), msgpack.packb({}), msgpack.packb({"outputs": 3})]
)
def test_what_is_neither_is_said_so(reply):
    with pytest.raises(InfaasError, match="reply"):
        read_answer(reply)


def test_a_broken_output_names_itself():
    short = {"datatype": "FP32", "shape": [3], "data": b"1234"}
    with pytest.raises(InfaasError, match=r"outputs\.y"):
        _ = read(answer({}, outputs={"y": short})).outputs


def test_other_replies():
    assert read_map(msgpack.packb({"items": []})) == {"items": []}
    with pytest.raises(Refused, match="unknown_app"):
        read_map(msgpack.packb(refusal("unknown_app")))
    with pytest.raises(InfaasError, match="reply"):
        read_map(msgpack.packb([1]))


# -- Why the chosen variant was chosen, in words.


def candidate(variant: str, state: str, cost: float, why_not: str = "") -> dict[str, Any]:
    return {
        "variant": variant,
        "state": state,
        "cost_per_1000": cost,
        "why_not": why_not,
        "fits": why_not in ("", RIVAL),
    }


RIVAL = "meets everything, but a cheaper variant does too"
ABSENT = "not loaded, and an Active variant meets the requirements"


@pytest.mark.parametrize(
    ("candidates", "told"),
    [
        ([candidate("a", "Active", 1.0)], "meets all needs"),
        ([candidate("a", "Active", 1.0), candidate("b", "Inactive", 0.5, ABSENT)], "the only loaded one"),
        (
            [candidate("a", "Active", 1.0), candidate("b", "Active", 2.0, RIVAL)],
            "the cheapest of those that are loaded",
        ),
        ([candidate("a", "Active", 3.0), candidate("b", "Active", 2.0, RIVAL)], "for accuracy"),
        ([candidate("a", "Loading", 1.0)], "being loaded"),
        ([candidate("a", "Interfered", 1.0)], "Interfered, but in time"),
        ([candidate("a", "Inactive", 1.0)], "would be loaded"),
    ],
)
def test_the_reason_follows_from_the_states_and_costs(candidates: list[dict[str, Any]], told: str) -> None:
    assert told in why_chosen({"chosen": candidates[0], "candidates": candidates})


def test_what_an_older_system_does_not_say_is_not_made_up() -> None:
    assert why_chosen({"chosen": {"variant": "a"}, "candidates": [{"variant": "a"}]}) == "meets all needs"


def test_where_nothing_is_chosen_there_is_no_reason() -> None:
    assert why_chosen({"chosen": None, "candidates": [candidate("a", "Active", 1.0, RIVAL)]}) == ""


def test_where_several_models_answer_each_chosen_variant_is_the_best_for_its_model() -> None:
    chosen = {"variant": "a1", "state": "Active", "why_not": ""}
    explanation = {"chosen": chosen, "candidates": [chosen], "members": [{"member": "a@1", "weight": 1.0}]}
    assert why_chosen(explanation) == "the best for its model"

"""Why the chosen variant was chosen, in words."""

import json
from typing import Any

import msgpack
import numpy as np
import pytest

from infaas.answers import Answer, read_answer, read_map, why_chosen
from infaas.errors import BadInput, InfaasError, NotConnected, Refused, Timeout
from tests.support.clients.responders import answer, refusal


def read(reply):
    return read_answer(msgpack.packb(reply))


def test_an_answer_gives_arrays_and_all_its_fields():
    got = read(answer({"id": "q", "inputs": [[1, 2], [3, 4]]}, confidence=0.8, missed=["latency"]))
    assert isinstance(got, Answer)
    assert read(answer({}, error=None)).variant == "adder-v1"
    assert got.output.tolist() == [3.0, 7.0]
    assert got.output.dtype == np.float32
    assert (got.id, got.variant, got.batch, got.missed) == ("q", "adder-v1", 2, ["latency"])
    assert (got.confidence, got.members) == (0.8, None)


def test_outputs_belong_to_the_caller_and_several_have_to_be_named() -> None:
    got = read(answer({"inputs": [[1.0]]}))
    got.output[0] = 5
    assert got.outputs["sum"].tolist() == [5.0]
    assert read(answer({}, outputs={"y": [[1, 2]]})).output.tolist() == [[1, 2]]
    got = read(answer({}, outputs={"a": [1.0], "b": [2.0]}))
    assert got.outputs["b"].tolist() == [2.0]
    with pytest.raises(InfaasError, match="a, b"):
        _ = got.output


def test_an_accuracy_is_told_in_the_metric_that_it_counts_for() -> None:
    assert "; mae 43.2 EUR; " in repr(read(answer({}, accuracy=1 / 44.2, metric="mae", unit="EUR")))
    assert read(answer({}, accuracy=0.9)).quality == "accuracy 0.9"
    assert read(answer({}, accuracy=None)).quality == ""


def test_the_map_is_json_without_what_does_not_apply():
    nan = {"datatype": "FP32", "shape": [1, 2], "data": np.array([[np.nan, 1]], "<f4").tobytes()}
    shown = read(answer({"id": "q"}, outputs={"y": nan}, accuracy=None)).to_map()
    assert json.loads(json.dumps(shown, allow_nan=False))["outputs"] == {"y": [[None, 1.0]]}
    assert shown["accuracy"] is None
    assert "confidence" not in shown
    assert "outputs_ref" not in shown


def test_refusals_broken_outputs_and_other_replies_say_what_they_are() -> None:
    got = read(refusal("overloaded", "full", retry_after_ms=5))
    assert isinstance(got, Refused)
    assert (got.code, got.retry_after_ms) == ("overloaded", 5)
    short = {"datatype": "FP32", "shape": [3], "data": b"1234"}
    with pytest.raises(InfaasError, match=r"outputs\.y"):
        _ = read(answer({}, outputs={"y": short})).outputs
    assert read_map(msgpack.packb({"items": []})) == {"items": []}
    with pytest.raises(Refused, match="unknown_app"):
        read_map(msgpack.packb(refusal("unknown_app")))
    with pytest.raises(InfaasError, match="reply"):
        read_map(msgpack.packb([1]))


@pytest.mark.parametrize(
    "reply", [b"", b"\xc1", b"\x93", msgpack.packb([1]), msgpack.packb({}), msgpack.packb({"outputs": 3})]
)
def test_what_is_neither_is_said_so(reply):
    with pytest.raises(InfaasError, match="reply"):
        read_answer(reply)


# -- Why the chosen variant was chosen, in words.


def candidate(variant: str, state: str, cost: float, why_not: str = "") -> dict[str, Any]:
    fits = why_not in ("", RIVAL)
    return {"variant": variant, "state": state, "cost_per_1000": cost, "why_not": why_not, "fits": fits}


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


def test_reasons_are_those_of_what_the_system_says() -> None:
    assert why_chosen({"chosen": {"variant": "a"}, "candidates": [{"variant": "a"}]}) == "meets all needs"
    assert why_chosen({"chosen": None, "candidates": [candidate("a", "Active", 1.0, RIVAL)]}) == ""
    chosen = {"variant": "a1", "state": "Active", "why_not": ""}
    explanation = {"chosen": chosen, "candidates": [chosen], "members": [{"member": "a@1", "weight": 1.0}]}
    assert why_chosen(explanation) == "the best for its model"


def test_a_refusal_keeps_all_it_was_told():
    told = {
        "id": "q1",
        "error": {
            "code": "unsatisfiable",
            "message": "no variant is that accurate",
            "closest": {"variant": "v", "accuracy": 0.9, "latency_ms": 3.0, "cost": 0.1},
            "retry_after_ms": 20.0,
        },
    }
    refused = Refused.from_map(told)
    assert (refused.code, refused.message, refused.id) == ("unsatisfiable", "no variant is that accurate", "q1")
    assert refused.closest == told["error"]["closest"]
    assert refused.retry_after_ms == 20.0
    assert refused.to_map() == told
    assert str(refused) == "unsatisfiable: no variant is that accurate"


def test_errors_are_infaas_errors_with_codes_of_later_versions() -> None:
    assert Refused.from_map({"error": {"code": "on_holiday", "message": "later"}}).code == "on_holiday"
    for error, python in ((NotConnected, ConnectionError), (Timeout, TimeoutError), (BadInput, ValueError)):
        assert issubclass(error, InfaasError)
        assert issubclass(error, python)


@pytest.mark.parametrize("error", [None, "no", 7, []])
def test_a_refusal_without_a_reason_still_is_one(error):
    assert Refused.from_map({"error": error}).code == "bad_reply"

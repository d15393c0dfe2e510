"""Apps with a default output: at the deadline it is answered, with the reason, and nobody hears twice. Virtual time."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bus.messages.catalog import Signature, TensorSpec, VariantRecord
from bus.messages.public import Tensor
from bus.tensors import to_array
from services.dispatcher.default_output import MOST_BYTES, default_outputs
from tests.support.simulated.fleet import Fleet, refused, variant

SLO_MS = 100.0


class WithDefault(Fleet):
    """A fleet whose app answers 7 where nothing better can come within its latency."""

    def __init__(self, *variants: VariantRecord, loaded: bool = True, slow: float = 1.0, **options: Any) -> None:
        super().__init__(*(variants or (variant(),)), **options)
        self.change(default_output=7, latency_ms=SLO_MS)
        for record in (variants or (variant(),)) if loaded else ():
            self.order(record)
        self.stage.run(1.0)
        self.devices["w0"].slow = slow


ASLEEP = 1000.0 / 2.5  # one second instead of 2.5 ms
AT_THE_OBJECTIVE = pytest.approx(SLO_MS / 1000.0, rel=0.1)


def is_default(reply: dict[str, Any], word: str) -> bool:
    return bool(reply["default"]) and word in reply["reason"] and reply["outputs"]["y"]["data"] == b"\0\0\xe0@"


def test_slow_models_and_what_waits_behind_them_are_answered_for_in_time() -> None:
    fleet = WithDefault(slow=ASLEEP)
    seconds, reply = fleet.timed(fleet.ask(confidence=0.5))
    assert seconds == AT_THE_OBJECTIVE
    assert is_default(reply, "deadline: the model had not answered")
    assert (reply["model"], reply["variant"], reply["cost"], reply["missed"]) == ("", "", 0.0, ["confidence"])
    [outcome] = fleet.outcomes()
    assert (outcome.outcome, outcome.code, outcome.cost) == ("default", "deadline", 0.0)
    fleet = WithDefault(slow=ASLEEP)
    labels = fleet.asks(3, seconds=0.01)
    labels += [fleet.ask() for _ in range(3)]
    assert all(is_default(reply, "deadline") for reply in fleet.each(labels, 3.0))
    assert sorted(outcome.outcome for outcome in fleet.outcomes()) == ["default"] * 6


def test_answers_in_time_are_no_default_also_after_a_load() -> None:
    fleet = WithDefault()
    _, reply = fleet.timed(fleet.ask())
    assert "default" not in reply
    assert reply["variant"] == variant().variant
    assert [outcome.outcome for outcome in fleet.outcomes()] == ["ok"]
    fleet = WithDefault(variant(load_ms=300.0), loaded=False)
    fleet.change(latency_ms=1000.0)
    _, reply = fleet.timed(fleet.ask())
    assert "default" not in reply


def test_a_model_that_can_never_make_it_is_answered_for_with_id_and_items() -> None:
    fleet = WithDefault(variant(base_ms=1000.0), loaded=False)
    seconds, reply = fleet.timed(fleet.ask(items=2))
    assert seconds == AT_THE_OBJECTIVE
    assert reply["default"] is True
    assert reply["reason"].startswith("unsatisfiable: ")
    assert (reply["outputs"]["y"]["shape"], reply["outputs"]["y"]["data"]) == ([2, 1], b"\0\0\xe0@" * 2)
    fleet = WithDefault(variant(base_ms=1000.0), loaded=False)
    reply = fleet.reply(fleet.ask(id="mine", items=3), 5.0)
    assert (reply["id"], reply["outputs"]["y"]["shape"]) == ("mine", [3, 1])


def test_a_load_that_takes_longer_than_the_objective_is_waited_for_no_longer() -> None:
    fleet = WithDefault(variant(load_ms=400.0), loaded=False)
    seconds, reply = fleet.timed(fleet.ask())
    assert seconds == AT_THE_OBJECTIVE
    assert is_default(reply, "being loaded")
    _, later = fleet.timed(fleet.ask())
    assert "default" not in later


def test_without_a_model_the_default_comes_at_once_and_bad_or_impossible_queries_are_refused() -> None:
    fleet = WithDefault()
    fleet.change(links={})
    seconds, reply = fleet.timed(fleet.ask())
    assert is_default(reply, "unknown_model")
    assert seconds < 0.01
    fleet = WithDefault()
    seconds, reply = fleet.timed(fleet.ask(accuracy=0.99))
    refused(reply, "unsatisfiable")
    assert seconds < 0.01
    fleet = WithDefault()
    refused(fleet.timed(fleet.ask(priority=11))[1], "bad_request")


def test_whoever_dies_one_default_is_given() -> None:
    fleet = WithDefault(slow=ASLEEP)
    label = fleet.ask(seconds=0.02)
    fleet.kill_worker("w0")
    assert is_default(fleet.reply(label, 5.0), "deadline")
    fleet = WithDefault(variant(load_ms=4000.0), loaded=False, dispatchers=2)
    labels = fleet.asks(2, seconds=0.02)
    fleet.stage.stop("d0")
    assert all(is_default(reply, "loaded") for reply in fleet.each(labels, 1.0))
    fleet = WithDefault(dispatchers=2, slow=ASLEEP)
    labels = [fleet.ask() for _ in range(2)]  # one each
    fleet.stage.run(0.02)
    fleet.stage.kill("d0", seconds=6.0)
    ends = [fleet.replies(label) for label in labels]
    assert max(map(len, ends)) == 1, "nobody hears twice"
    assert any(is_default(reply, "deadline") for end in ends for reply in end)


def test_versions_are_switched_and_rolled_back_and_no_answer_mixes_them() -> None:
    fleet = WithDefault(variant("m-v1", version="1"), variant("m-v2", version="2"))
    answers = []
    for version in ("1", "2", "1"):
        fleet.change(links={"m": version})
        replies = fleet.each([fleet.ask() for _ in range(5)], 0.5)
        answers.append({(reply["version"], reply["variant"]) for reply in replies})
    assert answers == [{("1", "m-v1")}, {("2", "m-v2")}, {("1", "m-v1")}]


def test_defaults_that_fill_no_message_are_not_made() -> None:
    fleet = WithDefault(variant(base_ms=1000.0), loaded=False)
    fleet.change(default_output="x" * 60_000)
    seconds, reply = fleet.timed(fleet.ask(items=1000))
    refused(reply, "unsatisfiable")
    assert seconds == AT_THE_OBJECTIVE
    assert [outcome.outcome for outcome in fleet.outcomes()] == ["refused"]
    assert fleet.timed(fleet.ask())[1]["default"] is True
    assert default_outputs("x" * 60_000, None, 65_536) is None
    assert default_outputs(0, signature(("y", "FP32", [1000])), 65_536) is None
    fits = default_outputs(0, signature(("y", "FP32", [1000])), MOST_BYTES // 4000)
    assert len(fits["y"].data) <= MOST_BYTES
    # A number fills no picture of gigabytes: it comes as it is.
    assert shown(3, ("y", "FP32", [30_000, 30_000])) == {"y": ("INT64", [3, 3])}


# -- An app's default output becomes tensors of its signature where it fits, and is never lost where it does not.


def signature(*outputs: tuple[str, str, list[int]]) -> Signature:
    return Signature(inputs=[], outputs=[TensorSpec(name=n, datatype=d, shape=s) for n, d, s in outputs])


def shown(value: Any, *outputs: tuple[str, str, list[int]], items: int = 2) -> dict[str, tuple[str, Any]]:
    found = default_outputs(value, signature(*outputs) if outputs else None, items)
    return {name: (tensor.datatype, to_array(tensor, name).tolist()) for name, tensor in found.items()}


@pytest.mark.parametrize(
    ("value", "outputs", "expected"),
    [
        (7, [("y", "FP32", [])], {"y": ("FP32", [7.0, 7.0])}),
        (0, [("y", "FP32", [2])], {"y": ("FP32", [[0.0, 0.0]] * 2)}),
        ([0.5, 0.25], [("y", "FP16", [2])], {"y": ("FP16", [[0.5, 0.25]] * 2)}),
        ([[1, 2], [3, 4]], [("y", "INT64", [2, 2])], {"y": ("INT64", [[[1, 2], [3, 4]]] * 2)}),
        ([1, 2, 3], [("y", "FP32", [-1])], {"y": ("FP32", [[1.0, 2.0, 3.0]] * 2)}),
        (5, [("y", "INT64", [-1])], {"y": ("INT64", [[5], [5]])}),
        (True, [("y", "BOOL", [])], {"y": ("BOOL", [True, True])}),
        (1.0, [("y", "INT32", [])], {"y": ("INT32", [1, 1])}),
        ({"b": 2}, [("a", "FP32", []), ("b", "FP32", [])], {"b": ("FP32", [2.0, 2.0])}),
        # what does not fit comes as it is
        ("none", [("y", "FP32", [])], {"y": ("BYTES", ["none", "none"])}),
        ("none", [("y", "BYTES", [])], {"y": ("BYTES", ["none", "none"])}),
        (1.5, [("y", "INT32", [])], {"y": ("FP64", [1.5, 1.5])}),
        (-1, [("y", "UINT8", [])], {"y": ("INT64", [-1, -1])}),
        ([1, 2], [("y", "FP32", [3])], {"y": ("INT64", [[1, 2], [1, 2]])}),
        ([], [("y", "FP32", [3])], {"y": ("BYTES", ["[]", "[]"])}),
        ({"c": 1}, [("y", "FP32", [])], {"y": ("BYTES", ['{"c":1}'] * 2)}),
        (2**70, [("y", "INT64", [])], {"y": ("FP64", [2.0**70] * 2)}),
        ("x", [], {"output": ("BYTES", ["x", "x"])}),
        (3, [], {"output": ("INT64", [3, 3])}),
    ],
)
def test_values_and_signatures(value: Any, outputs: list[Any], expected: dict[str, Any]) -> None:
    assert shown(value, *outputs) == expected


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
SPECS = st.lists(
    st.tuples(
        st.sampled_from(["y", "z"]),
        st.sampled_from(["FP32", "FP16", "INT8", "UINT64", "BOOL", "BYTES", "BF16"]),
        st.lists(st.sampled_from([-1, 1, 2, 3]), max_size=3),
    ),
    max_size=2,
    unique_by=lambda spec: spec[0],
)


@given(JSON, SPECS, st.integers(1, 4))
def test_whatever_it_is_there_are_as_many_items_as_were_asked_for(value: Any, outputs: list[Any], items: int) -> None:
    found = default_outputs(value, signature(*outputs), items)
    assert found
    for name, tensor in found.items():
        assert isinstance(tensor, Tensor)
        assert to_array(tensor, name).shape[0] == items

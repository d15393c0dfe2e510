"""Clipper's typed inputs become tensors, or are refused with what the application takes."""

import base64
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import to_builtins

from bus.messages.catalog import AppRecord, Signature, TensorSpec
from bus.messages.public import Tensor
from bus.tensors import to_array
from services.core.catalog import Catalog
from services.gateway.clipper import bodies
from services.gateway.clipper.bodies import input_type_of, items_of, tensors_of
from services.gateway.clipper.rest import PredictionCounts
from services.gateway.errors import BadRequest
from tests.support.data.events import catalog_of, model_record, variant_record


def app(kind: str | None = None, *specs: tuple[str, str, list[int]]) -> AppRecord:
    inputs = [TensorSpec(name=n, datatype=d, shape=s) for n, d, s in specs]
    signature = Signature(inputs=inputs, outputs=[]) if specs else None
    return AppRecord(app="a", links={}, signature=signature, input_type=kind)


def made(record: AppRecord, *items: Any) -> tuple[str, list[int], Any]:
    [(_, tensor)] = tensors_of(record, list(items)).items()
    return tensor["datatype"], tensor["shape"], to_array(Tensor(**tensor), "x").tolist()


@pytest.mark.parametrize(
    ("record", "items", "datatype", "shape", "values"),
    [
        (app("floats"), [[1, 2.5], [3, 4]], "FP32", [2, 2], [[1, 2.5], [3, 4]]),
        (app("floats", ("x", "FP32", [2, 1])), [[1, 2]], "FP32", [1, 2, 1], [[[1], [2]]]),
        (app("floats", ("x", "FP32", [2, 2])), [[[1, 2], [3, 4]]], "FP32", [1, 2, 2], [[[1, 2], [3, 4]]]),
        (app("floats", ("x", "FP16", [-1])), [[1, 2, 3]], "FP32", [1, 3], [[1, 2, 3]]),
        (app("floats", ("x", "FP32", [])), [1.5, 2], "FP32", [2], [1.5, 2]),
        (app("doubles"), [[1e300]], "FP64", [1, 1], [[1e300]]),
        (app("integers"), [[1, -2]], "INT64", [1, 2], [[1, -2]]),
        (app("integers", ("x", "UINT8", [2])), [[1, 255]], "UINT8", [1, 2], [[1, 255]]),
        (app("integers", ("x", "FP32", [2])), [[1, 2]], "INT64", [1, 2], [[1, 2]]),
        (app("bytes"), [base64.b64encode(b"\x01\xff").decode()], "UINT8", [1, 2], [[1, 255]]),
        (app("bytes", ("x", "BYTES", [])), [base64.b64encode(b"hi").decode()], "BYTES", [1], ["hi"]),
        (app("strings"), ["ä", ""], "BYTES", [2], ["ä", ""]),
        (app("strings", ("x", "BYTES", [1])), ["a"], "BYTES", [1, 1], [["a"]]),
        # what no application said, its models do
        (app(None, ("x", "FP32", [2])), [[1, 2]], "FP32", [1, 2], [[1, 2]]),
        (app(None, ("x", "INT32", [2])), [[1, 2]], "INT32", [1, 2], [[1, 2]]),
        (app(None, ("x", "BYTES", [])), ["a"], "BYTES", [1], ["a"]),
        (app(None, ("x", "UINT8", [3])), [base64.b64encode(b"abc").decode()], "UINT8", [1, 3], [[97, 98, 99]]),
        (app(None), [[1.5]], "FP32", [1, 1], [[1.5]]),
    ],
)
def test_what_fits(record: AppRecord, items: list[Any], datatype: str, shape: list[int], values: Any) -> None:
    assert made(record, *items) == (datatype, shape, values)


@pytest.mark.parametrize(
    ("record", "items", "word"),
    [
        (app("floats"), [["a"]], "takes floats"),
        (app("floats"), [[True]], "takes floats"),
        (app("floats"), [None], "takes floats"),
        (app("floats"), [[]], "empty"),
        (app("floats"), [[1, 2], [1]], "equally long"),
        (app("floats"), [[[1, 2], [1]]], "ragged"),
        (app("floats"), [[1e300]], "does not fit FP32"),
        (app("floats", ("x", "FP32", [3])), [[1, 2]], "must have 3"),
        (app("floats", ("x", "FP32", [2, -1])), [[1, 2, 3]], "must have 2"),
        (app("integers"), [[1.5]], "takes integers"),
        (app("integers"), [[1.0]], "takes integers"),
        (app("integers"), [[2**70]], "item 0"),
        (app("integers", ("x", "UINT8", [1])), [[256]], "does not fit UINT8"),
        (app("integers", ("x", "UINT8", [1])), [[-1]], "does not fit UINT8"),
        (app("bytes"), ["no base64!"], "takes bytes"),
        (app("bytes"), [[1]], "takes bytes"),
        (app("bytes"), ["ä"], "takes bytes"),
        (app("strings"), [[1]], "takes strings"),
        (app("strings"), ["\ud800"], "half a character"),
        (app("strings", ("x", "BYTES", [2])), ["a"], "2 texts"),
        (app("floats", ("a", "FP32", [1]), ("b", "FP32", [1])), [[1]], "several inputs"),
    ],
)
def test_what_does_not_fit_is_said(record: AppRecord, items: list[Any], word: str) -> None:
    with pytest.raises(BadRequest, match=word):
        tensors_of(record, items)


def test_one_item_or_a_batch_of_the_type_of_the_application() -> None:
    assert items_of([1], None) == ([[1]], False)
    assert items_of(None, [[1], [2]]) == ([[1], [2]], True)
    for item, batch in ((None, None), (1, [1]), (None, [])):
        with pytest.raises(BadRequest):
            items_of(item, batch)
    assert input_type_of(app("doubles", ("x", "FP32", [1]))) == "doubles"
    assert input_type_of(app(None, ("x", "FP64", [1]))) == "doubles"
    assert input_type_of(app(None)) == "floats"


NUMBERS = st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=6, max_size=6)


@given(st.lists(NUMBERS, min_size=1, max_size=4))
def test_numbers_arrive_as_they_were_sent(items: list[list[float]]) -> None:
    _, shape, values = made(app("floats", ("x", "FP32", [2, 3])), *items)
    assert shape == [len(items), 2, 3]
    assert np.array_equal(np.array(values), np.array(items).reshape(-1, 2, 3))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=12,
)


@given(
    st.sampled_from(["integers", "floats", "doubles", "bytes", "strings", None]),
    st.sampled_from([None, ("x", "FP32", [2]), ("x", "INT8", [-1]), ("x", "BYTES", []), ("x", "FP32", [0, 2])]),
    st.lists(JSON, min_size=1, max_size=3),
)
def test_any_json_is_a_tensor_or_refused(kind: str | None, spec: Any, items: list[Any]) -> None:
    record = app(kind, *([] if spec is None else [spec]))
    try:
        [(_, tensor)] = tensors_of(record, items).items()
    except BadRequest as error:
        assert str(error)
        return
    assert tensor["shape"][0] == len(items)
    if tensor["datatype"] != "BYTES":
        size = {"FP32": 4, "FP64": 8, "INT64": 8, "INT8": 1, "UINT8": 1}[tensor["datatype"]]
        assert len(tensor["data"]) == size * math.prod(tensor["shape"])


# -- services/gateway/clipper/bodies.py: descriptions, and the counts of /metrics.


def catalog(**links: str) -> Catalog:
    one = variant_record(variant="m-v1", model="m", version="1")
    two = variant_record(variant="m-v2", model="m", version="2")
    first = model_record(model="m", version="1", created=1.0, labels=["no", "yes"])
    app = AppRecord(app="a", links=links, latency_ms=20.0, default_output=[1, None])
    return catalog_of(one, two, first, model_record(model="m", version="2", created=2.0), app)


def test_an_application() -> None:
    app = catalog(m="1").app("a")
    assert app is not None
    assert to_builtins(bodies.describe_app(app)) == {
        "name": "a",
        "input_type": "floats",
        "default_output": "[1,null]",
        "latency_slo_micros": 20000,
        "linked_models": ["m"],
    }
    assert bodies.describe_app(AppRecord(app="b", links={}, default_output="-1.0")).default_output == "-1.0"


def test_the_current_version_is_the_one_that_serves_else_the_newest() -> None:
    for links, current in (({"m": "1"}, "1"), ({"m": "2"}, "2"), ({}, "2")):
        known = catalog(**links)
        found = [bodies.describe_model(record, known, []) for record in bodies.all_models(known)]
        assert [(one.model_version, one.is_current_version) for one in found] == [
            ("1", current == "1"),
            ("2", current == "2"),
        ]
        assert found[0].labels == ["no", "yes"]
        assert (found[0].variants, found[0].serving) == (["m-v1"], ["a"] if links.get("m") == "1" else [])


@pytest.mark.parametrize(
    ("limits", "said"), [((), None), ((("fixed", 4),), 4), ((("edf", 8),), -1), ((("fixed", 4), ("edf", 8)), None)]
)
def test_a_models_batch_size_is_that_of_its_instances(limits: tuple[tuple[str, int], ...], said: int | None) -> None:
    known = catalog()
    instances = [
        {
            "instance": f"i{n}",
            "variant": "m-v1",
            "device": "cpu",
            "state": "Active",
            "batching": policy,
            "batch_limit": most,
        }
        for n, (policy, most) in enumerate(limits)
    ]
    loaded = bodies.list_containers(known, [{"worker": "w0", "instances": instances}])
    first, second = (bodies.describe_model(record, known, loaded) for record in bodies.all_models(known))
    assert to_builtins(first).get("batch_size") == said
    assert "batch_size" not in to_builtins(second)


def test_containers_are_loaded_instances_numbered_within_their_version() -> None:
    def instance(name: str, variant: str) -> dict[str, str]:
        return {"instance": name, "variant": variant, "device": "cpu", "state": "Active"}

    workers = [
        {"worker": "w0", "instances": [instance("i2", "m-v1"), instance("i1", "m-v1")]},
        {"worker": "w1", "instances": [instance("i3", "m-v2"), instance("i4", "gone")]},
    ]
    found = bodies.list_containers(catalog(), workers)
    assert [(one.model_id, one.model_replica_id, one.worker) for one in found] == [
        ("m:1", 0, "w0"),
        ("m:1", 1, "w0"),
        ("m:2", 0, "w1"),
    ]


def test_counts() -> None:
    there = {"a", "gone"}
    counts = PredictionCounts(there.__contains__)
    assert counts.report() == {"counters": [], "ratio_counters": [], "histograms": []}
    counts.add("a", 3, 100.0, default=False)
    counts.add("a", 1, 300.0, default=True)
    assert counts.report() == {
        "counters": [{"app:a:num_predictions": {"count": 4}}],
        "ratio_counters": [{"app:a:default_prediction_ratio": {"ratio": 0.25}}],
        "histograms": [
            {"app:a:prediction_latency": {"unit": "microseconds", "size": 2, "mean": 200.0, "max": 300.0}},
        ],
    }
    counts.add("gone", 1, 100.0, default=False)
    there.remove("gone")
    counts.add("new", 1, 100.0, default=False)
    assert [list(one) for one in counts.report()["counters"]] == [
        ["app:a:num_predictions"],
        ["app:new:num_predictions"],
    ]

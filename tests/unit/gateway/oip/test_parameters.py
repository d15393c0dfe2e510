"""What the Open Inference Protocol says beside tensors: parameters, bodies, and the catalogue."""

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from bus.messages.catalog import AppRecord, PipelineRecord, Signature, TensorSpec
from infaas.answers import Answer
from infaas.errors import BadInput
from infaas.queries import Needs
from services.core.catalog import Catalog
from services.gateway.errors import BadRequest
from services.gateway.oip.infer import read
from services.gateway.oip.models import ModelTarget, ServedModel, config, find, index, metadata
from services.gateway.oip.parameters import RESERVED, ignored, parameters_of, requirements_of
from tests.support.data.events import catalog_of
from tests.support.simulated.fleet import SIGNATURE, catalogue, variant

ANSWER = Answer(
    id=None, model="m", version="1", variant="v", hardware="cpu", worker="w0", accuracy=0.9, latency_ms=2.0, queue_ms=0.5,
    compute_ms=1.0, batch=3, cached=False, simulated=True, cost=1e-6, missed=["latency", "cost"],
)  # fmt: skip
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)


def test_requirements_pass_with_their_types() -> None:
    given_ = {
        "latency_ms": 20,
        "accuracy": "0.95",
        "cost": 0.5,
        "confidence": "0.6",
        "context": "me",
        "model": "m",
        "variant": "",
        "note": "x",
    }
    assert requirements_of(given_, 0.0) == {
        "latency_ms": 20.0,
        "accuracy": 0.95,
        "cost": 0.5,
        "confidence": 0.6,
        "context": "me",
        "model": "m",
    }
    assert ignored(given_) == "note"


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("acuracy", "accuracy"), ("accurcay", "accuracy"), ("accuraccy", "accuracy"), ("sccuracy", "accuracy"),
        ("Accuracy", "accuracy"), ("latency-ms", "latency_ms"), ("latencyms", "latency_ms"), ("priorty", "priority"),
        ("verison", "version"), ("costs", "cost"), ("contxt", "context"), ("confidance", "confidence"),
    ],
)  # fmt: skip
def test_what_is_one_typo_from_a_need_is_refused(name: str, meant: str) -> None:
    with pytest.raises(BadRequest, match=f"parameters.{name} is unknown: did you mean {meant}"):
        requirements_of({name: 0.9}, 0.0)


@pytest.mark.parametrize("name", ["seed", "temperature", "latency", "tracking_id", "c"])
def test_other_names_are_not_taken_for_needs(name: str) -> None:
    assert requirements_of({name: "x"}, 0.0) == {}
    assert ignored({name: "x", "accuracy": 0.9}) == name


@pytest.mark.parametrize(("given_", "found"), [(0, None), (1, 1), (9, 9), ("2", 2)])
def test_priority_as_triton_means_it(given_: object, found: int | None) -> None:
    assert requirements_of({"priority": given_}, 0.0).get("priority") == found


def test_timeouts_are_microseconds_and_answers_scalars_also_of_several_models() -> None:
    assert requirements_of({"timeout": 250_000}, 1000.0) == {"deadline": 1000.25}
    assert requirements_of({"timeout": 0}, 1000.0) == {}
    assert requirements_of({"timeout": 2**63 - 1}, 1000.0) == {}
    told = parameters_of(ANSWER)
    assert told["missed"] == "latency,cost"
    assert told["batch"] == 3
    assert not {"default", "query", "confidence", "confidences", "members", "missing"} & told.keys()
    assert all(isinstance(value, str | int | float | bool) for value in told.values())
    several = replace(
        ANSWER, query="0f", confidence=1 / 3, confidences=[1.0, 1 / 3], members=["m@1", "n@2"], missing=1, cached=True
    )
    told = parameters_of(several)
    assert told["cached"] is True
    assert (told["query"], told["confidence"], told["confidences"]) == ("0f", 1 / 3, "1,0.3333")
    assert (told["members"], told["missing"]) == ("m@1,n@2", 1)
    assert all(isinstance(value, str | int | float | bool) for value in told.values())


@pytest.mark.parametrize("name", [*RESERVED, "triton_request_id"])
def test_what_triton_reserves_is_refused_unless_it_says_nothing(name: str) -> None:
    assert requirements_of({name: 0}, 0.0) == {}
    with pytest.raises(BadRequest, match=name):
        requirements_of({name: 1}, 0.0)


@given(
    st.dictionaries(
        st.sampled_from(["latency_ms", "accuracy", "cost", "context", "model", "priority", "timeout", "x"]), SCALARS
    )
)
def test_whatever_comes_is_a_requirement_or_refused_by_name(parameters: dict) -> None:
    try:
        requirements = requirements_of(parameters, 1000.0)
    except BadRequest as error:
        assert any(f"parameters.{name}" in str(error) for name in parameters)
    else:
        assert requirements.keys() <= Needs.__annotations__.keys()
        assert not any(isinstance(value, float) and math.isnan(value) for value in requirements.values())


# -- services/gateway/oip/infer.py: what a body may hold beside its tensors.
INPUTS = [{"name": "x", "shape": [1, 2], "datatype": "FP32", "data": [1.0, 2.0]}]


@pytest.mark.parametrize(
    ("name", "meant"),
    [("accuracy", "accuracy"), ("acuracy", "accuracy"), ("latency_ms", "latency_ms"), ("Cost", "cost"), ("timeout", "timeout")],
)  # fmt: skip
def test_a_need_beside_the_parameters_is_refused_with_the_remedy(name: str, meant: str) -> None:
    remedy = f'^{name} is not read beside parameters: give {{"parameters": {{"{meant}": ...}}}}$'
    for more in ({}, {"id": "me", "outputs": [{"name": "y"}], "parameters": {"cost": 1.0}}):
        with pytest.raises(BadRequest, match=remedy):
            read(json.dumps({"inputs": INPUTS, name: 0.9, **more}).encode(), None, None)


def test_needs_are_found_in_bodies_and_what_is_none_stays() -> None:
    raw = [{"name": "x", "shape": [1], "datatype": "FP32", "parameters": {"binary_data_size": 4}}]
    head = json.dumps({"inputs": raw, "accuracy": 0.9}).replace("accuracy", "\\u0061ccuracy").encode()
    with pytest.raises(BadRequest, match=r"^accuracy is not read beside parameters"):
        read(head + bytes(4), len(head), None)
    body = {"inputs": INPUTS, "id": "me", "outputs": [{"name": "y"}], "parameters": {"accuracy": 0.9}}
    for more in ({}, {"model_name": "m", "tracking": {"accuracy": 0.9}, "latency": 3}):
        asked = read(json.dumps({**body, **more}).encode(), None, None)
        assert (asked.id, asked.parameters) == ("me", {"accuracy": 0.9})


# -- What the Open Inference Protocol shows of the catalogue.


def known() -> Catalog:
    pipeline = AppRecord(app="twice", links={}, signature=SIGNATURE, pipeline=PipelineRecord(vertices=[]))
    return catalog_of(*catalogue(variant()), pipeline, AppRecord(app="empty", links={}))


NAMED = Signature(
    inputs=[TensorSpec(name="x", datatype="FP32", shape=[2], columns=["a", "b"])],
    outputs=[TensorSpec(name="p", datatype="FP32", shape=[2])],
)


def test_answers_and_metadata_have_the_owners_words() -> None:
    told = parameters_of(replace(ANSWER, labels=["churn", "no"], target="price", unit="EUR"), ["no", "churn"])
    assert (told["labels"], told["classes"], told["target"], told["unit"]) == ("churn,no", "no,churn", "price", "EUR")
    assert parameters_of(replace(ANSWER, labels=["a, b", "c"]))["labels"] == '["a, b", "c"]'
    found = metadata(ServedModel("m", NAMED, [], (), "", ["no", "churn"]))
    assert found["inputs"][0]["columns"] == ["a", "b"]
    assert (found["outputs"][0]["labels"], found["properties"]) == (["no", "churn"], {"labels": "no,churn"})
    price = replace(NAMED, outputs=[TensorSpec(name="y", datatype="FP32", shape=[1], columns=["price"], unit="EUR")])
    assert metadata(ServedModel("m", price, [], (), ""))["properties"] == {"target": "price", "unit": "EUR"}


def test_rows_are_items_by_the_apps_columns() -> None:
    for rows in ([{"b": 2, "a": 1}], [[1, 2]], [1, 2]):
        asked = read(json.dumps({"rows": rows, "parameters": {"accuracy": 0.5}}).encode(), None, NAMED)
        assert asked.inputs == {"x": {"datatype": "FP32", "shape": [1, 2], "data": b"\0\0\x80\x3f\0\0\0\x40"}}
        assert asked.parameters == {"accuracy": 0.5}
    for body, said in (
        ({"rows": [{"a": 1}]}, "column 'b' is missing"),
        ({"rows": [[1, 2], [3]]}, "as many values"),
        ({"rows": [[1, 2]], "inputs": [{"name": "x", "datatype": "FP32", "shape": [1], "data": [1]}]}, "in place of"),
    ):
        with pytest.raises((BadRequest, BadInput), match=said):
            read(json.dumps(body).encode(), None, NAMED)


def test_a_pipeline_is_a_model_without_versions() -> None:
    found = find(known(), ModelTarget("twice", None, None, None))
    assert found is not None
    assert metadata(found) == {
        "name": "twice",
        "versions": [],
        "platform": "infaas_pipeline",
        "properties": {},
        "inputs": [{"name": "x", "datatype": "FP32", "shape": [-1, 2]}],
        "outputs": [{"name": "y", "datatype": "FP32", "shape": [-1, 1]}],
    }
    assert (config(found)["name"], config(found)["max_batch_size"]) == ("twice", 1)
    assert find(known(), ModelTarget("twice", None, None, "1")) is None
    assert find(known(), ModelTarget("twice", "m", None, None)) is None


def test_the_index_has_all_that_may_be_queried_and_apps_without_models_are_none() -> None:
    names = [row["name"] for row in index(known(), ready=True)]
    assert names == ["app", "app.m", "app.m.m-v1-ort-fp32-t1-b8", "twice"]
    assert find(known(), ModelTarget("empty", None, None, None)) is None

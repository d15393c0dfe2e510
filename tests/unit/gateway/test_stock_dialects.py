"""Clipper's and Rafiqi's REST with a stock HTTP client, against a gateway before a peer that sends inputs back as outputs."""

import json
import struct
from typing import Any, NamedTuple

import pytest

from tests.support.gateways.echo_gateway import Echoing, stage
from tests.support.servers.processes import fetched

__all__ = ["stage"]  # a fixture


class Said(NamedTuple):
    status: int
    body: Any


def ask(stage: Echoing, path: str, body: Any = None, **headers: str) -> Said:
    """A POST with a body; a GET without one."""
    status, text = fetched(f"http://{stage.url}{path}", body, **headers)
    return Said(status, json.loads(text))


@pytest.mark.parametrize(
    ("app", "item"),
    [("int32", [1, -2]), ("uint8", [0, 255]), ("fp32", [0.5, 2]), ("fp64", [1e300]), ("bytes", "a text")],
)
def test_an_item_comes_back_as_it_went(stage: Echoing, app: str, item: Any) -> None:
    said = ask(stage, f"/{app}/predict", {"input": item})
    assert said.status == 200
    output = said.body.pop("output")
    assert output == (item if isinstance(item, list) else [item])
    number = said.body.pop("query_id")
    assert said.body == {"default": False, "model": f"m-{app}", "version": "1", "variant": f"{app}-v1"}
    assert stage.heard["id"] == str(number)
    batch = ask(stage, f"/{app}/predict", {"input_batch": [item, item], "version": 1}).body["batch_predictions"]
    assert [one["output"] for one in batch] == [output, output]
    assert batch[1]["query_id"] == batch[0]["query_id"] + 1
    assert stage.heard["version"] == "1"


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("/fp32/predict", {"input": [1], "accuracy": 0.9}, "accuracy: predict reads input, input_batch, version"),
        ("/fp32/predict", {"input": [1], "verison": 1}, "verison: predict reads"),
        ("/classify?model_name=fixed&accuracy=0.9", [1, 2, 3], "accuracy: classify reads model_name only"),
        (
            "/admin/set_selection",
            {"name": "a", "polcy": "exp4"},
            "polcy: nothing reads it here; did you mean policy?",
        ),
        (
            "/admin/set_pipeline",
            {
                "pipeline": {"name": "p", "latency_ms": 9},
                "vertex": [{"name": "v", "app": "a", "acuracy": 1}],
                "output": {},
            },
            "vertex[0].acuracy: nothing reads it here; did you mean accuracy?",
        ),
        (
            "/admin/add_model",
            {"model_name": "m", "model": {"file": "x"}, "validation": ""},
            "model: has file, which nothing reads: leave it out",
        ),
        (
            "/admin/add_model_links",
            {"app_name": "fp23", "model_names": []},
            "model_names: must be a list of at least one",
        ),
        (
            "/admin/get_linked_models",
            {"app_name": "fp23"},
            "there is no application 'fp23': add_app makes one; did you mean fp32?",
        ),
        (
            "/fp32/predict",
            {"input": ["a"]},
            "item 0: this application takes floats, [float]: [0] must be a number, not a text",
        ),
        ("/admin/get_model", {"model_name": "m", "model_version": 1, "batch": 2}, "batch: nothing reads it here"),
        (
            "/admin/add_model",
            {"model_name": "m", "model": {"blob": "!!"}, "validation": ""},
            "model.blob: must be the file's bytes as base64",
        ),
        (
            "/admin/add_model",
            {"model_name": "m", "model": {"blob": "aGk="}, "validation": {"blob": "aGk="}},
            "the validation set validation.npz is no .npz file; make one with numpy.savez",
        ),
        (
            "/admin/set_model_version",
            {"model_name": "m-fp23", "model_version": 1},
            "there is no version 1 of a model 'm-fp23': there is none; did you mean m-fp32?",
        ),
    ],
)
def test_what_would_have_no_effect_is_refused(stage: Echoing, path: str, body: Any, words: str) -> None:
    said = ask(stage, path, body)
    assert said.status == 400
    assert (said.body.get("cause") or said.body["error"]).startswith(words)


def test_shapes_names_and_numbers_are_the_applications(stage: Echoing) -> None:
    assert ask(stage, "/fp32/predict", {"input": [1], "uid": 0, "note": "x"}).body["ignored"] == "uid,note"
    batch = ask(stage, "/fp32/predict", {"input_batch": [[1]], "note": "x"}).body
    assert (batch["ignored"], len(batch["batch_predictions"])) == ("note", 1)
    assert ask(stage, "/fixed/predict", {"input": [1, 2, 3]}).body["output"] == [1, 2, 3]
    assert ask(stage, "/fixed/predict", {"input": [1, 2]}).status == 400
    for path in ("/several/predict", "/classify?model_name=several"):
        said = ask(stage, path, {"input": [1]})
        assert said.status == 400
        assert "/v2/models/several/infer" in (said.body.get("cause") or said.body["error"])
    fields = {"name": "a", "input_type": "floats", "default_output": "1", "latency_slo_micros": 10**400}
    said = ask(stage, "/admin/add_app", fields)
    assert said.status == 400
    assert "latency_slo_micros" in said.body["cause"]


def test_a_trace_goes_through(stage: Echoing) -> None:
    parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    assert ask(stage, "/fp32/predict", {"input": [1]}, traceparent=parent).status == 200
    assert parent.split("-")[1] in stage.headers["traceparent"]


def test_an_array_is_classified(stage: Echoing) -> None:
    said = ask(stage, "/classify?model_name=fixed", struct.pack("<3f", 0.1, 0.7, 0.2))
    assert said.status == 200
    assert [guess["label"] for guess in said.body] == ["1", "2", "0"]
    assert [guess["confidence"] for guess in said.body] == pytest.approx([0.7, 0.2, 0.1])
    assert ask(stage, "/classify?model_name=m-fixed", [0.1, 0.7, 0.2]).body[0]["label"] == "1"
    assert stage.heard["model"] == "m-fixed"


@pytest.mark.slow
def test_a_classification_that_takes_too_long_fails_after_ten_seconds(stage: Echoing) -> None:
    stage.delay = 30.0
    try:
        said = ask(stage, "/classify?model_name=fixed", struct.pack("<3f", 1, 2, 3))
    finally:
        stage.delay = 0.0
    assert said.status == 500
    assert "within 10 s" in said.body["error"]


@pytest.mark.parametrize(
    ("query", "status", "text"),
    [
        ("", 400, "nothing to change: give quanta and batchSize, or one of them"),
        ("?workers=3", 400, "workers: nothing reads it here; there are quanta, batchSize"),
        ("?quanta=soon", 400, "quanta: must be a number"),
        ("?quanta=0", 400, "quanta: must be at least 0.5 and at most 10000"),
        ("?quanta=nan", 400, "quanta: must be at least 0.5 and at most 10000"),
        ("?quanta=5&batchSize=1.5", 400, "batchSize: must be a whole number"),
        ("?batchSize=0", 400, "batchSize: must be at least 1 and at most 1024"),
        ("?batchSize=1000000", 400, "batchSize: must be at least 1 and at most 1024"),
        ("?quanta=5&model_name=nobody", 404, "there is no model 'nobody'"),
    ],
)
def test_tuning_of_what_is_not_there_is_refused_by_name(stage: Echoing, query: str, status: int, text: str) -> None:
    said = ask(stage, f"/change_params{query}")
    assert said.status == status
    assert said.body["error"].startswith(text)


def test_an_update_that_comes_again_has_the_key_that_it_had(stage: Echoing) -> None:
    """So it counts once, also after a restart of the gateway."""

    def update(**body: Any) -> dict[str, Any]:
        told = fetched(f"http://{stage.url}/fp32/update", {"query_id": 7, "label": 1} | body)
        assert told == (200, "Feedback received? 1")
        return stage.told[-1]

    once = update()
    assert update() == once
    assert once["id"] == "7"
    assert once["label"] == 1
    assert isinstance(once["label"], int), "a class stays a number of a class"
    others = [update(label=2), update(query_id=8), update(uid="u")]
    assert len({each["retry_key"] for each in (once, *others)}) == 4
    inputs = {"input": [1.0], "query_id": None}
    assert update(**inputs)["retry_key"] != update(**inputs)["retry_key"], "inputs alone name no query"

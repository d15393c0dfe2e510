"""Pipelines as operators set, plan and remove them: what is stored, and what is refused with field and remedy."""

from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from bus.codec import encode
from bus.messages.catalog import (
    AppRecord,
    EdgeCondition,
    PipelineEdge,
    PipelineRecord,
    PipelineVertex,
    Signature,
    TensorSpec,
)
from bus.messages.verbs import (
    DeleteApp,
    LinkModel,
    SetApp,
    SetPipeline,
    SetReplicas,
    SetSelection,
    SetVersion,
    UnlinkModel,
)
from services.registrar.changes import amend
from services.registrar.checks import verb_asked
from services.registrar.commands import LinkVersion
from tests.support.data.events import catalog_of
from tests.support.simulated.registrations import (
    BOTH,
    CHECKS,
    KNOWN,
    RECORDS,
    REQUEST,
    SET,
    SUBJECTS,
    TWICE,
    WITH,
    Stage,
    app_record,
    changed,
    heartbeat,
    model_record,
    refused,
    setting,
    variant_record,
)

# -- set-pipeline


def test_a_pipeline_is_an_app_with_the_signature_of_its_references() -> None:
    assert (
        AppRecord(
            app="both",
            links={},
            signature=Signature(
                inputs=[TensorSpec(name="image", datatype="FP32", shape=[64])],
                outputs=[TensorSpec(name=name, datatype="FP32", shape=[10]) for name in ("scores", "check")],
            ),
            latency_ms=100.0,
            pipeline=TWICE,
            min_instances=0,
        )
        == BOTH
    )


def test_pipelines_keep_what_is_not_named_and_apps_with_models_are_none() -> None:
    before = replace(BOTH, slo_target=0.9, created=3.0)
    assert changed(before, SET) == before
    assert changed(before, setting(slo_target=0.95, latency_ms=50.0)) == replace(
        before, slo_target=0.95, latency_ms=50.0
    )
    text = refused(app_record(), setting(vertices(app="checks"), "digits"))
    assert "pipeline.name: app digits exists already and has models of its own; give the pipeline another name" in text


def test_the_body_is_the_file() -> None:
    body = {
        "pipeline": {"name": "both", "latency_ms": 100, "slo_target": 0.9, "more": 1},
        **msgspec.to_builtins(TWICE),
        "plan": {"percentile": 0.99},
        "load": [{"rate": 5}],
        "option": [{}],
    }
    asked = verb_asked("set-pipeline", encode(body))
    assert asked == replace(setting(slo_target=0.9), plan={"percentile": 0.99})


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({}, "pipeline: set-pipeline needs it: Its name and latency_ms: [pipeline]"),
        ({"pipeline": {"name": "a b", "latency_ms": 1}}, "pipeline.name: must be 1 to 64"),
        ({"pipeline": {"name": "a", "latency_ms": -1}}, "pipeline.latency_ms: must be above 0, not -1"),
        ({"pipeline": {"name": "a", "latency_ms": 1, "slo_target": 2}}, "pipeline.slo_target: must be"),
    ],
)
def test_a_head_that_is_wrong_is_refused(body: dict[str, Any], message: str) -> None:
    error = verb_asked("set-pipeline", encode({"vertex": [], "output": {}} | body))
    assert error.message.startswith(message)


def vertices(**changes: Any) -> PipelineRecord:
    first, second = TWICE.vertices
    return replace(TWICE, vertices=[replace(first, **changes), second])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (setting(PipelineRecord(vertices=[])), "vertex: must name at least one stage"),
        (setting(vertices(app="none")), "vertex[first].app: there is no app 'none'; register a model"),
        (setting(vertices(app="both")), "vertex[first].app: the pipeline contains itself"),
        (setting(vertices(inputs={"y": "$.image"})), "vertex[first].inputs: lacks x"),
        (setting(latency_ms=0.15), "latency_ms: must be above 0.2 ms"),
    ],
)
def test_what_is_wrong_with_a_pipeline_is_refused(change: SetPipeline, message: str) -> None:
    text = refused(None, change)
    assert text.startswith("bad_request ")
    assert message in text


def test_a_pipeline_within_another_is_changed_only_so_that_the_other_fits() -> None:
    outer = changed(
        None,
        setting(
            PipelineRecord(
                vertices=[PipelineVertex(name="inner", app="both", inputs={"image": "$.x"})],
                output={"scores": "inner.check"},
            ),
            "outer",
            latency_ms=200.0,
        ),
        WITH,
    )
    known = catalog_of(*RECORDS, BOTH, outer)
    narrow = replace(TWICE, vertices=TWICE.vertices[:1], output={"scores": "first.scores"})
    text = refused(BOTH, setting(narrow), known)
    assert text.startswith("bad_request pipeline outer, which contains both, would not fit any more: output.scores")
    assert text.endswith("change outer first")
    around = replace(TWICE.vertices[0], app="outer")
    assert "the pipeline contains itself by way of outer" in refused(
        BOTH, setting(replace(TWICE, vertices=[around, TWICE.vertices[1]])), known
    )


# -- apps that are pipelines, and apps that pipelines name


def test_an_app_that_a_pipeline_names_is_not_deleted_nor_emptied() -> None:
    text = refused(CHECKS, DeleteApp(app="checks"), WITH)
    assert text == (
        "bad_request app: checks is a stage of pipeline both; change pipeline both (infaas.admin.set-pipeline) or delete it"
        " (infaas.admin.delete-app) first"
    )
    assert changed(CHECKS, UnlinkModel(app="checks", model="check"), WITH).links == {"exact": "1"}
    last = replace(CHECKS, links={"exact": "1"})
    text = refused(last, UnlinkModel(app="checks", model="exact"), WITH)
    assert text.startswith(
        "bad_request model: exact is the last model of app checks, which is a stage of pipeline both"
    )
    assert "change pipeline both" in text
    assert amend(CHECKS, DeleteApp(app="checks"), KNOWN) is None
    assert changed(last, UnlinkModel(app="checks", model="exact"), KNOWN).links == {}
    assert amend(BOTH, DeleteApp(app="both"), WITH) is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            LinkVersion(app="both", record=model_record()),
            "app: both is a pipeline and has no models of its own; register the model under the app of one",
        ),
        (
            SetSelection(app="both", policy="exp4"),
            "app: both is a pipeline, whose stages answer; use set-selection on the app of a stage",
        ),
        (SetReplicas(app="both", model="mlp", count=1), "app: both is a pipeline and has no instances of its own"),
        (LinkModel(app="both", model="mlp"), "app: both is a pipeline and has no models of its own"),
        (SetVersion(app="both", model="mlp", version="1"), "app: both is a pipeline and has no models of its own"),
        (SetReplicas(app="both", count=1), "app: both is a pipeline and has no instances of its own"),
        (SetApp(app="both", latency_ms=None), "latency_ms: both is a pipeline, which needs an objective"),
        (SetApp(app="both", min_instances=1), "min_instances: both is a pipeline and has no instances of its own"),
    ],
)
def test_what_makes_no_sense_for_a_pipeline_is_refused(change: Any, message: str) -> None:
    assert refused(BOTH, change, WITH).startswith(f"bad_request {message}")


def test_what_would_break_a_pipeline_is_refused_at_once() -> None:
    one = Stage()
    one.tell(heartbeat())
    one.put(SUBJECTS.catalog_bucket, "app.both", encode(BOTH))
    answer: Any = one.register(replace(REQUEST, app="both"))
    assert answer.error.code == "bad_request"
    assert answer.error.message.startswith("app: both is a pipeline and has no models of its own")
    text = refused(CHECKS, UnlinkModel(app="checks", model="exact"), WITH)
    assert text == (
        "bad_request model: without exact, pipeline both would not fit any more: vertex[second].accuracy: no variant of app"
        " checks has 0.9; the best has 0.8; link another model, or ask for less there (infaas.admin.set-pipeline), first"
    )


@pytest.mark.parametrize("latency_ms", [0.15, 0.2])
def test_what_set_pipeline_refuses_of_an_objective_set_app_refuses_too(latency_ms: float) -> None:
    texts = {
        refused(BOTH, change) for change in (SetApp(app="both", latency_ms=latency_ms), setting(latency_ms=latency_ms))
    }
    assert len(texts) == 1
    assert "latency_ms: must be above 0.2 ms" in texts.pop()


def test_a_floor_that_nothing_reaches_is_refused() -> None:
    text = refused(None, setting(vertices(accuracy=0.91)))
    assert text == (
        "bad_request vertex[first].accuracy: no variant of app digits has 0.91; the best has 0.9;"
        " ask for less, or register a more accurate model for digits first"
    )
    unmeasured = catalog_of(*RECORDS, variant_record("new", accuracy=None))
    assert changed(None, setting(vertices(accuracy=0.91)), unmeasured).pipeline is not None
    whole = PipelineRecord(
        vertices=[PipelineVertex(name="inner", app="both", inputs={"image": "$.x"}, accuracy=0.94)],
        output={"scores": "inner.check"},
    )
    text = refused(None, setting(whole, "outer"), WITH)
    assert "vertex[inner].accuracy: no variant of app both has 0.94; the best has 0.9" in text, (
        "its stage `first` has 0.9"
    )


def test_a_pipeline_that_is_too_large_to_be_kept_is_refused_with_its_size() -> None:
    many = EdgeCondition(output="scores", reduce="argmax", op="in", value=list(range(100_000, 120_000)))
    large = replace(
        TWICE,
        edges=[PipelineEdge(source="first", target="second", when=many)],
        output={"scores": "first.scores", "check": "second.scores | first.scores"},
    )
    text = refused(None, setting(large))
    assert "pipeline: takes 100," in text
    assert "bytes, and at most 65,536 are allowed" in text

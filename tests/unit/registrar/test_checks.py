"""What a registration may say: every wrong field is named."""

import re
from math import inf, nan
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from bus.codec import encode
from bus.messages.catalog import Functions, Profile, Signature, TensorSpec
from bus.messages.public import Error, Register, RegistrationAccepted
from bus.messages.work import ContainerPlace, PlaceContainer, VariantPlan
from bus.subjects import WITHOUT_APP, valid_name
from services.core.catalog import Catalog, app_key, model_key, signature_difference, variant_key
from services.core.settings import RegistrarSettings
from services.registrar.checks import measured_anew, registration_error
from services.registrar.policy import defect, next_version, place_of, plans, variant_name
from tests.support.simulated.registrations import (
    PROFILE,
    REQUEST,
    SIGNATURE,
    SUBJECTS,
    Stage,
    app_record,
    built,
    inspected,
    model_record,
    variant_record,
)
from tests.unit.registrar.test_registrations import CONTAINER

BAD_NAMES = ["", "../x", "a b", "a>", "*", "a\0b", "a.b", "-a", "_", "a" * 65, "ü", "a\n"]


def test_a_good_request_passes() -> None:
    full = replace(
        REQUEST,
        version="v-1",
        task="digits from pixels",
        metric="rmse",
        latency_ms=5.0,
        default_output=[1, 2],
        slo_target=0.5,
    )
    assert registration_error(REQUEST, RegistrarSettings()) is None
    assert registration_error(full, RegistrarSettings()) is None


@pytest.mark.parametrize("field", ["app", "model", "version", "registration"])
def test_names_must_be_names(field: str) -> None:
    for name in BAD_NAMES:
        error = registration_error(replace(REQUEST, **{field: name}), RegistrarSettings())
        if (field, name) == ("app", WITHOUT_APP):
            assert error is None, "a model on its own"
        else:
            assert error is not None, name
            assert (error.code, error.message.partition(": ")[0]) == ("bad_request", field), name


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("format", "pickle"),
        ("format", ""),
        ("metric", "f 1"),
        ("object", ""),
        ("object", "../secret"),
        ("object", "a/b"),
        ("object", "a..b"),
        ("object", "x" * 256),
        ("validation", "a b"),
        ("validation", "a>"),
        ("inputs_key", ""),
        ("inputs_key", "../x"),
        ("labels_key", "y\0"),
        ("latency_ms", 0.0),
        ("latency_ms", -1.0),
        ("latency_ms", nan),
        ("latency_ms", inf),
        ("slo_target", 0.0),
        ("slo_target", 1.0),
        ("slo_target", 1.5),
        ("slo_target", nan),
        ("task", ""),
        ("task", "x" * 201),
        ("default_output", "x" * 70_000),
        ("labels_key", "x"),
        ("validation", "r1.model"),
    ],
)
def test_each_field_is_checked(field: str, value: Any) -> None:
    error = registration_error(replace(REQUEST, **{field: value}), RegistrarSettings())
    assert error.code == "bad_request"
    assert error.message.startswith(f"{field}: ")


def test_wrong_fields_are_named_at_once_and_order_does_not_matter() -> None:
    error = registration_error(replace(REQUEST, app="a b", metric="f 1", latency_ms=-1.0), RegistrarSettings())
    assert [part.partition(":")[0] for part in error.message.split("; ")] == ["app", "metric", "latency_ms"]
    a, b = (TensorSpec(name=name, datatype="FP32", shape=[1]) for name in "ab")
    one, other = (Signature(inputs=inputs, outputs=[a]) for inputs in ([a, b], [b, a]))
    assert signature_difference(one, other) is None
    assert signature_difference(one, Signature(inputs=[a], outputs=[a])) is not None
    assert signature_difference(one, Signature(inputs=[a, b], outputs=[b])) is not None


def test_torch_runs_its_own_formats_where_it_can_and_is_allowed() -> None:
    request = replace(REQUEST, format="torchscript")
    error = registration_error(request, RegistrarSettings())
    assert error.code == "forbidden"
    assert "allow_torchscript" in error.message
    assert registration_error(request, RegistrarSettings(allow_torchscript=True)) is None
    both = {"ort": "", "torch": ""}
    assert kinds(made("pt2", frameworks=both, operators=[])) == {("ort", "fp32", "onnx"), ("torch", "fp32", "pt2")}
    assert kinds(made("onnx", frameworks=both, operators=[])) == {("ort", "fp32", "onnx")}
    assert kinds(made("torchscript", frameworks={"ort": "x", "torch": ""})) == {("torch", "fp32", "torchscript")}
    assert made("pt2", frameworks={"ort": "broken", "torch": "not installed"}) == []
    assert made("pt2", frameworks={}) == []


def signature(**changes: Any) -> Signature:
    return Signature(inputs=[replace(SIGNATURE.inputs[0], **changes)], outputs=SIGNATURE.outputs)


@pytest.mark.parametrize("format", ["onnx", "remote"])
def test_a_remote_engine_is_measured_alone(format: str) -> None:
    error = registration_error(replace(REQUEST, format=format, contended=True), RegistrarSettings())
    assert (error is None) == (format == "onnx")
    assert error is None or error.message.startswith("contended: ")


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"contexts": 0}, "contexts: must be at least 1 and at most 64, not 0"),
        ({"contexts": 1_000_000}, "contexts: must be at least 1 and at most 64, not 1000000"),
        ({"contexts": 2, "contended": True}, "contexts: contended measures one batch at a time; give one of both"),
        ({"contexts": 2, "format": "remote"}, "contexts: format remote computes one batch at a time; leave it out"),
        (
            {"functions": Functions(before="o.py:f", sources={"o.py": ""}), "format": "remote"},
            "functions: run before and after onnx and pt2 models, not remote: put them into what is served there",
        ),
        ({"functions": Functions(after="f")}, "functions: 'f' must be FILE:FUNCTION, and FILE among the sources"),
    ],
)
def test_contexts_and_functions_have_bounds_and_are_not_for_every_format(fields: dict[str, Any], says: str) -> None:
    error = registration_error(replace(REQUEST, **fields), RegistrarSettings())
    assert error.message == says
    assert registration_error(replace(REQUEST, contexts=2), RegistrarSettings()) is None


@pytest.mark.parametrize("changes", [{"name": "z"}, {"datatype": "FP64"}, {"shape": [28, 28]}, {"shape": [-1]}])
def test_signatures_differ_in_name_type_and_shape(changes: dict[str, Any]) -> None:
    difference = signature_difference(SIGNATURE, signature(**changes))
    assert difference is not None
    assert "inputs" in difference
    assert "x FP32[64]" in difference


# -- Whether a user's own process is a new version or a replica is the registrar's answer.
CONTAINER_REQUEST = Register(
    app="digits", model="mlp", format="container", object="", validation="", task="reading", metric="top5",
    labels=["no", "yes"], latency_ms=20.0, slo_target=0.9, default_output=[0],
)  # fmt: skip
BARE = Register(app="digits", model="mlp", format="container", object="", validation="")
RECORD = model_record(format="container", task="reading", metric="top5", labels=["no", "yes"], source="cc")
APP = app_record(latency_ms=20.0, slo_target=0.9, default_output=[0])
VARIANT = variant_record("mlp-v1-container", framework="container", format="container")


def catalogue(*records: Any) -> Catalog:
    found = Catalog()
    for record in records or (APP, RECORD, VARIANT):
        found.apply(*kept(record))
    return found


def kept(record: Any) -> tuple[str, bytes]:
    if hasattr(record, "links"):
        return app_key(record.app), encode(record)
    if hasattr(record, "variant"):
        return variant_key(record.variant), encode(record)
    return model_key(record.model, record.version), encode(record)


def asked(request: Register = BARE, catalog: Catalog | None = None, metric: str | None = None) -> ContainerPlace | str:
    place = place_of(PlaceContainer(request=request, metric=metric), catalog or catalogue(), 0.9)
    return place.message if isinstance(place, Error) else place


def test_what_nobody_has_registered_is_a_version_and_the_same_again_a_replica() -> None:
    new = ContainerPlace(version="1", signature=None, agreement=0.9)
    assert asked(catalog=Catalog()) == new
    assert asked(replace(BARE, version="own"), Catalog()) == replace(new, version="own")
    # The app is there, and its model is a file: the next number, with the app's inputs.
    files = catalogue(APP, model_record(), variant_record())
    assert asked(catalog=files) == ContainerPlace(version="2", signature=SIGNATURE, agreement=0.9)
    place = ContainerPlace(version="1", signature=SIGNATURE, agreement=0.9, variant=VARIANT, reference="cc")
    assert asked() == place
    later = (model_record(version="2", created=9.0), replace(RECORD, version="0", created=0.5))
    assert asked(catalog=catalogue(APP, RECORD, VARIANT, *later)) == place
    assert isinstance(asked(CONTAINER_REQUEST, metric="top5"), ContainerPlace)
    # left out: `Register` has a default
    assert isinstance(asked(replace(CONTAINER_REQUEST, metric="mae")), ContainerPlace)


@pytest.mark.parametrize(
    ("records", "version", "words"),
    [
        ((APP, model_record(), variant_record()), "1", "is a registered file, and no container"),
        ((RECORD, VARIANT), None, "not for app digits; link it with `infaas admin link-model digits --model mlp"),
        ((replace(APP, links={}), RECORD, VARIANT), None, "not for app digits"),
    ],
)
def test_what_is_no_replica_is_refused(records: tuple[Any, ...], version: str | None, words: str) -> None:
    assert words in str(asked(replace(BARE, version=version), catalogue(*records)))


@pytest.mark.parametrize(
    ("changes", "option"),
    [
        ({"task": "writing"}, "task"),
        ({"metric": "mae"}, "metric"),
        ({"labels": ["yes", "no"]}, "labels"),
        ({"latency_ms": 30.0}, "latency-ms"),
        ({"slo_target": 0.99}, "slo-target"),
        ({"default_output": [1]}, "default-output"),
        ({"accuracy": "any"}, "accuracy"),
    ],
)
def test_another_command_says_what_has_no_effect_on_a_replica(changes: dict[str, Any], option: str) -> None:
    request = replace(CONTAINER_REQUEST, **changes)
    said = asked(request, metric=request.metric)
    assert isinstance(said, str)
    assert said.startswith(f"--{option}: ") and "a replica changes nothing" in said


def test_the_registrar_answers() -> None:
    stage = Stage()
    question = PlaceContainer(request=BARE)
    for record in (APP, RECORD, VARIANT):
        stage.put(SUBJECTS.catalog_bucket, *kept(record))
    stage.tell(question, SUBJECTS.registrar("container"), "_INBOX.5")
    subject, place = stage.sent[-1]
    assert (subject, place.variant) == ("_INBOX.5", VARIANT)
    stage.tell(replace(question, metric="mae"), SUBJECTS.registrar("container"), "_INBOX.6")
    assert "--metric" in stage.sent[-1][1].error.message


# -- Which variants are generated, how they are named, and which are good enough.
SETTINGS = RegistrarSettings(threads=(1, 2), max_batches=(4, 32))


def made(
    format: str = "onnx", cores: int = 2, settings: RegistrarSettings = SETTINGS, **facts: object
) -> list[VariantPlan]:
    return plans("m", "1", format, inspected(**facts), cores, settings)


def kinds(found: list[VariantPlan]) -> set[tuple[str, str, str]]:
    return {(plan.framework, plan.precision, plan.format) for plan in found}


@pytest.mark.parametrize(
    ("operators", "precisions"),
    [
        (["Conv", "Relu", "Gemm"], {"fp32", "int8"}),
        (["ConvTranspose", "Add"], {"fp32", "int8"}),
        (["Gemm", "Relu"], {"fp32", "int8"}),
        (["QLinearConv", "QuantizeLinear"], {"fp32"}),
        (["MatMul", "Softmax"], {"fp32", "int8"}),
        (["aten.conv2d.default", "aten.linear.default"], {"fp32", "int8"}),
        (["aten.addmm.default"], {"fp32", "int8"}),
        (["TreeEnsembleClassifier", "ZipMap"], {"fp32"}),
        (["ConvertToBFloat"], {"fp32"}),
        ([], {"fp32"}),
    ],
)
def test_precisions_follow_the_operators(operators: list[str], precisions: set[str]) -> None:
    assert {plan.precision for plan in made(operators=operators)} == precisions


def test_every_precision_with_every_thread_count_that_cores_and_batches_allow() -> None:
    found = {(plan.precision, plan.threads, plan.max_batch) for plan in made(operators=["Gemm"])}
    assert found == {(p, t, b) for p in ("fp32", "int8") for t in (1, 2) for b in (4, 32)}
    assert {plan.threads for plan in made(cores=1)} == {1}
    assert {plan.threads for plan in made(cores=1, settings=RegistrarSettings(threads=(4, 8)))} == {1}
    assert {plan.threads for plan in made(cores=8, settings=RegistrarSettings(threads=(4, 8, 16)))} == {4, 8}
    assert {plan.max_batch for plan in made(fixed_batch=True)} == {1}


NAMES = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}", fullmatch=True)
KINDS = st.tuples(
    st.sampled_from(["ort", "torch"]), st.sampled_from(["fp32", "int8", "fp16"]), st.sampled_from([1, 2, 16])
)


@given(NAMES, NAMES, KINDS, st.sampled_from([1, 8, 64]))
def test_names_are_valid(model: str, version: str, kind: tuple[str, str, int], batch: int) -> None:
    assert valid_name(variant_name(model, version, *kind, batch))


SHORT = st.from_regex(r"[ab1][-abv1]{0,7}", fullmatch=True)


@given(SHORT, SHORT, SHORT, SHORT)
def test_different_models_never_share_a_name(model: str, version: str, other: str, other_version: str) -> None:
    same = (model, version) == (other, other_version)
    names = {variant_name(m, v, "ort", "fp32", 1, 8) for m, v in ((model, version), (other, other_version))}
    assert len(names) == (1 if same else 2)


def test_names_read_well_and_what_works_and_agrees_may_serve() -> None:
    assert variant_name("cnn", "3", "ort", "int8", 1, 64) == "cnn-v3-ort-int8-t1-b64"
    long = [variant_name("m" * 60 + tail, "1", "ort", "fp32", 1, 64) for tail in ("aaaa", "bbbb")]
    assert long[0] != long[1]
    assert all(re.fullmatch(r"m+-[0-9a-f]{6}-ort-fp32-t1-b64", name) for name in long)
    assert variant_name("a-v1", "2", "ort", "fp32", 1, 8) != variant_name("a", "1-v2", "ort", "fp32", 1, 8)
    assert defect(built(PLAN), SETTINGS) is None
    assert defect(built(PLAN, agreement=SETTINGS.agreement), SETTINGS) is None


@pytest.mark.parametrize(
    ("versions", "expected"), [([], 1), (["1", "2"], 3), (["9", "10"], 11), (["beta", "2"], 3), (["beta", "²"], 1)]
)
def test_the_next_version_is_one_more_than_the_largest_number(versions: list[str], expected: int) -> None:
    assert next_version(versions) == expected


PLAN = VariantPlan(variant="v", framework="ort", precision="int8", threads=1, max_batch=8, format="onnx")


@pytest.mark.parametrize(
    ("facts", "word"),
    [
        ({"accuracy": nan}, "NaN"),
        ({"accuracy": inf}, "not a number"),
        ({"accuracy": 1.2}, "outside 0..1"),
        ({"accuracy_low": 1.0, "accuracy_high": 0.5}, "interval"),
        ({"accuracy_low": nan}, "interval"),
        ({"agreement": 0.89}, "89.0%"),
        ({"agreement": nan}, "agrees"),
        ({"profile": replace(PROFILE, rows=[])}, "no measurement"),
        ({"profile": replace(PROFILE, saturation_qps=0.0)}, "cannot be"),
        ({"profile": replace(PROFILE, load_ms=-1.0)}, "cannot be"),
        ({"profile": replace(PROFILE, memory_mb=nan)}, "cannot be"),
        ({"profile": replace(PROFILE, rows=[replace(PROFILE.rows[0], p50_ms=inf)])}, "cannot be"),
    ],
)
def test_what_does_not_is_turned_down_with_the_reason(facts: dict[str, float | Profile], word: str) -> None:
    reason = defect(built(PLAN, **facts), SETTINGS)
    assert reason is not None
    assert word in reason


def test_a_version_is_measured_anew_with_its_own_file_and_what_was_said_of_it() -> None:
    known = model_record(metric="mae", labels=["a"], allow_nan=True, version="3", labels_key="old")
    catalog = Catalog()
    catalog.apply(model_key(known.model, "3"), encode(known))
    asked = replace(
        REQUEST, model=known.model, object="none", validation="r9.validation", labels_key="labels", remeasures="3"
    )
    found = measured_anew(asked, catalog)
    assert (found.object, found.metric, found.labels, found.allow_nan) == (known.source, "mae", ["a"], True)
    assert (found.validation, found.labels_key, found.version, found.app) == (
        "r9.validation",
        "labels",
        None,
        asked.app,
    )
    assert measured_anew(REQUEST, catalog) is REQUEST
    refused = measured_anew(replace(asked, remeasures="4"), catalog)
    assert isinstance(refused, Error) and (refused.code, "no version 4" in refused.message) == ("unknown_model", True)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"format": "container"}, "infaas remeasure"),
        ({"metric": "ndcg"}, "ndcg"),
        ({"metric": "mine"}, "validation set"),
    ],
)
def test_what_labels_of_queries_cannot_measure_is_refused(changes: dict[str, Any], words: str) -> None:
    known = model_record(**changes)
    catalog = Catalog()
    catalog.apply(model_key(known.model, known.version), encode(known))
    refused = measured_anew(replace(REQUEST, model=known.model, remeasures=known.version), catalog)
    assert words in refused.message


def test_a_container_that_is_measured_anew_keeps_its_version_and_profile() -> None:
    stage = Stage()
    stage.register(CONTAINER)
    before, old = stage.variants[0], stage.catalog["model.mlp.1"]
    nothing = Profile(rows=[], load_ms=0.0, memory_mb=0.0, saturation_qps=0.0)
    report = replace(
        CONTAINER.container, accuracy=0.4, accuracy_low=0.3, accuracy_high=0.5, profile=nothing, max_batch=1
    )
    again = replace(CONTAINER, registration="r2", validation="r2.validation", container=report, remeasures="1")
    assert stage.register(again) == RegistrationAccepted(registration="r2")
    assert stage.ends("r2") == ["done"], stage.last("r2")
    [record] = stage.variants
    assert record.remeasured > 0.0 == before.remeasured
    figures = {"accuracy": 0.4, "accuracy_low": 0.3, "accuracy_high": 0.5, "model_accuracy": 0.4}
    assert record == replace(before, remeasured=record.remeasured, **figures)
    assert record.production == (0.4, "registered"), "its process says what it was registered with"
    assert stage.catalog["model.mlp.1"] == old
    assert stage.forgotten[-1].uploads == ("r2.validation",)

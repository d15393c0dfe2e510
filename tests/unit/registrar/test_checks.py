"""What a registration may say: every wrong field is named."""

from math import inf, nan
from typing import Any

import pytest
from msgspec.structs import replace

from bus.messages.catalog import Signature, TensorSpec
from bus.subjects import WITHOUT_APP
from services.core.catalog import signature_difference
from services.core.settings import RegistrarSettings
from services.registrar.checks import registration_error
from tests.support.simulated.registrations import REQUEST, SIGNATURE

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


@pytest.mark.parametrize("name", BAD_NAMES)
@pytest.mark.parametrize("field", ["app", "model", "version", "registration"])
def test_names_must_be_names(field: str, name: str) -> None:
    error = registration_error(replace(REQUEST, **{field: name}), RegistrarSettings())
    if (field, name) == ("app", WITHOUT_APP):
        assert error is None  # a model on its own
        return
    assert error is not None
    assert error.code == "bad_request"
    assert error.message.startswith(f"{field}: ")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("format", "pickle"),
        ("format", ""),
        ("metric", "f1"),
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
    assert error is not None
    assert error.code == "bad_request"
    assert error.message.startswith(f"{field}: ")


def test_all_wrong_fields_are_named_at_once() -> None:
    error = registration_error(replace(REQUEST, app="a b", metric="f1", latency_ms=-1.0), RegistrarSettings())
    assert error is not None
    assert [part.partition(":")[0] for part in error.message.split("; ")] == ["app", "metric", "latency_ms"]


def test_torchscript_only_where_it_is_allowed() -> None:
    request = replace(REQUEST, format="torchscript")
    error = registration_error(request, RegistrarSettings())
    assert error is not None
    assert error.code == "forbidden"
    assert "allow_torchscript" in error.message
    assert registration_error(request, RegistrarSettings(allow_torchscript=True)) is None


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
    ],
)
def test_contexts_are_one_to_sixty_four_and_not_for_every_format(fields: dict[str, Any], says: str) -> None:
    error = registration_error(replace(REQUEST, **fields), RegistrarSettings())
    assert error is not None
    assert error.message == says
    assert registration_error(replace(REQUEST, contexts=2), RegistrarSettings()) is None


@pytest.mark.parametrize("changes", [{"name": "z"}, {"datatype": "FP64"}, {"shape": [28, 28]}, {"shape": [-1]}])
def test_signatures_differ_in_name_type_and_shape(changes: dict[str, Any]) -> None:
    difference = signature_difference(SIGNATURE, signature(**changes))
    assert difference is not None
    assert "inputs" in difference
    assert "x FP32[64]" in difference


def test_the_order_of_tensors_does_not_matter() -> None:
    a, b = (TensorSpec(name=name, datatype="FP32", shape=[1]) for name in "ab")
    one, other = (Signature(inputs=inputs, outputs=[a]) for inputs in ([a, b], [b, a]))
    assert signature_difference(one, other) is None
    assert signature_difference(one, Signature(inputs=[a], outputs=[a])) is not None
    assert signature_difference(one, Signature(inputs=[a, b], outputs=[b])) is not None

"""Which variants are generated, how they are named, and which are good enough."""

import re
from math import inf, nan

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from bus.messages.catalog import Profile
from bus.messages.work import VariantPlan
from bus.subjects import valid_name
from services.core.settings import RegistrarSettings
from services.registrar.policy import defect, next_version, plans, variant_name
from tests.support.simulated.registrations import PROFILE, built, inspected

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


def test_every_precision_comes_with_every_thread_count_and_batch_limit() -> None:
    found = {(plan.precision, plan.threads, plan.max_batch) for plan in made(operators=["Gemm"])}
    assert found == {(p, t, b) for p in ("fp32", "int8") for t in (1, 2) for b in (4, 32)}


def test_no_more_threads_than_cores_and_at_least_one() -> None:
    assert {plan.threads for plan in made(cores=1)} == {1}
    assert {plan.threads for plan in made(cores=1, settings=RegistrarSettings(threads=(4, 8)))} == {1}
    assert {plan.threads for plan in made(cores=8, settings=RegistrarSettings(threads=(4, 8, 16)))} == {4, 8}


def test_a_fixed_batch_allows_only_one_item() -> None:
    assert {plan.max_batch for plan in made(fixed_batch=True)} == {1}


def test_torch_runs_its_own_formats_where_it_can() -> None:
    both = {"ort": "", "torch": ""}
    assert kinds(made("pt2", frameworks=both, operators=[])) == {("ort", "fp32", "onnx"), ("torch", "fp32", "pt2")}
    assert kinds(made("onnx", frameworks=both, operators=[])) == {("ort", "fp32", "onnx")}
    assert kinds(made("torchscript", frameworks={"ort": "x", "torch": ""})) == {("torch", "fp32", "torchscript")}
    assert made("pt2", frameworks={"ort": "broken", "torch": "not installed"}) == []
    assert made("pt2", frameworks={}) == []


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


def test_names_read_well_and_long_ones_stay_different() -> None:
    assert variant_name("cnn", "3", "ort", "int8", 1, 64) == "cnn-v3-ort-int8-t1-b64"
    long = [variant_name("m" * 60 + tail, "1", "ort", "fp32", 1, 64) for tail in ("aaaa", "bbbb")]
    assert long[0] != long[1]
    assert all(re.fullmatch(r"m+-[0-9a-f]{6}-ort-fp32-t1-b64", name) for name in long)
    assert variant_name("a-v1", "2", "ort", "fp32", 1, 8) != variant_name("a", "1-v2", "ort", "fp32", 1, 8)


@pytest.mark.parametrize(
    ("versions", "expected"), [([], 1), (["1", "2"], 3), (["9", "10"], 11), (["beta", "2"], 3), (["beta", "²"], 1)]
)
def test_the_next_version_is_one_more_than_the_largest_number(versions: list[str], expected: int) -> None:
    assert next_version(versions) == expected


PLAN = VariantPlan(variant="v", framework="ort", precision="int8", threads=1, max_batch=8, format="onnx")


def test_what_works_and_agrees_may_serve() -> None:
    assert defect(built(PLAN), SETTINGS) is None
    assert defect(built(PLAN, agreement=SETTINGS.agreement), SETTINGS) is None


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

"""Cascades: which pairs are tried once a second model is measured, and what comes of them."""

from collections.abc import Iterable
from typing import Any

import pytest
from msgspec.structs import replace

from bus.codec import encode
from bus.messages.quality import Cascade
from bus.messages.work import BuildVariants, InspectModel
from services.core.catalog import key_of
from services.core.settings import RegistrarSettings
from tests.support.simulated.registrations import (
    PROFILE,
    SUBJECTS,
    Stage,
    app_record,
    build_order,
    built,
    finished,
    heartbeat,
    inspected,
    model_record,
    to_building,
    variant_record,
)


def second_model(
    stage: Stage | None = None, known: Iterable[Any] = (), links: dict[str, str] | None = None, **first: Any
) -> tuple[Stage, list[Any]]:
    """A dear and right model, registered beside a cheap one of the same app, up to the end of its own variants."""
    quick = replace(PROFILE, saturation_qps=100.0 * PROFILE.saturation_qps)
    cheap = variant_record("cheap-t1-b8", model="cheap", profile=quick, **({"accuracy": 0.8, "samples": 500} | first))
    stage = stage or Stage()
    for record in (cheap, model_record("cheap"), *known, app_record(links={"cheap": "1"} | (links or {}))):
        stage.put(SUBJECTS.catalog_bucket, key_of(record), encode(record))
    order = to_building(stage)
    for plan in order.plans:
        stage.tell(built(plan, accuracy=0.9 if plan.precision == "fp32" else 0.85))
    stage.tell(finished("build"))
    return stage, stage.orders()


def test_a_cascade_is_tried_once_the_second_model_is_measured_and_written_with_it() -> None:
    stage, orders = second_model()
    tried = orders[-1]
    assert isinstance(tried, BuildVariants)
    assert tried.plans == []
    best = tried.cascades[0]
    assert best.cascade.parts[0] == "cheap-t1-b8"
    assert best.cascade.versions == [("cheap", "1"), ("mlp", "1")]
    assert (best.plan.threads, best.plan.max_batch, best.plan.precision) == (1, 8, "cascade")
    known = replace(best.cascade, threshold=0.8, share=0.1)
    stage.tell(built(best.plan, accuracy=0.91, agreement=None, cascade=known))
    stage.tell(finished("build"))
    stage.perform()
    assert stage.last().state == "done"
    [made] = [one for one in stage.variants if one.cascade is not None]
    assert (made.cascade, made.model_accuracy, made.dominated) == (known, 0.9, False)


@pytest.mark.parametrize("model", ["mlp", "other"])
def test_a_cascade_with_the_version_before_is_no_reason_against_a_new_one(model: str) -> None:
    quick = replace(PROFILE, saturation_qps=100.0 * PROFILE.saturation_qps)
    joined = Cascade(parts=["cheap-t1-b8", "old"], versions=[("cheap", "1"), (model, "7")])
    old = variant_record("old", model=model, version="7", profile=quick, accuracy=0.9, cascade=joined)
    _, orders = second_model(known=(old, model_record(model, "7")), links={model: "7"})
    assert bool(orders[-1].cascades) == (model == "mlp")


def test_a_cascade_that_is_not_found_is_no_failure() -> None:
    stage, _ = second_model()
    stage.tell(finished("build"))
    stage.perform()
    assert (stage.last().state, stage.last().failures) == ("done", [])
    assert not [one for one in stage.variants if one.cascade is not None]


def test_cascades_are_switched_off() -> None:
    _, orders = second_model(Stage(settings=RegistrarSettings(cascades=False)))
    assert not orders[-1].cascades


@pytest.mark.parametrize("change", [{"metric": "f1_macro"}, {"samples": 199}, {"alone": "it is"}, {"hardware": "gpu"}])
def test_no_cascade_is_tried_of_what_cannot_be_a_part(change: dict[str, Any]) -> None:
    stage, orders = second_model(**change)
    assert not orders[-1].cascades
    stage.perform()
    assert stage.last().state == "done"


def relinked(settings: RegistrarSettings | None = None) -> Stage:
    """An app that had a cascade with version 2 of its dear model, and serves version 1 again."""
    quick = replace(PROFILE, saturation_qps=100.0 * PROFILE.saturation_qps)
    joined = Cascade(parts=["cheap-t1-b8", "mlp-2"], versions=[("cheap", "1"), ("mlp", "2")])
    stage = Stage(settings=settings)
    for record in (
        variant_record("cheap-t1-b8", model="cheap", profile=quick, accuracy=0.8, samples=500),
        variant_record("mlp-1", accuracy=0.9, samples=500, artifact="dd"),
        variant_record("mlp-2", version="2", accuracy=0.9, samples=500),
        variant_record("mlp-v2-ort-cascade-t1-b8", version="2", accuracy=0.9, cascade=joined),
        *(model_record("cheap"), model_record(), model_record(version="2")),
        app_record(links={"cheap": "1", "mlp": "2"}),
    ):
        stage.put(SUBJECTS.catalog_bucket, key_of(record), encode(record))
    rest(stage)
    assert stage.orders() == [], "the app has its cascade"
    changed = app_record(links={"cheap": "1", "mlp": "1"})
    stage.put(SUBJECTS.catalog_bucket, key_of(changed), encode(changed))
    rest(stage)
    return stage


def rest(stage: Stage) -> None:
    for _ in range(3):
        stage.tell(heartbeat())
        stage.pass_time(1)
        stage.perform()


def test_a_cascade_that_goes_with_a_change_of_a_version_is_looked_for_with_the_other_version() -> None:
    """Once, and nothing else is built; the one that waits for its versions stays as it is."""
    stage = relinked()
    [order] = stage.orders()
    assert isinstance(order, InspectModel)
    assert (order.stored, order.object) == (True, "aa")
    stage.settle(inspected(order.registration))
    tried = build_order(stage)
    assert tried.plans == []
    best = tried.cascades[0]
    assert (best.cascade.parts, best.artifacts) == (["cheap-t1-b8", "mlp-1"], ["aa", "dd"])
    stage.tell(built(best.plan, order.registration, accuracy=0.91, agreement=None, cascade=best.cascade))
    stage.settle(finished("build", order.registration))
    made = {one.variant: one.cascade for one in stage.variants if one.cascade is not None}
    assert made.pop(best.plan.variant) == best.cascade
    assert list(made) == ["mlp-v2-ort-cascade-t1-b8"]
    rest(stage)
    assert len(stage.orders()) == 2


def test_a_cascade_that_is_not_found_again_is_looked_for_once() -> None:
    stage = relinked()
    [order] = stage.orders()
    stage.settle(inspected(order.registration))
    stage.settle(finished("build", order.registration))
    assert stage.last(order.registration).state == "done"
    before = len(stage.orders())
    for _ in range(3):  # with the cheap one's version, then no more
        rest(stage)
        new = stage.orders()[before:]
        before += len(new)
        for one in new:
            stage.settle(inspected(one.registration) if isinstance(one, InspectModel) else finished("build", one.registration))  # fmt: skip
    rest(stage)
    assert len({one.registration for one in stage.orders()}) <= 2
    assert len(stage.orders()) == before


def test_no_lost_cascade_is_looked_for_where_they_are_switched_off() -> None:
    assert relinked(RegistrarSettings(cascades=False)).orders() == []

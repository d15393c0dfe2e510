"""Whether a user's own process is a new version or a replica is the registrar's answer."""

from typing import Any

import pytest
from msgspec.structs import replace

from bus.codec import encode
from bus.messages.public import Error, Register
from bus.messages.work import ContainerPlace, PlaceContainer
from services.core.catalog import Catalog, app_key, model_key, variant_key
from services.registrar.policy import place_of
from tests.support.simulated.registrations import (
    SIGNATURE,
    SUBJECTS,
    Stage,
    app_record,
    model_record,
    variant_record,
)

REQUEST = Register(
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


def test_what_nobody_has_registered_is_a_new_version() -> None:
    new = ContainerPlace(version="1", signature=None, agreement=0.9)
    assert asked(catalog=Catalog()) == new
    assert asked(replace(BARE, version="own"), Catalog()) == replace(new, version="own")
    # The app is there, and its model is a file: the next number, with the app's inputs.
    files = catalogue(APP, model_record(), variant_record())
    assert asked(catalog=files) == ContainerPlace(version="2", signature=SIGNATURE, agreement=0.9)


def test_the_same_once_more_is_a_replica_of_the_newest_version_of_containers() -> None:
    place = ContainerPlace(version="1", signature=SIGNATURE, agreement=0.9, variant=VARIANT, reference="cc")
    assert asked() == place
    later = (model_record(version="2", created=9.0), replace(RECORD, version="0", created=0.5))
    assert asked(catalog=catalogue(APP, RECORD, VARIANT, *later)) == place


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
    request = replace(REQUEST, **changes)
    said = asked(request, metric=request.metric)
    assert isinstance(said, str)
    assert said.startswith(f"--{option}: ") and "a replica changes nothing" in said


def test_only_what_was_given_counts_for_a_replica() -> None:
    assert isinstance(asked(REQUEST, metric="top5"), ContainerPlace)
    assert isinstance(asked(replace(REQUEST, metric="mae")), ContainerPlace)  # left out: `Register` has a default


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

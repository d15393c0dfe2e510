"""The catalogue's fold: whatever the order of arrival, it shows what the bucket holds and nothing half written."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bus.codec import encode
from services.core.catalog import Catalog, app_key, key_of, model_key, variant_key
from tests.support.simulated.registrations import app_record, model_record, variant_record


def catalog_of(*records: object) -> Catalog:
    catalog = Catalog()
    for record in records:
        catalog.apply(key_of(record), encode(record))  # type: ignore[arg-type]
    return catalog


def test_looks_up_what_was_put() -> None:
    variant, model, app = variant_record(), model_record(), app_record()
    catalog = catalog_of(variant, model, app)
    assert catalog.app("digits") == app
    assert catalog.model("mlp", "1") == model
    assert catalog.variant(variant.variant) == variant
    assert catalog.variants_of("digits") == (variant,)
    assert catalog.apps_linking("mlp") == {"digits"}
    assert list(catalog.apps) == [app]
    assert list(catalog.models) == [model]
    assert list(catalog.variants) == [variant]


def test_knows_nothing_of_strangers() -> None:
    catalog = Catalog()
    assert catalog.app("a") is None
    assert catalog.model("m") is None
    assert catalog.model("m", "1") is None
    assert catalog.variant("v") is None
    assert catalog.variants_of("a") == ()
    assert catalog.apps_linking("m") == frozenset()


def test_variants_without_their_model_stay_invisible() -> None:
    catalog = catalog_of(app_record(), variant_record())
    assert catalog.variants_of("digits") == ()
    assert catalog.apply(model_key("mlp", "1"), encode(model_record())) == {"digits"}
    assert catalog.variants_of("digits") == (variant_record(),)


def test_names_the_apps_that_a_change_affects() -> None:
    catalog = catalog_of(model_record(), app_record(), app_record("other", links={}))
    assert catalog.apply(variant_key("v"), encode(variant_record("v"))) == {"digits"}
    assert catalog.apply(variant_key("v2"), encode(variant_record("v2", version="2"))) == set()
    assert catalog.apply(app_key("digits"), encode(app_record(links={"mlp": "2"}))) == {"digits"}
    assert catalog.variants_of("digits") == ()
    assert catalog.apply(variant_key("v"), None) == set()
    assert catalog.apply(variant_key("v2"), None) == {"digits"}
    assert catalog.apply(app_key("digits"), None) == {"digits"}
    assert catalog.apply(app_key("digits"), None) == set()


def test_a_switch_of_version_shows_the_other_variants() -> None:
    one, two = variant_record("v1"), variant_record("v2", version="2")
    catalog = catalog_of(one, two, model_record(), model_record(version="2"), app_record())
    assert catalog.variants_of("digits") == (one,)
    catalog.apply(app_key("digits"), encode(app_record(links={"mlp": "2"})))
    assert catalog.variants_of("digits") == (two,)


def test_the_latest_version_is_the_one_registered_last() -> None:
    catalog = catalog_of(model_record(version="10", created=5.0), model_record(version="9", created=6.0))
    latest = catalog.model("mlp")
    assert latest is not None
    assert latest.version == "9"
    assert sorted(catalog.versions("mlp")) == ["10", "9"]


def test_gives_the_same_tuple_until_something_changes() -> None:
    catalog = catalog_of(variant_record(), model_record(), app_record())
    first = catalog.variants_of("digits")
    assert catalog.variants_of("digits") is first
    catalog.apply(variant_key("w"), encode(variant_record("w")))
    assert catalog.variants_of("digits") is not first


@pytest.mark.parametrize(
    "value",
    [b"", b"\xc1", b"\x80", encode({"app": "digits"}), encode({**msgspec.to_builtins(app_record()), "links": 7})],
)
def test_an_unreadable_entry_counts_as_absent_and_is_noted(value: bytes) -> None:
    catalog = catalog_of(variant_record(), model_record(), app_record())
    assert catalog.apply("app.digits", value) == {"digits"}
    assert catalog.app("digits") is None
    assert catalog.variants_of("digits") == ()
    assert list(catalog.unreadable) == ["app.digits"]
    catalog.apply("app.digits", encode(app_record()))
    assert catalog.unreadable == {}
    assert catalog.variants_of("digits") == (variant_record(),)


def test_a_record_under_another_key_is_not_believed() -> None:
    catalog = Catalog()
    catalog.apply("variant.other", encode(variant_record("v")))
    assert catalog.variant("other") is None
    assert catalog.variant("v") is None
    assert "variant.v" in catalog.unreadable["variant.other"]


def test_other_keys_are_ignored() -> None:
    catalog = Catalog()
    assert catalog.apply("price.cpu", b"x") == set()
    assert catalog.apply("nonsense", None) == set()
    assert catalog.unreadable == {}


RECORDS = [
    *(variant_record(f"v{n}", version=str(n % 2 + 1), model=f"m{n % 3}") for n in range(6)),
    *(model_record(f"m{n}", version) for n in range(3) for version in ("1", "2")),
    app_record("a", links={"m0": "1", "m1": "2"}),
    app_record("b", links={"m1": "1", "m2": "2"}),
    app_record("c", links={}),
]
STEPS = st.lists(st.tuples(st.sampled_from(RECORDS), st.booleans()), max_size=40)


@given(STEPS)
def test_any_history_ends_where_its_last_values_lead(steps: list[tuple[object, bool]]) -> None:
    """Folding every change equals folding only the last value of each key; changes name every app whose variants differ."""
    folded = Catalog()
    last: dict[str, bytes | None] = {}
    for record, put in steps:
        key, value = key_of(record), encode(record) if put else None  # type: ignore[arg-type]
        before = {app: folded.variants_of(app) for app in "abc"}
        affected = folded.apply(key, value)
        last[key] = value
        assert {app for app in "abc" if folded.variants_of(app) != before[app]} <= affected
    fresh = Catalog()
    for key, value in last.items():
        if value is not None:
            fresh.apply(key, value)
    for app in "abc":
        assert folded.app(app) == fresh.app(app)
        assert folded.variants_of(app) == fresh.variants_of(app)
    for n in range(3):
        assert folded.versions(f"m{n}") == fresh.versions(f"m{n}")
        assert folded.apps_linking(f"m{n}") == fresh.apps_linking(f"m{n}")
    assert sorted(v.variant for v in folded.variants) == sorted(v.variant for v in fresh.variants)

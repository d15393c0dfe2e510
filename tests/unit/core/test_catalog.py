"""The catalogue's fold: whatever the order of arrival, it shows what the bucket holds and nothing half written."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from bus.codec import encode
from bus.messages.catalog import ProfileRow, VariantRecord
from bus.messages.quality import Cascade
from services.core.catalog import Catalog, app_key, key_of, model_key, target_of, variant_key
from services.core.selection.eligibility import AppView, Ask
from services.registrar.policy import dominates, mark_dominated
from tests.support.data.events import catalog_of
from tests.support.data.pipelines import deployed
from tests.support.simulated.registrations import PROFILE, app_record, model_record, variant_record


def test_what_was_put_is_looked_up_and_nothing_of_strangers() -> None:
    variant, model, app = variant_record(), model_record(), app_record()
    catalog = catalog_of(variant, model, app)
    assert catalog.app("digits") == app
    assert catalog.model("mlp", "1") == model
    assert catalog.variant(variant.variant) == variant
    assert catalog_of(variant).variant(variant.variant) is catalog.variant(variant.variant)  # a process holds it once
    assert catalog.variants_of("digits") == (variant,)
    assert catalog.apps_linking("mlp") == {"digits"}
    assert (list(catalog.apps), list(catalog.models), list(catalog.variants)) == ([app], [model], [variant])
    assert "mlp" in catalog.meant_model("mpl")
    for record in (app, model):
        catalog.apply(key_of(record), None)
    assert not catalog.meant_model("mpl"), "nobody means what is gone"
    catalog = Catalog()
    assert catalog.app("a") is None
    assert catalog.model("m") is None
    assert catalog.model("m", "1") is None
    assert catalog.variant("v") is None
    assert catalog.variants_of("a") == ()
    assert catalog.apps_linking("m") == frozenset()


def test_an_app_without_a_target_has_that_of_the_settings() -> None:
    assert target_of(app_record(slo_target=0.999), 0.99) == 0.999
    assert target_of(app_record(), 0.95) == 0.95
    assert target_of(None, 0.95) == 0.95


def test_variants_are_visible_with_their_model_as_the_same_tuple_until_something_changes() -> None:
    catalog = catalog_of(app_record(), variant_record())
    assert catalog.variants_of("digits") == ()
    assert catalog.apply(model_key("mlp", "1"), encode(model_record())) == {"digits"}
    assert catalog.variants_of("digits") == (variant_record(),)
    catalog = catalog_of(variant_record(), model_record(), app_record())
    first = catalog.variants_of("digits")
    assert catalog.variants_of("digits") is first
    catalog.apply(variant_key("w"), encode(variant_record("w")))
    assert catalog.variants_of("digits") is not first


def test_names_the_apps_that_a_change_affects() -> None:
    catalog = catalog_of(model_record(), app_record(), app_record("other", links={}))
    assert catalog.apply(variant_key("v"), encode(variant_record("v"))) == {"digits"}
    assert catalog.apply(variant_key("v2"), encode(variant_record("v2", version="2"))) == set()
    assert catalog.apply(app_key("digits"), encode(app_record(links={"mlp": "2"}))) == {"digits"}
    assert catalog.variants_of("digits") == ()
    assert catalog.apply(variant_key("v"), None) == {"digits"}, "queries may name it"
    assert catalog.apply(variant_key("v2"), None) == {"digits"}
    assert catalog.apply(app_key("digits"), None) == {"digits"}
    assert catalog.apply(app_key("digits"), None) == set()


def test_versions_show_their_own_variants_and_the_latest_is_the_one_registered_last() -> None:
    one, two = variant_record("v1"), variant_record("v2", version="2")
    catalog = catalog_of(one, two, model_record(), model_record(version="2"), app_record())
    assert catalog.variants_of("digits") == (one,)
    catalog.apply(app_key("digits"), encode(app_record(links={"mlp": "2"})))
    assert catalog.variants_of("digits") == (two,)
    catalog = catalog_of(model_record(version="10", created=5.0), model_record(version="9", created=6.0))
    assert catalog.model("mlp").version == "9"
    assert sorted(catalog.versions("mlp")) == ["10", "9"]


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


def test_records_of_other_keys_are_not_believed_and_strange_keys_ignored() -> None:
    catalog = Catalog()
    catalog.apply("variant.other", encode(variant_record("v")))
    assert catalog.variant("other") is None
    assert catalog.variant("v") is None
    assert "variant.v" in catalog.unreadable["variant.other"]
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


# -- Marking variants that are worse than another in every respect.


def variant(name: str, accuracy: float | None = 0.9, ms: float = 1.0, **changes: object) -> VariantRecord:
    rows = [ProfileRow(batch=1, p50_ms=ms, p99_ms=ms, cpu_ms=ms, wall_over_cpu=1.0)]
    return variant_record(name, accuracy=accuracy, profile=replace(PROFILE, rows=rows), **changes)


def test_the_dominated_are_marked_and_any_advantage_saves() -> None:
    marked = mark_dominated([variant("slow", 0.8, 2.0), variant("fast", 0.9, 1.0)])
    assert [(v.variant, v.dominated) for v in marked] == [("slow", True), ("fast", False)]
    assert not any(v.dominated for v in mark_dominated([variant("a"), variant("b")]))
    assert not dominates(variant("cpu", 0.9, 1.0), variant("gpu", 0.1, 9.0, hardware="gpu"))
    assert not dominates(variant("real", 0.9, 1.0), variant("pretended", 0.1, 9.0, simulated=True))
    two_cells = variant_record("two", accuracy=0.5)
    assert not dominates(variant("one", 0.9, 0.1), two_cells)
    assert dominates(two_cells, variant("one", 0.4, 9.0))
    assert dominates(variant("known", 0.0), variant("unknown", None))
    assert not dominates(variant("unknown", None), variant("known", 0.0))
    best = variant("best", 0.9, 1.0)
    assert not dominates(best, variant("more accurate", 0.91, 5.0))
    assert not dominates(best, variant("larger batch", 0.5, 5.0, max_batch=64))
    assert not dominates(variant("two threads", 0.9, 1.0, threads=2), variant("one thread", 0.9, 1.0))
    lean = replace(PROFILE, memory_mb=1.0)
    assert not dominates(best, variant_record("lean", accuracy=0.1, profile=lean))


@given(st.lists(st.tuples(st.sampled_from([0.1, 0.5, 0.9]), st.sampled_from([1.0, 2.0, 3.0])), max_size=8))
def test_the_undominated_cover_all(points: list[tuple[float, float]]) -> None:
    """Every marked variant is dominated by one that is not marked, and marking again changes nothing."""
    marked = mark_dominated([variant(f"v{n}", accuracy, ms) for n, (accuracy, ms) in enumerate(points)])
    kept = [v for v in marked if not v.dominated]
    assert all(any(dominates(k, v) for k in kept) for v in marked if v.dominated)
    assert not points or kept
    assert mark_dominated(marked) == marked


def test_variants_of_deployed_pipelines_are_known() -> None:
    catalog = Catalog()
    assert not catalog.planned
    record = deployed({"lang": 2, "translate": 1}, {"lang": "a", "translate": "b"})
    catalog.apply(key_of(record), encode(record))
    assert catalog.planned == {"a": (record.app,), "b": (record.app,)}
    other = replace(record, app="another")
    catalog.apply(key_of(other), encode(other))
    assert catalog.planned["a"] == ("another", record.app)
    catalog.apply(key_of(other), None)
    catalog.apply(key_of(record), encode(replace(record, plan=None)))
    assert not catalog.planned


def test_a_cascade_is_of_the_apps_that_serve_both_its_versions_and_of_no_model() -> None:
    joined = variant_record("j", cascade=Cascade(parts=["a", "b"], versions=[("mlp", "1"), ("cnn", "2")]))
    records = (variant_record("a"), joined, model_record(), model_record("cnn", "1"), model_record("cnn", "2"))
    both, old, one = {"mlp": "1", "cnn": "2"}, {"mlp": "1", "cnn": "1"}, {"mlp": "1"}
    catalog = catalog_of(*records, app_record("both", links=both), app_record("old", links=old), app_record(links=one))
    assert [v.variant for v in catalog.variants_at("mlp", "1")] == ["a"]
    assert [v.variant for v in catalog.variants_of("both")] == ["a", "j"]
    for app in ("old", "digits"):
        assert [v.variant for v in catalog.variants_of(app)] == ["a"]
    assert [len(catalog.cascades_of(app_record(links=links))) for links in (both, old, one)] == [1, 1, 0]
    view = AppView(app_record(links=old), (variant_record("a"), joined), lambda _: 1.0)
    assert view.current.tolist() == [True, False]
    ask = Ask("old", 1, 1e9)
    assert view.pinned(replace(ask, model="mlp")).tolist() == [True, False]
    assert view.pinned(replace(ask, variant="j")).tolist() == [False, True]
    assert catalog.apply(app_key("old"), encode(app_record("old", links=both))) == {"old"}
    assert [v.variant for v in catalog.variants_of("old")] == ["a", "j"]
    catalog.apply(model_key("cnn", "2"), None)
    assert [v.variant for v in catalog.variants_of("both")] == ["a"]


def test_a_deadline_leaves_time_for_both_parts_of_a_cascade() -> None:
    rows = [ProfileRow(batch=1, p50_ms=2.0, p99_ms=9.0, cpu_ms=2.0, wall_over_cpu=1.0)]
    made = Cascade(parts=["a", "b"], versions=[("mlp", "1"), ("mlp", "1")])
    joined = variant_record("j", cascade=made, profile=replace(PROFILE, rows=rows))
    view = AppView(app_record(), (replace(joined, variant="a", cascade=None), joined), lambda _: 1.0)
    assert view.latency(1).tolist() == pytest.approx([0.002, 0.009])
    assert view.cost[0] == view.cost[1]

"""services/gateway/clipper/bodies.py: descriptions, and the counts of /metrics."""

import pytest
from msgspec import to_builtins

from bus.codec import encode
from bus.messages.catalog import AppRecord
from services.core.catalog import Catalog, key_of
from services.gateway.clipper import bodies
from services.gateway.clipper.rest import PredictionCounts
from tests.support.data.events import model_record, variant_record

# -- descriptions and counts


def catalog(**links: str) -> Catalog:
    found = Catalog()
    one = variant_record(variant="m-v1", model="m", version="1")
    two = variant_record(variant="m-v2", model="m", version="2")
    records = [
        one, two, model_record(model="m", version="1", created=1.0, labels=["no", "yes"]),
        model_record(model="m", version="2", created=2.0), AppRecord(app="a", links=links, latency_ms=20.0, default_output=[1, None]),
    ]  # fmt: skip
    for record in records:
        found.apply(key_of(record), encode(record))
    return found


def test_an_application() -> None:
    app = catalog(m="1").app("a")
    assert app is not None
    assert to_builtins(bodies.describe_app(app)) == {
        "name": "a",
        "input_type": "floats",
        "default_output": "[1,null]",
        "latency_slo_micros": 20000,
        "linked_models": ["m"],
    }
    assert bodies.describe_app(AppRecord(app="b", links={}, default_output="-1.0")).default_output == "-1.0"


def test_the_current_version_is_the_one_that_serves_else_the_newest() -> None:
    for links, current in (({"m": "1"}, "1"), ({"m": "2"}, "2"), ({}, "2")):
        known = catalog(**links)
        found = [bodies.describe_model(record, known, []) for record in bodies.all_models(known)]
        assert [(one.model_version, one.is_current_version) for one in found] == [
            ("1", current == "1"),
            ("2", current == "2"),
        ]
        assert found[0].labels == ["no", "yes"]
        assert (found[0].variants, found[0].serving) == (["m-v1"], ["a"] if links.get("m") == "1" else [])


@pytest.mark.parametrize(
    ("limits", "said"), [((), None), ((("fixed", 4),), 4), ((("edf", 8),), -1), ((("fixed", 4), ("edf", 8)), None)]
)
def test_a_models_batch_size_is_that_of_its_instances(limits: tuple[tuple[str, int], ...], said: int | None) -> None:
    known = catalog()
    instances = [
        {
            "instance": f"i{n}",
            "variant": "m-v1",
            "device": "cpu",
            "state": "Active",
            "batching": policy,
            "batch_limit": most,
        }
        for n, (policy, most) in enumerate(limits)
    ]
    loaded = bodies.list_containers(known, [{"worker": "w0", "instances": instances}])
    first, second = (bodies.describe_model(record, known, loaded) for record in bodies.all_models(known))
    assert to_builtins(first).get("batch_size") == said
    assert "batch_size" not in to_builtins(second)


def test_containers_are_loaded_instances_numbered_within_their_version() -> None:
    def instance(name: str, variant: str) -> dict[str, str]:
        return {"instance": name, "variant": variant, "device": "cpu", "state": "Active"}

    workers = [
        {"worker": "w0", "instances": [instance("i2", "m-v1"), instance("i1", "m-v1")]},
        {"worker": "w1", "instances": [instance("i3", "m-v2"), instance("i4", "gone")]},
    ]
    found = bodies.list_containers(catalog(), workers)
    assert [(one.model_id, one.model_replica_id, one.worker) for one in found] == [
        ("m:1", 0, "w0"),
        ("m:1", 1, "w0"),
        ("m:2", 0, "w1"),
    ]


def test_counts() -> None:
    counts = PredictionCounts()
    assert counts.report() == {"counters": [], "ratio_counters": [], "histograms": []}
    counts.add("a", 3, 100.0, default=False)
    counts.add("a", 1, 300.0, default=True)
    assert counts.report() == {
        "counters": [{"app:a:num_predictions": {"count": 4}}],
        "ratio_counters": [{"app:a:default_prediction_ratio": {"ratio": 0.25}}],
        "histograms": [
            {"app:a:prediction_latency": {"unit": "microseconds", "size": 2, "mean": 200.0, "max": 300.0}},
        ],
    }

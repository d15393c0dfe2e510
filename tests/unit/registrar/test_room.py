"""What the machines could never hold is refused when it is asked for, with the figures."""

from typing import Any

import pytest
from msgspec.structs import replace

from bus.messages.catalog import AppRecord, Ensemble, Signature
from bus.messages.public import Error
from bus.messages.verbs import AddApp, LinkModel, SetApp, SetReplicas, SetSelection, SetVersion
from services.core.catalog import Catalog
from services.core.settings import MachineKind, MonitorSettings
from services.registrar.changes import amend
from services.registrar.checks import Ceiling
from services.registrar.commands import LinkVersion
from tests.support.data.events import catalog_of
from tests.support.simulated.registrations import (
    PROFILE,
    SIGNATURE,
    app_record,
    heartbeat,
    model_record,
    variant_record,
)

# ten on a device of 1000 MB, of which all may be taken
SMALL = variant_record(profile=replace(PROFILE, memory_mb=100.0))
ROOM = Ceiling(monitor=MonitorSettings(memory_share=1.0), cache_mb=100.0)


def catalog(*records: Any) -> Catalog:
    return catalog_of(SMALL, model_record(), app_record(), *records)


def worker(memory_mb: float = 1000.0, **fields: Any) -> Any:
    beat = heartbeat(**fields)
    return replace(beat, devices=[replace(beat.devices[0], memory_mb=memory_mb)])


def count_of(count: int) -> list[Any]:
    each = SetReplicas(app="digits", model="mlp", count=count)
    everywhere, of_app = SetReplicas(model="mlp", count=count), SetReplicas(app="digits", count=count)
    return [each, everywhere, of_app, SetApp(app="digits", min_instances=count)]


@pytest.mark.parametrize("at", range(4))
@pytest.mark.parametrize(
    ("room", "workers", "most"),
    [
        (ROOM, 1, 10),
        (ROOM, 2, 20),
        (replace(ROOM, monitor=MonitorSettings(memory_share=0.5)), 1, 5),
        (replace(ROOM, monitor=MonitorSettings(memory_share=1.0, device_mb=300)), 1, 3),
        (replace(ROOM, monitor=MonitorSettings(memory_share=1.0, max_models=2)), 1, 2),
        (replace(ROOM, kinds={"big": MachineKind(maximum=2, memory_mb=2000)}), 1, 50),
        (replace(ROOM, kinds={"like": MachineKind(maximum=3)}), 1, 40),
        (replace(ROOM, kinds={"cpu": MachineKind(maximum=3)}), 1, 30),
    ],
)
def test_no_more_instances_than_fit(room: Ceiling, workers: int, most: int, at: int) -> None:
    alive = [worker(worker=f"w{n}") for n in range(workers)]
    assert room.refuse(count_of(most)[at], catalog(), alive) is None
    error = room.refuse(count_of(most + 1)[at], catalog(), alive)
    assert error.code == "unsatisfiable"
    field = "min_instances" if at == 3 else "count"
    assert error.message.startswith(
        f"{field}: at most {most} instances fit, not {most + 1}: each of {SMALL.variant} takes 100 MB"
    )


def test_the_unknown_is_not_refused_and_own_versions_may_have_other_classes() -> None:
    many = SetApp(app="digits", min_instances=100_000)
    assert ROOM.refuse(many, catalog(), []) is None, "no worker is alive"
    assert ROOM.refuse(AddApp(app="new", min_instances=100_000), catalog(), [worker()]) is None, "no model yet"
    gone = catalog(replace(SMALL, hardware="container-x"))
    assert ROOM.refuse(many, gone, [worker()]) is None, "its container may come back"
    assert ROOM.refuse(SetApp(app="digits", latency_ms=3.0), catalog(), [worker()]) is None
    # Its owner says so: a later registration renames or adds classes, and the way back stays open.
    old, new = model_record("lr", "1", app="a", labels=["x"]), model_record("lr", "2", app="a", labels=["y"])
    app = AppRecord(app="a", links={"lr": "2"}, signature=SIGNATURE)
    back = amend(app, SetVersion(app="a", model="lr", version="1"), catalog_of(old, new, app))
    assert back.links == {"lr": "1"}


def test_caches_of_all_apps_fit_into_the_setting() -> None:
    other = app_record("other", selection=Ensemble(cache_mb=40.0))

    def asked(cache_mb: float) -> Error | None:
        return ROOM.refuse(SetSelection(app="digits", cache_mb=cache_mb), catalog(other), [])

    assert asked(60.0) is None
    assert asked(61.0) is not None
    error = asked(1e12)
    assert "cache_mb: a dispatcher keeps at most 100 MB of answers (dispatcher.cache_mb)" in error.message
    assert "other apps have 40; give at most 60" in error.message


# -- No app answers with a version that was made for another one and means something else.
OTHER = Signature(inputs=SIGNATURE.outputs, outputs=SIGNATURE.inputs)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"labels": ["healthy", "sick"]}, "the app's classes are fair, fraud, the version's are healthy, sick"),
        ({"labels": ["fraud", "fair"]}, "the app's classes are fair, fraud, the version's are fraud, fair"),
        ({"labels": []}, "the app's classes are fair, fraud, the version's are without names"),
        ({"labels": ["fair", "fraud"], "metric": "top5"}, "the app's metric is top1, the version's is top5"),
        ({"labels": ["fair", "fraud"], "signature": OTHER}, "the app's inputs are"),
        ({"labels": ["fair", "fraud"]}, None),
    ],
)
@pytest.mark.parametrize("made_for", ["health", "_"])
@pytest.mark.parametrize("unlinked", [False, True])
def test_a_version_that_was_made_for_another_app_serves_only_where_it_means_the_same(
    changes: dict[str, Any], said: str | None, made_for: str, unlinked: bool
) -> None:
    own = model_record("lr", "5", app="fraud", labels=["fair", "fraud"])
    app = AppRecord(app="fraud", links={} if unlinked else {"lr": "5"}, signature=SIGNATURE)
    foreign = model_record("lr", "6", app=made_for, **changes)
    catalog = catalog_of(own, app, foreign)
    after = amend(app, LinkVersion(app="fraud", record=foreign), catalog)
    if said is None:
        assert after.links == {"lr": "6"}
        assert set(catalog.versions_for(app, "lr")) == {"5", "6"}
    else:
        assert isinstance(after, Error)
        maker = "no app" if made_for == "_" else "app health"
        assert after.message.startswith(f"version: version 6 of model lr was registered for {maker} and does not fit")
        assert said in after.message
        assert set(catalog.versions_for(app, "lr")) == {"5"}


def test_the_newest_version_that_fits_is_linked() -> None:
    app = AppRecord(app="fraud", links={}, signature=SIGNATURE)
    own, foreign = (
        model_record("lr", "1", app="fraud"),
        model_record("lr", "2", app="health", created=9.0, labels=["sick"]),
    )
    after = amend(app, LinkModel(app="fraud", model="lr"), catalog_of(app, own, foreign))
    assert after.links == {"lr": "1"}
    new = amend(AppRecord(app="new", links={}), LinkModel(app="new", model="lr"), catalog_of(own, foreign))
    assert new.links == {"lr": "2"}

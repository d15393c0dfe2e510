"""No app answers with a version that was made for another one and means something else."""

from typing import Any

import pytest

from bus.codec import encode
from bus.messages.catalog import AppRecord, Signature
from bus.messages.verbs import LinkModel, SetVersion
from services.core.catalog import Catalog, key_of
from services.registrar.changes import amend
from services.registrar.commands import ChangeRefused, LinkVersion
from tests.support.simulated.registrations import SIGNATURE, model_record

OTHER = Signature(inputs=SIGNATURE.outputs, outputs=SIGNATURE.inputs)


def catalog_of(*records: Any) -> Catalog:
    found = Catalog()
    for record in records:
        found.apply(key_of(record), encode(record))
    return found


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
        assert isinstance(after, AppRecord)
        assert after.links == {"lr": "6"}
        assert set(catalog.versions_for(app, "lr")) == {"5", "6"}
    else:
        assert isinstance(after, ChangeRefused)
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
    assert isinstance(after, AppRecord)
    assert after.links == {"lr": "1"}
    new = amend(AppRecord(app="new", links={}), LinkModel(app="new", model="lr"), catalog_of(own, foreign))
    assert isinstance(new, AppRecord)
    assert new.links == {"lr": "2"}


def test_an_apps_own_versions_may_have_other_classes() -> None:
    """Its owner says so: a later registration renames or adds classes, and the way back stays open."""
    old, new = model_record("lr", "1", app="a", labels=["x"]), model_record("lr", "2", app="a", labels=["y"])
    app = AppRecord(app="a", links={"lr": "2"}, signature=SIGNATURE)
    back = amend(app, SetVersion(app="a", model="lr", version="1"), catalog_of(old, new, app))
    assert isinstance(back, AppRecord)
    assert back.links == {"lr": "1"}

"""The catalogue as the dispatcher serves it: a view for each app, and for each model that is queried without an app. Pure."""

from collections.abc import Container
from typing import Any

from msgspec import Struct, field

from bus.messages.catalog import AppRecord, VariantRecord
from bus.messages.public import Error
from bus.subjects import WITHOUT_APP
from services.core.actor import Changed
from services.core.catalog import Catalog, KeptReplicas
from services.core.ensemble.base import Member
from services.core.selection.cluster import ClusterView
from services.core.selection.eligibility import AppView
from services.core.validation import WrongField, check_name


def forget(known: Container[str], *tables: Any) -> None:
    """Keep nothing of names that are gone. A key is a name, begins with one and a dot, or is a tuple that begins with one.

    Whole tables at each deletion: what ends after its app was deleted goes with the next one.
    """
    for table in tables:
        for key in list(table):
            name = key if isinstance(key, str) else key[0]
            if name not in known and name.partition(".")[0] not in known:
                table.pop(key)


class Apps(Struct, eq=False):
    """Keeps `view.apps` equal to the catalogue bucket. kept: the replicas of deployed pipelines, as the control bucket has them."""

    view: ClusterView
    catalog: Catalog = field(default_factory=Catalog)
    synced: bool = False
    kept: KeptReplicas = field(default_factory=KeptReplicas)

    def change(self, change: Changed) -> None:
        """One entry of the bucket has changed."""
        for app in self.catalog.apply(change.key, change.value):
            record = self.catalog.app(app)
            for model in (
                record.links if record is not None else ()
            ):  # another version may be its newest that is not held
                self.view.drop_app(f"{WITHOUT_APP}.{model}")
            if record is None:
                self.view.drop_app(app)
            elif self.synced:
                self._set(app, record)
        if change.key.startswith("model."):
            self.view.drop_app(f"{WITHOUT_APP}.{change.key.split('.')[1]}")

    def complete(self) -> None:
        """Every entry that the bucket had has arrived."""
        self.synced = True
        for record in list(self.catalog.apps):
            self._set(record.app, record)

    def of(self, name: str, model: str | None) -> tuple[str, AppView] | None:
        """The key and view of an app, or of a model's own pseudo app if the query names no app."""
        if name != WITHOUT_APP:
            view = self.view.apps.get(name)
            return None if view is None else (name, view)
        key = f"{WITHOUT_APP}.{model}"
        if key not in self.view.apps:
            record = self.catalog.model(model) if model is not None else None
            if record is None:
                return None
            links = {record.model: record.version}
            self._set(key, AppRecord(app=WITHOUT_APP, links=links, signature=record.signature))
        return key, self.view.apps[key]

    def unknown(self, name: str, model: str | None) -> Error:
        """Why `of` finds nothing."""
        try:
            check_name(name if name != WITHOUT_APP else None, "app")
            check_name(model, "model")
        except WrongField as error:
            return Error(code="bad_request", message=str(error))
        if not self.synced:
            return Error(
                code="overloaded", message="the dispatcher has only just started: ask again", retry_after_ms=100
            )
        if name != WITHOUT_APP:
            return Error(code="unknown_app", message=self.catalog.no_app(name))
        if model is None:
            text = "field `model` is missing: a query without an app names a registered model"
            return Error(code="bad_request", message=text)
        text = f"no model {model!r}: see infaas.list.models{self.catalog.meant_model(model)}"
        return Error(code="unknown_model", message=text)

    def variants(self, key: str) -> tuple[VariantRecord, ...]:
        """The variants that may serve an app, or a model's pseudo app. Empty if it is unknown."""
        view = self.view.apps.get(key)
        return () if view is None else view.records

    def _set(self, key: str, app: AppRecord) -> None:
        """The view has the versions of its models that the app may answer with: those not linked now serve queries that name them."""
        records = [
            record
            for model in sorted(app.links)
            for version in sorted(self.catalog.versions_for(app, model))
            for record in self.catalog.variants_at(model, version)
        ]
        if not key.startswith(WITHOUT_APP):
            records += self.catalog.cascades_of(app)
        self.view.set_app(app, self.catalog.seen(key, records), key)


def members_of(catalog: Catalog, name: str) -> list[Member]:
    """The models of an app that may answer together, in the order of its selection, else of their names. Empty if it has no selection."""
    app = catalog.app(name)
    if app is None or app.selection is None:
        return []
    found = []
    for model in sorted(app.links) if app.selection.members is None else app.selection.members:
        version = app.links.get(model)
        record = None if version is None else catalog.model(model, version)
        if version is None or record is None:
            continue
        measured = [
            v.accuracy for v in catalog.seen(name, catalog.variants_at(model, version)) if v.accuracy is not None
        ]
        best = max(measured, default=None)
        found.append(Member(model=model, version=version, accuracy=best, metric=record.metric, labels=record.labels))
    return found

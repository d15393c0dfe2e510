"""The catalogue as the dispatcher serves it: each app's view follows its records; models are also served without an app."""

from bus.messages.catalog import AppRecord, VariantRecord
from bus.subjects import WITHOUT_APP
from services.core.actor import Changed, Synced
from services.core.catalog import Catalog
from services.core.selection.cluster import ClusterView
from services.core.selection.eligibility import AppView


class Apps:
    """Keeps `view.apps` in step with the catalogue bucket."""

    def __init__(self, view: ClusterView) -> None:
        self.catalog = Catalog()
        self.synced = False
        self._view = view

    def heard(self, message: Changed | Synced) -> tuple[()]:
        """News of the bucket; nothing has to be done about them."""
        if isinstance(message, Synced):
            self.all_in()
        else:
            self.changed(message)
        return ()

    def changed(self, change: Changed) -> None:
        """One entry of the bucket."""
        for app in self.catalog.apply(change.key, change.value):
            record = self.catalog.app(app)
            if record is None:
                self._view.drop_app(app)
            elif self.synced:
                self._set(app, record)
        if change.key.startswith("model."):
            self._view.drop_app(f"{WITHOUT_APP}.{change.key.split('.')[1]}")

    def all_in(self) -> None:
        """Everything that was there has arrived."""
        self.synced = True
        for record in list(self.catalog.apps):
            self._set(record.app, record)

    def of(self, name: str, model: str | None) -> tuple[str, AppView] | None:
        """The key and view of an app; of a model's own pseudo app when the query names no app."""
        if name != WITHOUT_APP:
            view = self._view.apps.get(name)
            return None if view is None else (name, view)
        key = f"{WITHOUT_APP}.{model}"
        if key not in self._view.apps:
            record = self.catalog.model(model) if model is not None else None
            if record is None:
                return None
            links = {record.model: record.version}
            self._set(key, AppRecord(app=WITHOUT_APP, links=links, signature=record.signature))
        return key, self._view.apps[key]

    def variants(self, key: str) -> tuple[VariantRecord, ...]:
        """What may serve an app, or a model's pseudo app; nothing for one that is not known."""
        view = self._view.apps.get(key)
        return () if view is None else view.records

    def _set(self, key: str, app: AppRecord) -> None:
        """All versions of the app's models: those not linked now serve queries that name them."""
        records = [
            record
            for model in sorted(app.links)
            for version in sorted(self.catalog.versions(model))
            for record in self.catalog.variants_at(model, version)
        ]
        self._view.set_app(app, records, key)

"""Models that are registered get variants for a kind of device when a worker with that kind joins.

For real devices a model gets an extension: a registration of its own, which carries the kind. A worker of that kind inspects the model
again from its stored source, because only there it shows which frameworks work; then it builds and profiles the variants. One extension
at a time runs for each kind. Its id follows from the model, the kind and the start of the first worker with that kind: all registrars
choose the same id, and what failed is tried again after that worker has restarted.

CPUs count as two kinds for variants that compute with small integers: with VNNI, or without it, where sums are cut off at 16 bits. What was measured
on one is measured again on the other before it serves there; a variant of its own comes out.

A cascade that an app loses with a change of a version is looked for with the versions that it links now, by such an extension, too.

For simulated devices variants follow from measured ones. A registration brings its own with it. Those of earlier registrations are made
when a worker begins to simulate a kind, and deleted when none does any more. They are a function of the catalogue alone, so several
registrars write the same.
"""

import hashlib
from collections.abc import Callable, Container, Iterable

from msgspec import Struct
from msgspec.structs import replace

from bus.fields import filled
from bus.messages.catalog import ModelRecord, VariantRecord
from bus.messages.public import Register
from services.core.actor import NOTHING, Do, Effect
from services.core.catalog import Catalog
from services.core.placement import REMOTE
from services.registrar.checks import CONTAINER
from services.registrar.commands import ChangeSimulated, RegistrationRecord
from services.registrar.policy import CASCADE, WORKER_LOST_S, WORKER_TIMEOUT_S, simulated_variants
from services.registrar.registration import RegistrationStatuses, rejoined
from services.registrar.work import COMMAND_S, CPU, Workers

SIMULATED = ("simulated", "")  # id of the command


class Extensions(Struct, eq=False):
    """Finds models without variants for a kind of real device that is there now, and, if `joins`, apps that have lost their cascade."""

    catalog: Catalog
    statuses: RegistrationStatuses
    workers: Workers
    joins: bool

    def due(self, now: float, registrar: str, unfinished: Iterable[RegistrationRecord]) -> list[RegistrationRecord]:
        """Registrations to begin, at most one for each kind that has none among `unfinished`, which holds all registrars'."""
        unfinished = list(unfinished)
        kinds, arithmetics = {record.hardware for record in unfinished}, {record.arithmetic for record in unfinished}
        building = {record.registration for record in unfinished}
        found = []
        for arithmetic, started in self.workers.arithmetics(now, WORKER_TIMEOUT_S).items():
            next_ = (
                None if arithmetic in arithmetics else self._next(arithmetic, started, building, self._lacks_arithmetic)
            )
            if next_ is not None:
                record = self._record(*next_, CPU, registrar, now)
                found.append(replace(record, arithmetic=arithmetic, model_accuracy=self._own_accuracy(next_[1])))
        for kind, started in self.workers.accelerators(now, WORKER_TIMEOUT_S).items():
            next_ = None if kind in kinds else self._next(kind, started, building, self._lacks_kind)
            if next_ is not None:
                found.append(self._record(*next_, kind, registrar, now))
        if self.joins and not any(record.joins for record in unfinished):
            found += [
                replace(self._record(name, model, CPU, registrar, now, app), joins=True)
                for name, model, app in self._lost(building)
            ]
        return found

    def _lost(self, building: Container[str]) -> Iterable[tuple[str, ModelRecord, str]]:
        """The id, model and app of the next look for a cascade: of an app that has some, but only with versions that it does not link."""
        for app in self.catalog.apps:
            made = self.catalog.cascades_of(app)
            if not made or app.releasing or any(app.links.items() >= set(one.versions) for one in made):
                continue
            for model in filter(None, (self.catalog.model(*link) for link in sorted(app.links.items()))):
                name = extension_id(model, CASCADE, str(sorted(app.links.items())))
                tried = model.registration in building or self.statuses.last(name) is not None
                if not tried and rejoined(self.catalog, app, model):
                    yield name, model, app.app
                    return

    def _next(
        self, kind: str, started: str, building: Container[str], lacks: Callable[[ModelRecord, str], bool]
    ) -> tuple[str, ModelRecord] | None:
        """The id of the next registration for a kind, and its model: the newest that lacks it, is built and was not tried since `started`."""
        for model in sorted(self.catalog.models, key=lambda model: (-model.created, model.model, model.version)):
            if model.registration in building:
                continue
            if lacks(model, kind) and self.statuses.last(name := extension_id(model, kind, started)) is None:
                return name, model
        return None

    def _lacks_kind(self, model: ModelRecord, kind: str) -> bool:
        variants = self.catalog.variants_at(model.model, model.version)
        has = any(record.hardware == kind and not record.simulated for record in variants)
        return model.format not in (CONTAINER, REMOTE) and not has

    def _lacks_arithmetic(self, model: ModelRecord, arithmetic: str) -> bool:
        """Whether integer variants were measured on other CPUs only."""
        variants = self.catalog.variants_at(model.model, model.version)
        known = {record.arithmetic for record in variants if not record.simulated} - {""}
        return bool(known) and arithmetic not in known

    def _own_accuracy(self, model: ModelRecord) -> float | None:
        """Of the model as it was uploaded, as its variants know it."""
        variants = self.catalog.variants_at(model.model, model.version)
        return next((record.model_accuracy for record in variants if record.model_accuracy is not None), None)

    def _record(
        self, name: str, model: ModelRecord, kind: str, registrar: str, now: float, app: str = ""
    ) -> RegistrationRecord:
        apps = sorted(self.catalog.apps_linking(model.model))
        request = filled(Register, model, app=app or (apps[0] if apps else ""), object=model.source, registration=name)
        return RegistrationRecord(
            registration=name, request=request, registrar=registrar, created=now, version=model.version, hardware=kind
        )


def extension_id(model: ModelRecord, kind: str, started: str) -> str:
    """A registration id that no client would choose, the same for all registrars that see the same."""
    exact = f"{model.model}\0{model.version}\0{model.registration}\0{kind}\0{started}"
    return f"fit-{kind[:16]}-{model.model[:24]}-{hashlib.sha256(exact.encode()).hexdigest()[:12]}"


class SimulatedVariants:
    """Keeps the catalogue's simulated variants in step with the kinds of device that workers simulate."""

    def __init__(self, catalog: Catalog, workers: Workers) -> None:
        self._catalog = catalog
        self._workers = workers
        self._under_way = False
        self._listening_since = self._checked = float("-inf")

    def check(self, now: float) -> tuple[Effect, ...]:
        """Add the variants that are missing and delete those of kinds that nobody simulates any more; one command at a time."""
        if now - self._checked > WORKER_TIMEOUT_S:  # the process has just started, or slept: it heard no worker
            self._listening_since = now
        self._checked = now
        if self._under_way:
            return NOTHING
        add, drop = self._missing(now), self._outlived(now)
        if not add and not drop:
            return NOTHING
        self._under_way = True
        return (Do(SIMULATED, ChangeSimulated(add=add, drop=drop), COMMAND_S),)

    def ended(self) -> None:
        """The command succeeded or failed; the next check sees what is left to do."""
        self._under_way = False

    def _missing(self, now: float) -> tuple[VariantRecord, ...]:
        kinds = self._workers.simulated_kinds(now, WORKER_TIMEOUT_S)
        if not kinds:
            return ()
        catalog = self._catalog
        return tuple(
            record
            for model in catalog.models
            for record in simulated_variants(catalog.variants_at(model.model, model.version), kinds)
            if catalog.variant(record.variant) is None
        )

    def _outlived(self, now: float) -> tuple[str, ...]:
        if now - self._listening_since < WORKER_LOST_S:
            return ()
        kinds = self._workers.simulated_kinds(now, WORKER_LOST_S)
        return tuple(r.variant for r in self._catalog.variants if r.simulated and r.hardware not in kinds)

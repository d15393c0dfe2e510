"""Models that are registered get variants for a kind of device when the first worker that really has one joins. Pure.

Each is a registration of its own, with the kind in it: inspected again from its stored source on a worker of that kind, since only
there it shows which frameworks work, then built and profiled. One at a time and kind. Its id is made of model, kind and the start of
that kind's first worker, so that several registrars mean the same one, and what failed is tried again once a worker starts anew.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping

from bus.messages.catalog import ModelRecord, VariantRecord
from bus.messages.public import Register
from services.core.actor import Do
from services.core.catalog import Catalog
from services.registrar.commands import ChangeSimulated, RegistrationRecord
from services.registrar.policy import Rules, simulated_variants
from services.registrar.status import RegistrationStatuses


class Extensions:
    """Finds what is due. accelerators: kinds of real device now, each with a text that changes when its worker starts anew."""

    def __init__(
        self,
        catalog: Catalog,
        statuses: RegistrationStatuses,
        rules: Rules,
        accelerators: Callable[[float, float], Mapping[str, str]],
    ) -> None:
        self._catalog = catalog
        self._statuses = statuses
        self._rules = rules
        self._accelerators = accelerators

    def due(self, now: float, registrar: str, unfinished: Iterable[RegistrationRecord]) -> Iterator[RegistrationRecord]:
        """Registrations to begin, at most one for each kind that has none under way. unfinished: everybody's, claims included."""
        busy = {work.hardware for work in unfinished}
        for kind, started in self._accelerators(now, self._rules.worker_timeout_s).items():
            if kind in busy:
                continue
            for model in sorted(self._catalog.models, key=lambda model: (-model.created, model.model, model.version)):
                name = extension_id(model, kind, started)
                if not self._fitted(model, kind) and self._statuses.last(name) is None:
                    yield self._work(name, model, kind, registrar, now)
                    break

    def _fitted(self, model: ModelRecord, kind: str) -> bool:
        variants = self._catalog.variants_at(model.model, model.version)
        return any(record.hardware == kind and not record.simulated for record in variants)

    def _work(self, name: str, model: ModelRecord, kind: str, registrar: str, now: float) -> RegistrationRecord:
        apps = sorted(self._catalog.apps_linking(model.model))
        request = Register(
            app=apps[0] if apps else "",
            model=model.model,
            format=model.format,
            object=model.source,
            validation=model.validation,
            version=model.version,
            task=model.task,
            metric=model.metric,
            inputs_key=model.inputs_key,
            labels_key=model.labels_key,
            registration=name,
        )
        return RegistrationRecord(
            registration=name, request=request, registrar=registrar, created=now, version=model.version, hardware=kind
        )


def extension_id(model: ModelRecord, kind: str, started: str) -> str:
    """A registration id that no client would choose, the same for all registrars that see the same."""
    exact = f"{model.model}\0{model.version}\0{model.registration}\0{kind}\0{started}"
    return f"fit-{kind[:16]}-{model.model[:24]}-{hashlib.sha256(exact.encode()).hexdigest()[:12]}"


# -- simulated devices: a sweep makes the variants of earlier registrations when a new kind joins

COMMAND_S = 30.0
SIMULATED = ("simulated", "")


class SimulatedVariants:
    """Keeps the catalogue's simulated variants in step with the devices. kinds: those simulated by workers heard lately.

    `kinds(now, seconds)` looks back so many seconds.
    """

    def __init__(self, catalog: Catalog, rules: Rules, kinds: Callable[[float, float], set[str]]) -> None:
        self._catalog = catalog
        self._rules = rules
        self._kinds = kinds
        self._under_way = False
        self._watching_since = self._swept = float("-inf")

    def sweep(self, now: float) -> Iterator[Do]:
        """Order what is missing, and what nobody simulates any more gone; one order at a time."""
        if (
            now - self._swept > self._rules.worker_timeout_s
        ):  # just started, or asleep for a while: nobody could be heard
            self._watching_since = now
        self._swept = now
        if self._under_way:
            return
        add, drop = self._missing(now), self._outlived(now)
        if add or drop:
            self._under_way = True
            yield Do(SIMULATED, ChangeSimulated(add=add, drop=drop), COMMAND_S)

    def ended(self) -> None:
        """The order was carried out, or not: the next sweep sees what is left."""
        self._under_way = False

    def _missing(self, now: float) -> tuple[VariantRecord, ...]:
        kinds = self._kinds(now, self._rules.worker_timeout_s)
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
        patience = self._rules.worker_lost_s
        if now - self._watching_since < patience:
            return ()
        kinds = self._kinds(now, patience)
        return tuple(r.variant for r in self._catalog.variants if r.simulated and r.hardware not in kinds)

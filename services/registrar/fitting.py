"""Models that are registered get variants for a kind of device when the first worker that really has one joins. Pure.

Each is a registration of its own, with the kind in it: inspected again from its stored source on a worker of that kind, since only
there it shows which frameworks work, then built and profiled. One at a time and kind. Its id is made of model, kind and the start of
that kind's first worker, so that several registrars mean the same one, and what failed is tried again once a worker starts anew.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping

from bus.messages.catalog import ModelRecord
from bus.messages.public import Register
from services.core.catalog import Catalog
from services.registrar.commands import Work
from services.registrar.policy import Rules
from services.registrar.statuses import Statuses


class Fitting:
    """Finds what is due. accelerators: kinds of real device now, each with a text that changes when its worker starts anew."""

    def __init__(
        self,
        catalog: Catalog,
        statuses: Statuses,
        rules: Rules,
        accelerators: Callable[[float, float], Mapping[str, str]],
    ) -> None:
        self._catalog = catalog
        self._statuses = statuses
        self._rules = rules
        self._accelerators = accelerators

    def due(self, now: float, registrar: str, unfinished: Iterable[Work]) -> Iterator[Work]:
        """Registrations to begin, at most one for each kind that has none under way. unfinished: everybody's, claims included."""
        busy = {work.hardware for work in unfinished}
        for kind, started in self._accelerators(now, self._rules.worker_timeout_s).items():
            if kind in busy:
                continue
            for model in sorted(self._catalog.models, key=lambda model: (-model.created, model.model, model.version)):
                name = fitting_id(model, kind, started)
                if not self._fitted(model, kind) and self._statuses.last(name) is None:
                    yield self._work(name, model, kind, registrar, now)
                    break

    def _fitted(self, model: ModelRecord, kind: str) -> bool:
        variants = self._catalog.variants_at(model.model, model.version)
        return any(record.hardware == kind and not record.simulated for record in variants)

    def _work(self, name: str, model: ModelRecord, kind: str, registrar: str, now: float) -> Work:
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
        return Work(
            registration=name, request=request, registrar=registrar, created=now, version=model.version, hardware=kind
        )


def fitting_id(model: ModelRecord, kind: str, started: str) -> str:
    """A registration id that no client would choose, the same for all registrars that see the same."""
    exact = f"{model.model}\0{model.version}\0{model.registration}\0{kind}\0{started}"
    return f"fit-{kind[:16]}-{model.model[:24]}-{hashlib.sha256(exact.encode()).hexdigest()[:12]}"

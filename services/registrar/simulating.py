"""Variants for simulated devices: made of measured ones where a worker simulates a kind, gone again when none does any more. Pure.

A registration brings its own with it; a sweep makes those of earlier ones when a new kind joins. They are a function of the
catalogue alone, so several registrars that make them at once write the same.
"""

from collections.abc import Callable, Iterable, Iterator

from bus.messages.catalog import VariantRecord
from services.core.actor import Do
from services.core.catalog import Catalog
from services.core.dominance import mark
from services.core.emulation import KINDS, emulated, originals
from services.registrar.commands import ChangeSimulated
from services.registrar.policy import Rules, variant_name

COMMAND_S = 30.0
ID = ("simulated", "")


def simulated_variants(measured: Iterable[VariantRecord], kinds: Iterable[str]) -> tuple[VariantRecord, ...]:
    """What these variants of one version of a model become on simulated devices of these kinds."""
    pool = list(measured)
    return tuple(
        record
        for kind in sorted(set(kinds) & KINDS.keys())
        for record in mark(emulated(original, kind, _name(original, kind)) for original in originals(pool, kind))
    )


def _name(original: VariantRecord, kind: str) -> str:
    """The name says it, too: events and costs have no other mark."""
    of = original
    return variant_name(of.model, of.version, f"sim{kind}", of.precision, of.threads, of.max_batch)


class Simulating:
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
            yield Do(ID, ChangeSimulated(add=add, drop=drop), COMMAND_S)

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

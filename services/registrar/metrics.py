"""What a registrar shows. Pure."""

from collections.abc import Iterable

from services.core.metric import Family
from services.registrar.actor import Registrar


def families(actor: Registrar) -> Iterable[Family]:
    works = Family("infaas_registrations_under_way", "gauge", "Registrations that have not ended, all registrars'.")
    works.add(len(actor._works))
    return (works,)


def missing(actor: Registrar, now: float) -> str:
    del now
    return "the catalogue" if actor._unsynced else ""

"""Wires the recorder: `infaas run recorder`."""

import os
from contextlib import suppress
from functools import partial

from bus.messages.events import EVENTS, OutcomeEvent
from bus.port import Bus, StreamSpec
from bus.subjects import Subjects
from services.core.settings import BusSettings, Settings
from services.recorder import actor
from services.recorder.actor import make_recorder
from services.recorder.catalog import CatalogWriter
from services.recorder.edge import Counter, DatabaseProbe, RecorderEdge
from services.recorder.edge_copies import FileCopies
from services.shell.prices import load_prices
from services.shell.runtime.runtime import Runtime
from services.shell.settings import SettingsError, load
from services.shell.store import Store

NICE = 10  # writing history may wait, queries may not
DAY = 86400.0


def streams(subjects: Subjects, settings: BusSettings) -> dict[str, StreamSpec]:
    """The two streams of events.

    Outcomes are kept until they are in the database, and publishers wait while the stream is full. The other events only describe; when
    their stream is full, the oldest are deleted.
    """
    others = tuple(subjects.event(event.kind) for event in EVENTS if event is not OutcomeEvent)
    return {
        "outcomes": StreamSpec(
            subjects.outcome_stream, (subjects.event(OutcomeEvent.kind),), "work", settings.outcome_bytes
        ),
        "events": StreamSpec(
            subjects.event_stream, others, "limits", settings.event_bytes, max_age_s=DAY, full="oldest"
        ),
    }


async def wire(settings: Settings, bus: Bus) -> list[Runtime]:
    """The recorder; raises SettingsError when the settings name no database."""
    if not settings.store.dsn:
        raise SettingsError("the recorder needs a database: set INFAAS_STORE__DSN to the writing role's DSN")
    with suppress(OSError):
        os.nice(max(0, NICE - os.nice(0)))
    subjects = Subjects(settings.prefix)
    store = Store(settings.store.dsn, "infaas recorder")
    catalog = CatalogWriter(store, load_prices(settings.prices), settings.autoscaler.slo_target)
    beside = Store(settings.store.dsn, "infaas recorder files")
    files, counter = FileCopies(bus, subjects, beside), Counter(bus, subjects.event_stream, beside)
    edge = RecorderEdge(bus, store, streams(subjects, settings.bus), catalog, files, counter)
    reachable = DatabaseProbe(settings.store.dsn).missing
    make = partial(make_recorder, subjects)
    return [Runtime("recorder", make, bus, subjects, edge, insight=actor, reachable=reachable)]


if __name__ == "__main__":
    import sys

    from services.shell.runtime.serve import serve

    sys.exit(serve("recorder", load(), wire))

"""What a gateway remembers: the catalogue, and which dispatchers are heard. Pure; the servers are its edge's."""

from collections.abc import Iterable

from msgspec import Struct

from bus.messages.fleet import DispatcherHeartbeat
from bus.subjects import Subjects
from services.core.actor import Changed, Do, Effect, Envelope, Failed, Halt, Inlet, Started, Stopping, Synced, Watch
from services.core.catalog import Catalog

SILENT = 3.0  # s without a heartbeat after which a dispatcher counts as gone


class Serve(Struct, frozen=True):
    """Open the servers; nothing where they are open already."""


class Close(Struct, frozen=True):
    """Let what is under way finish within so many seconds, then close."""

    grace: float


class Gateway:
    """catalog: as last told. `missing` says why no query can be answered now."""

    def __init__(self, subjects: Subjects) -> None:
        self.catalog = Catalog()
        self.synced = False
        self._bucket = subjects.catalog_bucket
        self._heard: dict[str, float] = {}  # dispatcher -> Unix seconds
        self.inlets = (Inlet(subject=subjects.dispatcher_heartbeat(), message=DispatcherHeartbeat),)
        self.watches = (Watch(bucket=self._bucket),)

    def handle(self, envelope: Envelope) -> Iterable[Effect]:
        match envelope.message:
            case DispatcherHeartbeat() as beat:
                self._hear(beat, envelope.now)
            case Changed(key=key, value=value):
                self.catalog.apply(key, value)
            case Synced():
                self.synced = True
            case Started():
                return (Do("serve", Serve()),)
            case Stopping(grace):
                return (Do("close", Close(grace)),)
            case Failed("serve", error):
                return (Halt(f"it cannot listen: {error}"),)
        return ()

    def missing(self, now: float) -> str:
        """What it lacks to have queries answered, in words; empty when nothing."""
        if not self.synced:
            return "the catalogue"
        return "" if any(now - at < SILENT for at in self._heard.values()) else "a dispatcher that is heard"

    def _hear(self, beat: DispatcherHeartbeat, now: float) -> None:
        if beat.leaving:
            self._heard.pop(beat.dispatcher, None)
            return
        if beat.dispatcher not in self._heard:  # seldom: the moment to forget those that are gone
            self._heard = {name: at for name, at in self._heard.items() if now - at < SILENT}
        self._heard[beat.dispatcher] = now

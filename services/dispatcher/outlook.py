"""What this dispatcher tells the workers' autoscalers of the fleet, since it must follow every worker anyway (docs/adr/0004). Pure."""

from bus.messages.digest import FleetDigest
from bus.messages.fleet import WorkerHeartbeat
from bus.subjects import Subjects
from services.core.actor import Publish
from services.core.digest import digest_of
from services.dispatcher.apps import Apps

GONE = 2.0  # s without a heartbeat after which a worker does not count


class Outlook:
    """Keeps every worker's last heartbeat."""

    def __init__(self, name: str, subjects: Subjects, apps: Apps) -> None:
        self._name = name
        self._digest_subject = subjects.fleet("digest")
        self._roster_subject = subjects.fleet("roster")
        self._apps = apps
        self._beats: dict[str, tuple[float, WorkerHeartbeat]] = {}
        self._holders: dict[str, list[str]] = {}
        self._able: dict[tuple[str, bool], list[str]] = {}

    def heard(self, beat: WorkerHeartbeat, now: float) -> None:
        self._beats[beat.worker] = (now, beat)

    def tell(self, now: float) -> tuple[Publish, ...]:
        """The digest; nothing while no worker is there."""
        for name in [name for name, (at, _) in self._beats.items() if now - at > GONE]:
            del self._beats[name]
        if not self._beats:
            self._holders, self._able = {}, {}
            return ()
        beats = (beat for _, beat in self._beats.values())
        digest, roster = digest_of(self._name, beats, self._apps.catalog.variant, now)
        self._note(digest)
        return Publish(self._digest_subject, digest), Publish(self._roster_subject, roster)

    def _note(self, digest: FleetDigest) -> None:
        self._holders = {}
        for row in digest.variants:
            self._holders.setdefault(row.variant, []).extend(row.holders[:1])
        self._able = {(pool.kind, pool.simulated): pool.first[:1] for pool in digest.pools}

    def responsible(self, app: str) -> list[str]:
        """Workers that may have to act for all where an app is concerned, by the last digest: the first to have one of its
        variants, and the first that could.
        """
        found: dict[str, None] = {}
        for record in self._apps.variants(app):
            found.update(dict.fromkeys(self._holders.get(record.variant, ())))
            found.update(dict.fromkeys(self._able.get((record.hardware, record.simulated), ())))
        return list(found)

"""Last statuses of all registrations: told at every step, kept at most once a second, the last one always."""

from collections.abc import Iterator

import msgspec

from bus.messages.public import RegistrationStatus
from bus.subjects import Subjects
from services.core.actor import Do, Effect, Publish
from services.registrar.commands import PutStatus

PREFIX = "registration."
KEEP_EVERY_S = 1.0
TIMEOUT_S = 10.0
OVER = ("done", "failed")

_decode = msgspec.msgpack.Decoder(RegistrationStatus).decode


class RegistrationStatuses:
    """What each registration's last status is, and the saving of our own: one at a time for each, newest last."""

    def __init__(self, subjects: Subjects) -> None:
        self._subjects = subjects
        self._last: dict[str, RegistrationStatus] = {}
        self._ours: set[str] = set()
        self._saving: dict[str, RegistrationStatus] = {}
        self._kept: dict[str, tuple[float, RegistrationStatus]] = {}

    def last(self, registration: str) -> RegistrationStatus | None:
        return self._last.get(registration)

    def fold(self, registration: str, value: bytes | None) -> None:
        """Take what the bucket holds; our own we know better."""
        if registration in self._ours:
            return
        if value is None:
            self._last.pop(registration, None)
            return
        try:
            self._last[registration] = _decode(value)
        except (msgspec.DecodeError, UnicodeDecodeError):
            self._last.pop(registration, None)

    def tell(self, status: RegistrationStatus, now: float) -> Iterator[Effect]:
        """Publish a status of ours, and keep it when the state is new or the last one kept is old."""
        registration = status.registration
        self._ours.add(registration)
        self._last[registration] = status
        yield Publish(self._subjects.registration(registration), status)
        kept = self._kept.get(registration)
        if kept is None or kept[1].state != status.state or now - kept[0] >= KEEP_EVERY_S:
            self._kept[registration] = (now, status)
            if registration not in self._saving:
                yield self._save(status)

    def saved(self, registration: str) -> Effect | None:
        """The save under way has ended: the next one, if what is to be kept has changed meanwhile."""
        wanted = self._kept[registration][1]
        if self._saving.pop(registration) is not wanted:
            return self._save(wanted)
        if wanted.state in OVER:
            del self._kept[registration]
        return None

    def again(self, registration: str) -> Effect:
        """The save under way failed: try what is to be kept now."""
        return self._save(self._kept[registration][1])

    def _save(self, status: RegistrationStatus) -> Effect:
        self._saving[status.registration] = status
        return Do(("status", status.registration), PutStatus(status), TIMEOUT_S)

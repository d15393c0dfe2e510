"""The last status of every registration: published at each step, kept in the status bucket at most once a second, the last one always."""

from bus.codec import decode_kept
from bus.messages.public import RegistrationStatus
from bus.subjects import Subjects
from services.core.actor import NOTHING, Do, Effect, Publish
from services.core.requests import Commands
from services.registrar.commands import PutStatus

PREFIX = "registration."
SAVE_EVERY_S = 1.0
TIMEOUT_S = 10.0
OVER = ("done", "failed", "cancelled")


class RegistrationStatuses:
    """The last status of each registration, this registrar's and others'.

    Its own it saves: one write at a time for each registration, the newest status last.
    """

    def __init__(self, subjects: Subjects, commands: Commands) -> None:
        self._subjects = subjects
        self._commands = commands
        self._last: dict[str, RegistrationStatus] = {}
        self._own: set[str] = set()
        self._saving: dict[str, RegistrationStatus] = {}
        self._wanted: dict[str, tuple[float, RegistrationStatus]] = {}  # when it was to be saved, and what

    def last(self, registration: str) -> RegistrationStatus | None:
        return self._last.get(registration)

    def apply(self, registration: str, value: bytes | None) -> None:
        """Take what the bucket holds. Of its own registrations this registrar knows newer statuses."""
        if registration in self._own:
            return
        self._last.pop(registration, None)
        if (status := decode_kept(RegistrationStatus, value)) is not None:
            self._last[registration] = status

    def publish(self, status: RegistrationStatus, now: float) -> tuple[Effect, ...]:
        """Publish a status of this registrar's, and save it when the state is new or the last save is old."""
        registration = status.registration
        self._own.add(registration)
        self._last[registration] = status
        effect = Publish(self._subjects.registration(registration), status)
        wanted = self._wanted.get(registration)
        if wanted is None or wanted[1].state != status.state or now - wanted[0] >= SAVE_EVERY_S:
            self._wanted[registration] = (now, status)
            if registration not in self._saving:
                return effect, self._save(status)
        return (effect,)

    def saved(self, registration: str) -> tuple[Effect, ...]:
        """A save has ended; another one begins if there is something newer to save."""
        newest = self._wanted[registration][1]
        if self._saving.pop(registration) is not newest:
            return (self._save(newest),)
        self._commands.ended(("status", registration))
        if newest.state in OVER:
            del self._wanted[registration]
        return NOTHING

    def _save(self, status: RegistrationStatus) -> Effect:
        self._saving[status.registration] = status
        return self._commands.start(Do(("status", status.registration), PutStatus(status), TIMEOUT_S))

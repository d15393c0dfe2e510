"""Whose requests may be answered: the one thing of a message that NATS does not check is its reply subject. Pure."""

from collections.abc import Mapping

from bus.rights import ANY_APP, OWN, SERVICE
from bus.subjects import Subjects

STREAM = "Nats-Stream"  # header of a message that JetStream hands out on request


def from_stream(reply: str, headers: Mapping[str, str] | None) -> bool:
    """Whether JetStream sent this. No order comes that way: whoever may read a stream can have its messages sent to any subject."""
    return reply.startswith("$JS.") or (headers is not None and STREAM in headers)


def app_of(reply: str) -> str:
    """The app whose client wants the answer here; empty where that is not known, or where it may ask for any app."""
    first, _, rest = reply.partition(".")
    app = rest.partition(".")[0]
    return app if first == OWN and app != ANY_APP else ""


class Callers:
    """Looks at what outsiders ask, before anybody acts on it.

    inbox: one of our own. It tells whether users have inboxes of their own (`infaas auth`): then nobody else's is answered.
    Otherwise anything is but what belongs to the system and to NATS itself: an answer published there would be an order in our name.
    """

    def __init__(self, subjects: Subjects, inbox: str) -> None:
        self._space = f"{subjects.prefix}."
        self._closed = inbox.startswith((f"{OWN}.", f"{SERVICE}."))
        self._of_app = (subjects.query(), subjects.feedback(), subjects.explain(), subjects.job())
        self._others = (
            subjects.list(),
            subjects.list("jobs"),
            subjects.admin(),
            subjects.register(),
            subjects.registration(),
            subjects.job_status(),
            subjects.job_cancel(),
        )

    def guards(self, inlet: str) -> bool:
        """Whether requests that come in here are outsiders'."""
        return inlet in self._of_app or inlet in self._others

    def may_answer(self, inlet: str, subject: str, reply: str) -> bool:
        """Whether the reply subject is the caller's own."""
        if not self._closed:
            return not reply.startswith((self._space, "$"))
        tokens = reply.split(".", 3)
        if len(tokens) < 4 or tokens[0] != OWN:
            return False
        return inlet not in self._of_app or tokens[1] in (ANY_APP, subject.rpartition(".")[2])

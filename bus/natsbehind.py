"""What a connection says to itself, so that it comes back behind all that any server of a cluster had got before.

A server keeps the order of what it gets and passes on, and so does the one connection between two servers (`pool_size: -1`). What goes through
our own server alone shows nothing of what still is on its way from another one. So each server is asked for something small, which every account may
ask: its answer comes behind what that server had got before the question. Once all have answered, the message is sent.
"""

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import msgspec

from bus.port import ECHO, Delivery, DeliveryHandler, Status
from bus.subjects import EVERY_SERVER

GONE_S = 2.0  # s of questions that a server does not answer, after which it is not waited for
STEP_S = 0.25  # s between two questions that count at most: who stood still for longer asked nothing meanwhile
_QUESTION = b'{"include_unused":true}'  # also a server without a client of ours answers
_EARLY, _LOST = {ECHO: "early"}, {ECHO: "lost"}
_log = logging.getLogger("infaas.bus")


class _Server(msgspec.Struct):
    name: str


class _Reply(msgspec.Struct):
    server: _Server


_read = msgspec.json.Decoder(_Reply)


class Post(Protocol):
    def __call__(
        self, subject: str, data: bytes, reply: str = "", headers: Mapping[str, str] | None = None
    ) -> None: ...


@dataclass(slots=True)
class _Asked:
    """at: s on the clock of questions. of: the servers that are to answer. what: subject and body; None: it has been sent, or never will be."""

    at: float
    of: set[str]
    heard: set[str]
    what: tuple[str, bytes] | None


class Behind:
    """listen: subscribes an inbox. patience: seconds, as GONE_S.

    Where servers do not answer such questions at all, as they forbid it, only our own one is heard.
    """

    def __init__(self, post: Post, listen: Callable[[str, DeliveryHandler], object], inbox: str) -> None:
        self.patience = GONE_S
        self._post = post
        self._listen = listen
        self._inbox = f"{inbox}."
        self._asked: dict[int, _Asked] = {}
        self._servers: dict[str, float] = {}  # by name: `at` of the newest question that it has answered
        self._count = 0
        self._clock = 0.0
        self._last = 0.0
        self._why = ""  # they are not asked
        self._said = False
        self._anew = False  # what came on the connection before this one may be lost, and nothing has said so yet

    def publish(self, subject: str, data: bytes, alone: bool) -> None:
        """One goes through our own server at once; its headers say so. alone: it is the only one."""
        if alone or self._why:
            self._come((subject, data))
            return
        if not self._count:
            self._listen(f"{self._inbox}*", self._answered)
        self._post(subject, data, headers=_EARLY)
        now = time.monotonic()
        self._clock += min(now - self._last, STEP_S)
        self._last = now
        self._count += 1
        self._asked[self._count] = _Asked(self._clock, set(self._servers), set(), (subject, data))
        self._post(EVERY_SERVER, _QUESTION, f"{self._inbox}{self._count}")
        self._forget()

    def _forget(self) -> None:
        """Old questions. Where nobody ever answered one, nobody may be there who does."""
        for number, asked in list(self._asked.items()):
            if asked.at >= self._clock - 2.0 * self.patience:
                return
            del self._asked[number]
            if not self._servers and asked.what is not None:
                self._say("no server answers")
                self._come(asked.what)

    def _answered(self, delivery: Delivery) -> None:
        if delivery.status:
            self._give_up("nobody hears what asks them")
            return
        asked = self._asked.get(int(delivery.subject[len(self._inbox) :]))
        if asked is None:
            return
        server = _read.decode(delivery.data).server.name
        asked.heard.add(server)
        self._servers[server] = max(self._servers.get(server, 0.0), asked.at)
        newest = max(self._servers.values())
        self._servers = {name: at for name, at in self._servers.items() if at > newest - self.patience}
        self._send()

    def _send(self) -> None:
        """What all have answered comes back. What one will not answer any more, as it was lost between servers or one has gone, says that."""
        lost: tuple[str, bytes] | None = None
        for asked in self._asked.values():
            if asked.what is None or not asked.heard:
                continue
            missing = asked.of - asked.heard
            if any(self._servers.get(name, self._clock) < asked.at for name in missing):
                continue
            what, asked.what = asked.what, None
            if missing:
                lost = what
            else:
                self._come(what)
        if lost is not None:
            self._post(*lost, headers=_LOST)

    def _come(self, what: tuple[str, bytes]) -> None:
        anew, self._anew = self._anew, False
        self._post(*what, headers=_LOST if anew else None)

    def denied(self, subject: str) -> bool:
        """The server refuses to let us publish there. Returns whether it was a question of ours."""
        if subject != EVERY_SERVER or not self._count:
            return False
        self._give_up("our rights do not allow it: `infaas auth` writes them anew")
        return True

    def _give_up(self, why: str) -> None:
        left, self._asked, self._why = self._asked, {}, why
        self._say(why)
        for asked in left.values():
            if asked.what is not None:
                self._come(asked.what)

    def _say(self, why: str) -> None:
        if not self._said:
            self._said = True
            _log.warning(
                "the servers of the NATS cluster cannot be asked what is on its way between them: %s. "
                "The row of a query may say `refused` although its answer was on its way",
                why,
            )

    def changed(self, status: Status) -> None:
        """Of the connection. What was under way on it is lost, and another server may know more."""
        if status != "closed":
            self._asked.clear()
            self._why = ""
            self._anew |= status != "connected"

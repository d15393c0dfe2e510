"""Queries that nobody can serve at the moment: only their dispatcher has them, and what it says of them in case it is killed. Pure."""

from typing import Any

from bus.messages.flow import HandBack
from services.core.actor import Effect, Publish, Will
from services.dispatcher.query import Query


class WaitingQueries(dict[bytes, Query]):
    """Queries that only this dispatcher has, by uid. If it is killed, its successor hands them on (`wills`). changed: those that came or went."""

    def __init__(self) -> None:
        self.changed: set[bytes] = set()
        self._willed: set[bytes] = set()

    def __setitem__(self, uid: bytes, query: Query) -> None:
        super().__setitem__(uid, query)
        self.changed.add(uid)

    def __delitem__(self, uid: bytes) -> None:
        super().__delitem__(uid)
        self.changed.add(uid)

    def pop(self, uid: bytes, default: Any = None) -> Any:
        self.changed.add(uid)
        return super().pop(uid, default)

    def wills(self, dispatcher: str, policy: str, subject: str) -> list[Effect]:
        """What to say if this dispatcher is killed, as far as that has changed. Of a part, executors have the query, or will."""
        effects: list[Effect] = []
        for uid in self.changed:
            query = self.get(uid)
            if query is None:
                if uid in self._willed:
                    self._willed.remove(uid)
                    effects.append(Will(uid, None))
            elif uid not in self._willed and query.part is None:
                self._willed.add(uid)
                effects.append(Will(uid, handed_back(query, dispatcher, policy, subject)))
        self.changed.clear()
        return effects


def handed_back(query: Query, dispatcher: str, policy: str, subject: str) -> Publish:
    """Its dispatcher is gone: another one goes on with it."""
    return Publish(subject, HandBack(query.route(dispatcher, "", policy), "gone", query.raw), "", query.headers)

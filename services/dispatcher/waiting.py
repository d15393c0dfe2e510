"""Queries that nobody can serve at the moment: only their dispatcher has them, and what it says of them in case it is killed. Pure."""

from typing import Any

from bus.messages.flow import HandBack
from services.core.actor import Effect, Publish, Will
from services.dispatcher.query import Join, Query, QueryPart, outermost


class WaitingQueries(dict[bytes, Query]):
    """Queries that only this dispatcher has, by uid. If it is killed, its successor hands them on (`wills`). changed: those that came or went. gone: those that
    went, and that an executor may still have that was taken for dead.
    """

    def __init__(self) -> None:
        self.changed: set[bytes] = set()
        self.gone: list[Query] = []
        self._willed: set[bytes] = set()
        self._sent: list[Join] = []

    def __setitem__(self, uid: bytes, query: Query) -> None:
        super().__setitem__(uid, query)
        self.changed.add(uid)

    def __delitem__(self, uid: bytes) -> None:
        self.pop(uid)

    def pop(self, uid: bytes, default: Any = None) -> Any:
        query = super().pop(uid, default)
        self.changed.add(uid)
        self.went(query)
        return query

    def went(self, query: Query | None) -> None:
        """It waits no longer, here or for its turn as a retry: an executor that was taken for dead need not have it any more."""
        if query is not None and query.lent is not None:
            self.gone.append(query)
            self.changed.add(query.uid)

    def sent(self, part: QueryPart) -> None:
        """An executor gets a part of a query: if this dispatcher dies, it hands the query on."""
        outer = outermost(part.join)
        if not part.sent:
            part.sent = True
            outer.sent += 1
        if outer.willed:
            self._sent.append(outer)
            self.changed.add(part.uid)

    def back(self, part: QueryPart | None) -> None:
        """Its executor has not got it, has given it back or has ended: if none has another part, only this dispatcher has those that wait."""
        if part is None or not part.sent:
            return
        part.sent = False
        outer = outermost(part.join)
        outer.sent -= 1
        if not outer.sent:
            self.changed.update(uid for uid, one in self.items() if one.part and outermost(one.part.join) is outer)

    def wills(self, dispatcher: str, policy: str, subject: str) -> list[Effect]:
        """What to say if this dispatcher is killed, as far as that has changed."""
        effects: list[Effect] = []
        for uid in self.changed:
            query = self.get(uid)
            if query is not None and query.part is not None:
                effects.extend(_of_whole(query.part.join, subject))
            elif query is None:
                if uid in self._willed:
                    self._willed.remove(uid)
                    effects.append(Will(uid, None))
            elif uid not in self._willed:
                self._willed.add(uid)
                effects.append(Will(uid, handed_back(query, dispatcher, policy, subject)))
        for join in self._sent:
            effects.extend(take_back(join))
        self.changed.clear()
        self._sent.clear()
        return effects


def handed_back(query: Query, dispatcher: str, policy: str, subject: str) -> Publish:
    """Its dispatcher is gone: another one goes on with it."""
    return Publish(subject, HandBack(query.route(dispatcher, "", policy), "gone", query.raw), "", query.headers)


def _of_whole(join: Join, subject: str) -> list[Effect]:
    """The will of a query of which a part waits. Once an executor has got a part, it hands the query on itself."""
    outer = outermost(join)
    if outer.willed or outer.sent or outer.ended or outer.origin is None:
        return []
    outer.willed = True
    query = outer.query
    return [Will(query.uid, Publish(subject, HandBack(outer.origin.route, "orphaned", query.raw), "", query.headers))]


def take_back(join: Join) -> list[Effect]:
    """The query needs its will no more."""
    if not join.willed:
        return []
    join.willed = False
    return [Will(join.query.uid, None)]

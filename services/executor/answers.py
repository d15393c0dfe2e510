"""Recent answers: a query that was answered is not computed again, and a client that asks again gets the same answer."""

from typing import Any

from bus.messages.flow import Route

KEPT = 8192


class Answers:
    """The last answers by (uid, part), oldest dropped first."""

    def __init__(self) -> None:
        self._kept: dict[tuple[bytes, int], Any] = {}

    def get(self, route: Route) -> Any:
        return self._kept.get((route.uid, route.part))

    def keep(self, route: Route, answer: Any) -> None:
        kept = self._kept
        kept[route.uid, route.part] = answer
        if len(kept) > 2 * KEPT:
            # Dropping the older half at once is cheaper than one at a time.
            self._kept = dict(list(kept.items())[KEPT:])

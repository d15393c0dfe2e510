"""What a simulated system runs on: a clock, actors that come and go, key-value buckets.

The kernel is one; the asyncio runtime on a clock that jumps is another (tests/simulation), and both must tell the same story.
"""

from collections.abc import Callable
from typing import Any, Protocol

from services.core.actor import Actor

Hands = Callable[
    [Any], tuple[float, Any]
]  # an actor's simulated edge: command -> (seconds it takes, result or an exception)


class Stage(Protocol):
    """now: seconds; never goes back."""

    @property
    def now(self) -> float: ...
    def enter(self, name: str, actor: Actor, hands: Hands | None = None) -> None:
        """An actor begins: it gets Started, then what its watched buckets hold."""

    def leave(self, name: str, *, goodbye: bool) -> None:
        """It ends. goodbye: it gets Stopping and may say something; else as kill -9. Nobody of that name: nothing happens."""

    def at(self, delay: float, action: Callable[[Any], None], argument: Any = None) -> None:
        """Call action(argument) after so many seconds."""

    def put(self, bucket: str, key: str, value: bytes | None) -> None:
        """Change a key (None: delete it); who watches the bucket hears of it."""

    def get(self, bucket: str, key: str) -> bytes | None: ...
    def publish(self, subject: str, message: Any, reply: str = "", body: bytes = b"") -> None:
        """Say something from outside. body: the message's encoding, where somebody reads that (queries)."""

"""The one protocol with a child process that runs code which is not ours: a user's class, a user's policy, an uploaded model.

Messages are MessagePack, each behind its length in 4 bytes. The child gets them on its standard input, and answers on what was its standard
output: what its code prints goes to standard error. It leads a process group of its own, which is killed as a whole. Of our environment
it gets what is named, and so no credentials; a container, which its user starts, gets all.
"""

import os
import signal
from collections.abc import Callable, Iterable
from contextlib import suppress
from importlib import import_module
from typing import IO, TYPE_CHECKING, Any, TypeVar

from msgspec import Struct

from bus.codec import decode, encode
from bus.fields import meant

if TYPE_CHECKING:
    import asyncio  # a child that measures memory goes without

M = TypeVar("M")

_KEPT = ("PATH", "LD_LIBRARY_PATH", "LANG", "LC_ALL", "TZ")
_HEAD = 4
_MOST_NAMED = 5


def framed(message: Any) -> bytes:
    """The message as it is sent."""
    body = encode(message)
    return len(body).to_bytes(_HEAD, "big") + body


def kept_environment(also: Iterable[str] = ()) -> dict[str, str]:
    """What Python needs to start, of ours; and these variables."""
    return {name: os.environ[name] for name in (*_KEPT, *also) if name in os.environ} | {"PYTHONDONTWRITEBYTECODE": "1"}


def kill_group(pid: int) -> None:
    """Kill a child and all that it has started."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def how_ended(code: int) -> str:
    """The end of a child, after "it". code: as subprocess has it, negative for a signal."""
    if code >= 0:
        return f"ended with code {code}"
    with suppress(ValueError):  # most real-time signals have no name
        return f"was ended by {signal.Signals(-code).name}"
    return f"was ended by signal {-code}"


class NoSuchCode(Exception):
    """What a user names is not there. The text is a clause that says what is."""


def named(path: str) -> Any:
    """What "module:name" or "module:name.name" names. Raises NoSuchCode, and whatever the module raises."""
    module, _, names = path.partition(":")
    try:
        found = import_module(module)
    except ModuleNotFoundError as error:
        if not f"{module}.".startswith(f"{error.name}."):  # one that the module itself imports
            raise
        raise NoSuchCode(f"there is no module {error.name}; put the folder of {error.name}.py on PYTHONPATH") from None
    for name in names.split("."):
        if not hasattr(found, name):
            there = getattr(found, "__dict__", {}).items()
            own = [key for key, one in there if getattr(one, "__module__", "") == module and not key.startswith("_")]
            hint = meant(name, dir(found)) or f"; it has {', '.join(own[:_MOST_NAMED]) or 'no class and no function'}"
            raise NoSuchCode(f"{getattr(found, '__name__', path)} has no {name}{hint}")
        found = getattr(found, name)
    return found


async def read_frame(stream: "asyncio.StreamReader", most: int) -> bytes:
    """The next message, undecoded. Raises IncompleteReadError when there is none, and OverflowError for one of more than `most` bytes."""
    length = int.from_bytes(await stream.readexactly(_HEAD), "big")
    if length > most:
        raise OverflowError(f"{length} bytes: at most {most}")
    return await stream.readexactly(length)


class Channel(Struct, eq=False):
    """Messages in both directions, without asyncio. `received` raises EOFError when the other side has ended, or says more than `most` bytes at
    once, `send` an OSError.
    """

    incoming: IO[bytes]
    outgoing: IO[bytes]
    most: int = 2**32

    @classmethod
    def of_child(cls) -> "Channel":
        """In the child: takes standard input and output away from whatever else reads and prints."""
        channel = cls(os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb"))
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.close(nothing)
        os.dup2(2, 1)
        return channel

    def send(self, message: Any) -> None:
        self.outgoing.write(framed(message))
        self.outgoing.flush()

    def received(self, kind: type[M]) -> M:
        """Waits for the next message. Raises BadMessage if it is none of this kind."""
        return decode(kind, self._exactly(int.from_bytes(self._exactly(_HEAD), "big")))

    def serve(self, kind: type[M], answer: Callable[[M], Any]) -> None:
        """Answer each message, in the child, until the other side ends."""
        while True:
            try:
                message = self.received(kind)
            except EOFError:
                return
            self.send(answer(message))

    def close(self) -> None:
        for stream in (self.outgoing, self.incoming):
            with suppress(OSError):
                stream.close()

    def _exactly(self, count: int) -> bytes:
        if count > self.most:
            raise EOFError
        data = self.incoming.read(count)
        if len(data) < count:
            raise EOFError
        return data

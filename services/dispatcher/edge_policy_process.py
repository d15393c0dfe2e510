"""The process of one user's selection policy: calls and results, one at a time (services/shell/child.py). It ends when the dispatcher does."""

import resource
import sys
import traceback
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from msgspec import Struct

from bus.codec import encode
from bus.messages.public import Requirements, Tensor
from bus.tensors import from_array, to_array
from services.core.ensemble.base import Learnt, Member
from services.shell.child import Channel, NoSuchCode, named

MEMORY = 2**30  # bytes of data that a policy may have
FILES = 256
NEEDED = ("init", "select", "combine", "observe")
Arrays = dict[str, dict[str, Tensor]]  # by model, by output


class PolicyCall(Struct, frozen=True, kw_only=True):
    """One call, with the arguments that its method has."""

    method: str
    members: list[Member]
    state: bytes = b""
    ask: Requirements = Requirements()
    u: float = 0.0
    outputs: Arrays = {}
    label: Any = None
    p: dict[str, float] = {}


class PolicyReply(Struct, frozen=True, kw_only=True):
    """What came of a call; the first one says that the class is loaded. error: a clause, or "". agree: of each item."""

    error: str = ""
    state: bytes = b""
    models: list[str] = []
    outputs: dict[str, Tensor] = {}
    agree: list[int] = []
    rows: list[Learnt] = []


class WrongResult(Exception):
    """The policy gave something else than its method should. The text is a clause for its author."""


class UserPolicy:
    """A user's class. It has `init`, `select`, `combine` and `observe`.

    Without `dump` and `load`, its state is plain data (numbers, texts, lists, maps). Without `learnt`, all members count alike.
    """

    def __init__(self, name: str) -> None:
        """Import and make it. Raises NoSuchCode, WrongResult, and whatever the user's module raises."""
        self._policy = named(name)()
        for method in NEEDED:
            if not callable(getattr(self._policy, method, None)):
                raise WrongResult(f"it has no method `{method}`: a policy needs {', '.join(NEEDED)}")
        self._dump: Callable[[Any], bytes] = getattr(self._policy, "dump", encode)
        self._load: Callable[[bytes], Any] = getattr(self._policy, "load", msgspec.msgpack.decode)

    def answer(self, call: PolicyCall) -> PolicyReply:
        """Carry out one call. Raises WrongResult, and whatever the policy raises."""
        policy, members = self._policy, call.members
        if call.method == "init":
            return PolicyReply(state=self._state(policy.init(members)))
        state = self._load(call.state) if call.state else policy.init(members)  # b"": before any feedback
        if call.method == "select":
            return PolicyReply(models=_names(policy.select(state, members, call.ask, call.u)))
        outputs = {
            model: {name: to_array(tensor, name) for name, tensor in one.items()} for model, one in call.outputs.items()
        }
        if call.method == "combine":
            return _combined(policy.combine(state, members, outputs))
        if call.method == "observe":
            return PolicyReply(state=self._state(policy.observe(state, members, call.label, outputs, call.p)))
        learnt = getattr(policy, "learnt", None)
        if learnt is None:
            return PolicyReply(rows=[Learnt(member.model, 1.0 / len(members), 1.0, 0) for member in members])
        return PolicyReply(rows=[_row(row) for row in learnt(state, members)])

    def _state(self, state: Any) -> bytes:
        data = self._dump(state)
        if not isinstance(data, bytes):
            raise WrongResult(f"`dump` gave {type(data).__name__} and not bytes")
        return data


def _names(models: Any) -> list[str]:
    if isinstance(models, str) or not isinstance(models, Iterable):
        raise WrongResult(f"select gave {models!r:.60} and not a list of models")
    return [str(model) for model in models]


def _combined(result: Any) -> PolicyReply:
    try:
        outputs, agree = result
        tensors = {str(name): from_array(array) for name, array in outputs.items()}
        counts = np.asarray(agree, np.float64).reshape(-1).tolist()
    except (TypeError, ValueError, AttributeError) as error:
        raise WrongResult(f"combine gave no (outputs by name, agreeing members of each item): {error}") from error
    if not all(count.is_integer() for count in counts):
        raise WrongResult("combine must say of each item how many members agree, as a whole number")
    return PolicyReply(outputs=tensors, agree=[int(count) for count in counts])


def _row(row: Any) -> Learnt:
    try:
        member, weight, probability, n = row
        return Learnt(str(member), float(weight), float(probability), int(n))
    except (TypeError, ValueError) as error:
        raise WrongResult(f"learnt gave {row!r:.60} and not (member, weight, probability, n)") from error


# -- the process


def main(name: str) -> int:
    """Load the class, then answer calls until there are no more."""
    channel = Channel.of_child()
    _limit()
    try:
        policy = UserPolicy(name)
    except (Exception, SystemExit) as error:
        channel.send(PolicyReply(error=_said(error)))
        return 1
    channel.send(PolicyReply())
    channel.serve(PolicyCall, partial(_answer, policy))
    return 0


def _answer(policy: UserPolicy, call: PolicyCall) -> PolicyReply:
    try:
        return policy.answer(call)
    except (Exception, SystemExit) as error:
        return PolicyReply(
            error=error.args[0] if isinstance(error, WrongResult) else f"{call.method} raised {_said(error)}"
        )


def _limit() -> None:
    for what, value in ((resource.RLIMIT_DATA, MEMORY), (resource.RLIMIT_NOFILE, FILES), (resource.RLIMIT_CORE, 0)):
        _, hard = resource.getrlimit(what)
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(what, (value, value))


def _said(error: BaseException) -> str:
    """An exception, and the place in the user's code where it was raised."""
    text = str(error) if isinstance(error, WrongResult | NoSuchCode) else f"{type(error).__name__}: {error}"
    theirs = [one for one in traceback.extract_tb(error.__traceback__) if one.filename != __file__]
    ours = isinstance(error, WrongResult | NoSuchCode | ImportError) or not theirs
    place = "" if ours else f" ({Path(theirs[-1].filename).name}, line {theirs[-1].lineno})"
    return " ".join(text.split())[:300] + place


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))

"""The dispatcher's edge: contexts in the selection bucket, users' policies, large outputs. And what its wiring needs: new ids.

Users' selection policies run in processes of their own, which are started at the first call, limited, and started again when they hang or crash.
Nothing that comes back is trusted: it is decoded by type and checked before anybody else sees it. The operator chooses the classes, so
a process keeps the rights of the dispatcher's user. It gets none of the dispatcher's variables, and so none of its credentials.
"""

import asyncio
import contextlib
import itertools
import math
import os
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
from msgspec import Struct, field

from bus.codec import BadMessage, decode, decode_kept
from bus.messages.catalog import TensorSpec
from bus.messages.flow import Payload, id_digest
from bus.messages.public import Requirements, Tensor
from bus.messages.quality import AppQuality
from bus.port import Bus, KeyValue, NotFound, WrongRevision
from bus.subjects import Subjects
from bus.tensors import BadTensor, datatype_of, fit, from_array, to_array
from services.core.catalog import app_key, quality_key
from services.core.ensemble.base import Array, Combined, Learnt, Member, Outputs
from services.dispatcher.commands import (
    ContextWritten,
    DeleteResults,
    FetchTensors,
    FindKept,
    GatherOutputs,
    PutQuality,
    ReadContext,
    RunPolicy,
    StoredContext,
    WriteContext,
)
from services.dispatcher.edge_policy_process import Arrays, PolicyCall, PolicyReply
from services.shell.child import framed, how_ended, kill_group, read_frame
from services.shell.objects import delete_all, fetch_tensors, store_outputs
from services.shell.policies import policy_command, policy_environment

CALL_S = 1.0  # that one call may take
START_S = 20.0  # that the import of the class may take
PAUSES = (0.5, 30.0)  # s before it is started again: after the first failure, and at most
SOUND_S = 60.0  # a process that lived so long failed for the first time
IDLE_S = 600.0  # without calls, after which its process ends
MOST_WAITING = 1000  # calls of one policy
MOST_STATE = 2**16  # bytes of a state
LARGEST_REPLY = 64 * 2**20
LISTED_S = 5.0


class PolicyFailed(ChildProcessError):
    """A user's policy has no result. The text is a sentence that names the class."""


class UserPolicies(Struct, eq=False):
    """The processes of all users' policies of one dispatcher, by import path."""

    call_s: float = CALL_S
    _processes: "dict[str, _PolicyProcess]" = {}

    async def run(self, command: RunPolicy) -> Any:
        """The result of the command, checked. Raises PolicyFailed."""
        name = command.policy
        process = self._processes.get(name)
        if process is None:
            module, _, attribute = name.partition(":")
            if not (module and attribute):
                raise PolicyFailed(f"policy {name!r} is no module:Class")
            process = self._processes[name] = _PolicyProcess(name, self.call_s)
        self._end_idle()
        try:
            call = _call(command)
        except (BadTensor, TypeError, ValueError) as error:
            raise PolicyFailed(f"policy {name!r}: {command.method} cannot get its arguments: {error}") from error
        reply = await process.call(call)
        try:
            return _checked(call, command, reply)
        except (_Unsound, BadTensor) as error:
            raise PolicyFailed(f"policy {name!r}: {command.method} {error}") from None

    def close(self) -> None:
        """End all processes."""
        for process in self._processes.values():
            process.end()
        self._processes.clear()

    def _end_idle(self) -> None:
        now = time.monotonic()
        for process in self._processes.values():
            if now - process.used > IDLE_S and process.free:
                process.end()


class _PolicyProcess:
    """The process of one policy. Calls go one after the other."""

    def __init__(self, name: str, call_s: float) -> None:
        self.used = time.monotonic()
        self._name = name
        self._call_s = call_s
        self._turn = asyncio.Lock()
        self._waiting = 0
        self._process: asyncio.subprocess.Process | None = None
        self._born = 0.0
        self._failures = 0
        self._again = 0.0  # when it may be started again
        self._why = ""  # it has to wait

    @property
    def free(self) -> bool:
        return self._waiting == 0

    async def call(self, call: PolicyCall) -> PolicyReply:
        self.used = time.monotonic()
        if self._waiting >= MOST_WAITING:
            raise PolicyFailed(f"policy {self._name!r} is too slow: {self._waiting} calls wait for it")
        self._waiting += 1
        try:
            async with self._turn:
                process = await self._started()
                reply = await self._ask(process, framed(call), self._call_s, call.method)
        finally:
            self._waiting -= 1
        if reply.error:
            raise PolicyFailed(f"policy {self._name!r}: {reply.error}")
        return reply

    def end(self) -> None:
        """Kill the process and all that it has started."""
        process, self._process = self._process, None
        if process is not None:
            kill_group(process.pid)

    async def _started(self) -> asyncio.subprocess.Process:
        if self._process is not None and self._process.returncode is None:
            return self._process
        wait = self._again - time.monotonic()
        if wait > 0.0:
            raise PolicyFailed(f"{self._why}; it is started again in {wait:.1f} s")
        self._born = time.monotonic()
        try:
            self._process = process = await asyncio.create_subprocess_exec(
                *policy_command(self._name),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                env=policy_environment(),
                start_new_session=True,
                limit=2**20,
            )  # fmt: skip
        except OSError as error:
            raise self._failed(f"policy {self._name!r} cannot be started: {error}") from error
        reply = await self._ask(process, None, START_S, "its import")
        if reply.error:
            raise self._failed(f"policy {self._name!r} cannot be loaded: {reply.error}")
        return process

    async def _ask(
        self, process: asyncio.subprocess.Process, body: bytes | None, seconds: float, what: str
    ) -> PolicyReply:
        """Send a call, if there is one, and wait for a reply."""
        assert process.stdin is not None, "it is a pipe"
        assert process.stdout is not None, "it is a pipe"
        try:
            async with asyncio.timeout(seconds):
                if body is not None:
                    process.stdin.write(body)
                    await process.stdin.drain()
                return decode(PolicyReply, await read_frame(process.stdout, LARGEST_REPLY))
        except TimeoutError:
            raise self._failed(f"policy {self._name!r}: {what} took longer than {seconds:g} s") from None
        except (BadMessage, OverflowError) as error:
            raise self._failed(f"policy {self._name!r}: {what} gave no result: {error}") from error
        except (asyncio.IncompleteReadError, OSError):
            how = await _how_ended(process)
            raise self._failed(f"policy {self._name!r}: its process {how} in {what}") from None
        except asyncio.CancelledError:
            self.end()  # its reply would be taken for that of the next call
            raise

    def _failed(self, why: str) -> PolicyFailed:
        """End the process, and start none for a while. Returns the error."""
        self.end()
        now = time.monotonic()
        self._failures = 1 if now - self._born > SOUND_S else self._failures + 1
        first, most = PAUSES
        self._again = now + min(first * 2.0 ** min(self._failures - 1, 10), most)
        self._why = why
        return PolicyFailed(why)


async def _how_ended(process: asyncio.subprocess.Process) -> str:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(1.0):
            return how_ended(await process.wait())
    return "said no more"


# -- arguments


def _call(command: RunPolicy) -> PolicyCall:
    method, args = command.method, command.args
    if method == "init":
        return PolicyCall(method=method, members=list(args[0]))
    state, members = args[0], list(args[1])
    if method == "select":
        # A query's head is more than what it asks for.
        ask = Requirements(**{name: getattr(args[2], name) for name in Requirements.__struct_fields__})
        return PolicyCall(method=method, state=state, members=members, ask=ask, u=args[3])
    if method == "combine":
        if not args[2]:
            raise ValueError("no member has answered")
        return PolicyCall(method=method, state=state, members=members, outputs=_tensors(args[2]))
    if method == "observe":
        label, outputs, p = args[2:]
        return PolicyCall(
            method=method, state=state, members=members, label=label, outputs=_tensors(outputs), p=dict(p)
        )
    return PolicyCall(method=method, state=state, members=members)


def _tensors(outputs: Mapping[str, Outputs]) -> Arrays:
    return {model: {name: from_array(array) for name, array in one.items()} for model, one in outputs.items()}


# -- results


class _Unsound(Exception):
    """A result is none. The text follows the method's name."""


def _checked(call: PolicyCall, command: RunPolicy, reply: PolicyReply) -> Any:
    if call.method in {"init", "observe"}:
        if len(reply.state) > MOST_STATE:
            raise _Unsound(f"gave a state of {len(reply.state)} bytes: at most {MOST_STATE}")
        return reply.state
    if call.method == "select":
        return _members(reply.models, call.members)
    if call.method == "combine":
        return _answer(reply, command.args[2])
    return _rows(reply.rows, call.members)


def _members(models: list[str], members: Sequence[Member]) -> list[str]:
    known = [member.model for member in members]
    if not models:
        raise _Unsound(f"chose no member: {', '.join(known)}")
    for model in models:
        if model not in known:
            raise _Unsound(f"chose {model!r:.60}, which is no member: {', '.join(known)}")
    return list(dict.fromkeys(models))


def _answer(reply: PolicyReply, given: Mapping[str, Outputs]) -> Combined:
    first = next(iter(given.values()))
    if reply.outputs.keys() != first.keys():
        raise _Unsound(
            f"gave the outputs {', '.join(reply.outputs) or 'none'}, but the members' are {', '.join(first)}"
        )
    outputs = {name: _output(name, tensor, given) for name, tensor in reply.outputs.items()}
    items = len(next(iter(first.values())))
    if len(reply.agree) != items or not all(0 <= count <= len(given) for count in reply.agree):
        raise _Unsound(f"must say of each of {items} items how many of {len(given)} members agree")
    return Combined(outputs, np.array(reply.agree, np.int64))


def _output(name: str, tensor: Tensor, given: Mapping[str, Outputs]) -> Array:
    array = to_array(tensor, name)
    theirs = [one[name] for one in given.values() if name in one]
    if not any(array.shape == one.shape for one in theirs):
        shape = list(theirs[0].shape)
        raise _Unsound(f"gave output {name!r} with shape {list(array.shape)}, but the members' is {shape}")
    spec = TensorSpec(name=name, datatype=datatype_of(theirs[0]), shape=list(theirs[0].shape[1:]))
    try:
        array = fit(array, spec, name)
    except BadTensor as error:
        raise _Unsound(
            f"gave output {name!r} as {array.dtype}, but the members' is {theirs[0].dtype}: {error}"
        ) from error
    if array.dtype.kind == "f" and np.isnan(array).any():
        raise _Unsound(f"gave output {name!r} with values that are not numbers (NaN)")
    return array


def _rows(rows: list[Learnt], members: Sequence[Member]) -> list[Learnt]:
    _members([row.member for row in rows], members)
    for row in rows:
        if not (math.isfinite(row.weight) and row.weight >= 0.0):
            raise _Unsound(f"gave {row.member} the weight {row.weight}: it must be a finite number, at least 0")
        if not 0.0 <= row.probability <= 1.0:
            raise _Unsound(f"gave {row.member} the probability {row.probability}: it must be 0 to 1")
    total = math.fsum(row.weight for row in rows)
    if not 0.0 < total < math.inf:
        raise _Unsound(f"gave weights that sum up to {total:g}")
    return [row._replace(weight=row.weight / total) for row in rows]


class KeptQueries(Struct, eq=False):
    """Queries of the payloads bucket, by name. Names are listed again after LISTED_S: labels that come days later come in thousands."""

    bus: Bus
    subjects: Subjects
    _listing: asyncio.Lock = field(default_factory=asyncio.Lock)
    _names: dict[str, tuple[float, defaultdict[str, list[str]]]] = {}

    async def find(self, command: FindKept) -> Payload | None:
        """The query that is meant, if it is there."""
        try:
            bucket = await self.bus.key_value(self.subjects.payloads_bucket, create=False)
        except NotFound:
            return None
        name = id_digest(command.id) if command.query is None else command.query
        found = []
        for key in (await self._listed(bucket, command.app))[name]:
            with suppress(NotFound):  # its time was over
                found.append(decode(Payload, (await bucket.get(key)).value or b""))
        return max(found, key=lambda one: one.time, default=None)

    async def _listed(self, bucket: KeyValue, app: str) -> defaultdict[str, list[str]]:
        async with self._listing:
            at, names = self._names.get(app, (-math.inf, defaultdict(list)))
            if time.monotonic() > at + LISTED_S:
                names = defaultdict(list)
                for key in await bucket.keys(app):
                    _, asked, digest, uid = key.split(".")
                    names[uid].append(key)
                    if asked == uid:  # a stage is named by its own uid alone
                        names[digest].append(key)
                now = time.monotonic()
                self._names = {one: kept for one, kept in self._names.items() if now <= kept[0] + LISTED_S}
                self._names[app] = now, names
            return names


class DispatcherEdge:
    """Carries out the commands of services/dispatcher/commands.py."""

    def __init__(self, bus: Bus, subjects: Subjects) -> None:
        self._bus = bus
        self._subjects = subjects
        self._bucket: KeyValue | None = None
        self._policies = UserPolicies()
        self._kept = KeptQueries(bus, subjects)

    async def perform(self, command: Any) -> Any:
        """Carry out one command. Raises BusError and PolicyFailed."""
        if type(command) is RunPolicy:
            return await self._policies.run(command)
        if type(command) is GatherOutputs:
            found = await fetch_tensors(self._bus, command.refs)
            return await store_outputs(
                self._bus, self._subjects.outputs_bucket, command.key, {**command.outputs, **found}
            )
        if type(command) is FetchTensors:
            return await fetch_tensors(self._bus, command.refs)
        if type(command) is DeleteResults:
            return await delete_all(self._bus, self._subjects.outputs_bucket, command.keys)
        if type(command) is FindKept:
            return await self._kept.find(command)
        if type(command) is PutQuality:
            return await _put(await self._bus.key_value(self._subjects.catalog_bucket), command)
        if self._bucket is None:  # most dispatchers serve no app that needs it
            self._bucket = await self._bus.key_value(self._subjects.selection_bucket)
        match command:
            case ReadContext():
                return await _read(self._bucket, command.key)
            case WriteContext():
                return await _write(self._bucket, command)
        raise ValueError(f"the dispatcher's edge cannot {type(command).__name__}")


async def _read(bucket: KeyValue, key: str) -> StoredContext:
    try:
        entry = await bucket.get(key)
    except NotFound:
        return StoredContext(None, 0)
    return StoredContext(entry.value, entry.revision)


async def _write(bucket: KeyValue, command: WriteContext) -> ContextWritten | StoredContext:
    try:
        if command.revision:
            return ContextWritten(await bucket.update(command.key, command.value, command.revision))
        return ContextWritten(await bucket.create(command.key, command.value))
    except WrongRevision:
        return await _read(bucket, command.key)


async def _put(bucket: KeyValue, command: PutQuality) -> None:
    key = quality_key(command.app)
    while True:
        try:
            entry = await bucket.get(key)
        except NotFound:
            with suppress(WrongRevision):
                await bucket.create(key, command.value)
                try:
                    await bucket.get(app_key(command.app))
                except NotFound:  # it was deleted meanwhile, and what labels said of it
                    await bucket.delete(key)
                return
            continue
        held = decode_kept(AppQuality, entry.value)
        if held is not None and held.revision >= command.revision:
            return
        with suppress(WrongRevision):
            await bucket.update(key, command.value, entry.revision)
            return


def uid_maker() -> Callable[[], bytes]:
    """16-byte ids: 8 random bytes for this process, then an 8-byte count."""
    prefix = os.urandom(8)
    numbers = itertools.count()
    return lambda: prefix + next(numbers).to_bytes(8, "big")


def dispatcher_name() -> str:
    return f"d-{os.urandom(4).hex()}"

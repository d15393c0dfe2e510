"""The dispatcher's edge: contexts in the selection bucket, users' policies, large outputs. And what its wiring needs: new ids."""

import itertools
import os
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from bus.codec import decode_kept
from bus.messages.quality import AppQuality
from bus.port import Bus, KeyValue, NotFound, WrongRevision
from bus.subjects import Subjects
from services.core.catalog import quality_key
from services.dispatcher.commands import (
    ContextWritten,
    DeleteResults,
    FetchTensors,
    GatherOutputs,
    PutQuality,
    ReadContext,
    RunPolicy,
    StoredContext,
    WriteContext,
)
from services.dispatcher.edge_policies import UserPolicies
from services.shell.objects import delete_all, fetch_tensors, store_outputs


class DispatcherEdge:
    """Carries out the commands of services/dispatcher/commands.py."""

    def __init__(self, bus: Bus, subjects: Subjects) -> None:
        self._bus = bus
        self._subjects = subjects
        self._bucket: KeyValue | None = None
        self._policies = UserPolicies()

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

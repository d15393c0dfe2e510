"""Buckets on JetStream, in the layouts that every NATS client shares.

Key-value buckets (ADR-8): stream KV_<bucket>, subject $KV.<bucket>.<key>. Object buckets (ADR-20): stream OBJ_<bucket>, chunks on
$O.<bucket>.C.<id>, one description for each object on $O.<bucket>.M.<base64 of its name>.

Not nats-py's: it waits for ever for chunks that are gone, takes 51 s to get 64 MiB (0.5 s here), and asks for more rights than one
bucket's.
"""

import asyncio
import base64
import contextlib
import hashlib
import os
import secrets
from collections.abc import AsyncIterator, Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from bus.natsconsumers import OrderedReader, Puller, StreamPosition, drop_consumer, passing_consumer, read_all
from bus.natsjet import NANO, WRONG_SEQUENCE, JetError, JetStream
from bus.port import Buffer, BusError, Delivery, KeyValueEntry, NotFound, Subscription, WrongRevision, in_pieces
from bus.subjects import check_key

_OPERATION = "KV-Operation"
_EXPECTED = "Nats-Expected-Last-Subject-Sequence"
_TTL_DISABLED = 10166
MARK_S = 86_400  # s for which the mark of a deleted key stays: whoever watches again within it hears of the deletion


class NatsKeyValue:
    """One key-value bucket. Revisions are the stream's sequence numbers."""

    def __init__(self, jet: JetStream, bucket: str) -> None:
        self._jet = jet
        self._stream = f"KV_{bucket}"
        self._prefix = f"$KV.{bucket}."

    async def open(self, *, create: bool, max_age_s: float = 0.0, max_bytes: int = 0) -> None:
        config = {
            "subjects": [f"{self._prefix}>"],
            "max_msgs_per_subject": 1,
            "max_bytes": max_bytes or -1,
            "discard": "old" if max_bytes else "new",
            "deny_delete": True,
            "allow_msg_ttl": True,
        }
        update = ("allow_msg_ttl", *(["max_bytes"] if max_age_s else ()))
        await _open(self._jet, self._stream, config, update, max_age_s, create=create)

    async def put(self, key: str, value: bytes) -> int:
        return await self._jet.publish(self._subject(key), value)

    async def get(self, key: str) -> KeyValueEntry:
        entry = await self._last(key)
        if entry.value is None:
            raise NotFound(f"key {key!r} was deleted")
        return entry

    async def create(self, key: str, value: bytes) -> int:
        try:
            return await self.update(key, value, 0)
        except WrongRevision:
            last = await self._last(key)
            if last.value is not None:
                raise WrongRevision(f"key {key!r} is there already, at revision {last.revision}") from None
            return await self.update(key, value, last.revision)  # over the mark that a deletion left

    async def update(self, key: str, value: bytes, revision: int) -> int:
        try:
            return await self._jet.publish(self._subject(key), value, {_EXPECTED: str(revision)})
        except JetError as error:
            if error.code in WRONG_SEQUENCE:
                raise WrongRevision(f"key {key!r} is not at revision {revision}") from None
            raise

    async def delete(self, key: str) -> None:
        try:
            await self.get(key)  # the mark of what is not there would tell nobody anything
        except NotFound:
            return
        mark = {_OPERATION: "DEL"}
        try:
            await self._jet.publish(self._subject(key), b"", mark | {"Nats-TTL": str(MARK_S)})
        except JetError as error:  # made by an older version, and its owner has not started since
            if error.code != _TTL_DISABLED:
                raise
            await self._jet.publish(self._subject(key), b"", mark)

    async def keys(self, under: str = "") -> list[str]:
        return [entry.key for entry in await self._present(under, headers_only=True)]

    async def entries(self, under: str = "") -> list[KeyValueEntry]:
        return await self._present(under)

    async def _present(self, under: str, *, headers_only: bool = False) -> list[KeyValueEntry]:
        found: dict[str, KeyValueEntry] = {}
        pattern = f"{self._subject(under)}.>" if under else f"{self._prefix}>"

        def take(delivery: Delivery, revision: int) -> None:
            entry = self._entry(delivery, revision)
            found.pop(entry.key, None)
            if entry.value is not None:
                found[entry.key] = entry

        await read_all(self._jet, self._stream, pattern, take, headers_only=headers_only)
        return list(found.values())

    async def watch(self, handler: Callable[[KeyValueEntry | None], None]) -> Subscription:
        def take(delivery: Delivery, revision: int) -> None:
            handler(self._entry(delivery, revision))

        reader = OrderedReader(self._jet, self._stream, f"{self._prefix}>", take, lambda: handler(None))
        await reader.start()
        return reader

    def _entry(self, delivery: Delivery, revision: int) -> KeyValueEntry:
        headers = delivery.headers or {}
        deleted = headers.get(_OPERATION) in ("DEL", "PURGE") or "Nats-Marker-Reason" in headers
        return KeyValueEntry(delivery.subject.removeprefix(self._prefix), None if deleted else delivery.data, revision)

    async def _last(self, key: str) -> KeyValueEntry:
        try:
            revision, value, headers = await self._jet.last_message(self._stream, self._subject(key))
        except NotFound:
            raise NotFound(f"no key {key!r}") from None
        return KeyValueEntry(
            key, None if f"{_OPERATION}: " in headers or "Nats-Marker-Reason: " in headers else value, revision
        )

    def _subject(self, key: str) -> str:
        check_key(key)
        return self._prefix + key


CHUNK = 128 * 1024
PIECE = 8 * CHUNK  # bytes that are read from or written to a file at once, off the event loop
ROUND = 16  # chunks in one request
PATIENCE_S = 5.0  # for the next chunk
ATTEMPTS = 3  # at reading an object that is being replaced, or whose consumer a restart has ended


class _Info(msgspec.Struct, omit_defaults=True):
    """ADR-20's ObjectInfo, as far as it is used here."""

    name: str
    bucket: str = ""
    nuid: str = ""
    size: int = 0
    chunks: int = 0
    digest: str = ""
    mtime: str = ""
    deleted: bool = False
    options: dict[str, Any] = {}


class NatsObjectStore:
    """One bucket of large values."""

    def __init__(self, jet: JetStream, bucket: str) -> None:
        self._jet = jet
        self._bucket = bucket
        self._stream = f"OBJ_{bucket}"

    async def open(self, *, max_age_s: float, create: bool) -> None:
        config = {
            "subjects": [f"$O.{self._bucket}.C.>", f"$O.{self._bucket}.M.>"],
            "max_bytes": -1,
            "discard": "new",
        }
        await _open(self._jet, self._stream, config, (), max_age_s, create=create)

    async def put(self, key: str, data: bytes | Path | Sequence[Buffer]) -> None:
        before = await self._find(key)
        nuid = secrets.token_hex(11)
        chunks = f"$O.{self._bucket}.C.{nuid}"
        digest = hashlib.sha256()
        size = count = 0
        try:
            async for piece in _pieces(data, digest.update):
                view = memoryview(piece)  # chunks of it are no copies
                for at in range(0, len(piece), CHUNK):
                    await self._jet.publish(chunks, view[at : at + CHUNK])
                    count += 1
                size += len(piece)
            info = _Info(
                name=key,
                bucket=self._bucket,
                nuid=nuid,
                size=size,
                chunks=count,
                digest=f"SHA-256={base64.urlsafe_b64encode(digest.digest()).decode()}",
                mtime=datetime.now(UTC).isoformat(),
                options={"max_chunk_size": CHUNK},
            )
            await self._describe(info)
        except BaseException:
            with contextlib.suppress(BusError):
                await self._purge(nuid)
            raise
        if before is not None and before.nuid:
            await self._purge(before.nuid)

    async def get(self, key: str) -> bytes:
        parts: list[bytes] = []

        async def keep(more: list[bytes]) -> None:
            parts.extend(more)

        async def again() -> None:
            parts.clear()

        await self._read(key, keep, again)
        return b"".join(parts)

    async def get_to(self, key: str, path: Path) -> None:
        part = path.with_name(f"{path.name}.{secrets.token_hex(4)}.part")
        file: BinaryIO = await asyncio.to_thread(part.open, "wb")

        async def keep(more: list[bytes]) -> None:
            await asyncio.to_thread(file.writelines, more)

        async def again() -> None:
            file.seek(0)
            file.truncate()

        try:
            try:
                await self._read(key, keep, again)
            finally:
                await asyncio.to_thread(file.close)
            os.replace(part, path)
        finally:
            part.unlink(missing_ok=True)

    async def exists(self, key: str) -> bool:
        info = await self._find(key)
        return info is not None and not info.deleted

    async def delete(self, key: str) -> None:
        info = await self._find(key)
        if info is None or info.deleted:
            return
        mark = await self._describe(_Info(name=key, bucket=self._bucket, nuid=info.nuid, deleted=True))
        await self._purge(info.nuid)
        # The mark has told who watches; left, each chunk of each job ever computed would stay as one. Of an object made since nothing goes.
        await self._jet.call(f"STREAM.PURGE.{self._stream}", {"filter": self._meta(key), "seq": mark + 1})

    async def keys(self) -> list[str]:
        return [*await self.sizes()]

    async def sizes(self) -> dict[str, int]:
        found: dict[str, _Info] = {}

        def take(delivery: Delivery, _: int) -> None:
            info = msgspec.json.decode(delivery.data, type=_Info)
            if info.deleted:
                found.pop(delivery.subject, None)
            else:
                found[delivery.subject] = info

        await read_all(self._jet, self._stream, f"$O.{self._bucket}.M.>", take)
        return {info.name: info.size for info in found.values()}

    def _meta(self, key: str) -> str:
        return f"$O.{self._bucket}.M.{base64.urlsafe_b64encode(key.encode()).decode()}"

    async def _describe(self, info: _Info) -> int:
        return await self._jet.publish(self._meta(info.name), msgspec.json.encode(info), {"Nats-Rollup": "sub"})

    async def _purge(self, nuid: str) -> None:
        await self._jet.call(f"STREAM.PURGE.{self._stream}", {"filter": f"$O.{self._bucket}.C.{nuid}"})

    async def _find(self, key: str) -> _Info | None:
        try:
            _, data, _ = await self._jet.last_message(self._stream, self._meta(key))
        except NotFound:
            return None
        try:
            return msgspec.json.decode(data, type=_Info)
        except msgspec.DecodeError as error:
            raise BusError(f"the description of object {key!r} is not understood: {error}") from None

    async def _read(self, key: str, keep: Callable[[list[bytes]], Any], again: Callable[[], Any]) -> None:
        """Pass the object to `keep` in pieces. When it changes meanwhile, call `again` and start over."""
        error = ""
        for _ in range(ATTEMPTS):
            info = await self._find(key)
            if info is None or info.deleted:
                raise NotFound(f"no object {key!r} in bucket {self._bucket}")
            digest = hashlib.sha256()
            size = 0
            async for chunks in self._chunks(info):
                for chunk in chunks:
                    digest.update(chunk)
                    size += len(chunk)
                await keep(chunks)
            wanted = info.digest.partition("=")[2]
            if size != info.size:
                error = f"only {size} of its {info.size} bytes came"
            elif wanted and base64.urlsafe_b64decode(wanted) != digest.digest():
                error = "its digest does not match its bytes"
            else:
                return
            await again()
        raise BusError(f"object {key!r} in bucket {self._bucket} cannot be read: {error}")

    async def _chunks(self, info: _Info) -> AsyncIterator[list[bytes]]:
        """The object's chunks in order, some at a time. It ends early when they stop coming."""
        if info.chunks == 0:
            return
        subject = f"$O.{self._bucket}.C.{info.nuid}"
        name, _ = await passing_consumer(self._jet, self._stream, subject, {"deliver_policy": "all"})
        arrived: list[Delivery] = []
        puller = Puller(self._jet, self._stream, name, arrived.append)
        left = info.chunks
        seen = 0
        try:
            while left > 0:
                status = await puller.pull(min(ROUND, left), PATIENCE_S)
                round_ = arrived.copy()
                arrived.clear()
                for delivery in round_:
                    seen += 1
                    if StreamPosition(delivery.reply).consumer != seen:
                        return
                left -= len(round_)
                if round_:
                    yield [delivery.data for delivery in round_]
                if status:
                    return
        finally:
            puller.stop()
            await drop_consumer(self._jet, self._stream, name)


async def _open(
    jet: JetStream, stream: str, config: dict[str, Any], update: tuple[str, ...], max_age_s: float, *, create: bool
) -> None:
    """Find a bucket's stream, or make it. config: what is not the same for all buckets. update: as of `Streams.make`. Raises NotFound."""
    if not create:
        try:
            await jet.stream_info(stream)
        except NotFound:
            raise NotFound(f"no bucket {stream.partition('_')[2]}") from None
        return
    ages = {"max_age": int(max_age_s * NANO), "duplicate_window": int(min(120.0, max_age_s or 120.0) * NANO)}
    same = {"name": stream, "storage": "file", "allow_rollup_hdrs": True, "allow_direct": True}
    await jet.streams.make(same | ages | config, (*update, *(ages if max_age_s else ())))


async def _pieces(data: bytes | Path | Sequence[Buffer], hashed: Callable[[Buffer], None]) -> AsyncIterator[Buffer]:
    """`data` in pieces of PIECE bytes at most, each one hashed. Neither reading nor hashing blocks the event loop for long."""
    if not isinstance(data, Path):
        for part in in_pieces(data):
            view = memoryview(part)
            for at in range(0, len(part), PIECE):
                piece = view[at : at + PIECE]
                if len(piece) > CHUNK:
                    await asyncio.to_thread(hashed, piece)
                else:
                    hashed(piece)
                yield piece
        return

    def read(file: BinaryIO) -> bytes:
        content = file.read(PIECE)
        hashed(content)
        return content

    file: BinaryIO = await asyncio.to_thread(data.open, "rb")
    try:
        while content := await asyncio.to_thread(read, file):
            yield content
    finally:
        await asyncio.to_thread(file.close)

"""Answers kept for equal inputs, and equal parts of queries evaluated once, of apps that ask for it (paper 002, section 4.2). Pure.

The key is this system's own digest of the inputs (`predictions.digest_of`), never one that a client names.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterable
from sys import getsizeof
from typing import NamedTuple

import msgspec
from msgspec import Struct, field

from bus.messages.public import Tensor
from services.core.selection.eligibility import Ask
from services.dispatcher.apps import Apps
from services.dispatcher.query import PartReply, Query

MB = 1_000_000  # bytes
SHARDS = 256  # small tables, so that no query waits while a large one grows
SHARD_BYTES = 65_536  # of answers, from which on a cache has a further shard
CHANCES = 1_000  # answers that one eviction passes over at most, so that it takes at most 0.1 ms
HOLES = 1.5  # bytes of memory per byte of a table: as it grows, it leaves holes; measured
_encode = msgspec.msgpack.Encoder().encode_into
_decode = msgspec.msgpack.Decoder(dict[str, Tensor]).decode


class PartSource(NamedTuple):
    """Where an answer comes from. Answers of one variant on one worker share one object."""

    model: str
    version: str
    variant: str
    hardware: str
    worker: str
    accuracy: float | None
    simulated: bool
    reason: str = ""
    zeros: bool = False
    accuracy_source: str = "registered"

    def reaches(self, accuracy: float) -> bool:
        """Whether it has at least this accuracy. One that was never measured has 0."""
        return (self.accuracy or 0.0) >= accuracy


class CachedPart(Struct, gc=False):
    """A kept answer. packed: MessagePack of its outputs. used: since the clock's hand last passed."""

    key: bytes
    source: PartSource
    packed: bytes
    used: bool = False

    @property
    def outputs(self) -> dict[str, Tensor]:
        return _decode(self.packed)

    @property
    def size(self) -> int:
        return _allocated(getsizeof(self)) + _allocated(getsizeof(self.key)) + _allocated(getsizeof(self.packed))


class PredictionCache:
    """Answers by inputs, model and version, in at most `max_bytes` of memory, with everything that Python needs for them.

    The CLOCK algorithm evicts: answers stand in a ring, a look-up marks one as used, and the hand takes the next one that is not marked and
    removes the marks that it passes. hits, misses, evictions: since the start.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.hits = 0
        self.misses = 0
        self.evictions = 0
        count = 1
        while count < SHARDS and count * SHARD_BYTES < max_bytes:
            count *= 2
        self._mask = count - 1
        self._shards: list[dict[bytes, CachedPart]] = [{} for _ in range(count)]
        self._ring: deque[CachedPart] = deque()  # the clock: its hand is at the left end
        self._tags: dict[tuple[str | None, str | None], bytes] = {}  # short names of versions, within keys
        self._sources: dict[PartSource, PartSource] = {}
        self._tables = sum(getsizeof(shard) for shard in self._shards)
        self._parts = 0

    def __len__(self) -> int:
        return len(self._ring)

    @property
    def size(self) -> int:
        """Bytes of memory in use."""
        return self._parts + int(HOLES * self._tables) + getsizeof(self._ring)

    def get(
        self, digest: bytes, model: str | None, version: str | None, fits: Callable[[PartSource], bool]
    ) -> CachedPart | None:
        """The answer to these inputs if there is one that fits. model, version: None where the query left the choice to selection."""
        part = self.peek(digest, model, version, fits)
        if part is None:
            self.misses += 1
            return None
        self.hits += 1
        part.used = True
        return part

    def peek(
        self, digest: bytes, model: str | None, version: str | None, fits: Callable[[PartSource], bool]
    ) -> CachedPart | None:
        """As `get`, of an answer that nobody gets yet."""
        tag = self._tags.get((model, version))
        part = None if tag is None else self._shards[digest[0] & self._mask].get(digest + tag)
        return part if part is not None and fits(part.source) else None

    def put(
        self, digest: bytes, model: str | None, version: str | None, source: PartSource, outputs: dict[str, Tensor]
    ) -> None:
        """Keep an answer, unless the cache holds a more accurate one of the same version, or it is larger than the cache."""
        tag = self._tags.get((model, version))
        if tag is None:
            tag = self._tags[model, version] = len(self._tags).to_bytes(4, "little")
        key = digest + tag
        shard = self._shards[digest[0] & self._mask]
        before = shard.get(key)
        if before is not None:
            held = before.source
            if held[:2] == source[:2] and held.reaches(source.accuracy or 0.0):
                return
        part = CachedPart(key, self._sources.setdefault(source, source), _packed(outputs))
        if part.size > self.max_bytes // 2:
            return
        if before is None:
            self._ring.append(part)
            table = getsizeof(shard)
            shard[key] = part
            self._tables += getsizeof(shard) - table
            self._parts += part.size
        else:
            self._parts -= before.size
            before.source, before.packed = part.source, part.packed
            self._parts += before.size
        self._fit()

    def resize(self, max_bytes: int) -> None:
        """Change the bound; the shards stay as they are."""
        self.max_bytes = max_bytes
        self._fit()

    def _fit(self) -> None:
        while self._ring and self.size > self.max_bytes:
            self._evict()

    def _evict(self) -> None:
        ring = self._ring
        part = ring.popleft()
        chances = CHANCES
        while part.used and chances:
            part.used = False
            ring.append(part)
            part = ring.popleft()
            chances -= 1
        del self._shards[part.key[0] & self._mask][part.key]
        self._parts -= part.size
        self.evictions += 1


def _packed(outputs: dict[str, Tensor]) -> bytes:
    """MessagePack in just as many bytes. What the encoder makes by itself has room for more."""
    room = bytearray()
    _encode(outputs, room)
    return bytes(room)


def _allocated(size: int) -> int:
    """Bytes that the allocator takes for an object of this size: small ones in steps of 16, large ones with a header."""
    return (size + 15) & ~15 if size <= 512 else (size + 23) & ~15


PartKey = tuple[str, bytes, str | None, str | None]  # app, digest of the inputs, model, version


class Coalescing(Struct, eq=False):
    """Equal parts under way: one is evaluated, the *leader*, and others wait for its answer.

    A part waits only for one that must answer no later, with no lower accuracy, and that others do not push aside sooner. So it loses
    nothing by waiting; if its leader is refused all the same, it is asked itself. waited: by app, parts that waited, since the start.
    """

    waited: Counter[str] = field(default_factory=Counter)
    _leaders: dict[PartKey, Query] = {}
    _waiting: dict[bytes, tuple[PartKey, list[Query]]] = {}  # by the leader's uid

    def __len__(self) -> int:
        return len(self._waiting)

    def wait(self, key: PartKey, part: Query, now: float) -> bool:
        """Whether this part waits for an equal one. If not, it leads from now on: it is to be evaluated."""
        leader = self._leaders.get(key)
        if leader is not None and leader.uid != part.uid:
            first, own = leader.ask, part.ask
            sooner = now < first.deadline <= own.deadline and first.priority <= own.priority
            if sooner and (first.accuracy >= own.accuracy if own.accuracy else not first.accuracy):
                self._waiting[leader.uid][1].append(part)
                self.waited[key[0]] += 1
                return True
        self._leaders[key] = part
        self._waiting.setdefault(part.uid, (key, []))
        return False

    def followed(self, uid: bytes) -> bool:
        """Whether others wait for this part."""
        return uid in self._waiting and bool(self._waiting[uid][1])

    def overdue(self, before: float) -> list[bytes]:
        """Leaders whose deadline was before this time, and of which nothing was heard."""
        return [leader.uid for leader in self._leaders.values() if leader.ask.deadline < before]

    def ended(self, uid: bytes) -> tuple[PartKey, list[Query]] | None:
        """A part has ended: its key, and those that waited for it. None if it did not lead."""
        found = self._waiting.pop(uid, None)
        if found is not None and (leader := self._leaders.get(found[0])) is not None and leader.uid == uid:
            del self._leaders[found[0]]
        return found


class CachedParts(Struct, eq=False):
    """Parts that need no evaluation of their own. caches: by app, of those that ask for it. equal: parts under way."""

    apps: Apps
    caches: dict[str, PredictionCache] = {}
    equal: Coalescing = field(default_factory=Coalescing)

    def find(self, part: Query) -> PartReply | None:
        """The answer to a part, if it is kept. None, too, where the app keeps no answers."""
        join = part.part.join if part.part is not None else None
        if join is None or join.digest is None:
            return None
        ask, rules = part.ask, join.query.ensemble
        assert rules is not None
        most = int(rules.cache_mb * MB)
        cache = self.caches.get(ask.app)
        if cache is None:
            cache = self.caches[ask.app] = PredictionCache(most)
        elif cache.max_bytes != most:
            cache.resize(most)
        kept = cache.get(join.digest, *_of(ask), lambda source: self._suits(source, ask))
        return None if kept is None else _reply(self._now(ask, kept.source), kept.outputs)

    def _now(self, ask: Ask, source: PartSource) -> PartSource:
        """With the accuracy that counts now, for this query, which may not be that of when the answer was computed, nor for whom."""
        view = self.apps.view.apps[ask.app]
        if not view.live and ask.labels is None and source.accuracy_source == "registered":
            return source
        record = view.seen(ask)[view.index[source.variant]]
        accuracy, by = record.production or (record.measured, "registered")
        return source._replace(accuracy=accuracy, accuracy_source=by)

    def holds(self, digest: bytes | None, ask: Ask) -> bool:
        """Whether the answer to a part with these needs is kept, and costs nothing. digest: of its inputs, where its app keeps answers."""
        cache = self.caches.get(ask.app)
        if digest is None or cache is None:
            return False
        return cache.peek(digest, *_of(ask), lambda source: self._suits(source, ask)) is not None

    def waits(self, part: Query, now: float) -> bool:
        """Whether an equal part is under way, whose answer this one gets, too."""
        join = part.part.join if part.part is not None else None
        if join is None or join.digest is None:
            return False
        ask = part.ask
        return self.equal.wait((ask.app, join.digest, *_of(ask)), part, now)

    def ended(self, uid: bytes, reply: PartReply | None) -> Iterable[tuple[Query, PartReply | None]]:
        """A part has ended: those that waited for it, each with its answer. None: it must be asked itself. reply: None if refused."""
        found = self.equal.ended(uid)
        if found is None:
            return ()
        (app, digest, model, version), waiting = found
        if reply is None or reply.error is not None or reply.outputs_ref is not None:
            return [(part, None) for part in waiting]
        source = PartSource(*(getattr(reply, name) for name in PartSource._fields))
        cache = self.caches.get(app)
        if cache is not None:
            cache.put(digest, model, version, source, reply.outputs)
        return [
            (part, _reply(self._now(part.ask, source), reply.outputs) if self._suits(source, part.ask) else None)
            for part in waiting
        ]

    def drop(self) -> None:
        """The catalogue has changed: free the answers of apps that keep none any more."""
        for app in list(self.caches):
            record = self.apps.catalog.app(app)
            if record is None or record.selection is None or not record.selection.cache_mb:
                del self.caches[app]
                del self.equal.waited[app]

    def _suits(self, source: PartSource, ask: Ask) -> bool:
        """Whether an answer is accurate enough, or without an accuracy its model's own, and of the version that serves now."""
        view = self.apps.view.apps.get(ask.app)
        place = None if view is None else view.index.get(source.variant)
        if view is None or place is None:
            return False
        left = view.left or ask.labels is not None
        reaches = view.accurate(ask)[place] if left else self._now(ask, source).reaches(ask.accuracy)
        if not (reaches if ask.accuracy else view.default[place]):
            return False
        # With a model, the key names the version, which serves since the part asks for it.
        return ask.model is not None or bool(view.serving[ask.arm is not None and ask.arm.new][place])


def _of(ask: Ask) -> tuple[str | None, str | None]:
    """Model and version by which an answer is kept. In a release the new version's answers are its own."""
    new = ask.arm is not None and ask.arm.new and ask.version is None
    return ask.model, ask.arm.version if new and ask.arm is not None else ask.version


def _reply(source: PartSource, outputs: dict[str, Tensor]) -> PartReply:
    """The answer to a part for which nothing was computed."""
    return PartReply(outputs=outputs, cached=True, **source._asdict())

"""The simulated edges of offline jobs: a work queue of chunks, a bucket of parts, empty inputs, and outputs that are counted.

The actors of the coordinator and the runners decide when and where anything is computed. This module does what
services/jobs/edge.py and services/jobs/runner/edge.py do with JetStream, objects and files.
"""

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from msgspec import Raw
from msgspec.structs import replace

from bus.codec import encode
from bus.fields import filled
from bus.messages.jobs import Chunk, Part, PartStored, SubmitJob
from bus.messages.public import Refusal
from bus.subjects import Subjects
from services.jobs.commands import (
    Abandon,
    Accept,
    Assemble,
    Assembled,
    Broken,
    ChunkRange,
    Conclude,
    Feed,
    ForgetJob,
    Keep,
    Read,
    Resume,
    Resumed,
    WasRead,
)
from services.jobs.runner.chunks import ChunkKey, DropChunk, ExtendChunks, ReturnChunk, StorePart, TakeChunk
from services.jobs.runner.edge import ACK_WAIT_S, WAIT_S
from services.simulation.edges import STORE
from services.simulation.kernel import Environment
from services.simulation.scenario.model import JobSpec

INBOX = "_INBOX.job."
BODY = Raw(encode({"inputs": {}}))


class WorkQueue:
    """Chunks of jobs, as JetStream delivers them: each to one runner, and again if that runner does not finish it in time.

    Chunks that return are delivered first.
    """

    def __init__(self) -> None:
        self._chunks: dict[int, Chunk] = {}
        self._waiting: deque[int] = deque()
        self._back: dict[int, float] = {}  # of delivered chunks: when they return
        self._number = 0

    def __len__(self) -> int:
        """Number of unfinished chunks."""
        return len(self._chunks)

    def put(self, chunk: Chunk) -> None:
        self._number += 1
        self._chunks[self._number] = chunk
        self._waiting.append(self._number)

    def take(self, now: float) -> tuple[int, Chunk] | None:
        """Deliver a chunk, with its number in the queue; None if none waits."""
        number = self._next(now)
        if number is None:
            return None
        self.hold(number, now + ACK_WAIT_S)
        return number, self._chunks[number]

    def _next(self, now: float) -> int | None:
        back = min(((at, number) for number, at in self._back.items() if at <= now), default=None)
        if back is not None:
            return back[1]
        return self._waiting.popleft() if self._waiting else None

    def hold(self, number: int, until: float) -> None:
        """Deliver it to no other runner before `until`."""
        if number in self._chunks:
            self._back[number] = until

    def done(self, number: int) -> None:
        self._chunks.pop(number, None)
        self._back.pop(number, None)


class OfflineWork:
    """What the jobs of one run share. jobs: the scenario's; they are named job-0, job-1, ... in their order.

    written: called with each job's new outputs, as (job, items).
    """

    def __init__(self, environment: Environment, subjects: Subjects, jobs: Sequence[JobSpec]) -> None:
        self.written: Callable[[str, int], None] | None = None
        self.queue = WorkQueue()
        self.parts: dict[ChunkKey, Part] = {}
        self.jobs = {f"job-{number}": spec for number, spec in enumerate(jobs)}
        self._environment = environment
        self._subjects = subjects
        self._outputs = dict.fromkeys(self.jobs, 0)

    def submit(self, job: str) -> None:
        """Submit a job, as a client does."""
        spec = self.jobs[job]
        urls = {"input": f"file:///{job}.npy", "output": f"file:///{job}-outputs.npy"}
        ask = filled(SubmitJob, spec, accuracy=spec.accuracy or None, job=job, **urls)
        self._environment.publish(self._subjects.job(spec.app), ask, f"{INBOX}{job}")

    def mailboxes(self, refused: Callable[[str, str], None]) -> dict[str, Callable[[Any], None]]:
        """The inboxes for replies to `submit`. refused: called with a refused job and the reason."""

        def take(job: str, reply: Any) -> None:
            if type(reply) is Refusal:
                refused(job, reply.error.message)

        return {f"{INBOX}{job}": partial(take, job) for job in self.jobs}

    # -- the coordinator's edge

    def coordinate(self, command: Any) -> tuple[float, Any]:
        match command:
            case Accept():
                self._keep(command.route.job, encode(command.record))
            case Read():
                return STORE, WasRead(self.jobs[command.route.job].inputs, "simulated")
            case Feed():
                return STORE, self._feed(command)
            case Resume():
                return STORE, Resumed(True, frozenset(n for job, n in self.parts if job == command.route.job))
            case Assemble():
                return STORE, self._assemble(command)
            case Keep():
                job = command.record.status.job
                self._keep(job, encode(command.record))
                for number in command.drop:
                    self.parts.pop((job, number), None)
                return STORE, True
            case Conclude():
                return STORE, None
            case Abandon():
                for key in [key for key in self.parts if key[0] == command.route.job]:
                    del self.parts[key]
                return STORE, ""
            case ForgetJob():
                self._keep(command.job, None)
            case _:
                return 0.0, ValueError(f"simulated jobs cannot {type(command).__name__}")
        return STORE, None

    def _keep(self, job: str, record: bytes | None) -> None:
        self._environment.put(self._subjects.jobs_bucket, job, record)

    def _feed(self, feed: Feed) -> list[ChunkRange]:
        chunks: list[ChunkRange] = []
        number, first = feed.number, feed.first
        while len(chunks) < feed.count and first < feed.total:
            items = min(feed.chunk_items, feed.total - first)
            chunks.append(ChunkRange(number, first, items, feed.position, feed.position))
            if number not in feed.skip:
                self.queue.put(Chunk(feed.route.job, number, first, items, BODY, feed.generation))
            number, first = number + 1, first + items
        return chunks

    def _assemble(self, command: Assemble) -> Assembled | Broken:
        """Append parts to the output from its checkpoint on. Stops at a part that failed."""
        job, checkpoint = command.route.job, command.checkpoint
        cost, variants = 0.0, list[str]()
        failure, failed = "", 0
        for chunk in command.chunks:
            part = self.parts.get((job, chunk.number))
            if part is None:
                return Broken(f"output: a part of it is gone: {chunk.number}")
            if part.error:
                failure, failed = f"items {chunk.first} to {chunk.first + chunk.items - 1}: {part.error}", chunk.items
                break
            after = checkpoint.items + part.items
            checkpoint = replace(checkpoint, chunks=chunk.number + 1, items=after, bytes=after)
            cost += part.cost
            if part.variant not in variants:
                variants.append(part.variant)
        new, self._outputs[job] = checkpoint.bytes - self._outputs[job], checkpoint.bytes
        if new and self.written is not None:
            self.written(job, new)
        return Assembled(checkpoint, cost, variants, failure, failed)

    # -- the runners' edges

    def runner(self) -> "SimulatedRunnerEdge":
        """The edge of another runner."""
        return SimulatedRunnerEdge(self._environment, self, self._subjects)


class SimulatedRunnerEdge:
    """A runner's edge."""

    def __init__(self, environment: Environment, offline: OfflineWork, subjects: Subjects) -> None:
        self._environment = environment
        self._offline = offline
        self._queue = offline.queue
        self._subject = subjects.offline("part")
        self._taken: dict[ChunkKey, int] = {}

    def __call__(self, command: Any) -> tuple[float, Any]:
        queue, taken, now = self._queue, self._taken, self._environment.now
        match command:
            case TakeChunk():
                found = queue.take(now)
                if found is None:
                    return WAIT_S, None
                number, chunk = found
                taken[chunk.job, chunk.number] = number
                return STORE, chunk
            case ExtendChunks():
                for key in command.keys:
                    if key in taken:
                        queue.hold(taken[key], now + ACK_WAIT_S)
            case ReturnChunk():
                if command.key in taken:
                    queue.hold(taken.pop(command.key), now + command.delay)
            case DropChunk():
                self._done(command.key)
            case StorePart():
                part = command.part
                self._offline.parts[part.job, part.number] = part
                self._environment.publish(self._subject, PartStored(job=part.job, number=part.number))
                self._done((part.job, part.number))
            case _:
                return 0.0, ValueError(f"simulated runners cannot {type(command).__name__}")
        return STORE, None

    def _done(self, key: ChunkKey) -> None:
        number = self._taken.pop(key, None)
        if number is not None:
            self._queue.done(number)

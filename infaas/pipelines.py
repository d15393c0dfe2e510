"""Pipelines as ordinary code (InferLine, paper 004, section 3.1).

    async def driver(rpc, x):
        quick = await rpc("digits", x["image"])
        if quick.outputs["scores"].max() > 0.9:
            return quick
        return await rpc("digits-exact", x["image"])

    answer = await infaas.pipelines.run(client, driver, {"image": image})

`rpc(app, x)` begins at once and may be awaited later, so branches overlap: `await asyncio.gather(rpc("a", x), rpc("b", x))`. The driver runs in
the caller's process. A pipeline that the system runs by itself needs a file: infaas/tracing.py writes most of it (docs/pipelines.md).
"""

import asyncio
import os
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Generator
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Protocol

from msgspec import Struct

from infaas.answers import Answer
from infaas.queries import current_traceparent

if TYPE_CHECKING:
    from infaas.client import Client

Driver = Callable[["Rpc", Any], Awaitable[Any]]


class Rpc(Protocol):
    """What a driver asks apps with."""

    def __call__(self, app: str, x: Any, *, stage: str = "", **needs: Any) -> "asyncio.Future[Answer]":
        """Begin a query. app, x, needs: as for `Client.query`. stage: its name; by default the app's. The future raises Refused."""
        ...


async def run(client: "Client", driver: Driver, x: Any, *, latency_ms: float | None = None) -> Any:
    """What the driver returns for x. latency_ms: objective of the whole run; each of its queries has the deadline that follows.

    All queries of a run belong to one trace (W3C), and their ids are `<run>/<stage>/<number>`. When the driver fails, the queries that it
    has not awaited are given up. Raises what the driver raises.
    """
    return (await follow(client, driver, x, latency_ms)).returned


# -- one run


class RpcCall(Struct, eq=False):
    """One query of a run. site: the line of the driver that asked. seen: the driver has got the answer or the refusal.

    before: the calls whose answers the driver had when it asked.
    """

    app: str
    stage: str
    site: tuple[str, int]
    inputs: Any
    accuracy: float | None
    before: "list[RpcCall]"
    seen: bool = False
    answer: Answer | None = None


class AskedAnswer(asyncio.Future[Answer]):
    """The answer to a call. It knows whether the driver, or a `gather` for it, has got it."""

    def __init__(self, call: RpcCall) -> None:
        super().__init__()
        self._call = call

    def result(self) -> Answer:
        self._call.seen = True
        return super().result()

    def exception(self) -> BaseException | None:
        self._call.seen = True
        return super().exception()

    def __await__(self) -> Generator[Any, None, Answer]:
        try:
            return (yield from super().__await__())
        finally:
            self._call.seen = self._call.seen or self.done()


class DriverBranch:
    """A task of the driver that asks. before: the calls whose answers it may have from the task that began it."""

    def __init__(self, task: "asyncio.Task[Any] | None", parent: "DriverBranch | None") -> None:
        self.task = task
        self.calls: list[RpcCall] = []
        self.children: list[DriverBranch] = []
        self.before = [] if parent is None else parent.known()
        if parent is not None:
            parent.children.append(self)

    def known(self) -> list[RpcCall]:
        """The calls whose answers are there: its own, and those of tasks that it has begun and that have ended."""
        found = [*self.before, *(call for call in self.calls if call.seen)]
        for child in self.children:
            if child.task is not None and child.task.done():
                found += [call for call in child.known() if call not in found]
        return found


_branch: "ContextVar[DriverBranch | None]" = ContextVar("_branch", default=None)


class DriverRun:
    """One run of a driver, with all that it asked. x: its inputs."""

    def __init__(self, client: "Client", x: Any, latency_ms: float | None) -> None:
        self._client = client
        self._deadline = None if latency_ms is None else time.time() + latency_ms / 1000.0
        self._id = os.urandom(4).hex()
        self._trace = current_traceparent() or f"00-{os.urandom(16).hex()}-{os.urandom(8).hex()}-01"
        self._numbers: Counter[str] = Counter()
        self._asking: list[tuple[AskedAnswer, asyncio.Task[None]]] = []
        self.x = x
        self.calls: list[RpcCall] = []
        self.returned: Any = None
        self.seconds = 0.0

    def rpc(self, app: str, x: Any, *, stage: str = "", **needs: Any) -> AskedAnswer:
        frame = sys._getframe(1)
        branch, task = _branch.get(), asyncio.current_task()
        if branch is None or branch.task is not task:
            branch = DriverBranch(task, branch)
            _branch.set(branch)
        site = (frame.f_code.co_filename, frame.f_lineno)
        call = RpcCall(app, stage, site, x, needs.get("accuracy"), branch.known())
        branch.calls.append(call)
        self.calls.append(call)
        name = stage or app
        self._numbers[name] += 1
        needs.setdefault("id", f"{self._id}/{name}/{self._numbers[name]}")
        if self._deadline is not None:
            needs.setdefault("deadline", self._deadline)
        asked = AskedAnswer(call)
        asking = asyncio.create_task(self._ask(asked, call, needs))
        asked.add_done_callback(lambda _: asking.cancel())  # if the driver gives it up
        self._asking.append((asked, asking))
        return asked

    async def _ask(self, asked: AskedAnswer, call: RpcCall, needs: Any) -> None:
        try:
            call.answer = await self._client.query(call.app, call.inputs, traceparent=self._trace, **needs)
        except asyncio.CancelledError:
            asked.cancel()
            raise
        except Exception as error:  # it is the driver's
            if not asked.done():
                asked.set_exception(error)
        else:
            if not asked.done():
                asked.set_result(call.answer)

    async def finish(self) -> None:
        """Wait for what the driver has not awaited. Raises its refusals."""
        ahead = zip(self.calls, self._asking, strict=True)
        await asyncio.gather(*(asked for call, (asked, _) in ahead if not call.seen))

    async def give_up(self) -> None:
        """End what is under way."""
        for _, asking in self._asking:
            asking.cancel()
        await asyncio.gather(*(asked for asked, _ in self._asking), return_exceptions=True)


async def follow(client: "Client", driver: Driver, x: Any, latency_ms: float | None = None) -> DriverRun:
    one = DriverRun(client, x, latency_ms)
    began = time.monotonic()
    token = _branch.set(None)
    try:
        one.returned = await driver(one.rpc, x)
        await one.finish()
    finally:
        _branch.reset(token)
        await one.give_up()
    one.seconds = time.monotonic() - began
    return one

"""The client without asyncio: a background thread runs the asyncio client, and each method waits for its result.

    with infaas.connect_blocking() as system:
        answer = system.query("digits", images, latency_ms=20)

Any number of threads may share one client. Their queries run concurrently.
"""

import asyncio
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Coroutine, Sequence
from functools import update_wrapper
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Concatenate, Literal, ParamSpec, Self, TypeVar, Unpack, overload

from msgspec.structs import asdict, replace

from bus.messages.events import OutcomeEvent
from bus.messages.public import RegistrationStatus
from bus.port import KeyValueEntry, StreamSpec
from infaas.answers import Answer
from infaas.client import Client
from infaas.connecting import connect
from infaas.errors import BadInput, NotConnected, Refused
from infaas.queries import Needs

if TYPE_CHECKING:
    from services.shell.runtime.runtime import Runtime

END_S = 2.0  # s that what runs in this process may take to end
LOOK_S = 0.01
P = ParamSpec("P")
T = TypeVar("T")


def _waiting(method: Callable[Concatenate[Client, P], Coroutine[Any, Any, T]]) -> "Callable[Concatenate[Infaas, P], T]":
    """The method of the asyncio client as a blocking one."""

    def call(self: "Infaas", /, *args: P.args, **kwargs: P.kwargs) -> T:
        return self._run(method(self._client, *args, **kwargs))

    update_wrapper(call, method)
    return call


class Infaas:
    """A blocking connection to one system. Arguments and errors as for `infaas.connect` and `infaas.Client`."""

    def __init__(
        self,
        url: str | None = None,
        *,
        data_dir: str | Path | None = None,
        prefix: str | None = None,
        timeout: float = 5.0,
        **login: str | None,
    ) -> None:
        self._begin(connect(url, data_dir=data_dir, prefix=prefix, timeout=timeout, **login).open())

    def _begin(self, opening: Coroutine[Any, Any, Client]) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="infaas-client", daemon=True)
        self._thread.start()
        self._closed = False
        try:
            self._client = self._run(opening)
        except BaseException:
            self._stop()
            raise

    if TYPE_CHECKING:

        @overload
        def query(
            self,
            app: str | None,
            x: Any,
            *,
            timeout: float | None = None,
            raise_refused: Literal[True] = True,
            traceparent: str | None = None,
            **needs: Unpack[Needs],
        ) -> Answer: ...
        @overload
        def query(
            self,
            app: str | None,
            x: Any,
            *,
            timeout: float | None = None,
            raise_refused: Literal[False],
            traceparent: str | None = None,
            **needs: Unpack[Needs],
        ) -> Answer | Refused: ...
        def query(self, *args: Any, **needs: Any) -> Any: ...

    else:
        query = _waiting(Client.query)
    feedback = _waiting(Client.feedback)
    apps = _waiting(Client.apps)
    models = _waiting(Client.models)
    variants = _waiting(Client.variants)
    workers = _waiting(Client.workers)
    pipelines = _waiting(Client.pipelines)
    selection = _waiting(Client.selection)
    explain = _waiting(Client.explain)
    admin = _waiting(Client.admin)
    register = _waiting(Client.register)
    cancel_registration = _waiting(Client.cancel_registration)
    submit = _waiting(Client.submit)
    jobs = _waiting(Client.jobs)
    job = _waiting(Client.job)
    wait_job = _waiting(Client.wait_job)
    cancel_job = _waiting(Client.cancel_job)
    save_output = _waiting(Client.save_output)

    def close(self) -> None:
        """Disconnect. A second call does nothing."""
        if not self._closed:
            try:
                self._run(self._client.close())
            finally:
                self._stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        if self._closed:
            work.close()
            raise NotConnected("this client is closed")
        if threading.current_thread() is self._thread:
            work.close()
            raise RuntimeError("a callback cannot call the blocking client: call it from another thread")
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()  # after Ctrl-C, no query is left in flight
            raise

    def _stop(self) -> None:
        self._closed = True
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


connect_blocking = Infaas  # connects, and waits for the connection


def _told() -> dict[str, Any]:
    """Options of a registration that say on stderr what was understood, and the progress."""

    def say(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    last = [""]

    def on_progress(status: RegistrationStatus) -> None:
        if status.step and status.step != last[0]:
            last[0] = status.step
            say(f"{100 * status.progress:3.0f} %  {status.step}")

    return {"on_progress": on_progress, "say": say}


def register(
    model: Any,
    x: Any,
    y: Any = None,
    app: str = "",
    *,
    name: str | None = None,
    metric: str | None = None,
    data_dir: str | Path | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Register a trained model with the system that the commands find, and return what `infaas register --json` prints.

        infaas.register(classifier, x_test, y_test, app="wine")

    Arguments as for `Client.register`; without y, accuracy is agreement with the model itself. What was understood, and the progress, go to stderr.
    """
    if not app:
        raise BadInput("app: name the app that the model serves: infaas.register(model, x, y, app='...')")
    with connect_blocking(data_dir=data_dir) as system:
        return system.register(model, x, y, app=app, name=name, metric=metric, **_told() | options)


# -- without a system: in this process

# The services that share this process, in the order in which they start; the gateway, if there is a port for it.
HERE = ("registrar", "monitor", "executor", "dispatcher", "model-autoscaler")
LACKS = {
    "fail-over": "a model that crashes ends this process, and the queries in it have no answer",
    "foreign clients": "there is no NATS server; other programs ask over HTTP, if `port` is given",
    "history in SQL": "the last {} outcomes are in memory: `outcomes()`",
    "more machines": "nothing plans instances, machines or pipelines; queries and the load of this machine decide",
    "offline jobs": "there is no `submit`",
}  # what this composition does not have, and what is instead
MOST_OUTCOMES = 10_000
LAST_BYTES = 2**16  # of events that are kept for nobody


class Served(Infaas):
    """A system within this process, on a bus within it. `infaas.serve` makes it; it has what `infaas.connect_blocking` gives, and:

    `outcomes()`, the history; `status()`, with what this composition lacks; `close()`, which ends it. url: of its gateway; "" without one.
    """

    def __init__(self, port: int = 0) -> None:
        from services.shell.host.process import port_is_free  # noqa: PLC0415  (to connect takes none of it)

        if port and not port_is_free(port):
            raise BadInput(f"port: {port} is in use; give another one")
        self.url = f"http://127.0.0.1:{port}" if port else ""
        self._port = port
        self._outcomes: deque[OutcomeEvent] = deque(maxlen=MOST_OUTCOMES)
        self._runtimes: list[Runtime] = []
        self._directory = TemporaryDirectory(prefix="infaas-", ignore_cleanup_errors=True)
        self._registering: asyncio.Task[Any] | None = None
        self._begin(self._start())

    async def _start(self) -> Client:
        from bus.memory import MemoryBus  # noqa: PLC0415
        from services.shell.runtime.serve import together  # noqa: PLC0415
        from services.shell.settings import SettingsError, load  # noqa: PLC0415

        try:
            given = load()
            settings = replace(
                given,
                data_dir=self._directory.name,
                bus=replace(given.bus, url=""),
                store=replace(given.store, dsn=""),
                worker=replace(given.worker, name="here"),
                gateway=replace(given.gateway, port=self._port, grpc_port=0),
            )
            bus = MemoryBus(name="infaas.serve")
            client = await Client(bus, prefix=settings.prefix).open()
            await bus.ensure_stream(
                StreamSpec(
                    client.subjects.event_stream, (client.subjects.event("*"),), "limits", LAST_BYTES, full="oldest"
                )
            )
            self._runtimes = await together((*HERE, *["gateway"] * bool(self._port)))(settings, bus)
        except (SettingsError, SystemExit) as error:
            raise BadInput(str(error)) from None
        for runtime in self._runtimes:
            runtime.sealed = self._record
            await runtime.start()
        return client

    def _record(self, kind: str, events: Sequence[Any]) -> None:
        if kind == OutcomeEvent.kind:
            self._outcomes.extend(events)

    def outcomes(self, app: str | None = None) -> list[dict[str, Any]]:
        """The last outcomes, the oldest first, with the columns of `infaas.outcomes`. One is there a moment after its answer."""
        rows = [asdict(one) for one in self._outcomes.copy() if app in (None, one.app)]
        return [row | {"uid": row["uid"].hex()} for row in rows]

    def status(self) -> dict[str, Any]:
        """What `infaas status` shows of a system: its lists, what it `lacks`, and its history in short (`outcomes`, by `answered` and codes)."""
        counts = Counter(one.code or one.outcome for one in self._outcomes.copy())
        return {
            "lacks": {name: text.format(MOST_OUTCOMES) for name, text in LACKS.items()},
            "apps": self.apps(),
            "variants": self.variants(),
            "workers": self.workers(),
            "outcomes": dict(counts),
            "gateway": self.url or None,
        }

    async def _serve_first(self, model: Any, x: Any, y: Any, app: str, options: dict[str, Any]) -> None:
        """Return once the app is in the catalogue: its first variant answers while the others are made."""
        from services.core.catalog import app_key  # noqa: PLC0415

        client, there = self._client, asyncio.Event()
        ours = app_key(app)

        def changed(entry: KeyValueEntry | None) -> None:
            if entry is not None and entry.key == ours:
                there.set()

        watch = await (await client.bus.key_value(client.subjects.catalog_bucket)).watch(changed)
        registering = self._registering = asyncio.ensure_future(client.register(model, x, y, app=app, **options))
        waiting = asyncio.ensure_future(there.wait())
        await asyncio.wait([registering, waiting], return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        await watch.drain()
        if registering.done():
            registering.result()
        if self._port:
            gateway = self._runtimes[-1]
            while gateway.missing(time.time()) and not gateway.failed.done():  # noqa: ASYNC110  (its server is not asyncio's)
                await asyncio.sleep(LOOK_S)

    def close(self) -> None:
        """End the system. A second call does nothing."""
        if not self._closed:
            self._run(self._end())
            super().close()
            self._directory.cleanup()

    async def _end(self) -> None:
        if self._registering is not None:
            self._registering.cancel()
            await asyncio.wait([self._registering])
        for runtime in reversed(self._runtimes):
            await runtime.stop(END_S)


def serve(
    model: Any,
    x: Any,
    y: Any = None,
    app: str = "m",
    *,
    port: int = 0,
    **options: Any,
) -> Served:
    """Serve a trained model in this process, without a system, and return what `infaas.connect_blocking()` gives.

        with infaas.serve(classifier, x_test, y_test, app="wine") as system:
            answer = system.query("wine", x_test[:1], latency_ms=50)

    model, x, y, options: as for `infaas.register`. It returns when the first variant answers; the others are made meanwhile, in processes of
    their own. port: of an HTTP gateway on 127.0.0.1; 0: none. Settings come from variables (INFAAS_SECTION__FIELD). What a system has and this
    has not, `status()` says.
    """
    system = Served(port)
    try:
        system._run(system._serve_first(model, x, y, app, _told() | options))
    except BaseException:
        system.close()
        raise
    return system

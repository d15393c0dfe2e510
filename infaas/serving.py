"""`infaas.serve`: a system within the process that calls it, on a bus within it, without a server."""

import asyncio
import time
from collections import Counter, deque
from collections.abc import Sequence
from tempfile import TemporaryDirectory
from typing import Any

from msgspec.structs import asdict, replace

from bus.memory import MemoryBus
from bus.messages.events import OutcomeEvent
from bus.port import KeyValueEntry, StreamSpec
from infaas.blocking import Infaas, told
from infaas.client import Client
from infaas.errors import BadInput
from services.core.catalog import app_key
from services.shell.host.process import port_is_free
from services.shell.runtime.runtime import Runtime
from services.shell.runtime.serve import together
from services.shell.settings import SettingsError, load

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
END_S = 2.0  # s that what runs in this process may take to end
LOOK_S = 0.01
LAST_BYTES = 2**16  # of events that are kept for nobody


class Served(Infaas):
    """A system within this process, on a bus within it. `infaas.serve` makes it; it has what `infaas.connect_blocking` gives, and:

    `outcomes()`, the history; `status()`, with what this composition lacks; `close()`, which ends it. url: of its gateway; "" without one.
    """

    def __init__(self, port: int = 0) -> None:

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
        system._run(system._serve_first(model, x, y, app, told() | options))
    except BaseException:
        system.close()
        raise
    return system

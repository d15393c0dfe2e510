"""Three real NATS servers on loopback, and the network between them, which a test can cut."""

import asyncio
import contextlib
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bus.natsbus import NatsBus
from tests.support.servers.nats import NatsServer, free_port, skip_without_nats

NAMES = ("n1", "n2", "n3")
USER = "tester:secret"


class Network:
    """What servers say to each other goes through here: one door for each ordered pair. A cut line keeps what is said, and says nothing."""

    def __init__(self, routes: dict[str, int]) -> None:
        """routes: each server's port for the others."""
        self.doors: dict[tuple[str, str], int] = {}
        self._routes = routes
        self._cut: set[str] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._do(self._open())

    def cut(self, name: str) -> None:
        """Nobody hears this one any more, and it hears nobody."""
        self._do(self._change(lambda: self._cut.add(name)))

    def heal(self) -> None:
        self._do(self._change(self._cut.clear))

    def close(self) -> None:
        self._do(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    def _do(self, work: Any) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(60)

    async def _open(self) -> None:
        self._changed = asyncio.Condition()
        self._tasks: set[asyncio.Task[None]] = set()
        self._servers = []
        for here in self._routes:
            for there in self._routes:
                if here != there:
                    server = await asyncio.start_server(self._door(here, there), "127.0.0.1", 0)
                    self._servers.append(server)
                    self.doors[here, there] = server.sockets[0].getsockname()[1]

    def _door(self, here: str, there: str) -> Any:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            this = asyncio.current_task()
            assert this is not None
            self._tasks.add(this)
            this.add_done_callback(self._tasks.discard)
            try:
                onward, back = await asyncio.open_connection("127.0.0.1", self._routes[there])
            except (OSError, asyncio.CancelledError):
                writer.close()
                return
            both = {here, there}
            for source, sink in ((reader, back), (onward, writer)):
                task = self._loop.create_task(self._pump(both, source, sink))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

        return serve

    async def _pump(self, both: set[str], source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        try:
            while data := await source.read(2**16):
                async with self._changed:
                    await self._changed.wait_for(lambda: not both & self._cut)
                sink.write(data)
                await sink.drain()
        except OSError:
            pass
        finally:
            sink.close()

    async def _change(self, change: Any) -> None:
        async with self._changed:
            change()
            self._changed.notify_all()

    async def _close(self) -> None:
        for server in self._servers:
            server.close()
        await asyncio.sleep(0)
        while self._tasks:
            await asyncio.sleep(0)  # what has just come begins, and then closes what it has
            for task in list(self._tasks):
                task.cancel()
            if self._tasks:
                await asyncio.wait(self._tasks)
        await asyncio.sleep(0)


class Cluster:
    """names: of its servers, which run one by one as `start` is called. url: of all of them."""

    def __init__(self, directory: Path, names: tuple[str, ...] = NAMES) -> None:
        self.servers: dict[str, NatsServer] = {}
        routes = {name: free_port() for name in names}
        self.network = Network(routes)
        for name in names:
            others = ", ".join(
                f'"nats://127.0.0.1:{self.network.doors[name, other]}"' for other in names if other != name
            )
            # What they tell each other of their addresses leads nowhere: only the doors do.
            extra = (
                f"server_name: {name}\ncluster {{\n  name: test\n"
                f'  listen: "127.0.0.1:{routes[name]}"\n  advertise: "127.0.0.1:1"\n  no_advertise: true\n'
                f"  connect_retries: 1\n  pool_size: -1\n  routes: [ {others} ]\n}}\n"
            )
            self.servers[name] = NatsServer(directory / name, extra=extra)
        self.url = ",".join(server.url for server in self.servers.values())

    def start(self) -> None:
        for server in self.servers.values():
            server.start()

    def close(self) -> None:
        for server in self.servers.values():
            server.stop(kill=True)
        self.network.close()


async def api(bus: NatsBus, verb: str, body: Any = None) -> dict[str, Any]:
    """One request to JetStream's API as it is."""
    data = b"" if body is None else json.dumps(body).encode()
    found: dict[str, Any] = json.loads((await bus.request(f"$JS.API.{verb}", data, 10.0)).data)
    return found


async def leader(bus: NatsBus, stream: str) -> str:
    """The server that leads a stream; empty while there is none."""
    with contextlib.suppress(Exception):
        return str((await api(bus, f"STREAM.INFO.{stream}"))["cluster"].get("leader", ""))
    return ""


async def whole(bus: NatsBus, stream: str, replicas: int = 3) -> bool:
    """Whether it has so many replicas and all have everything."""
    with contextlib.suppress(Exception):
        found = await api(bus, f"STREAM.INFO.{stream}")
        others = found["cluster"].get("replicas", [])
        return found["config"]["num_replicas"] == replicas and all(other["current"] for other in others)
    return False


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    """Three servers that have been started."""
    skip_without_nats()
    made = Cluster(tmp_path / "cluster")
    try:
        made.start()
        yield made
    finally:
        made.close()

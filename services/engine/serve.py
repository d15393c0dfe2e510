"""The engine proxy's process: `infaas run engine-proxy`."""

import asyncio
import logging
import signal
from collections.abc import Iterable

from services.core.metric import MetricFamily
from services.core.settings import Settings
from services.engine.proxy import EngineClient, Proxy
from services.shell.http import HttpListener, Pages, Reply, plain, serve_pages, state_page
from services.shell.metrics.counts import process_families
from services.shell.runtime import telemetry

log = logging.getLogger(__name__)

_LOOPBACK = ("127.0.0.1", "::1", "localhost")
_GRACE_S = 5.0


def serve(settings: Settings) -> int:
    """Serve until SIGTERM or Ctrl-C; returns the exit code. Raises SystemExit with the reason if it cannot listen."""
    telemetry.set_up(settings.log_level, "engine-proxy")
    return asyncio.run(_main(settings))


async def _main(settings: Settings) -> int:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    asked = settings.engine
    proxy = Proxy(EngineClient(asked.socket), asked.token)
    listener = HttpListener(proxy.answer, proxy.refuse)
    try:
        await listener.open(asked.address, asked.port)
    except OSError as error:
        reason = error.strerror or error
        raise SystemExit(
            f"cannot listen on {asked.address}:{asked.port}: {reason}; set engine.address or engine.port"
        ) from error
    metrics = await _pages(settings, proxy)
    log.info("the engine proxy runs", extra={"address": asked.address, "port": listener.port, "socket": asked.socket})
    if not asked.token and asked.address not in _LOOPBACK:
        log.warning(
            "anybody who reaches this address may read the swarm and set labels infaas.*: engine.token is not set"
        )
    if missing := await proxy.missing():
        log.warning("not ready: it lacks %s", missing)
    await stop.wait()
    await listener.close(_GRACE_S)
    if metrics is not None:
        await metrics.close(0.0)
    log.info("the engine proxy stopped")
    return 0


async def _pages(settings: Settings, proxy: Proxy) -> HttpListener | None:
    """Serve /healthz, /readyz, /startz and /metrics at `metrics.port`, as every service does."""
    up = False

    async def health(_: str) -> Reply:
        return plain(200, "ok\n")

    async def ready(_: str) -> Reply:
        nonlocal up
        missing = await proxy.missing()
        up = up or not missing
        return state_page("ready", [missing] if missing else [])

    async def startup(accept: str) -> Reply:
        """200 from the first readiness on: an update of a proxy that cannot reach the socket must not count as done."""
        return plain(200, "up\n") if up else await ready(accept)

    async def metrics(accept: str) -> Reply:
        from services.shell.metrics.exposition import page  # noqa: PLC0415  (prometheus_client: only where somebody asks)

        return page([*process_families(), *families(proxy)], settings.metrics.series, accept)

    pages: Pages = {"/healthz": health, "/readyz": ready, "/startz": startup, "/metrics": metrics}
    asked = settings.metrics
    if not asked.enabled or not asked.port:
        return None
    try:
        return await serve_pages(asked.host, asked.port, pages)
    except OSError as error:
        raise SystemExit(f"cannot listen on {asked.host}:{asked.port} (metrics.port): {error.strerror}") from error


def families(proxy: Proxy) -> Iterable[MetricFamily]:
    """The proxy's own metrics."""
    ended = {"passed": proxy.passed, "refused": proxy.refused, "failed": proxy.failed}
    return (
        MetricFamily(
            "infaas_engine_requests_total", "counter", "Requests to the engine proxy, by what became of them."
        ).add_all(ended, "outcome"),
        MetricFamily("infaas_engine_label_changes_total", "counter", "Nodes whose labels were changed.").add(
            proxy.changes
        ),
    )

"""The page of a whole system, and where its processes' pages are."""

import json
import os
import signal
import socket
import subprocess
import sys

import pytest

from services.core.parts import Missing
from services.core.settings import MetricsSettings
from services.shell.host.supervise import Child, Supervisor
from services.shell.http import fetch
from services.shell.metrics import system as system_module
from services.shell.metrics.exporter import Exporter
from services.shell.metrics.system import SystemMetrics, SystemPage
from tests.support.clients.responders import until
from tests.support.servers.nats import free_port, run

HOST = "127.0.0.1"


def claims(busy: set[int]) -> tuple[list[int], object]:
    taken: list[int] = []

    def take(port: int) -> bool:
        if port in busy or port in taken:
            return False
        taken.append(port)
        return True

    return taken, take


def hub(base: int | None, busy: set[int], recorded: int | None = None, **settings: object) -> SystemMetrics:
    _, take = claims(busy)
    return SystemMetrics(MetricsSettings(**settings), base, recorded, Supervisor(), take, lambda: 4711)


def test_ports() -> None:
    async def main() -> None:
        assert hub(None, set()).port == 9100
        assert hub(None, set(), port=7000).port == 7000
        assert hub(20000, set(), port=7000).port == 20010
        assert hub(None, {9100}, recorded=9300).port == 9300
        assert hub(20000, {20010}).port == 4711  # a service without metrics at the right place is better than none
        off = hub(None, set(), enabled=False)
        assert (off.port, off.port_for("a"), await off.open()) == (0, 0, None)
        some = hub(None, {9102})
        assert [some.port_for(name) for name in ("a", "b", "a", "c")] == [9101, 9103, 9101, 9104]
        some.remove(["a", "never seen"])
        assert [some.port_for(name) for name in ("d", "b", "e")] == [9101, 9103, 9105]

    run(main())


def test_one_page_of_all_processes_and_the_truth_about_them() -> None:
    async def page(port: int, path: str) -> tuple[int, str]:
        found = await fetch(HOST, port, path, 20.0)
        return found.status, found.text

    async def main() -> None:
        supervisor = Supervisor()
        ports = [free_port() for _ in range(3)]
        it = SystemMetrics(MetricsSettings(port=ports[0]), None, None, supervisor, lambda _: True, lambda: ports[1])
        it._next = ports[1]
        assert await it.open() == f"http://{HOST}:{ports[0]}/metrics"
        assert it.port_for("service") == ports[1]
        service = Exporter("service", MetricsSettings(port=ports[1]))
        await service.open()
        supervisor.start(
            Child("sleeper", lambda: subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]))
        )
        status, text = await page(ports[0], "/metrics")
        assert status == 200
        assert 'infaas_process_info{process="service",service="service"} 1.0\n' in text
        assert 'infaas_part_up{part="sleeper",process="up"} 1.0\n' in text
        assert 'infaas_part_restarts_total{part="sleeper",process="up"} 0.0\n' in text
        assert (await page(ports[0], "/healthz"))[0] == 200

        it.started = True
        status, text = await page(ports[0], "/readyz")
        assert (status, json.loads(text)["missing"]) == (503, ["service: a connection to NATS"])
        it.started = False
        assert "the system: it is starting or stopping" in (await page(ports[0], "/readyz"))[1]
        it.started = True
        await service.close()
        status, text = await page(ports[0], "/healthz")
        assert (status, json.loads(text)["missing"]) == (503, ["service: does not answer"])
        assert (await page(ports[0], "/metrics"))[0] == 200  # what is there is shown all the same
        await supervisor.stop()
        assert "sleeper: does not run" in (await page(ports[0], "/readyz"))[1]
        await it.close()

    run(main())


def test_what_queries_need_and_the_figure_that_prometheus_reads() -> None:
    async def page(port: int, path: str) -> str:
        return (await fetch(HOST, port, path, 20.0)).text

    async def main() -> None:
        supervisor, port = Supervisor(), free_port()
        it = SystemMetrics(MetricsSettings(port=port), None, None, supervisor, lambda _: True, lambda: port)
        await it.open()
        it.started = True
        system = SystemPage(it.page)
        assert await system.missing() == []
        assert 'infaas_ready{process="up"} 1.0\n' in await page(port, "/metrics")

        def sleeper() -> subprocess.Popen[bytes]:
            return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])

        supervisor.start(Child("history", sleeper, serves=False))
        await supervisor.stop()
        await until(lambda: not supervisor.pids)
        says = json.loads(await page(port, "/readyz"))
        assert says == {"ready": False, "serves": True, "missing": ["history: does not run"]}
        text = await page(port, "/metrics")
        assert 'infaas_ready{process="up"} 0.0\n' in text
        assert 'infaas_part_hangs_total{part="history",process="up"} 0.0\n' in text

        async def told() -> bool:  # an answer is good for those who ask a moment later
            return await system.missing() == [Missing("history: does not run", serves=False)]

        await until(told)
        await it.close()
        assert await SystemPage(it.page).missing() is None

    run(main())


def test_nobody_waits_for_the_page_of_a_process_that_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system_module, "PATIENCE", 1e6)  # s

    async def main() -> None:
        supervisor, port = Supervisor(), free_port()
        with socket.create_server((HOST, 0)) as silent:
            it = SystemMetrics(
                MetricsSettings(port=port), None, None, supervisor, lambda _: True, lambda: silent.getsockname()[1]
            )
            await it.open()
            it._next = it._settings.port + 1_000_000  # no port is near
            it.port_for("stopped")
            command = [sys.executable, "-c", "import time; time.sleep(600)"]
            supervisor.start(Child("stopped", lambda: subprocess.Popen(command), hung=1e9))
            os.kill(supervisor.pids["stopped"], signal.SIGSTOP)
            says = await fetch(HOST, port, "/readyz", 240.0)
            assert "stopped: silent for" in says.text
            os.kill(supervisor.pids["stopped"], signal.SIGCONT)
            await supervisor.stop()
            await it.close()

    run(main())

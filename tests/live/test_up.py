"""`infaas up`: a whole system in one command, and nothing left of it afterwards."""

import asyncio
import json
import os
import re
import signal
import socket
import stat
import subprocess
import urllib.request
from collections.abc import Iterator
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

import psycopg
import pytest

import infaas as infaas_client
from bus.codec import decode, encode
from bus.messages.fleet import ExecutorExited
from bus.messages.public import Listing, ListRequest
from bus.natsbus import NatsBus
from bus.subjects import Subjects
from tests.support.models import tiny_models
from tests.support.servers.nats import run
from tests.support.servers.processes import about, alive, eventually, infaas, living_of, program, read_line, stands_by

SUBJECTS = Subjects()


def up(directory: Path, *options: str, **more: str) -> AbstractContextManager["subprocess.Popen[str]"]:
    """Start `infaas up`."""
    errors = directory.parent / f"{directory.name}.err"
    return program("infaas.cli", "up", "--data-dir", str(directory), *options, errors=errors, **more)


class System:
    """A system that runs: its process, directory and what it printed."""

    def __init__(self, process: subprocess.Popen[str], directory: Path) -> None:
        self.process = process
        self.directory = directory
        self.urls = json.loads(read_line(process))
        self.ready = read_line(process)

    def pids(self, part: str) -> list[int]:
        """Processes whose command line has this text, but those that stand by."""
        return [pid for pid in living_of(self.directory) if part in _command(pid) and not stands_by(pid)]


def _command(pid: int) -> str:
    return about(pid, "cmdline").replace("\0", " ")


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    directory = tmp_path_factory.mktemp("up") / "data"
    with up(directory, "--json", "--dispatchers", "2", "--no-dashboard", "--no-gateway") as process:
        yield System(process, directory)


async def workers(url: str) -> list[dict]:
    bus = await NatsBus.connect(url, name="test")
    try:
        reply = await bus.request(SUBJECTS.list("workers"), encode(ListRequest()), 30.0)
        return decode(Listing, reply.data).items
    finally:
        await bus.close()


def live_workers(url: str) -> list[str]:
    return [item["worker"] for item in run(workers(url)) if any(device["alive"] for device in item["devices"])]


def test_it_prints_its_urls_and_then_that_it_is_ready(system: System) -> None:
    assert list(system.urls) == ["nats", "sql", "dashboard", "gateway", "gateway_grpc", "metrics"]
    assert system.urls["nats"].startswith("nats://")
    assert system.urls["gateway"] is system.urls["gateway_grpc"] is None  # as --no-gateway has it
    assert system.ready.startswith("ready")
    assert eventually(lambda: live_workers(system.urls["nats"]) == ["w0"])  # each dispatcher hears of it by itself


def test_the_dsn_reads_and_does_not_write(system: System) -> None:
    with psycopg.connect(system.urls["sql"], autocommit=True) as connection:
        assert connection.execute("SELECT current_user").fetchall() == [("infaas_reader",)]
        connection.execute("SELECT count(*) FROM infaas.query_outcomes")
        with pytest.raises(psycopg.Error):
            connection.execute("CREATE TABLE infaas.mine (i int)")


def test_everything_with_a_password_in_it_is_private(system: System) -> None:
    files = [path for path in system.directory.glob("*") if path.is_file()]
    assert {"endpoints.json", "nats.secret", "postgres.secret", "nats.conf"} <= {path.name for path in files}
    assert all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in files)
    secrets = [path.read_text().strip() for path in files if path.suffix == ".secret"]
    for log in (system.directory / "logs").glob("*"):
        assert not [secret for secret in secrets if secret in log.read_text()]
    for pid in living_of(system.directory):
        assert not [secret for secret in secrets if secret in _command(pid)]


def test_doctor_finds_it_well(system: System) -> None:
    parts = ("nats", "jetstream", "outcomes", "sql", "dispatchers", "workers", "clock", "registrar", "parts")
    found: list[dict[str, str]] = []

    def well() -> bool:  # what it asks may answer late on a busy machine
        done = infaas("doctor", "--data-dir", str(system.directory), "--json")
        found.append({check["check"]: check["state"] for check in json.loads(done.stdout)["checks"]})
        return all(found[-1][name] == "ok" for name in parts)

    assert eventually(well), found[-1]


def test_doctor_names_a_wrong_password(system: System) -> None:
    wrong = system.urls["nats"].replace("nats://infaas:", "nats://infaas:x")
    done = infaas("doctor", INFAAS_NATS_URL=wrong, INFAAS_SQL_DSN=system.urls["sql"])
    assert done.returncode == 1
    assert "password" in done.stdout
    assert "Traceback" not in done.stderr


def test_a_service_joins_from_another_terminal(system: System) -> None:
    log = system.directory.parent / "joins.err"
    command = ("infaas.cli", "run", "dispatcher", "--data-dir", str(system.directory))
    with program(*command, errors=log) as process:
        assert eventually(lambda: "dispatcher runs" in log.read_text())
        process.terminate()
        assert process.wait(60) == 0


def test_a_killed_executor_is_announced_at_once_and_comes_back(system: System) -> None:
    async def main() -> ExecutorExited:
        import asyncio

        bus = await NatsBus.connect(system.urls["nats"], name="test")
        told: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        await bus.subscribe(SUBJECTS.exited(), lambda delivery: told.set_result(delivery.data))
        await bus.flush()
        os.kill(first, signal.SIGKILL)
        data = await asyncio.wait_for(told, 60)
        await bus.close()
        return decode(ExecutorExited, data)

    assert eventually(lambda: len(system.pids("infaas.cli.run executor")) == 1)
    [first] = system.pids("infaas.cli.run executor")
    fact = run(main())
    assert (fact.worker, fact.device, fact.reason) == ("w0", "cpu", "killed by SIGKILL")
    assert eventually(lambda: system.pids("infaas.cli.run executor") not in ([], [first]))
    assert eventually(lambda: live_workers(system.urls["nats"]) == ["w0"])


@pytest.mark.parametrize("server", ["nats-server", "bin/postgres"])
def test_killed_servers_come_back_at_the_same_address(system: System, server: str) -> None:
    assert eventually(lambda: len(system.pids(server)) == 1)
    [first] = system.pids(server)
    os.kill(first, signal.SIGKILL)
    assert eventually(lambda: not alive(first))
    assert eventually(lambda: system.pids(server) not in ([], [first]))
    assert eventually(partial(_answers, system))
    assert eventually(lambda: not _zombies(system.process.pid)), "what the killed server has left"
    wanted = r"(?s)up +WARNING \w+ ended \(killed by SIGKILL\)\n.* up +WARNING \w+ was started again \("
    name = server.removeprefix("bin/")[:4]
    logs = ("logs", name, "--lines", "100000", "--data-dir", str(system.directory))  # a server says much as it recovers
    assert eventually(lambda: re.search(wanted, infaas(*logs).stdout)), infaas(*logs).stdout[-5000:]
    said = (system.directory / "logs" / "registrar.log").read_text()
    assert "Traceback" not in said, [line for line in said.splitlines() if "Traceback" in line]  # it fails in a line


def _zombies(parent: int) -> list[int]:
    children = [pid for task in Path(f"/proc/{parent}/task").glob("*/children") for pid in task.read_text().split()]
    return [int(pid) for pid in children if ") Z " in about(int(pid), "stat")]


def test_a_closed_terminal_ends_nothing(system: System) -> None:
    log = system.directory / "logs" / "up.log"
    system.process.send_signal(signal.SIGHUP)
    assert eventually(lambda: f"`kill {system.process.pid}` stops it" in log.read_text())
    assert eventually(partial(_answers, system))
    assert system.process.poll() is None


def _answers(system: System) -> bool:
    try:
        with psycopg.connect(system.urls["sql"], connect_timeout=30):
            return live_workers(system.urls["nats"]) == ["w0"]
    except Exception:  # whatever a server that is coming back says
        return False


def test_however_it_ends_nothing_is_left_and_the_next_start_finds_it_as_it_was(tmp_path: Path) -> None:
    """By SIGTERM, killed, and by Ctrl-C."""
    directory = tmp_path / "data"
    with up(directory, "--json") as process:
        first = System(process, directory)
        pids = living_of(directory)
        assert len(pids) > 6
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
        assert not [pid for pid in pids if alive(pid)]
        assert living_of(directory) == []
    done = infaas("doctor", "--data-dir", str(directory))
    assert "is stopped" in done.stdout
    config = tmp_path / "infaas.toml"
    config.write_text("[monitor]\nsample_s = 3\n")
    with up(directory, "--json", "--config", str(config)) as process:
        second = System(process, directory)
        # Credentials stay; a port may have been taken meanwhile.
        assert second.urls["nats"].rpartition("@")[0] == first.urls["nats"].rpartition("@")[0]
        shown = infaas("settings", "--running", "--data-dir", str(directory)).stdout
        assert re.search(rf"monitor\.sample_s +3 +2 +{config}", shown)
        process.kill()
        process.wait()
        assert eventually(lambda: not living_of(directory))
    taken = urlsplit(second.urls["metrics"]).port
    assert taken is not None
    with socket.create_server(("127.0.0.1", taken)), up(directory, "--json") as process:
        third = System(process, directory)
        notices = (tmp_path / "data.err").read_text()
        assert f"port {taken} is busy: metrics has port {urlsplit(third.urls['metrics']).port} instead" in notices
        assert f"the last start had --config {config}, this one has none" in notices
        assert third.ready.startswith("ready")
        assert eventually(lambda: live_workers(third.urls["nats"]) == ["w0"])
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
    assert living_of(directory) == []


def test_a_worker_is_drained_and_takes_work_again(system: System) -> None:
    where = ("--data-dir", str(system.directory))
    assert eventually(lambda: live_workers(system.urls["nats"]) == ["w0"])

    def drains() -> bool:
        with psycopg.connect(system.urls["sql"]) as connection:
            found = connection.execute(
                "SELECT to_state FROM infaas.worker_events WHERE worker = 'w0' ORDER BY time DESC LIMIT 1"
            ).fetchone()
            return found == ("Draining",)

    assert infaas("admin", "drain", "--worker", "w0", *where).returncode == 0
    assert eventually(drains)
    assert infaas("worker", "drain", "w0", "--resume", *where).returncode == 0
    assert eventually(lambda: not drains())
    wrong = infaas("admin", "drain", "--worker", "w00", *where)
    assert (wrong.returncode, "no worker w00 runs: there are w0; did you mean w0?" in wrong.stderr) == (1, True)


def test_a_worker_that_is_added_is_in_the_logs_and_on_the_page_of_metrics(system: System) -> None:
    where, err = ("--data-dir", str(system.directory)), system.directory.parent / "added.err"
    url = json.loads((system.directory / "endpoints.json").read_text())["metrics"]

    def shown() -> set[str]:
        page = urllib.request.urlopen(url).read().decode()
        return set(re.findall(r'infaas_part_up\{part="(\w+-added)",process="up"\} 1', page)) & set(
            re.findall(r'infaas_process_info\{process="(\S+)",', page)
        )

    with program("infaas.cli", "run", "worker", *where, errors=err, INFAAS_WORKER__NAME="added") as process:
        assert eventually(lambda: shown() == {"executor-added", "monitor-added"})
        [executor] = [pid for pid in system.pids("infaas.cli.run executor") if "NAME=added\0" in about(pid, "environ")]
        os.kill(executor, signal.SIGKILL)

        def told() -> bool:
            said = infaas("logs", "executor-added", *where).stdout
            return "executor-added ended (killed by SIGKILL)" in said and "executor-added was started again" in said

        assert eventually(told)
        assert "executor runs" in infaas("logs", "executor-added", *where).stdout
        process.terminate()
        assert process.wait(60) == 0
    assert shown() == set()
    assert eventually(lambda: live_workers(system.urls["nats"]) == ["w0"])


async def killed_amid_answers(process: "subprocess.Popen[str]", directory: Path) -> set[str]:
    """Kill the whole system while it answers; returns the ids of the queries that were answered, and of which their dispatcher has heard that."""
    x, y = tiny_models.digits()
    model, validation = directory.parent / "it.onnx", directory.parent / "it.npz"
    model.write_bytes(tiny_models.exact(tiny_models.mlp()))
    validation.write_bytes(tiny_models.npz(x=x, y=y))
    answered: set[str] = set()
    async with infaas_client.connect(data_dir=directory) as client:
        await client.register(str(model), app="it", model="it", validation=str(validation))

        async def ask() -> None:
            answer = await client.query("it", x[:1], timeout=60.0)
            answered.add(answer.query)

        asked = [asyncio.create_task(ask()) for _ in range(600)]
        while len(answered) < 300:  # noqa: ASYNC110  answers set no event
            await asyncio.sleep(0.001)
        heard = set(answered)
        await client.apps()  # the dispatcher lists them, and reads what executors have told it before
        process.kill()
        for task in asked:
            task.cancel()
        await asyncio.gather(*asked, return_exceptions=True)
    return heard


def test_a_system_that_is_killed_as_a_whole_misses_no_row_afterwards(tmp_path: Path) -> None:
    directory = tmp_path / "data"
    options = ("--json", "--no-dashboard", "--no-gateway")
    with up(directory, *options) as process:
        System(process, directory)
        answered = run(killed_amid_answers(process, directory))
        process.wait()
        assert eventually(lambda: not living_of(directory))
    with up(directory, *options) as process:
        system = System(process, directory)

        def lacking() -> set[str]:
            with psycopg.connect(system.urls["sql"]) as connection:
                found = connection.execute("SELECT uid FROM infaas.query_outcomes WHERE app = 'it'").fetchall()
            return answered - {uid.hex for (uid,) in found}

        assert eventually(lambda: not lacking()), lacking()
        process.terminate()
        assert process.wait(60) == 0
    assert not (directory / "unsent").exists()


def test_it_can_be_stopped_while_it_starts(tmp_path: Path) -> None:
    directory = tmp_path / "data"
    with up(directory) as process:
        assert eventually((directory / "up.lock").exists)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    assert living_of(directory) == []


@pytest.mark.parametrize(
    ("variable", "told"),
    [
        ("EMBEDDED_PG_BIN", "EMBEDDED_PG_BIN: there is no postgres in {}\n"),
        ("NATS_SERVER_BIN", "{}/old is nats-server 2.10.0, "),
    ],
)
def test_a_server_that_cannot_start_is_one_line(variable: str, told: str, tmp_path: Path) -> None:
    old = tmp_path / "old"
    old.write_text("#!/bin/sh\necho nats-server: v2.10.0\n")
    old.chmod(0o755)
    place = str(tmp_path if variable == "EMBEDDED_PG_BIN" else old)
    done = infaas("up", "--data-dir", str(tmp_path / "data"), **{variable: place})
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert done.stderr.startswith("infaas: " + told.format(tmp_path))
    assert living_of(tmp_path / "data") == []


def test_servers_of_somebody_else_are_used(tmp_path: Path, nats_url: str, superuser_dsn: str, prefix: str) -> None:
    """By --config; the prefix keeps this system apart from others on the same NATS."""
    config = tmp_path / "infaas.toml"
    database = superuser_dsn.rpartition("/")[0] + f"/{prefix}"
    config.write_text(f'prefix = "{prefix}"\n[bus]\nurl = "{nats_url}"\n[store]\ndsn = "{database}"\n')
    directory = tmp_path / "data"
    with up(directory, "--json", "--config", str(config)) as process:
        system = System(process, directory)
        assert system.urls["nats"] == nats_url
        assert system.ready.startswith("ready")
        assert system.pids("nats-server") == []
        assert system.pids("bin/postgres") == []
        with psycopg.connect(system.urls["sql"]) as connection:
            connection.execute("SELECT count(*) FROM infaas.query_outcomes")
    with psycopg.connect(superuser_dsn, autocommit=True) as connection:
        connection.execute(f'DROP DATABASE "{prefix}" WITH (FORCE)')

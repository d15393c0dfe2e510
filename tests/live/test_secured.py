"""A whole system under `infaas auth`: each service a process with its own key, over TLS; it serves, registers, records, computes jobs."""

import json
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import numpy as np
import psycopg
import pytest

import infaas
from bus.subjects import Subjects
from infaas.client import Client
from infaas.credentials import CredentialStore
from infaas.demo import digits
from infaas.errors import Refused
from tests.support.clients.responders import until
from tests.support.documents.code_blocks import Reader, blocks
from tests.support.servers.nats import free_port, run
from tests.support.servers.processes import ROOT, container, environ, eventually
from tests.support.servers.processes import infaas as command
from tests.support.servers.secured_nats import CLIENTS, Secured, secured

# service: the user that it logs in as
SERVICES = {
    "registrar": "registrar",
    "recorder": "recorder",
    "vm-autoscaler": "vm-autoscaler",
    "jobs": "jobs",
    "dispatcher": "dispatcher",
    "executor": "executor",
    "monitor model-autoscaler offline": "monitor",
    "gateway": "gateway",
}
SETTINGS = """
[registrar]
threads = [1]
max_batches = [8]
[jobs]
utilisation_below = 1.0
latency_ratio = 1000.0
[metrics]
enabled = false
"""


class System:
    """processes: the services, each as another user. reader: the reading role's DSN."""

    def __init__(self, server: Secured, directory: Path, reader: str, processes: list[subprocess.Popen[bytes]]) -> None:
        self.processes = processes
        self.server = server
        self.directory = directory
        self.reader = reader

    def connect(self, user: str) -> "infaas.connecting.Connecting":
        login = self.server.login(user)
        return infaas.connect(self.server.url, nkey_seed=login.nkey_seed, tls_ca=login.tls_ca)

    def logs(self) -> str:
        return "\n".join(f"{path.name}: {path.read_text()[-2000:]}" for path in self.directory.glob("*.log"))


@pytest.fixture
def system(tmp_path: Path, database_dsn: str, reader_dsn: str) -> Iterator[System]:
    directory = tmp_path / "data"
    (directory / "jobs").mkdir(parents=True)
    (tmp_path / "infaas.toml").write_text(SETTINGS)
    with ExitStack() as stack:
        server = stack.enter_context(secured(tmp_path))
        processes = []
        for services, user in SERVICES.items():
            more = server.environ(user) | {"INFAAS_WORKER__NAME": "w1", "INFAAS_BUS__URL": server.url}
            if services == "gateway":
                more |= {"INFAAS_GATEWAY__PORT": str(free_port()), "INFAAS_GATEWAY__GRPC_PORT": str(free_port())}
            if services == "recorder":
                more["INFAAS_STORE__DSN"] = database_dsn
            del more["INFAAS_NATS_URL"]
            settings = ["--config", str(tmp_path / "infaas.toml")]
            log = stack.enter_context((directory / f"{services.split()[0]}.log").open("w"))
            run_it = [sys.executable, "-P", "-m", "infaas.cli.run", *services.split(), *settings]
            env = environ(INFAAS_DATA_DIR=str(directory), **more)
            processes.append(subprocess.Popen(run_it, stdout=log, stderr=log, env=env))
        try:
            yield System(server, directory, reader_dsn, processes)
        finally:
            for process in processes:
                process.terminate()
            for process in processes:
                try:
                    process.wait(60)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()


@pytest.mark.timeout(1200)
def test_a_system_of_processes_with_rights_of_their_own_does_all_its_work(system: System) -> None:
    server, operator = system.server, system.server.environ("operator")
    model = digits.models()["logreg"]
    validation = digits.save_validation(system.directory / "validation.npz")
    where = ("--app", "faces", "--model", "logreg", "--validation", str(validation))
    give_up = time.monotonic() + 400
    while (done := command("register", str(model), *where, **operator)).returncode != 0:  # the services are starting
        assert all(process.poll() is None for process in system.processes), system.logs()
        assert time.monotonic() < give_up, done.stderr + system.logs()
    unseen = digits.load(digits.UNSEEN)

    async def ask() -> None:
        async with system.connect("phone") as phone:
            answer = await phone.query("faces", unseen.x[:8], accuracy=0.5, timeout=120)
            assert np.argmax(answer.output, axis=1).shape == (8,)
            explained = await phone.explain("faces")
            assert explained["chosen"] is not None
            np.save(system.directory / "jobs" / "in.npy", unseen.x[:20])
            place = (system.directory / "jobs").as_uri()
            job = await phone.submit("faces", f"{place}/in.npy", f"{place}/out.npy")
            status = await phone.wait_job(job, timeout=400)
            assert status.state == "done", (status, system.logs())
        async with system.connect("operator") as boss:
            assert [app["app"] for app in await boss.apps()] == ["faces"]
            large = np.repeat(unseen.x, 2, axis=0)  # 1,500 digits, 4.7 MB: by the object store
            assert len((await boss.query("faces", large, timeout=120)).output) == 1500
            await a_pipeline_passes_large_tensors_on(boss, large)
        await nothing_for_a_thief(system)

    run(ask())
    a_users_own_process_serves(system)
    # A policy beside the system needs no right to order anything, and reads the database.
    done = command("shadow", "infaas", "--seconds", "1", **operator | {"INFAAS_SQL_DSN": system.reader})
    assert "no query came in this time" in done.stderr, done.stderr
    # The thief's alone, apart from services that came before those who make their buckets, asked once, and waited.
    expected = [line for line in server.violations if "$JS.API.STREAM.CREATE." not in line]
    names = {user.name for user in CLIENTS}
    theirs = {key.public for user in server.credentials.users() if user.name in names for key in user.keys}
    assert expected, "the thief was caught"
    for line in expected:
        assert any(key in line for key in theirs), line

    def recorded() -> int:
        with psycopg.connect(system.reader) as connection:
            found = connection.execute("SELECT count(*) FROM infaas.query_outcomes WHERE app = 'faces'").fetchone()
            return found[0] if found else 0

    assert eventually(lambda: recorded() >= 2), system.logs()


async def a_pipeline_passes_large_tensors_on(boss: Client, large: np.ndarray) -> None:
    """Inputs and answer by reference: the dispatcher reads what the client has stored, and stores the answer beside it."""
    [app] = [app for app in await boss.apps() if app["app"] == "faces"]
    await boss.admin(
        "set-pipeline",
        pipeline={"name": "copies", "latency_ms": 60_000.0},
        vertex=[{"name": "read", "app": "faces", "inputs": {"x": "$.x"}}],
        output={"scores": f"read.{app['outputs'][0]['name']}", "x": "$.x"},
    )

    async def served() -> bool:
        return not isinstance(await boss.query("copies", large[:1], timeout=120, raise_refused=False), Refused)

    await until(served)
    answer = await boss.query("copies", large, timeout=120)
    assert answer.outputs_ref is not None
    assert np.array_equal(answer.outputs["x"], large)
    assert len(answer.outputs["scores"]) == len(large)
    await boss.admin("delete-app", app="copies")

    async def gone() -> bool:
        return len(await boss.apps()) == 1

    await until(gone)


CLASS = """
import numpy as np

class Zeros:
    def predict_batch(self, inputs):
        (x,) = inputs.values()
        return {%r: np.eye(10, dtype=np.float32)[np.zeros(len(x), int)]}
"""


def a_users_own_process_serves(system: System) -> None:
    """With the rights of the user `container`, from its registration to its end."""
    [app] = json.loads(command("apps", "--json", **system.server.environ("operator")).stdout)["items"]
    (system.directory / "mine.py").write_text(CLASS % app["outputs"][0]["name"])
    options = ("--app", "faces", "--model", "zeros", "--validation", "validation.npz")
    with container(system.directory, "mine:Zeros", *options, **system.server.environ("container")) as (process, _):

        async def ask() -> None:
            async with system.connect("phone") as phone:
                answer = await phone.query("faces", np.zeros((3, 784), "f4"), model="zeros", timeout=120)
                assert (answer.output.argmax(axis=1) == 0).all()

        run(ask())
        process.terminate()
        assert process.wait(60) == 0, system.logs()


async def nothing_for_a_thief(system: System) -> None:
    """A client of another app, with its own credentials, through its own connection."""
    async with system.connect("thief") as thief:
        with pytest.raises(Refused, match="forbidden"):
            await thief.query("faces", np.zeros((1, 784), "f4"), timeout=60)
        with pytest.raises(Refused, match="forbidden"):
            await thief.admin("delete-app", app="faces")
        with pytest.raises(Refused, match="unknown_app"):
            await thief.query("numbers", np.zeros((1, 784), "f4"), timeout=60)
    # An answer to somebody else's inbox, or to where orders go: no service gives it.
    heard: list[str] = []
    subjects = Subjects()
    phone, thief_bus = await system.server.bus("phone"), await system.server.bus("thief")
    client = Client(thief_bus)
    try:
        await phone.subscribe(
            f"{phone.new_inbox().rpartition('.')[0]}.>", lambda delivery: heard.append(delivery.subject)
        )
        for reply in (
            "_INBOX_.faces.phone.x.y",
            "infaas.admin.delete-app",
            "$KV.infaas-catalog.app.faces",
            "_INBOX.x.y.z",
        ):
            thief_bus.publish(subjects.query("numbers"), b"\x80", reply)
            thief_bus.publish(subjects.explain("numbers"), b"\x80", reply)
        own = await thief_bus.request(subjects.query("numbers"), b"\x80", 60.0)  # those before it have been looked at
        assert own.data
        await phone.flush()
        assert heard == []
    finally:
        await client.close()
        await phone.close()
        await thief_bus.close()


@pytest.mark.timeout(600)
def test_the_recipe_of_the_documents_gives_every_door_keys_and_tls(tmp_path: Path) -> None:
    """bus.auth, dashboard.tls_certificate and dashboard.tls_key are what auth/infaas.toml sets."""
    reader = Reader(tmp_path)
    [recipe, *_] = (block for block in blocks(ROOT / "docs" / "security.md") if block.language == "sh")
    assert len(recipe.text.splitlines()) <= 3
    try:
        reader.run(recipe)
        found = json.loads((tmp_path / ".infaas" / "endpoints.json").read_text())
        trusted = ssl.create_default_context(cafile=str(tmp_path / "auth" / "ca.pem"))
        for page in (f"{found['gateway']}/v2/health/live", f"{found['dashboard']}/overview"):
            with urlopen(page, context=trusted, timeout=60) as reply:
                assert reply.status == 200
        with pytest.raises(HTTPError, match="401"):
            urlopen(f"{found['gateway']}/v2/models", context=trusted, timeout=60)
        token = CredentialStore(tmp_path / "auth").add_token("more", "faces", None)
        asked = Request(f"{found['gateway']}/v2/models", headers={"Authorization": f"Bearer {token}"})
        with pytest.raises(infaas.NotConnected), infaas.connect_blocking(found["nats"]):
            pass

        def accepted() -> bool:
            try:
                with urlopen(asked, context=trusted, timeout=60) as reply:
                    return json.load(reply) == []
            except HTTPError:
                return False

        eventually(accepted)
        here = {"INFAAS_DATA_DIR": str(tmp_path / ".infaas")}
        assert command("status", **here).returncode == 0
        checks = json.loads(command("doctor", "--json", **here).stdout)["checks"]
        tls = {one["check"]: one for one in checks if one["check"].startswith("TLS")}
        assert {name: one["state"] for name, one in tls.items()} == {
            f"TLS {name}": "ok" for name in ("NATS", "gateway", "dashboard")
        }
    finally:
        reader.close()

"""Our own PostgreSQL: as root or not, keeps what it committed, and dies cleanly with whoever started it."""

import os
import pwd
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from services.shell.host.postgres import EmbeddedPostgres, ProcessIdentity, find_postgres, runs
from services.shell.host.process import ServerError
from tests.support.servers.processes import alive, eventually, read_line, script

SCRIPT = """
import sys, time
from pathlib import Path
from services.shell.host.postgres import EmbeddedPostgres
server = EmbeddedPostgres(Path(sys.argv[1])).start()
print(server.process.pid, server._binaries.identity.mode, server.superuser_dsn, flush=True)
time.sleep(600)
"""


def ask(dsn: str, query: str):
    with psycopg.connect(dsn, connect_timeout=60) as connection:
        return connection.execute(query).fetchall()


def children_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data directory whose cluster is already made, to be copied: initdb takes its time."""
    directory = tmp_path_factory.mktemp("cluster")
    EmbeddedPostgres(directory).start().stop()
    return directory


@pytest.fixture
def directory(cluster: Path, tmp_path: Path) -> Path:
    return shutil.copytree(cluster, tmp_path / "data")


@pytest.fixture
def server(directory: Path) -> Iterator[EmbeddedPostgres]:
    with EmbeddedPostgres(directory) as running:
        yield running


def test_it_is_utf8_and_small_and_on_loopback_only(server: EmbeddedPostgres) -> None:
    [(encoding, database)] = ask(server.superuser_dsn, "SELECT current_setting('server_encoding'), current_database()")
    assert (encoding, database) == ("UTF8", "infaas")
    settings = dict(ask(server.superuser_dsn, "SELECT name, setting FROM pg_settings"))
    assert settings["listen_addresses"] == "127.0.0.1"
    assert settings["unix_socket_directories"] == ""
    assert settings["password_encryption"] == "scram-sha-256"
    assert settings["autovacuum"] == "on"
    assert int(settings["shared_buffers"]) * 8192 == 32 * 2**20


def test_what_a_large_file_has_taken_is_given_back(directory: Path, server: EmbeddedPostgres) -> None:
    def taken() -> int:
        return sum(path.stat().st_size for path in (directory / "postgres" / "pg_wal").iterdir())

    with psycopg.connect(server.superuser_dsn, autocommit=True) as connection:
        connection.execute("CREATE TABLE files (body bytea STORAGE EXTERNAL)")
        for _ in range(100):
            connection.execute("INSERT INTO files VALUES (%s)", (os.urandom(2**20),))
        assert taken() > 100 * 2**20
        connection.execute("TRUNCATE files")
        connection.execute("CHECKPOINT")
        assert taken() <= 3 * 16 * 2**20  # segments that are written, or made ready


def test_without_the_password_nobody_gets_in(server: EmbeddedPostgres) -> None:
    for password in ("", "wrong"):
        with pytest.raises(psycopg.OperationalError):
            psycopg.connect(server.dsn("postgres", password), connect_timeout=5)


def test_secrets_and_data_are_private(server: EmbeddedPostgres) -> None:
    assert stat.S_IMODE((server.data_dir / "postgres.secret").stat().st_mode) == 0o600
    assert stat.S_IMODE(server.cluster.stat().st_mode) == 0o700
    assert not list(server.data_dir.glob("initdb*"))
    command = Path(f"/proc/{server.process.pid}/cmdline").read_bytes()
    assert server.password.encode() not in command


def test_it_does_not_run_as_root(server: EmbeddedPostgres) -> None:
    """PostgreSQL itself refuses root; as what it runs depends on who we are and what the kernel allows."""
    if os.geteuid() != 0:
        pytest.skip("only root has somebody else to become")
    namespace = os.stat(f"/proc/{server.process.pid}/ns/user").st_ino != os.stat("/proc/self/ns/user").st_ino
    assert namespace or Path(f"/proc/{server.process.pid}").stat().st_uid != 0


def test_what_was_committed_survives_kill_9(directory: Path) -> None:
    server = EmbeddedPostgres(directory).start()
    try:
        with psycopg.connect(server.superuser_dsn, autocommit=True) as connection:
            connection.execute("CREATE TABLE t AS SELECT generate_series(1, 1000) AS i")
        server.process.kill()
        server.process.wait()
        assert eventually(lambda: not _locked(server))
        server.launch()
        server.wait_ready()
        assert ask(server.superuser_dsn, "SELECT count(*) FROM t") == [(1000,)]
    finally:
        server.stop()


def _locked(server: EmbeddedPostgres) -> bool:
    """Whether anything of a killed server still lives: its backends notice after a moment."""
    return any(
        process.name.isdigit() and alive(int(process.name)) and _works_in(process, server.cluster)
        for process in Path("/proc").iterdir()
    )


def _works_in(process: Path, directory: Path) -> bool:
    try:
        return (process / "cwd").resolve(strict=True) == directory
    except OSError:
        return False


def test_stopping_is_clean_complete_and_may_be_repeated(directory: Path) -> None:
    server = EmbeddedPostgres(directory).start()
    pids = [server.process.pid, *children_of(server.process.pid)]
    assert len(pids) > 1
    server.stop()
    server.stop()
    assert not [pid for pid in pids if alive(pid)]
    assert "database system is shut down" in server.log.read_text()


def test_it_shuts_down_cleanly_when_its_parent_is_killed(directory: Path) -> None:
    with script(SCRIPT, str(directory)) as parent:
        pid = int(read_line(parent).split()[0])
        pids = [pid, *children_of(pid)]
        parent.kill()
    assert eventually(lambda: not any(alive(pid) for pid in pids))
    assert (directory / "logs" / "postgres.log").read_text().rstrip().endswith("database system is shut down")


def test_a_directory_in_use_is_refused(server: EmbeddedPostgres) -> None:
    with pytest.raises(ServerError, match="in use"):
        EmbeddedPostgres(server.data_dir, lock_wait=0.1).start()


def test_a_pid_file_of_a_crash_is_ignored_and_its_pid_never_signalled(directory: Path) -> None:
    """After a reboot the pid in it may be anybody's."""
    with subprocess.Popen(["sleep", "600"]) as bystander:
        content = f"{bystander.pid}\n{directory / 'postgres'}\n0\n5432\n\n127.0.0.1\n 1 1\nready\n"
        (directory / "postgres" / "postmaster.pid").write_text(content)
        with EmbeddedPostgres(directory) as server:
            assert ask(server.superuser_dsn, "SELECT 1") == [(1,)]
        assert bystander.poll() is None
        bystander.kill()


def test_a_cluster_of_another_version_is_refused_with_the_remedy(directory: Path) -> None:
    (directory / "postgres" / "PG_VERSION").write_text("15\n")
    with pytest.raises(ServerError, match=r"made by PostgreSQL 15.*EMBEDDED_PG_BIN"):
        EmbeddedPostgres(directory).start()


def test_a_half_made_cluster_is_made_again(tmp_path: Path) -> None:
    (tmp_path / "postgres.new").mkdir()
    (tmp_path / "postgres.new" / "PG_VERSION").write_text("18\n")
    with EmbeddedPostgres(tmp_path) as server:
        assert ask(server.superuser_dsn, "SELECT 1") == [(1,)]


def test_a_busy_port_is_an_error_that_names_it(server: EmbeddedPostgres, cluster: Path, tmp_path: Path) -> None:
    other = shutil.copytree(cluster, tmp_path / "other")
    with pytest.raises(ServerError, match=str(server.port)):
        EmbeddedPostgres(other, server.port).start()


# ---- as whom


def test_root_without_user_namespaces_runs_it_as_another_user(tmp_path_factory: pytest.TempPathFactory) -> None:
    """As in a container with Docker's default rules."""
    if os.geteuid() != 0:
        pytest.skip("only root can change the user")
    directory = _open_directory("infaas-setuid")
    try:
        with EmbeddedPostgres(directory, allow_userns=False) as server:
            assert ask(server.superuser_dsn, "SELECT 1") == [(1,)]
            assert Path(f"/proc/{server.process.pid}").stat().st_uid == NOBODY.pw_uid
        # The same data afterwards in a user namespace, and back.
        with EmbeddedPostgres(directory) as server:
            assert ask(server.superuser_dsn, "SELECT 1") == [(1,)]
        with EmbeddedPostgres(directory, allow_userns=False) as server:
            assert ask(server.superuser_dsn, "SELECT 1") == [(1,)]
    finally:
        shutil.rmtree(directory)
    closed = tmp_path_factory.mktemp("closed")
    with pytest.raises(ServerError, match="may not enter"):
        EmbeddedPostgres(closed, allow_userns=False).start()


NOBODY = pwd.getpwnam("nobody")


def runs_as(identity: ProcessIdentity, mode: str, directory: Path) -> None:
    with script(SCRIPT, str(directory), identity=identity) as parent:
        pid, found, dsn = read_line(parent).split()
        assert found == mode
        assert ask(dsn, "SELECT 1") == [(1,)]
    assert eventually(lambda: not alive(int(pid)))


@pytest.mark.parametrize(("user", "mode"), [((NOBODY.pw_uid, NOBODY.pw_gid), "plain"), ((54321, 54321), "userns")])
def test_an_ordinary_user_and_one_without_an_account_run_it(user: tuple[int, int], mode: str, tmp_path: Path) -> None:
    """Seen from inside a user namespace without capabilities, we are an ordinary user who can still read this Python.

    Without an account as in a container that was started with `--user 54321`: initdb looks its user up, and finds nobody.
    """
    if os.geteuid() != 0 and mode == "userns":
        pytest.skip("only root can become such a user")
    identity = ProcessIdentity("userns", *user) if os.geteuid() == 0 else ProcessIdentity("plain", 0, 0)  # we are one
    if not runs(["true"], identity):
        pytest.skip("no user namespaces here")
    runs_as(identity, mode, tmp_path)


def test_another_user_of_this_machine_runs_it(tmp_path_factory: pytest.TempPathFactory) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can change the user")
    identity = ProcessIdentity("setuid", NOBODY.pw_uid, NOBODY.pw_gid)
    for needed in (sys.executable, str(find_postgres() / "postgres"), __file__):
        if not runs(["test", "-r", needed], identity):
            pytest.skip(f"user nobody cannot reach {needed}")
    directory = _open_directory("infaas-nobody")
    try:
        os.chown(directory, NOBODY.pw_uid, NOBODY.pw_gid)
        runs_as(identity, "plain", directory)
    finally:
        shutil.rmtree(directory)


def _open_directory(name: str) -> Path:
    """A directory that every user may enter, unlike pytest's own."""
    import tempfile

    directory = Path(tempfile.mkdtemp(prefix=name))
    directory.chmod(0o755)
    return directory

import signal
import stat
import subprocess
from pathlib import Path

import pytest

from services.shell.host import process
from services.shell.host.nats import nats_version
from services.shell.host.postgres import ProcessIdentity, role_dsn, runs
from services.shell.host.process import ServerError
from tests.support.servers.processes import eventually, read_line, script


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_secret_is_made_once_kept_private_and_made_again_where_it_is_empty(tmp_path: Path) -> None:
    file = tmp_path / "deep" / "x.secret"
    secret = process.kept_secret(file)
    assert len(secret) >= 24
    assert process.kept_secret(file) == secret
    assert mode(file) == 0o600
    assert [path.name for path in file.parent.iterdir()] == ["x.secret"]
    file = tmp_path / "x.secret"
    file.touch()
    assert process.kept_secret(file) != ""


def test_a_lock_excludes_until_released(tmp_path: Path) -> None:
    lock = process.Lock(tmp_path / "lock")
    with pytest.raises(ServerError, match="in use"):
        process.Lock(tmp_path / "lock", wait=0.1)
    lock.release()
    process.Lock(tmp_path / "lock").release()


def test_a_server_that_was_given_the_lock_holds_it(tmp_path: Path) -> None:
    lock = process.Lock(tmp_path / "lock")
    child = process.start(["sleep", "60"], log=tmp_path / "log", on_our_death=signal.SIGKILL, keep_open=[lock.fd])
    lock.release()
    with pytest.raises(ServerError):
        process.Lock(tmp_path / "lock")
    process.end(child)
    process.Lock(tmp_path / "lock", wait=5.0).release()


def test_ending_goes_on_to_the_next_signal(tmp_path: Path) -> None:
    stubborn = process.start(
        ["sh", "-c", "trap '' TERM; echo up; while :; do sleep 1; done"],
        log=tmp_path / "log",
        on_our_death=signal.SIGKILL,
    )
    while "up" not in (tmp_path / "log").read_text():
        assert stubborn.poll() is None
    process.end(stubborn, ((signal.SIGTERM, 0.2), (signal.SIGKILL, 5.0)))
    assert stubborn.returncode == -signal.SIGKILL


def test_a_program_that_is_not_there_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(ServerError, match="nosuchprogram"):
        process.start([tmp_path / "nosuchprogram"], log=tmp_path / "log", on_our_death=signal.SIGKILL)


def test_a_log_that_cannot_be_written_is_a_clear_error_too(tmp_path: Path) -> None:
    (tmp_path / "log").mkdir()
    with pytest.raises(ServerError, match=r"cannot start echo: .*log"):
        process.start(["echo"], log=tmp_path / "log", on_our_death=signal.SIGKILL)


def test_logs_are_emptied_when_large_while_they_are_written_and_end_with_a_last_line(tmp_path: Path) -> None:
    log = tmp_path / "it.log"
    log.write_bytes(b"x" * 2**20)
    writes = process.start(
        ["sh", "-c", "echo old; while [ -s $0 ]; do :; done; echo new", str(log)], log=log, on_our_death=signal.SIGKILL
    )
    assert eventually(lambda: log.stat().st_size > 2**20)
    process.rotate(tmp_path, limit=2**20)
    assert writes.wait() == 0
    assert log.read_text() == "new\n"
    assert (tmp_path / "it.log.1").read_bytes() == b"x" * 2**20 + b"old\n"
    (tmp_path / "log").write_text("first\nlast words\n")
    assert process.last_line(tmp_path / "log") == "last words"
    assert process.last_line(tmp_path / "none") == ""


def test_a_port_in_use_is_not_free() -> None:
    port = process.free_port()
    assert process.port_is_free(port)
    with subprocess.Popen(
        [
            "python3",
            "-c",
            f"import socket as s; l=s.create_server(('127.0.0.1',{port})); print(1,flush=True); l.accept()",
        ],
        stdout=subprocess.PIPE,
    ) as listener:
        listener.stdout.readline()
        assert not process.port_is_free(port)
        listener.kill()


def test_threads_that_a_fork_would_start_do_not_keep_a_program_from_its_user_namespace() -> None:
    """As gRPC does: it starts threads in each forked child, and such a child gets no namespace."""
    nobody = ProcessIdentity("userns", 65534, 65534)
    if not runs(["true"], nobody):
        pytest.skip("no user namespaces here")
    code = (
        "import os, sys, threading, time\n"
        "from services.shell.host.postgres import ProcessIdentity, runs\n"
        "start = lambda: threading.Thread(target=time.sleep, args=(60,), daemon=True).start()\n"
        "os.register_at_fork(after_in_child=start)\n"
        "start()\n"
        "print(runs(['true'], ProcessIdentity('userns', 65534, 65534)), flush=True)\n"
        "os._exit(0)\n"
    )
    with script(code) as child:
        assert read_line(child) == "True"


def program(directory: Path, says: str) -> Path:
    file = directory / "nats-server"
    file.write_text(f"#!/bin/sh\necho '{says}'\n")
    file.chmod(0o755)
    return file


def test_versions_are_numbers(tmp_path: Path) -> None:
    assert nats_version(program(tmp_path, "nats-server: v2.12.10")) == (2, 12, 10)


def test_a_program_that_is_no_nats_server_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ServerError, match="does not say"):
        nats_version(program(tmp_path, "hello"))


def test_a_binary_that_cannot_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ServerError, match="cannot run"):
        nats_version(tmp_path / "none")


@pytest.mark.parametrize("old", ["2.12.2", "2.9.10", "1.99.99"])
def test_a_server_that_loses_messages_is_refused(tmp_path: Path, old: str) -> None:
    with pytest.raises(ServerError, match=rf"{old}.*2\.12\.3.*pip install"):
        nats_version(program(tmp_path, f"nats-server: v{old}"))


def test_a_dsn_for_another_role_keeps_the_rest_or_is_refused() -> None:
    dsn = "postgresql://postgres:a%20b@db.example:6000/infaas?sslmode=require"
    assert role_dsn(dsn, "reader", "p@ss/") == "postgresql://reader:p%40ss%2F@db.example:6000/infaas?sslmode=require"
    assert role_dsn("postgres://127.0.0.1/x", "r", "s") == "postgres://r:s@127.0.0.1/x"
    with pytest.raises(ServerError, match="postgresql://user:password@host"):
        role_dsn("host=localhost user=x", "r", "s")

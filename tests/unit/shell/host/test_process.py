import signal
import stat
import subprocess
from pathlib import Path

import pytest

from services.shell.host import process
from services.shell.host.process import ServerError
from services.shell.host.rootless import ProcessIdentity, runs
from tests.support.servers.processes import read_line, script


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_secret_is_made_once_kept_and_private(tmp_path: Path) -> None:
    file = tmp_path / "deep" / "x.secret"
    secret = process.kept_secret(file)
    assert len(secret) >= 24
    assert process.kept_secret(file) == secret
    assert mode(file) == 0o600
    assert [path.name for path in file.parent.iterdir()] == ["x.secret"]


def test_an_empty_secret_left_by_a_crash_is_made_again(tmp_path: Path) -> None:
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


def test_a_large_log_is_set_aside_at_the_start(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_bytes(b"x" * (10 * 2**20 + 1))
    process.start(["echo", "new"], log=log, on_our_death=signal.SIGKILL).wait()
    assert log.read_text() == "new\n"
    assert (tmp_path / "log.1").stat().st_size == 10 * 2**20 + 1


def test_last_line_of_a_log(tmp_path: Path) -> None:
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
        assert listener.stdout is not None
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
        "from services.shell.host.rootless import ProcessIdentity, runs\n"
        "start = lambda: threading.Thread(target=time.sleep, args=(60,), daemon=True).start()\n"
        "os.register_at_fork(after_in_child=start)\n"
        "start()\n"
        "print(runs(['true'], ProcessIdentity('userns', 65534, 65534)), flush=True)\n"
        "os._exit(0)\n"
    )
    with script(code) as child:
        assert read_line(child) == "True"

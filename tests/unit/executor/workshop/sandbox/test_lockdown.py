"""What code in a sandbox can and cannot do: a script of ours plays the hostile model."""

import asyncio
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from services.executor.workshop.sandbox.protocol import SandboxLimits, Step
from services.executor.workshop.sandbox.supervisor import SandboxCrashed, _Budget
from tests.support.clients.responders import until
from tests.support.servers.processes import ROOT

SCRIPT = """
import sys, os
sys.path.insert(0, {root!r})
from pathlib import Path
from services.executor.workshop.sandbox.protocol import SandboxLimits
from services.executor.workshop.sandbox.lockdown import lock_down
missing = lock_down(SandboxLimits(memory_bytes=300 * 2**20, seconds=30.0, file_bytes=2**20), Path({scratch!r}), [{given!r}])
if {needs!r} in missing:
    print("MISSING"); sys.exit(0)
try:
{body}
except Exception as error:
    print(type(error).__name__)
else:
    print("DONE")
"""


def try_in_sandbox(directory: Path, body: str, needs: str = "") -> str:
    """What the body came to behind the limits: "DONE" or the exception's name."""
    scratch, given = directory / "scratch", directory / "given"
    scratch.mkdir(exist_ok=True)
    given.write_text("for the sandbox")
    (directory / "secret").write_text("not for the sandbox")
    indented = "\n".join(f"    {line}" for line in body.splitlines())
    script = SCRIPT.format(root=str(ROOT), scratch=str(scratch), given=str(given), needs=needs, body=indented)
    done = subprocess.run([sys.executable, "-I", "-c", script], capture_output=True, text=True, check=False, timeout=60)
    said = (
        done.stdout.strip().splitlines()[-1] if done.stdout.strip() else f"code {done.returncode}: {done.stderr[-300:]}"
    )
    if said == "MISSING":
        pytest.skip(f"this kernel has no {needs}")
    return said


def test_it_may_read_what_it_was_given_and_write_its_scratch_directory(tmp_path):
    body = f"open({str(tmp_path / 'given')!r}).read(); Path({str(tmp_path / 'scratch' / 'a')!r}).write_text('x')"
    assert try_in_sandbox(tmp_path, body) == "DONE"
    assert try_in_sandbox(tmp_path, "import json, decimal, sqlite3") == "DONE"


@pytest.mark.parametrize(
    "body",
    [
        "open({secret!r}).read()",
        "os.listdir({directory!r})",
        "open({given!r}, 'w')",
        "open({directory!r} + '/new', 'w')",
        "os.symlink('/etc', {directory!r} + '/link')",
        "os.unlink({secret!r})",
        "open('/etc/shadow').read()",
    ],
)
def test_other_files_are_out_of_reach(tmp_path, body):
    filled = body.format(secret=str(tmp_path / "secret"), given=str(tmp_path / "given"), directory=str(tmp_path))
    assert try_in_sandbox(tmp_path, filled, needs="landlock") in {"PermissionError", "FileNotFoundError"}
    assert (tmp_path / "secret").read_text() == "not for the sandbox"


def test_it_starts_no_programs_and_reads_no_other_process(tmp_path) -> None:
    body = "import subprocess\nsubprocess.run(['/bin/true'], check=True)"
    assert try_in_sandbox(tmp_path, body, needs="landlock") == "PermissionError"
    body = f"open('/proc/{os.getpid()}/environ', 'rb').read()"
    assert try_in_sandbox(tmp_path, body, needs="namespaces") == "PermissionError"


def test_it_starts_threads_and_no_processes(tmp_path) -> None:
    assert try_in_sandbox(tmp_path, "os.fork()", needs="seccomp") == "PermissionError"
    assert try_in_sandbox(tmp_path, "os.posix_spawn(sys.executable, ['it'], {})", needs="seccomp") == "PermissionError"
    body = "import threading\nasked = threading.Thread(target=print)\nasked.start()\nasked.join()"
    assert try_in_sandbox(tmp_path, body, needs="seccomp") == "DONE"


def test_it_has_no_network(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as server:
        body = f"import socket\nsocket.create_connection(('127.0.0.1', {server.getsockname()[1]}), 5)"
        assert try_in_sandbox(tmp_path, body, needs="namespaces") in {
            "OSError",
            "ConnectionRefusedError",
            "PermissionError",
        }


WITHOUT_NAMESPACES = """
import ctypes, os, socket, sys
sys.path.insert(0, {root!r})
from pathlib import Path
from services.executor.workshop.sandbox import lockdown
libc = ctypes.CDLL(None, use_errno=True)
version = libc.syscall(444, None, ctypes.c_size_t(0), 1)
libc.prctl(38, 1, 0, 0, 0)
done = lockdown._landlock(libc, Path({scratch!r}), (), "cpu")
if not done or version < {least}:
    print("MISSING"); sys.exit(0)
try:
    {body}
except Exception as error:
    print(type(error).__name__)
else:
    print("DONE")
"""


@pytest.mark.parametrize(
    ("least", "body"),
    [
        (4, "socket.create_connection(('127.0.0.1', {port}), 5)"),
        (4, "socket.create_server(('127.0.0.1', 0))"),
        (6, "os.kill({pid}, 0)"),
    ],
)
def test_in_a_container_landlock_alone_keeps_it_from_tcp_and_from_others_signals(tmp_path, least, body):
    with socket.create_server(("127.0.0.1", 0)) as server:
        filled = body.format(port=server.getsockname()[1], pid=os.getpid())
        script = WITHOUT_NAMESPACES.format(root=str(ROOT), scratch=str(tmp_path), least=least, body=filled)
        done = subprocess.run(
            [sys.executable, "-I", "-c", script], capture_output=True, text=True, check=False, timeout=60
        )
    if done.stdout.strip() == "MISSING":
        pytest.skip(f"this kernel's Landlock is older than version {least}")
    assert done.stdout.strip() == "PermissionError", done.stderr


def test_it_gets_no_more_memory_and_no_larger_files_than_allowed(tmp_path):
    assert try_in_sandbox(tmp_path, "bytearray(2**30)") == "MemoryError"
    large = f"import signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\nPath({str(tmp_path / 'scratch' / 'a')!r}).write_bytes(bytes(2**21))"
    assert try_in_sandbox(tmp_path, large) == "OSError"
    assert try_in_sandbox(tmp_path, "held = [os.open('/dev/null', 0) for _ in range(1000)]") == "OSError"


@pytest.mark.slow
@pytest.mark.skipif(
    not Path("/proc/self/schedstat").exists(), reason="this kernel does not count how long processes wait"
)
def test_silence_while_others_have_the_core_is_no_hang() -> None:
    core = min(os.sched_getaffinity(0))
    spin = f"import os; os.sched_setaffinity(0, [{core}]); os.nice(%d)\nwhile True: pass"
    silent, *others = (subprocess.Popen([sys.executable, "-c", spin % lower]) for lower in (5, 0, 0, 0))
    budget = _Budget(SandboxLimits(memory_bytes=2**30, seconds=600.0, file_bytes=2**20))

    async def watch() -> None:
        budget.received(Step(step="loading", within=2.0))
        watching = asyncio.ensure_future(budget.memory(silent.pid))
        await until(lambda: budget._waited > 4.0 or watching.done())
        assert not watching.done()
        for one in others:
            one.kill()
        with pytest.raises(SandboxCrashed, match="the model hangs"):
            await watching

    try:
        asyncio.run(watch())
    finally:
        for one in (silent, *others):
            one.kill()
            one.wait()

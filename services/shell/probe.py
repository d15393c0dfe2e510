"""`python -m services.shell.probe [PATH]`: the health check of a container. It imports next to nothing.

It asks the process's own pages (docs/metrics.md), at INFAAS_METRICS__PORT, for PATH, by default /startz. With `--port N` it asks
another server's page, with `--listening N` only whether somebody listens there, without connecting. The exit code is 0 if all is well,
else 1; the reason is on standard output, where `docker inspect` shows it. Without a port there is nothing to ask, and the code is 0.

A process that does not answer its own page is looked at, as a supervisor does (services/shell/host/watch.py): one that is still for 2 s is ended, so that
its container is started again at once. One that is busy or starved is left alone.
"""

import os
import socket
import sys
from collections.abc import Iterable, Mapping, Sequence

PATH = "/startz"
PATIENCE = (
    2.5  # s for the whole answer: with the looks at who does not answer less than the time-out of the health check
)
MOST = 65536  # bytes of an answer that are read
LISTEN = "0A"  # state of a socket in /proc/net/tcp


def main(arguments: Sequence[str], environ: Mapping[str, str]) -> int:
    try:
        path, port, listening = _parsed(arguments, environ)
    except ValueError:
        print("usage: python -m services.shell.probe [PATH] [--port N | --listening N]")
        return 2
    if listening:
        if listens(listening):
            return 0
        print(f"nobody listens on port {listening}")
        return 1
    if not port:
        return 0
    try:
        status, body = ask(port, path)
    except OSError as error:
        print(f"no answer at port {port}: {error}")
        if isinstance(error, TimeoutError) and "--port" not in arguments:
            print(end_if_still(port))
        return 1
    if status == 200:
        return 0
    print(f"{path}: {status} {body.strip()}")
    return 1


def _parsed(arguments: Sequence[str], environ: Mapping[str, str]) -> tuple[str, int, int]:
    """The path, the port to ask, the port that must listen; raises ValueError."""
    path, numbers = PATH, {"--port": int(environ.get("INFAAS_METRICS__PORT") or 0), "--listening": 0}
    rest = list(arguments)
    while rest:
        word = rest.pop(0)
        if word in numbers:
            numbers[word] = int(rest.pop(0) if rest else "")
        elif word.startswith("/"):
            path = word
        else:
            raise ValueError(word)
    return path, numbers["--port"], numbers["--listening"]


def ask(port: int, path: str) -> tuple[int, str]:
    """Status and body of a page on this machine; raises OSError."""
    with socket.create_connection(("127.0.0.1", port), PATIENCE) as connection:
        connection.settimeout(PATIENCE)
        connection.sendall(f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nConnection: close\r\n\r\n".encode())
        answer = b""
        while len(answer) < MOST and (piece := connection.recv(MOST)):
            answer += piece
    head, _, body = answer.partition(b"\r\n\r\n")
    words = head.split(b" ", 2)
    if len(words) < 2 or not words[1].isdigit():
        raise OSError("what answers does not speak HTTP")
    return int(words[1]), body.decode(errors="replace")


def listens(port: int, tables: Iterable[str] = ("/proc/net/tcp", "/proc/net/tcp6")) -> bool:
    """Whether a socket of this network namespace takes connections at this port; False where Linux does not say."""
    return bool(_listening(port, tables))


def _listening(port: int, tables: Iterable[str] = ("/proc/net/tcp", "/proc/net/tcp6")) -> set[str]:
    """The numbers of the sockets that take connections at this port."""
    found = set()
    for table in tables:
        try:
            with open(table) as file:
                rows = [line.split() for line in file][1:]
        except OSError:
            continue
        found |= {"".join(row[9:10]) for row in rows if row[3] == LISTEN and int(row[1].rpartition(":")[2], 16) == port}
    return found


def end_if_still(port: int) -> str:
    """End the process that listens at this port, if it is still for 2 s; says in words what was found."""
    import signal  # noqa: PLC0415  (most probes need none of it)
    import time  # noqa: PLC0415

    from services.shell.host.watch import HUNG, LOOK, ProcessStillness, Seen, threads_of  # noqa: PLC0415

    pid = _holder({f"socket:[{number}]" for number in _listening(port)})
    if not pid:
        return "nobody is seen to listen there"
    still, before = ProcessStillness(), time.monotonic()
    for _ in range(round(HUNG / LOOK) + 2):
        now = time.monotonic()
        hangs = still.looked(Seen(1, False, threads_of(pid)), now - before)  # it has not turned since it was asked
        if hangs:
            os.kill(pid, signal.SIGKILL)
            return f"process {pid} {hangs}: ended"
        before = now
        time.sleep(LOOK)
    return f"process {pid} is busy"


def _holder(sockets: set[str]) -> int:
    """The process that has one of these sockets open; 0 for none that we may look into."""
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) != os.getpid():
            try:
                place = f"/proc/{name}/fd"
                if any(os.readlink(f"{place}/{fd}") in sockets for fd in os.listdir(place)):
                    return int(name)
            except OSError:
                continue
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], os.environ))

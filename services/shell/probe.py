"""`python -m services.shell.probe [PATH]`: the health check of a container. It imports next to nothing.

It asks the process's own pages (docs/metrics.md), at INFAAS_METRICS__PORT, for PATH, by default /startz. With `--port N` it asks
another server's page, with `--listening N` only whether somebody listens there, without connecting. The exit code is 0 if all is well,
else 1; the reason is on standard output, where `docker inspect` shows it. Without a port there is nothing to ask, and the code is 0.
"""

import os
import socket
import sys
from collections.abc import Iterable, Mapping, Sequence

PATH = "/startz"
PATIENCE = 2.5  # s for the whole answer: less than the time-out of the health check
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
    for table in tables:
        try:
            with open(table) as file:
                rows = [line.split() for line in file][1:]
        except OSError:
            continue
        if any(row[3] == LISTEN and int(row[1].rpartition(":")[2], 16) == port for row in rows):
            return True
    return False


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], os.environ))

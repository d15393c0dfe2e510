"""Fetching from real servers on this machine that behave in every bad way."""

import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import pytest

from services.gateway.rafiqi.fetching import FetchFailed, Fetching, NotAllowed, fetch
from services.gateway.rafiqi.places import hosts_of

BODY = bytes(range(256)) * 40
OK = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(BODY) + BODY


class Served:
    """Where a server listens, and what it was asked."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.requests: list[bytes] = []

    def url(self, host: str = "depot.test", scheme: str = "http") -> str:
        return f"{scheme}://{host}:{self.port}/m.onnx"

    def rules(self, address: str = "127.0.0.1", **more: object) -> Fetching:
        return Fetching(hosts_of((f"depot.test:{self.port}={address}",)), **{"timeout_s": 20.0, **more})  # type: ignore[arg-type]


@contextmanager
def serving(
    answer: bytes | Callable[[socket.socket], None],
    address: str = "127.0.0.1",
    port: int = 0,
    tls: ssl.SSLContext | None = None,
) -> Iterator[Served]:
    """A server that reads a request's head and then sends these bytes, or does what it likes."""
    with closing(socket.create_server((address, port))) as listener:
        served = Served(listener.getsockname()[1])
        threads = []

        def talk(raw: socket.socket) -> None:
            with raw, suppress(OSError):
                connection = raw if tls is None else tls.wrap_socket(raw, server_side=True)
                with connection:
                    connection.settimeout(10)
                    head = b""
                    while b"\r\n\r\n" not in head and (piece := connection.recv(65536)):
                        head += piece
                    served.requests.append(head)
                    if callable(answer):
                        answer(connection)
                    else:
                        connection.sendall(answer)

        def accept() -> None:
            with suppress(OSError):
                while True:
                    raw, _ = listener.accept()
                    thread = threading.Thread(target=talk, args=(raw,))
                    threads.append(thread)
                    thread.start()

        accepting = threading.Thread(target=accept)
        accepting.start()
        try:
            yield served
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            accepting.join()
            for thread in threads:
                thread.join(20)


def at(*addresses: str) -> Callable[[str, int], list[str]]:
    return lambda _host, _port: list(addresses)


def test_a_file_is_fetched_once_from_the_address_that_was_checked(tmp_path: Path) -> None:
    with serving(OK) as served:
        into = tmp_path / "m"
        assert fetch(served.url(), into, served.rules(), at("127.0.0.1")) == len(BODY)
        assert into.read_bytes() == BODY
    [request] = served.requests
    assert request.startswith(b"GET /m.onnx HTTP/1.1\r\nHost: depot.test:%d\r\n" % served.port)
    assert b"Authorization" not in request


def test_a_chunked_file_is_fetched(tmp_path: Path) -> None:
    chunks = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n"
    with serving(chunks) as served:
        assert fetch(served.url(), tmp_path / "m", served.rules(), at("127.0.0.1")) == 5
        assert (tmp_path / "m").read_bytes() == b"abcde"


def test_a_name_that_moves_after_it_was_checked_gains_nothing(tmp_path: Path) -> None:
    """DNS rebinding: the second look-up would lead inside."""
    asked = []

    def moving(host: str, _port: int) -> list[str]:
        asked.append(host)
        return ["127.0.0.1"] if len(asked) == 1 else ["127.0.0.2"]

    with serving(OK) as served, serving(OK, "127.0.0.2", served.port) as inside:
        fetch(served.url(), tmp_path / "m", served.rules(), moving)
        assert (len(served.requests), inside.requests, asked) == (1, [], ["depot.test"])


@pytest.mark.parametrize("addresses", [("127.0.0.1",), ("9.9.9.9", "127.0.0.1"), ("::ffff:127.0.0.1",), ("::1",)])
def test_a_public_name_that_leads_inside_is_not_asked(tmp_path: Path, addresses: tuple[str, ...]) -> None:
    with serving(OK) as served:
        rules = Fetching(hosts_of((f"depot.test:{served.port}",)))
        with pytest.raises(NotAllowed, match="private network"):
            fetch(served.url(), tmp_path / "m", rules, at(*addresses))
        assert served.requests == []


def test_hosts_that_are_not_allowed_are_not_even_looked_up(tmp_path: Path) -> None:
    def never(host: str, _port: int) -> list[str]:
        raise AssertionError(host)

    for url in ("http://other.test/x", "http://127.0.0.1/x", "file:///etc/passwd", "http://a:b@depot.test/"):
        with pytest.raises(NotAllowed):
            fetch(url, tmp_path / "m", Fetching(hosts_of(("depot.test",))), never)


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_redirects_are_not_followed(tmp_path: Path, status: int) -> None:
    with serving(OK, "127.0.0.2") as inside:
        moved = f"HTTP/1.1 {status} Moved\r\nLocation: http://127.0.0.2:{inside.port}/m\r\nContent-Length: 0\r\n\r\n"
        with serving(moved.encode()) as served, pytest.raises(FetchFailed, match="redirects"):
            fetch(served.url(), tmp_path / "m", served.rules(), at("127.0.0.1"))
        assert inside.requests == []


@pytest.mark.parametrize(
    ("answer", "word"),
    [
        (b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n", "answered 404"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nshort", "no usable answer"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n", "no usable answer"),
        (b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: 1\r\n\r\nx", "coding"),
        (b"SSH-2.0-OpenSSH\r\n", "no usable answer"),
        (b"", "no usable answer"),
        (b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 1000 + b"\r\n", "no usable answer"),
    ],
)
def test_answers_that_are_no_file(tmp_path: Path, answer: bytes, word: str) -> None:
    with serving(answer) as served, pytest.raises(FetchFailed, match=word):
        fetch(served.url(), tmp_path / "m", served.rules(), at("127.0.0.1"))
    assert not (tmp_path / "m").exists()


def test_a_file_that_says_it_is_too_large_is_not_begun(tmp_path: Path) -> None:
    with serving(OK) as served, pytest.raises(FetchFailed, match="register_max_bytes") as failed:
        fetch(served.url(), tmp_path / "m", served.rules(max_bytes=len(BODY) - 1), at("127.0.0.1"))
    assert failed.value.status == 413


def test_an_endless_stream_ends_at_the_limit(tmp_path: Path) -> None:
    def pour(connection: socket.socket) -> None:
        connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
        while True:
            connection.sendall(bytes(2**16))

    with serving(pour) as served, pytest.raises(FetchFailed, match="larger") as failed:
        fetch(served.url(), tmp_path / "m", served.rules(max_bytes=2**20), at("127.0.0.1"))
    assert failed.value.status == 413
    assert not (tmp_path / "m").exists()


@pytest.mark.parametrize("head", [b"", b"HTTP/1.1 200 OK\r\nX-A: ", b"HTTP/1.1 200 OK\r\n\r\n"])
def test_a_server_that_sends_a_byte_now_and_then_is_left_when_the_time_is_up(tmp_path: Path, head: bytes) -> None:
    def drip(connection: socket.socket) -> None:
        connection.sendall(head)
        while True:
            connection.sendall(b"a")
            time.sleep(0.05)

    with serving(drip) as served, pytest.raises(FetchFailed, match=r"within 0\.5 s") as failed:
        fetch(served.url(), tmp_path / "m", served.rules(timeout_s=0.5), at("127.0.0.1"))
    assert failed.value.status == 504
    assert not (tmp_path / "m").exists()


def test_nobody_there_and_no_such_name(tmp_path: Path) -> None:
    with serving(OK) as served:
        pass

    def unknown(host: str, _port: int) -> list[str]:
        raise socket.gaierror(-2, f"{host} is not known")

    with pytest.raises(FetchFailed, match="cannot be reached"):
        fetch(served.url(), tmp_path / "m", served.rules(), at("127.0.0.1"))
    with pytest.raises(FetchFailed, match="cannot be found"):
        fetch(served.url(), tmp_path / "m", served.rules(), unknown)


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One for depot.test, with its key, in one PEM file."""
    directory = tmp_path_factory.mktemp("tls")
    names = ("-subj", "/CN=depot.test", "-addext", "subjectAltName=DNS:depot.test")
    key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-keyout", directory / "key.pem")
    try:
        command = ["openssl", "req", "-x509", *key, "-out", directory / "cert.pem", "-days", "2", *names]
        subprocess.run(command, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no certificate can be made here: {error}")
    both = directory / "both.pem"
    both.write_bytes((directory / "cert.pem").read_bytes() + (directory / "key.pem").read_bytes())
    return both


def test_tls_is_checked_against_the_name_not_the_address(tmp_path: Path, certificate: Path) -> None:
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(certificate)
    trusting = ssl.create_default_context(cafile=str(certificate))
    with serving(OK, tls=server) as served:
        rules = served.rules(tls=trusting)
        assert fetch(served.url(scheme="https"), tmp_path / "m", rules, at("127.0.0.1")) == len(BODY)
        other = Fetching(hosts_of((f"other.test:{served.port}=127.0.0.1",)), tls=trusting)
        with pytest.raises(FetchFailed, match="cannot be reached"):
            fetch(served.url("other.test", "https"), tmp_path / "n", other, at("127.0.0.1"))
        with pytest.raises(FetchFailed, match="cannot be reached"):
            fetch(served.url(scheme="https"), tmp_path / "n", served.rules(), at("127.0.0.1"))

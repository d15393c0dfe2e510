"""Downloads from real servers on this machine that misbehave, and the checks of URLs, hosts and addresses."""

import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.core.hosts import AllowedHost, allowed_hosts
from services.gateway.download import (
    DownloadFailed,
    DownloadRules,
    NotAllowed,
    checked_addresses,
    download,
    file_url,
    is_public,
)
from tests.support.servers.processes import certified

BODY = bytes(range(256)) * 40
OK = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(BODY) + BODY


class Served:
    """Where a server listens, and what it was asked."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.requests: list[bytes] = []

    def url(self, host: str = "depot.test", scheme: str = "http") -> str:
        return f"{scheme}://{host}:{self.port}/m.onnx"

    def rules(self, address: str = "127.0.0.1", **more: object) -> DownloadRules:
        return DownloadRules(allowed_hosts((f"depot.test:{self.port}={address}",)), **{"timeout_s": 20.0, **more})  # type: ignore[arg-type]


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
        assert download(served.url(), into, served.rules(), at("127.0.0.1")) == len(BODY)
        assert into.read_bytes() == BODY
    [request] = served.requests
    assert request.startswith(b"GET /m.onnx HTTP/1.1\r\nHost: depot.test:%d\r\n" % served.port)
    assert b"Authorization" not in request


def test_a_chunked_file_is_fetched(tmp_path: Path) -> None:
    chunks = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n"
    with serving(chunks) as served:
        assert download(served.url(), tmp_path / "m", served.rules(), at("127.0.0.1")) == 5
        assert (tmp_path / "m").read_bytes() == b"abcde"


def test_a_name_that_moves_after_it_was_checked_gains_nothing(tmp_path: Path) -> None:
    """DNS rebinding: the second look-up would lead inside."""
    asked = []

    def moving(host: str, _port: int) -> list[str]:
        asked.append(host)
        return ["127.0.0.1"] if len(asked) == 1 else ["127.0.0.2"]

    with serving(OK) as served, serving(OK, "127.0.0.2", served.port) as inside:
        download(served.url(), tmp_path / "m", served.rules(), moving)
        assert (len(served.requests), inside.requests, asked) == (1, [], ["depot.test"])


@pytest.mark.parametrize("addresses", [("127.0.0.1",), ("9.9.9.9", "127.0.0.1"), ("::ffff:127.0.0.1",), ("::1",)])
def test_a_public_name_that_leads_inside_is_not_asked(tmp_path: Path, addresses: tuple[str, ...]) -> None:
    with serving(OK) as served:
        rules = DownloadRules(allowed_hosts((f"depot.test:{served.port}",)))
        with pytest.raises(NotAllowed, match="private network"):
            download(served.url(), tmp_path / "m", rules, at(*addresses))
        assert served.requests == []


def test_hosts_that_are_not_allowed_are_not_even_looked_up(tmp_path: Path) -> None:
    def never(host: str, _port: int) -> list[str]:
        raise AssertionError(host)

    for url in ("http://other.test/x", "http://127.0.0.1/x", "file:///etc/passwd", "http://a:b@depot.test/"):
        with pytest.raises(NotAllowed):
            download(url, tmp_path / "m", DownloadRules(allowed_hosts(("depot.test",))), never)


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_redirects_are_not_followed(tmp_path: Path, status: int) -> None:
    with serving(OK, "127.0.0.2") as inside:
        moved = f"HTTP/1.1 {status} Moved\r\nLocation: http://127.0.0.2:{inside.port}/m\r\nContent-Length: 0\r\n\r\n"
        with serving(moved.encode()) as served, pytest.raises(DownloadFailed, match="redirects"):
            download(served.url(), tmp_path / "m", served.rules(), at("127.0.0.1"))
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
    with serving(answer) as served, pytest.raises(DownloadFailed, match=word):
        download(served.url(), tmp_path / "m", served.rules(), at("127.0.0.1"))
    assert not (tmp_path / "m").exists()


def test_a_file_that_says_it_is_too_large_is_not_begun(tmp_path: Path) -> None:
    with serving(OK) as served, pytest.raises(DownloadFailed, match="register_max_bytes") as failed:
        download(served.url(), tmp_path / "m", served.rules(max_bytes=len(BODY) - 1), at("127.0.0.1"))
    assert failed.value.status == 413


def test_an_endless_stream_ends_at_the_limit(tmp_path: Path) -> None:
    def pour(connection: socket.socket) -> None:
        connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
        while True:
            connection.sendall(bytes(2**16))

    with serving(pour) as served, pytest.raises(DownloadFailed, match="larger") as failed:
        download(served.url(), tmp_path / "m", served.rules(max_bytes=2**20), at("127.0.0.1"))
    assert failed.value.status == 413
    assert not (tmp_path / "m").exists()


@pytest.mark.parametrize("head", [b"", b"HTTP/1.1 200 OK\r\nX-A: ", b"HTTP/1.1 200 OK\r\n\r\n"])
def test_a_server_that_sends_a_byte_now_and_then_is_left_when_the_time_is_up(tmp_path: Path, head: bytes) -> None:
    def drip(connection: socket.socket) -> None:
        connection.sendall(head)
        while True:
            connection.sendall(b"a")
            time.sleep(0.05)

    with serving(drip) as served, pytest.raises(DownloadFailed, match=r"within 0\.5 s") as failed:
        download(served.url(), tmp_path / "m", served.rules(timeout_s=0.5), at("127.0.0.1"))
    assert failed.value.status == 504
    assert not (tmp_path / "m").exists()


def test_nobody_there_and_no_such_name(tmp_path: Path) -> None:
    with serving(OK) as served:
        pass

    def unknown(host: str, _port: int) -> list[str]:
        raise socket.gaierror(-2, f"{host} is not known")

    with pytest.raises(DownloadFailed, match="cannot be reached"):
        download(served.url(), tmp_path / "m", served.rules(), at("127.0.0.1"))
    with pytest.raises(DownloadFailed, match="cannot be found"):
        download(served.url(), tmp_path / "m", served.rules(), unknown)


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One for depot.test, with its key, in one PEM file."""
    directory = tmp_path_factory.mktemp("tls")
    both = directory / "both.pem"
    both.write_text("".join(Path(one).read_text() for one in certified(directory, who="DNS:depot.test")))
    return both


def test_tls_is_checked_against_the_name_not_the_address(tmp_path: Path, certificate: Path) -> None:
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(certificate)
    trusting = ssl.create_default_context(cafile=str(certificate))
    with serving(OK, tls=server) as served:
        rules = served.rules(tls=trusting)
        assert download(served.url(scheme="https"), tmp_path / "m", rules, at("127.0.0.1")) == len(BODY)
        other = DownloadRules(allowed_hosts((f"other.test:{served.port}=127.0.0.1",)), tls=trusting)
        with pytest.raises(DownloadFailed, match="cannot be reached"):
            download(served.url("other.test", "https"), tmp_path / "n", other, at("127.0.0.1"))
        with pytest.raises(DownloadFailed, match="cannot be reached"):
            download(served.url(scheme="https"), tmp_path / "n", served.rules(), at("127.0.0.1"))


# -- URLs, hosts and addresses

HOSTS = allowed_hosts(
    ("models.test", "depot.test:8080", "inside.test=10.1.2.3", "127.0.0.1:9000", "::1", "up.test:81=::1")
)


def test_entries_of_the_setting() -> None:
    assert (
        AllowedHost("models.test", None, None),
        AllowedHost("depot.test", 8080, None),
        AllowedHost("inside.test", None, IPv4Address("10.1.2.3")),
        AllowedHost("127.0.0.1", 9000, IPv4Address("127.0.0.1")),
        AllowedHost("::1", None, IPv6Address("::1")),
        AllowedHost("up.test", 81, IPv6Address("::1")),
    ) == HOSTS


@pytest.mark.parametrize(
    "entry", ["", "http://models.test", "a b", "models.test:", "models.test:0", "models.test=here", "a/b", "2130706433"]
)
def test_entries_that_are_none_are_named(entry: str) -> None:
    with pytest.raises(ValueError, match="is no"):
        allowed_hosts((entry,))


@pytest.mark.parametrize(
    ("url", "target"),
    [
        ("https://models.test/a/b.onnx?x=1#part", "/a/b.onnx?x=1"),
        ("http://MODELS.test.", "/"),
        ("http://depot.test:8080/x", "/x"),
        ("http://127.0.0.1:9000/x", "/x"),
        ("https://[::1]/x", "/x"),
    ],
)
def test_what_may_be_fetched(url: str, target: str) -> None:
    assert file_url(url, HOSTS).target == target


@pytest.mark.parametrize(
    ("url", "word"),
    [
        ("file:///etc/passwd", "only http"),
        ("gopher://models.test/1", "only http"),
        ("ftp://models.test/1", "only http"),
        ("data:text/plain,hello", "only http"),
        ("//models.test/x", "only http"),
        ("models.test/x", "only http"),
        ("http:///x", "no host"),
        ("http://user@models.test/x", "credentials"),
        ("http://user:word@models.test/x", "credentials"),
        ("http://models.test@169.254.169.254/x", "credentials"),
        ("http://models.test:x/", "cannot be read"),
        ("http://models.test\\@other.test/", "printable"),
        ("http://models.test/a b", "printable"),
        ("http://models.test/a\r\nHost: other", "printable"),
        ("http://modéls.test/", "printable"),
        ("http://models.test/" + "a" * 3000, "printable"),
        ("http://[::1", "cannot be read"),
        ("http://2130706433/", "no host name"),
        ("http://0x7f000001/", "no host name"),
        ("http://0177.0.0.1/", "no host name"),
        ("http://127.1/", "no host name"),
        ("http://127.0.0.0x1/", "no host name"),
    ],
)
def test_what_is_no_url_to_fetch(url: str, word: str) -> None:
    with pytest.raises(NotAllowed, match=word) as refused:
        file_url(url, HOSTS)
    assert not refused.value.forbidden


@pytest.mark.parametrize(
    "url",
    [
        "http://other.test/",
        "http://models.test:8000/",
        "http://depot.test/",
        "http://sub.models.test/",
        "http://127.0.0.1/",
        "http://127.0.0.2:9000/",
        "http://169.254.169.254/latest/meta-data/",
        "http://localhost:9000/",
        "http://[::ffff:7f00:1]:9000/",
    ],
)
def test_hosts_that_the_operator_did_not_name(url: str) -> None:
    with pytest.raises(NotAllowed, match="register_hosts") as refused:
        file_url(url, HOSTS)
    assert refused.value.forbidden


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1", "127.8.8.8", "0.0.0.0", "10.0.0.1", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1",
        "224.0.0.1", "240.0.0.1", "255.255.255.255", "192.0.0.8", "198.18.0.1", "203.0.113.5",
        "::", "::1", "fe80::1", "fc00::1", "fd12::1", "fec0::1", "ff02::1", "2001:db8::1",
        "::ffff:127.0.0.1", "::ffff:10.0.0.1", "::ffff:a9fe:a9fe", "::7f00:1", "2002:7f00:1::", "2002:a00:1::1",
        "64:ff9b::7f00:1", "2001:0:4136:e378:8000:63bf:3fff:fdd2",
    ],
)  # fmt: skip
def test_addresses_of_private_networks(address: str) -> None:
    assert not is_public(ip_address(address))
    place = file_url("http://models.test/", HOSTS)
    with pytest.raises(NotAllowed, match="private"):
        checked_addresses([address], place)
    with pytest.raises(NotAllowed, match="private"):
        checked_addresses(["9.9.9.9", address], place)


@pytest.mark.parametrize("address", ["9.9.9.9", "2606:4700::1111", "::ffff:9.9.9.9", "64:ff9b::909:909"])
def test_addresses_of_the_internet(address: str) -> None:
    assert checked_addresses([address], file_url("http://models.test/", HOSTS)) == [address]


def test_a_host_with_an_address_may_be_nowhere_else() -> None:
    place = file_url("http://inside.test/", HOSTS)
    assert checked_addresses(["10.1.2.3"], place) == ["10.1.2.3"]
    assert checked_addresses(["::ffff:10.1.2.3"], place) == ["::ffff:10.1.2.3"]
    for other in ("10.1.2.4", "9.9.9.9", "::1"):
        with pytest.raises(NotAllowed, match="another address"):
            checked_addresses(["10.1.2.3", other], place)
    with pytest.raises(NotAllowed, match="no address"):
        checked_addresses([], place)


@given(st.ip_addresses(v=4))
def test_an_ipv4_address_is_the_same_however_it_is_written(address: IPv4Address) -> None:
    assert is_public(ip_address(f"::ffff:{address}")) == is_public(address)
    assert not (is_public(address) and (address.is_private or address.is_multicast or address.is_loopback))


@given(st.text(max_size=60))
def test_any_text_is_refused_or_leads_to_an_allowed_host(text: str) -> None:
    for url in (text, f"http://{text}", f"https://models.test{text}", f"http://{text}.models.test/"):
        try:
            place = file_url(url, HOSTS)
        except NotAllowed:
            continue
        assert place.host in {host.name for host in HOSTS}
        assert not set(place.target) & set(" \r\n\t")

"""Connections to a remote engine: TLS, names, and the relay that a sandbox has."""

import os
import socket
import ssl
import threading
import time
from contextlib import closing
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from bus.codec import encode
from services.executor.backends.base import RunFailed
from services.executor.backends.remote_http import (
    HttpEngine,
    RelayedEngine,
    RelayRequest,
    _connected,
    engine_url,
    relay,
)
from tests.support.servers.engine import engine
from tests.support.servers.processes import certified, eventually


def test_a_sandbox_reaches_one_model_through_its_relay() -> None:
    with engine() as stock:
        ours, theirs = socket.socketpair()
        with Connection(ours.detach()) as here:
            serving = threading.Thread(target=relay, args=(here, HttpEngine(engine_url(stock.url()))))
            serving.start()
            end = theirs.dup()
            other = RelayedEngine(theirs.detach())
            assert b"stock" in other.call("server").body
            assert other.call("config").status == 404
            assert [path for path, _ in stock.seen] == ["/v2"]
            stock.stop()
            with pytest.raises(RunFailed, match="connection refused"):
                other.call("model")
            end.shutdown(socket.SHUT_RDWR)
            end.close()
            serving.join(10)
            assert not serving.is_alive()


@pytest.mark.parametrize("asked", [b"\xc1", encode({"what": "http://169.254.169.254/"}), encode({"what": "../infer"})])
def test_a_relay_ends_when_it_is_asked_for_anything_else(asked: bytes) -> None:
    with engine() as stock:
        ours, theirs = socket.socketpair()
        with (
            Connection(ours.detach()) as here,
            Connection(theirs.detach()) as there,
            closing(HttpEngine(engine_url(stock.url()))) as direct,
        ):
            serving = threading.Thread(target=relay, args=(here, direct))
            serving.start()
            there.send_bytes(encode(RelayRequest("server")))
            there.recv_bytes()
            there.send_bytes(asked)
            serving.join(10)
            assert not serving.is_alive()
        assert [path for path, _ in stock.seen] == ["/v2"]


def test_tls_with_a_certificate_that_is_trusted_and_no_other(tmp_path: Path) -> None:
    certificate, key = certified(tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)

    def serve(listener: socket.socket) -> None:
        for _ in range(3):
            raw, _ = listener.accept()
            try:
                with context.wrap_socket(raw, server_side=True) as secured:
                    secured.recv(4096)
                    secured.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi")
            except OSError:
                raw.close()

    with closing(socket.create_server(("127.0.0.1", 0))) as listener:
        threading.Thread(target=serve, args=(listener,), daemon=True).start()
        port = listener.getsockname()[1]
        named = engine_url(f"https://localhost:{port}/v2/models/m")
        trusting = ssl.create_default_context(cafile=str(certificate))
        with closing(HttpEngine(named, trusting)) as found:
            assert found.call("model").body == b"hi"
        with pytest.raises(RunFailed, match=r"(?i)certificate"):
            HttpEngine(named).call("model")
        with pytest.raises(RunFailed, match=r"(?i)certificate|mismatch"):
            HttpEngine(engine_url(f"https://127.0.0.1:{port}/v2/models/m"), trusting).call("model")


def test_a_host_that_takes_no_connection_fails_soon() -> None:
    """Its queue of connections is full, so that it answers no more."""
    with closing(socket.socket()) as full:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        waiting = [socket.socket() for _ in range(4)]
        for one in waiting:
            one.setblocking(False)
            one.connect_ex(full.getsockname())
        started = time.monotonic()
        with pytest.raises(RunFailed, match=r"does not answer|cannot be used"):
            HttpEngine(engine_url(f"http://127.0.0.1:{full.getsockname()[1]}/v2/models/m")).call("server")
        assert time.monotonic() - started < 60.0  # the system alone would try for two minutes
        for one in waiting:
            one.close()


def test_a_machine_that_stood_still_meanwhile_connects_all_the_same() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def connects() -> bool:
            try:
                _connected("127.0.0.1", server.getsockname()[1], time.monotonic() - 1.0).close()
            except OSError:  # it is so busy that not even what each step gets at least is enough
                return False
            return True

        assert eventually(connects)


def test_a_name_that_nobody_has() -> None:
    with pytest.raises(RunFailed, match=r"nobody\.invalid"):
        HttpEngine(engine_url("http://nobody.invalid/v2/models/m")).call("server")
    assert os.environ.get("INFAAS_ENGINE_RELAY") is None

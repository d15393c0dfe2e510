"""services/shell/http/server.py: valid and invalid certificates and keys."""

import asyncio
import ssl
from pathlib import Path

import pytest

from services.core.settings import GatewaySettings
from services.shell.http.server import BadTls, HttpServer, tls_context
from tests.support.gateways.web_application import Echo, read, served, shut
from tests.support.servers.nats import free_port
from tests.support.servers.processes import certified


def test_none_is_none_and_versions_older_than_1_2_are_not_spoken(tmp_path: Path) -> None:
    assert tls_context("", "") is None
    tls = tls_context(*certified(tmp_path, name="one"))
    assert tls.minimum_version is ssl.TLSVersion.TLSv1_2


async def test_it_listens_at_the_address_and_port_of_the_settings() -> None:
    server = HttpServer(Echo(), settings := GatewaySettings(address="127.0.0.2", port=free_port()))
    await server.open()
    reader, writer = await asyncio.open_connection("127.0.0.2", settings.port)
    writer.write(b"GET /a HTTP/1.1\r\nHost: h\r\n\r\n")
    assert (reply := await read(reader)) is not None
    assert reply.status == 200
    await shut(writer)
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection("127.0.0.1", settings.port)
    await server.close(1.0)


async def test_requests_over_tls(tmp_path: Path) -> None:
    certificate, key = certified(tmp_path, name="one")
    async with served(settings=GatewaySettings(tls_certificate=certificate, tls_key=key)) as server:
        trust = ssl.create_default_context(cafile=certificate)
        reader, writer = await asyncio.open_connection("localhost", server.port, ssl=trust)
        assert writer.get_extra_info("ssl_object").version() == "TLSv1.3"
        writer.write(b"POST /unread HTTP/1.1\r\nHost: h\r\nContent-Length: 400000\r\n\r\n" + b"x" * 300_000)
        assert (reply := await read(reader)) is not None
        assert reply.body == b"POST /unread 0 - h"
        writer.write(b"x" * 100_000 + b"GET /a HTTP/1.1\r\nHost: h\r\n\r\n" + b"nonsense\r\n\r\n")
        assert (reply := await read(reader)) is not None
        assert reply.body == b"GET /a 0 - h"
        assert (reply := await read(reader)) is not None
        assert reply.status == 400
        await shut(writer)

        old = ssl.create_default_context(cafile=certificate)
        old.maximum_version = ssl.TLSVersion.TLSv1_2
        _, writer = await asyncio.open_connection("localhost", server.port, ssl=old)
        await shut(writer)


async def test_a_client_that_does_not_begin_is_sent_away(tmp_path: Path) -> None:
    certificate, key = certified(tmp_path, name="one")
    settings = GatewaySettings(head_timeout_s=0.2, tls_certificate=certificate, tls_key=key)
    async with served(settings=settings) as server:
        for said in (b"", b"\x16\x03\x01", b"GET / HTTP/1.1\r\n\r\n"):
            reader, writer = await server.connect()
            writer.write(said)
            assert b"HTTP" not in await asyncio.wait_for(reader.read(), 120)
            await shut(writer)


def test_what_is_wrong_is_told_by_setting(tmp_path: Path) -> None:
    certificate, key = certified(tmp_path, name="one")
    _, other = certified(tmp_path, name="two")
    locked = certified(tmp_path, "-passout", "pass:secret", name="three")
    text = tmp_path / "text"
    text.write_text("no certificate")
    for pair, words in (
        ((certificate, ""), "gateway.tls_key must name"),
        (("", key), "gateway.tls_certificate must name"),
        ((str(tmp_path / "none"), key), "gateway.tls_certificate: cannot read"),
        ((certificate, str(tmp_path)), "gateway.tls_key: cannot read"),
        ((certificate, str(text)), "gateway.tls_key: .* is not a PEM file"),
        ((certificate, other), "gateway.tls_key: .* is not the key of"),
        ((key, key), "gateway.tls_certificate: there is no certificate in"),
        ((certificate, certificate), "gateway.tls_key: there is no private key in"),
        (locked, "gateway.tls_key: .* is encrypted"),
    ):
        with pytest.raises(BadTls, match=words):
            tls_context(*pair)

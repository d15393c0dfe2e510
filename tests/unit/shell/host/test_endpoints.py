"""What the supervisor writes is what clients read."""

import socket
import stat
import sys
from pathlib import Path

import pytest
from msgspec.structs import replace

from bus.login import ENDPOINTS, SystemAddress
from infaas.connecting import read_endpoints
from infaas.errors import NotConnected
from services.shell.host import endpoints
from services.shell.host.endpoints import DEFAULT_PORTS, PortClaims, choose_ports
from services.shell.host.process import ServerError, free_port

THERE = SystemAddress(
    nats="nats://u:p@127.0.0.1:4222", sql="postgresql://r:p@h/d", writer="postgresql://w:p@h/d", prefix="x"
)


def test_written_endpoints_are_found_until_they_are_marked_as_stopped(tmp_path: Path) -> None:
    endpoints.write_endpoints(tmp_path, THERE, {"nats": 4222})
    found = read_endpoints(tmp_path)
    assert found == replace(THERE, data_dir=tmp_path)
    assert stat.S_IMODE((tmp_path / ENDPOINTS).stat().st_mode) == 0o600
    endpoints.write_endpoints(tmp_path, THERE, {"nats": 4333})
    endpoints.mark_stopped(tmp_path)
    with pytest.raises(NotConnected, match="stopped"):
        read_endpoints(tmp_path)
    assert endpoints.recorded_ports(tmp_path) == {"nats": 4333}


@pytest.mark.parametrize("content", ["", "[]", "{", '{"ports": 3}', '{"ports": {"nats": "x"}}'])
def test_a_damaged_file_gives_no_ports(tmp_path: Path, content: str) -> None:
    (tmp_path / ENDPOINTS).write_text(content)
    assert endpoints.recorded_ports(tmp_path) == {}
    endpoints.mark_stopped(tmp_path)
    with pytest.raises(NotConnected, match="damaged"):
        read_endpoints(tmp_path)


def free_but(*busy: int):
    return lambda port: port not in busy


def test_ports_are_the_default_ones_of_our_own_servers_or_the_last_ones() -> None:
    assert choose_ports(DEFAULT_PORTS, None, {}, take=free_but(), take_any=lambda: 1) == DEFAULT_PORTS
    chosen = choose_ports(DEFAULT_PORTS, None, {"nats": 7000}, take=free_but(), take_any=lambda: 1)
    assert chosen == {**DEFAULT_PORTS, "nats": 7000}
    chosen = choose_ports(DEFAULT_PORTS, None, {"nats": 7000}, take=free_but(7000), take_any=lambda: 1)
    assert chosen == DEFAULT_PORTS
    assert choose_ports(["postgres"], 6000, {}, take=free_but(6000), take_any=lambda: 1) == {"postgres": 6001}
    assert choose_ports([], None, {}, take=free_but(), take_any=lambda: 1) == {}


def test_busy_ports_are_replaced_by_last_times_or_any_and_not_claimed() -> None:
    chosen = choose_ports(DEFAULT_PORTS, None, {"nats": 7000}, take=free_but(4222), take_any=lambda: 9999)
    assert chosen == {**DEFAULT_PORTS, "nats": 7000}
    chosen = choose_ports(DEFAULT_PORTS, None, {"nats": 7000}, take=free_but(4222, 7000, 5433), take_any=lambda: 9999)
    assert chosen == {**DEFAULT_PORTS, "nats": 9999, "postgres": 9999}
    claims = PortClaims()
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert not claims.take(server.getsockname()[1])


def test_a_base_fixes_every_port() -> None:
    assert choose_ports(DEFAULT_PORTS, 6000, {"nats": 7000}, take=free_but(), take_any=lambda: 1) == {
        "nats": 6000,
        "postgres": 6001,
        "dashboard": 6002,
        "gateway": 6003,
        "gateway_grpc": 6004,
        "metrics": 6010,
    }
    # A service without metrics at the right place is better than none.
    assert choose_ports(["metrics"], 6000, {}, take=free_but(6010), take_any=lambda: 4711) == {"metrics": 4711}


def test_a_port_of_the_settings_comes_before_last_times_and_is_an_error_when_it_is_busy() -> None:
    chosen = choose_ports(["dashboard"], None, {"dashboard": 7000}, free_but(), lambda: 1, {"dashboard": 8080})
    assert chosen == {"dashboard": 8080}
    with pytest.raises(ServerError, match=r"port 8080 for dashboard is busy: .* the setting dashboard\.port"):
        choose_ports(["dashboard"], None, {}, free_but(8080), lambda: 1, {"dashboard": 8080})


def test_ports_of_a_base_that_are_busy_or_too_high_are_errors() -> None:
    with pytest.raises(ServerError, match="6001"):
        choose_ports(DEFAULT_PORTS, 6000, {}, take=free_but(6001), take_any=lambda: 1)
    with pytest.raises(ServerError, match="65536"):
        choose_ports(DEFAULT_PORTS, 65535, {}, take=free_but(), take_any=lambda: 1)


def test_a_claimed_port_is_nobody_elses_until_released() -> None:
    """Two systems that start at the same time see the same ports free."""
    one, two, port = PortClaims(), PortClaims(), free_port()
    assert one.take(port)
    if sys.platform == "linux":
        assert not two.take(port)
    one.release()
    assert two.take(port)
    assert two.take_any() != port
    two.release()

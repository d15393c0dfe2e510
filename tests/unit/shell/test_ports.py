import socket
import sys

import pytest

from services.shell.ports import DEFAULTS, Claims, choose
from services.shell.process import ServerError, free_port


def free_but(*busy: int):
    return lambda port: port not in busy


def test_default_ports_when_they_are_free() -> None:
    assert choose(DEFAULTS, None, {"nats": 7000}, take=free_but(), take_any=lambda: 1) == DEFAULTS


def test_a_busy_default_is_replaced_by_last_times_port() -> None:
    chosen = choose(DEFAULTS, None, {"nats": 7000}, take=free_but(4222), take_any=lambda: 9999)
    assert chosen == {**DEFAULTS, "nats": 7000}


def test_else_by_any_free_one() -> None:
    chosen = choose(DEFAULTS, None, {"nats": 7000}, take=free_but(4222, 7000, 5433), take_any=lambda: 9999)
    assert chosen == {**DEFAULTS, "nats": 9999, "postgres": 9999}


def test_a_base_fixes_every_port() -> None:
    assert choose(DEFAULTS, 6000, {"nats": 7000}, take=free_but(), take_any=lambda: 1) == {
        "nats": 6000,
        "postgres": 6001,
        "dashboard": 6002,
        "gateway": 6003,
        "gateway_grpc": 6004,
    }


def test_a_preferred_port_comes_before_last_times() -> None:
    chosen = choose(["dashboard"], None, {"dashboard": 7000}, free_but(), lambda: 1, {"dashboard": 8080})
    assert chosen == {"dashboard": 8080}


def test_a_busy_port_of_a_base_is_an_error_that_names_it() -> None:
    with pytest.raises(ServerError, match="6001"):
        choose(DEFAULTS, 6000, {}, take=free_but(6001), take_any=lambda: 1)


def test_a_base_too_high_is_an_error() -> None:
    with pytest.raises(ServerError, match="65536"):
        choose(DEFAULTS, 65535, {}, take=free_but(), take_any=lambda: 1)


def test_only_our_own_servers_get_ports() -> None:
    assert choose(["postgres"], 6000, {}, take=free_but(6000), take_any=lambda: 1) == {"postgres": 6001}
    assert choose([], None, {}, take=free_but(), take_any=lambda: 1) == {}


def test_a_claimed_port_is_nobody_elses_until_released() -> None:
    """Two systems that start at the same time see the same ports free."""
    one, two, port = Claims(), Claims(), free_port()
    assert one.take(port)
    if sys.platform == "linux":
        assert not two.take(port)
    one.release()
    assert two.take(port)
    assert two.take_any() != port
    two.release()


def test_a_busy_port_is_not_claimed() -> None:
    claims = Claims()
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert not claims.take(server.getsockname()[1])

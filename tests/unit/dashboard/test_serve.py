"""`infaas run dashboard`, as far as it comes without a visitor."""

import socket

import pytest

from tests.support.servers.processes import infaas


@pytest.mark.parametrize("address", ["127.0.0.2", "127.0.0.3"])
def test_it_listens_at_the_address_and_port_of_the_settings(address: str) -> None:
    """Which somebody else has, so that it ends and names them."""
    with socket.socket() as taken:
        taken.bind((address, 0))
        taken.listen()
        port = taken.getsockname()[1]
        busy = infaas("run", "dashboard", INFAAS_DASHBOARD__ADDRESS=address, INFAAS_DASHBOARD__PORT=str(port))
    assert (busy.returncode, busy.stderr.count("\n")) == (1, 1)
    assert f"cannot listen on {address}:{port}" in busy.stderr

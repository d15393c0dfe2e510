"""What the supervisor writes is what clients read."""

import stat
from pathlib import Path

import pytest

from infaas.errors import NotConnected
from infaas.locate import read_endpoints
from services.shell import endpoints
from services.shell.endpoints import Endpoints

THERE = Endpoints(
    nats="nats://u:p@127.0.0.1:4222", sql="postgresql://r:p@h/d", writer="postgresql://w:p@h/d", prefix="x"
)


def test_written_endpoints_are_found(tmp_path: Path) -> None:
    endpoints.write(tmp_path, THERE, {"nats": 4222})
    found = read_endpoints(tmp_path)
    assert (found.nats, found.sql, found.writer, found.prefix) == (THERE.nats, THERE.sql, THERE.writer, THERE.prefix)
    assert stat.S_IMODE((tmp_path / endpoints.FILE).stat().st_mode) == 0o600


def test_a_stopped_system_is_said_to_be_stopped_and_its_ports_stay_noted(tmp_path: Path) -> None:
    endpoints.write(tmp_path, THERE, {"nats": 4333})
    endpoints.mark_stopped(tmp_path)
    with pytest.raises(NotConnected, match="stopped"):
        read_endpoints(tmp_path)
    assert endpoints.recorded_ports(tmp_path) == {"nats": 4333}


@pytest.mark.parametrize("content", ["", "[]", "{", '{"ports": 3}', '{"ports": {"nats": "x"}}'])
def test_a_damaged_file_gives_no_ports(tmp_path: Path, content: str) -> None:
    (tmp_path / endpoints.FILE).write_text(content)
    assert endpoints.recorded_ports(tmp_path) == {}
    endpoints.mark_stopped(tmp_path)
    with pytest.raises(NotConnected, match="damaged"):
        read_endpoints(tmp_path)


def test_the_public_part_has_the_contracts_keys_and_no_writer() -> None:
    assert list(THERE.public()) == ["nats", "sql", "dashboard", "gateway", "gateway_grpc", "metrics"]

from pathlib import Path

import pytest

from services.shell.host.nats import nats_version
from services.shell.host.process import ServerError


def program(directory: Path, says: str) -> Path:
    file = directory / "nats-server"
    file.write_text(f"#!/bin/sh\necho '{says}'\n")
    file.chmod(0o755)
    return file


def test_versions_are_numbers(tmp_path: Path) -> None:
    assert nats_version(program(tmp_path, "nats-server: v2.12.10")) == (2, 12, 10)


@pytest.mark.parametrize("old", ["2.12.2", "2.9.10", "1.99.99"])
def test_a_server_that_loses_messages_is_refused(tmp_path: Path, old: str) -> None:
    with pytest.raises(ServerError, match=rf"{old}.*2\.12\.3.*pip install"):
        nats_version(program(tmp_path, f"nats-server: v{old}"))


def test_a_program_that_is_no_nats_server_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ServerError, match="does not say"):
        nats_version(program(tmp_path, "hello"))


def test_a_binary_that_cannot_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ServerError, match="cannot run"):
        nats_version(tmp_path / "none")

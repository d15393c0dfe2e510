from collections.abc import Iterator
from contextlib import chdir
from pathlib import Path

import pytest

from infaas.connecting import DEFAULT_NATS, DEFAULT_SQL, locate
from infaas.errors import NotConnected


def system(directory: Path, name: str) -> Path:
    directory.mkdir(exist_ok=True)
    (directory / "endpoints.json").write_text(
        f'{{"nats": "nats://{name}", "sql": "postgresql://{name}", "running": true}}'
    )
    return directory


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path) -> Iterator[None]:
    with chdir(tmp_path):
        yield


def test_a_named_directory_wins_over_all(tmp_path: Path) -> None:
    one, two = system(tmp_path / "one", "one"), system(tmp_path / "two", "two")
    system(tmp_path / ".infaas", "here")
    environ = {"INFAAS_DATA_DIR": str(two), "INFAAS_NATS_URL": "nats://env"}
    assert locate(one, environ).nats == "nats://one"
    assert locate(None, environ).nats == "nats://two"


def test_then_the_urls_of_the_environment(tmp_path: Path) -> None:
    system(tmp_path / ".infaas", "here")
    found = locate(None, {"INFAAS_NATS_URL": "nats://env"})
    assert (found.nats, found.sql) == ("nats://env", DEFAULT_SQL)
    assert locate(None, {"INFAAS_SQL_DSN": "postgresql://env"}).nats == DEFAULT_NATS


def test_then_the_directory_here(tmp_path: Path) -> None:
    system(tmp_path / ".infaas", "here")
    assert locate(None, {}).sql == "postgresql://here"


def test_else_the_default_ports() -> None:
    assert locate(None, {}).nats == DEFAULT_NATS


def test_a_stopped_system_here_is_passed_over(tmp_path: Path) -> None:
    directory = system(tmp_path / ".infaas", "here")
    file = directory / "endpoints.json"
    file.write_text(file.read_text().replace("true", "false"))
    assert locate(None, {}).nats == DEFAULT_NATS


def test_a_named_directory_without_a_system_is_an_error_with_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(NotConnected, match="infaas up --data-dir"):
        locate(tmp_path / "nothing", {"INFAAS_NATS_URL": "nats://env"})

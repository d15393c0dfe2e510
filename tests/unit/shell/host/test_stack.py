"""What `infaas up` starts, as its settings say."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from nats.aio.client import Client

from infaas.cli.up import _plan
from services.shell.host.nats import find_nats_server
from services.shell.host.process import ServerError
from services.shell.host.stack import Stack
from services.shell.host.supervise import Child
from tests.support.servers.nats import run


class Children:
    """Keeps a list instead of processes."""

    def __init__(self) -> None:
        self.kept: list[Child] = []

    def start(self, child: Child) -> None:
        self.kept.append(child)


def planned(directory: Path, settings: str, **more: Any) -> Stack:
    (directory / "infaas.toml").write_text(settings)
    options: dict[str, Any] = {
        "port_base": None,
        "workers": 1,
        "max_workers": None,
        "dispatchers": None,
        "simulate": None,
    }
    config = directory / "infaas.toml"
    return Stack(_plan(directory, config=config, dashboard=False, gateway=False, **(options | more)))


def dispatchers_of(stack: Stack) -> list[Child]:
    """What it keeps running as dispatchers."""
    children = Children()
    stack._supervisor = children  # type: ignore[assignment]
    stack._start_serving({})
    return [child for child in children.kept if child.name.startswith("dispatcher")]


@pytest.mark.parametrize(("option", "count"), [(None, 3), (2, 2)])
def test_as_many_dispatchers_as_the_option_or_else_the_settings_say(
    tmp_path: Path, option: int | None, count: int
) -> None:
    stack = planned(tmp_path, "[dispatcher]\ncount = 3\n", dispatchers=option)
    assert [child.name for child in dispatchers_of(stack)] == [f"dispatcher-{number}" for number in range(count)]


@pytest.mark.parametrize(("count", "spare"), [(1, True), (2, False)])
def test_a_lone_dispatcher_has_a_spare_and_one_of_several_has_the_others(
    tmp_path: Path, count: int, spare: bool
) -> None:
    for child in dispatchers_of(planned(tmp_path, "", dispatchers=count)):
        assert (child.spare is not None) == spare


def test_a_database_with_both_roles_is_used_as_it_is(tmp_path: Path) -> None:
    stack = planned(tmp_path, "[store]\ndsn = 'postgres://writer@db/i'\nreader_dsn = 'postgres://reader@db/i'\n")
    assert run(stack._start_store(0)) == ("postgres://writer@db/i", "postgres://reader@db/i")


@pytest.mark.parametrize("most", [2**20, 2**24])
def test_nats_takes_messages_as_large_as_the_settings_say(tmp_path: Path, most: int) -> None:
    try:
        find_nats_server()
    except ServerError as error:
        pytest.skip(str(error))
    stack = planned(tmp_path, f"[bus]\nmax_payload = {most}\n[dispatcher]\nmax_inline = 1000\n[jobs]\nchunk_kb = 1\n")

    async def main() -> int:
        client = Client()
        try:
            await client.connect(await stack._start_nats(0), allow_reconnect=False)
            return client.max_payload
        finally:
            await client.close()
            await stack._supervisor.stop()

    assert asyncio.run(main()) == most

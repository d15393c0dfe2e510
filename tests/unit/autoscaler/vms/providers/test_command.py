"""The operator's commands as real processes: words, outcomes, time limits, one at a time."""

import asyncio
import os
import sys
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path

import pytest

from bus.messages.scaling import StartMachine, StopMachine
from services.autoscaler.vms.commands import ProviderTraits
from services.autoscaler.vms.providers.base import ProviderError
from services.autoscaler.vms.providers.command import Command, Hook
from services.core.settings import CommandSettings
from tests.support.clients.responders import until


def script(path: Path, text: str) -> str:
    """A program that notes what it is called with, and then does this."""
    file = path / f"hook{len(list(path.glob('hook*')))}"
    file.write_text(f'#!/bin/sh\necho "$0" "$@" >> {path}/calls\n{text}\n')
    file.chmod(0o755)
    return str(file)


def calls(path: Path) -> list[list[str]]:
    file = path / "calls"
    return [line.split()[1:] for line in file.read_text().splitlines()] if file.exists() else []


async def refusal(work: Awaitable[None]) -> str:
    with pytest.raises(ProviderError) as refused:
        await work
    return str(refused.value)


async def test_kind_and_name_follow_the_words_and_no_shell_sees_them(tmp_path: Path) -> None:
    add = script(tmp_path, f'printf "%s\\n" "$@" > {tmp_path}/words')
    await Hook([add, "a b", "$HOME;"], [add], 10.0).add("cpu", "cpu-1-1")
    assert (tmp_path / "words").read_text().splitlines() == ["a b", "$HOME;", "cpu", "cpu-1-1"]


async def test_what_was_made_is_not_made_again_until_it_was_removed(tmp_path: Path) -> None:
    hook = Hook([script(tmp_path, "")], [script(tmp_path, ""), "off"], 10.0)
    for _ in range(3):
        await hook.add("cpu", "a")
    await hook.remove("cpu", "a")
    await hook.remove("cpu", "a")
    await hook.add("cpu", "a")
    assert calls(tmp_path) == [["cpu", "a"], ["off", "cpu", "a"], ["off", "cpu", "a"], ["cpu", "a"]]


async def test_the_last_line_that_it_complains_of_is_the_reason(tmp_path: Path) -> None:
    add = script(tmp_path, 'echo "trying" >&2; echo "quota of 3 machines is used up" >&2; echo >&2; exit 4')
    silent = script(tmp_path, "exit 7")
    assert await refusal(Hook([add], [add], 10.0).add("cpu", "a")) == f"{add}: quota of 3 machines is used up"
    assert await refusal(Hook([silent], [silent], 10.0).add("cpu", "a")) == f"{silent}: it ended with code 7"
    nowhere = str(tmp_path / "nowhere")
    assert await refusal(Hook([nowhere], [add], 10.0).add("cpu", "a")) == (
        f"cannot run {nowhere}: No such file or directory"
    )


async def test_what_it_says_or_leaves_running_holds_nobody_up(tmp_path: Path) -> None:
    noisy = script(tmp_path, f"{sys.executable} -c \"import sys; sys.stderr.write('x' * 3_000_000)\"; exit 1")
    assert len(await refusal(Hook([noisy], [noisy], 20.0).add("cpu", "a"))) < 1000
    add = script(tmp_path, f"sleep 1000 & echo $! > {tmp_path}/child; echo no more >&2; exit 1")
    try:
        assert await refusal(Hook([add], [add], 60.0, wait_s=30.0).add("cpu", "a")) == f"{add}: no more"
    finally:
        os.kill(int((tmp_path / "child").read_text()), 9)


async def patiently(work: Callable[[str, str], Awaitable[None]]) -> None:
    """Ask for it until it has ended."""
    async with asyncio.timeout(120):
        while True:
            with suppress(TimeoutError):
                return await work("cpu", "a")


async def test_one_that_takes_long_goes_on_and_is_waited_for_again_not_begun_again(tmp_path: Path) -> None:
    add = script(tmp_path, f"while [ ! -e {tmp_path}/go ]; do sleep 0.02; done")
    hook = Hook([add], [add], 30.0, wait_s=0.2)
    for _ in range(3):
        with pytest.raises(TimeoutError):
            await hook.add("cpu", "a")
    await until(lambda: calls(tmp_path) == [["cpu", "a"]])
    (tmp_path / "go").touch()
    await patiently(hook.add)
    assert calls(tmp_path) == [["cpu", "a"]]


async def test_a_removal_waits_for_the_making_to_end_and_follows_it_whatever_came_of_it(tmp_path: Path) -> None:
    add = script(tmp_path, f"while [ ! -e {tmp_path}/go ]; do sleep 0.02; done; exit 1")
    hook = Hook([add], [script(tmp_path, ""), "off"], 30.0, wait_s=0.2)
    for work in (hook.add, hook.remove):
        with pytest.raises(TimeoutError):
            await work("cpu", "a")
    await until(lambda: calls(tmp_path) == [["cpu", "a"]])
    (tmp_path / "go").touch()
    await patiently(hook.remove)
    assert calls(tmp_path) == [["cpu", "a"], ["off", "cpu", "a"]]


async def test_one_that_takes_too_long_is_ended_with_all_that_it_started(tmp_path: Path) -> None:
    add = script(tmp_path, f"sleep 1000 & echo $! > {tmp_path}/child; wait")
    for limit in (1.0, 10.0, 100.0):  # a busy machine begins it later
        hook = Hook([add], [add], limit, wait_s=300.0)
        assert await refusal(hook.add("cpu", "a")) == f"{add} did not end within {limit:g} s"
        if (tmp_path / "child").exists() and (tmp_path / "child").read_text().strip():
            break
    child = int((tmp_path / "child").read_text())
    await until(lambda: _gone(child))


async def test_our_settings_are_not_in_its_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INFAAS_BUS__NKEY_SEED", "secret")
    monkeypatch.setenv("CLOUD_REGION", "north")

    add = script(tmp_path, f"env > {tmp_path}/environment")
    await Hook([add], [add], 10.0).add("cpu", "a")
    found = (tmp_path / "environment").read_text().splitlines()
    assert "CLOUD_REGION=north" in found
    assert [line for line in found if line.startswith("INFAAS_")] == []


async def test_closing_ends_what_runs(tmp_path: Path) -> None:
    add = script(tmp_path, f"echo $$ > {tmp_path}/pid; exec sleep 1000")
    hook = Hook([add], [add], 60.0, wait_s=0.1)
    with pytest.raises(TimeoutError):
        await hook.add("cpu", "a")
    await until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text().strip() != "")
    await hook.close()
    await until(lambda: _gone(int((tmp_path / "pid").read_text())))


async def test_the_provider_of_commands_only(tmp_path: Path) -> None:
    settings = CommandSettings(add=f"{script(tmp_path, '')} on", remove=(script(tmp_path, ""), "off"))
    provider = Command(settings)
    assert provider.traits == ProviderTraits(confirm_stops=True)
    await provider.start(StartMachine(worker="cpu-1-1", kind="cpu", epoch=1))
    await provider.stop(StopMachine(worker="cpu-1-1", kind="cpu", epoch=1))
    assert calls(tmp_path) == [["on", "cpu", "cpu-1-1"], ["off", "cpu", "cpu-1-1"]]
    dry = Command(CommandSettings(add=settings.add, remove=settings.remove, dry_run=True))
    await dry.start(StartMachine(worker="cpu-1-2", kind="cpu", epoch=1))
    await dry.stop(StopMachine(worker="cpu-1-2", kind="cpu", epoch=1))
    assert len(calls(tmp_path)) == 2


async def test_its_time_limit_is_that_of_the_settings(tmp_path: Path) -> None:
    sleeps = script(tmp_path, "exec sleep 1000")
    provider = Command(CommandSettings(add=sleeps, remove=sleeps, command_s=1.0))
    work = provider.start(StartMachine(worker="cpu-1-1", kind="cpu", epoch=1))
    assert await refusal(work) == f"{sleeps} did not end within 1 s"
    await provider.close()


def _gone(pid: int) -> bool:
    """Whether it runs no more; one that nobody has waited for yet does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True

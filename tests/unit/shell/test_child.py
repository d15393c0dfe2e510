"""The protocol with a child that runs code which is not ours: what it prints is no message, and it keeps nothing of ours."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from bus.codec import encode
from services.core.policy import GuardedPolicy
from services.core.selection import Decision
from services.core.selection.policy import InfaasPolicy
from services.core.settings import AutoscalerSettings, DispatcherSettings, Settings
from services.shell.child import Channel, framed, how_ended, kept_environment, kill_group, read_frame
from services.shell.policies import load_policy, load_scaling
from services.shell.settings import SettingsError

CHILD = """
import os, subprocess, sys
from services.shell.child import Channel

channel = Channel.of_child()
print("said by its code", flush=True)
os.system("echo said by a child of its own")
channel.send({"read": sys.stdin.read(), "kept": os.environ.get("A_SECRET")})
while True:
    try:
        channel.send(channel.received(list))
    except EOFError:
        sys.exit(7)
"""


@contextmanager
def started(code: str) -> Iterator[tuple["subprocess.Popen[bytes]", Channel]]:
    source = str(Path(__file__).parents[3])
    with subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=kept_environment() | {"PYTHONPATH": source},
        start_new_session=True,
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        yield process, Channel(process.stdout, process.stdin)


def test_messages_go_both_ways_and_what_is_printed_goes_to_standard_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_SECRET", "of ours")
    with started(CHILD) as (process, channel):
        assert channel.received(dict) == {"read": "", "kept": None}
        for message in ([], [1, "two"], [b"x" * 2**20]):
            channel.send(message)
            assert channel.received(list) == message
        channel.close()
        assert process.stderr.read().decode().splitlines() == ["said by its code", "said by a child of its own"]
        assert how_ended(process.wait()) == "ended with code 7"


def test_a_child_is_killed_with_all_that_it_has_started() -> None:
    code = (
        "import subprocess\nfrom services.shell.child import Channel\nchannel = Channel.of_child()\n"
        "channel.send([subprocess.Popen(['sleep', '1000']).pid])\nchannel.received(list)"
    )
    with started(code) as (process, channel):
        (grandchild,) = channel.received(list)
        assert os.getpgid(grandchild) == process.pid
        kill_group(process.pid)
        assert how_ended(process.wait()) == f"was ended by {signal.SIGKILL.name}"
        with pytest.raises(EOFError):
            channel.received(list)
        process.stderr.read()  # its end comes when nobody of the group is left to write
        kill_group(process.pid)  # none is there: that is no error


async def test_long_messages_are_not_read_and_unnamed_signals_have_a_number() -> None:
    assert how_ended(-40) == "was ended by signal 40"
    stream = asyncio.StreamReader()
    stream.feed_data(framed([1]) + framed(["x" * 100]))
    assert await read_frame(stream, 10) == encode([1])
    with pytest.raises(OverflowError, match="at most 10"):
        await read_frame(stream, 10)
    stream.feed_eof()


# -- Policies by their names in the settings: a user's own class, and what is wrong with one.


class Selects:
    name = "mine"

    def select(self, ask: object, now: float, view: object) -> Decision:
        raise AssertionError("it is only loaded here")


class Scales:
    name = "mine"

    def scale(self, problem: object, now: float) -> dict[str, int]:
        raise AssertionError("it is only loaded here")


class Both(Selects, Scales):
    goal = "accuracy"

    def observe(self, outcome: object) -> None: ...


class Nameless:
    def select(self, ask: object, now: float, view: object) -> None: ...
    def scale(self, problem: object, now: float) -> None: ...


class Aimless(Both):
    goal = "fame"


class Needy(Both):
    def __init__(self, what: str) -> None: ...


class Failing(Both):
    def __init__(self) -> None:
        raise OSError("no such file")


def settings(path: str) -> Settings:
    return Settings(dispatcher=DispatcherSettings(policy=path), autoscaler=AutoscalerSettings(policy=path))


def test_one_class_may_decide_on_queries_and_on_instances() -> None:
    both = settings(f"{__name__}:Both")
    selection, scaling = load_policy(both), load_scaling(both)
    assert isinstance(selection, GuardedPolicy)
    assert isinstance(scaling, GuardedPolicy)
    assert selection.observe is not None
    assert selection.goal == "accuracy"
    assert isinstance(selection.builtin, InfaasPolicy)
    assert selection.builtin.goal == "accuracy"
    assert selection.failures == dict.fromkeys(("select", "scale", "observe"), 0)


def test_methods_are_needed_where_they_are_asked() -> None:
    assert load_policy(settings(f"{__name__}:Selects")).name == "mine"
    scaling = load_scaling(settings(f"{__name__}:Scales"))
    assert scaling.name == "mine"
    assert load_scaling(Settings()) is None
    with pytest.raises(SettingsError, match=r"^dispatcher.policy '.*:Scales' lacks the method select: docs/scaling.md"):
        load_policy(settings(f"{__name__}:Scales"))
    with pytest.raises(SettingsError, match=r"^autoscaler.policy '.*:Selects' lacks the method scale: docs/scaling.md"):
        load_scaling(settings(f"{__name__}:Selects"))


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("no.such.module:Mine", "cannot be loaded: there is no module no; put the folder of no.py on PYTHONPATH"),
        (f"{__name__}:Nobody", "cannot be loaded: .* has no Nobody; it has "),
        (f"{__name__}:Needy", "cannot be loaded: TypeError: .* missing 1 required positional argument: 'what'"),
        (f"{__name__}:Failing", "cannot be loaded: OSError: no such file"),
        (f"{__name__}:Nameless", "lacks a `name`, a text"),
        (f"{__name__}:Aimless", "its `goal` must be cost or accuracy, not 'fame'"),
    ],
)
def test_what_is_wrong_with_a_class_is_said(name: str, fault: str) -> None:
    with pytest.raises(SettingsError, match=f"^dispatcher.policy '{name}'.* {fault}"):
        load_policy(settings(name))
    with pytest.raises(SettingsError, match=f"^autoscaler.policy '{name}'.* {fault}"):
        load_scaling(settings(name))

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
from services.shell.child import Channel, framed, how_ended, kept_environment, kill_group, read_frame

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
        assert process.stderr is not None
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
        assert process.stderr is not None
        process.stderr.read()  # its end comes when nobody of the group is left to write
        kill_group(process.pid)  # none is there: that is no error


def test_a_signal_without_a_name_has_a_number() -> None:
    assert how_ended(-40) == "was ended by signal 40"


def test_a_message_that_is_too_long_is_not_read() -> None:
    async def main() -> None:
        stream = asyncio.StreamReader()
        stream.feed_data(framed([1]) + framed(["x" * 100]))
        assert await read_frame(stream, 10) == encode([1])
        with pytest.raises(OverflowError, match="at most 10"):
            await read_frame(stream, 10)
        stream.feed_eof()

    asyncio.run(main())

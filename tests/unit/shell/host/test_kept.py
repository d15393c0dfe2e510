"""What a killed process leaves its successor."""

import mmap
import os
import signal
import sys
from pathlib import Path
from random import Random

import pytest

from services.shell.host import process
from services.shell.host import running as module
from services.shell.host.running import KEPT_SIZE, ROOM, Kept, LastingMemory, shared

WRITES = f"""
import os
from services.shell.host.running import inherited
kept = inherited().kept
first = kept.put(b"stored")
kept.put(b"not stored")
kept.drop(first)
os.kill(os.getpid(), {int(signal.SIGKILL)})
"""


def memory() -> mmap.mmap:
    return mmap.mmap(-1, KEPT_SIZE)


def bodies(kept: Kept) -> list[bytes]:
    return list(kept.left().values())


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="shared memory without a file: Linux only")
def test_a_killed_process_leaves_what_it_kept() -> None:
    running = shared()
    assert running is not None
    command: list[str | Path] = [sys.executable, "-c", WRITES]
    environ = process.with_our_source(os.environ)
    child = process.start_service(command, log=None, environ=environ, running=running)
    assert child.wait(60.0) == -signal.SIGKILL
    assert bodies(running.kept) == [b"not stored"]


def test_what_is_left_is_somebodys_from_then_on() -> None:
    shared_memory = memory()
    Kept(shared_memory).put(b"one")
    second = Kept(shared_memory)
    found = second.left()
    assert list(found.values()) == [b"one"]
    assert second.left() == {}
    second.leave(found)
    assert second.left() == found, "who had it has ended: an actor of the same process that begins anew"
    assert bodies(Kept(shared_memory)) == [b"one"], "it is kept until it is dropped"
    second.drop(next(iter(found)))
    assert bodies(Kept(shared_memory)) == []


def test_only_whole_entries_are_left_whenever_the_process_dies() -> None:
    """The bytes of an entry are all there before its length is."""
    shared_memory = memory()
    kept = Kept(shared_memory)
    kept.drop(kept.put(b"a long entry, which the next one overwrites"))
    kept.put(b"x" * 5)
    before = bytes(shared_memory[:200])
    kept.put(b"y" * 20)
    after = bytes(shared_memory[:200])
    length = next(at for at in range(200) if before[at : at + 4] == bytes(4) and after[at : at + 4] == b"\x14\0\0\0")
    shared_memory[length : length + 4] = bytes(4)
    assert bodies(Kept(shared_memory)) == [b"xxxxx"]


def test_it_goes_on_for_ever_in_the_same_memory() -> None:
    shared_memory, draw = memory(), Random(1)
    kept, expected = Kept(shared_memory), dict[int, bytes]()
    for n in range(3 * KEPT_SIZE // 5_000):
        body = n.to_bytes(8, "little") + bytes(draw.randrange(10_000))
        number = kept.put(body)
        assert number
        expected[number] = body
        for old in draw.sample(sorted(expected), k=len(expected) // 2 if len(expected) > 40 else 0):
            kept.drop(old)
            del expected[old]
        if n % 300 == 0:
            assert sorted(bodies(Kept(shared_memory))) == sorted(expected.values())
    assert sorted(bodies(Kept(shared_memory))) == sorted(expected.values())


def test_without_room_it_says_so_until_something_is_dropped() -> None:
    shared_memory = memory()
    kept = Kept(shared_memory)
    assert kept.put(bytes(ROOM)) == 0
    first = kept.put(bytes(ROOM // 2))
    assert first
    assert kept.put(bytes(ROOM // 2)) == kept.put(bytes(ROOM // 2)) == 0
    kept.drop(first)
    assert kept.put(bytes(ROOM // 2))
    assert len(bodies(Kept(shared_memory))) == 1


def test_wills_are_apart_from_rows_and_leave_them_room() -> None:
    shared_memory = memory()
    kept = Kept(shared_memory)
    number = kept.put(b"will", will=True)
    kept.put(b"row")
    assert kept.put(bytes(ROOM // 2), will=True) == 0
    assert kept.put(bytes(ROOM // 2))
    successor = Kept(shared_memory)
    assert list(successor.left(wills=True).values()) == [b"will"]
    assert [len(body) for body in bodies(successor)] == [3, ROOM // 2]
    kept.drop(number)
    assert Kept(shared_memory).left(wills=True) == {}


@pytest.mark.skipif(not hasattr(os, "posix_fallocate"), reason="Linux only")
def test_a_system_keeps_rows_on_disk_where_memory_has_no_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MEMORY", tmp_path / "none")
    killed = LastingMemory()
    killed.open(tmp_path)
    first = killed.of("dispatcher-1")
    first.kept.put(b"not sent")
    assert os.stat(first.fd).st_blocks * 512 >= KEPT_SIZE, "a full disk ends no process later"
    successor = LastingMemory()
    successor.open(tmp_path)
    found = successor.of("dispatcher-1")
    assert bodies(Kept(mmap.mmap(found.fd, 0), module._KEPT_AT)) == [b"not sent"]

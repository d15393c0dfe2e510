"""What every bus promises of key-value and object buckets."""

import asyncio
import gc
import os
import time
from pathlib import Path

import pytest

from bus.natsbus import NatsBus
from bus.natsconsumers import OrderedReader
from bus.port import BusError, KeyValueEntry, NotFound, WrongRevision
from tests.support.clients.responders import until
from tests.support.servers.buses import Buses, Connects


async def test_a_key_has_the_value_put_last(buses: Buses, connect: Connects) -> None:
    one, two = await connect(), await connect()
    bucket = await one.key_value(f"{buses.prefix}-b")
    first = await bucket.put("app.faces", b"1")
    second = await bucket.put("app.faces", b"\x00\xff")
    await bucket.put("model.m/1", b"")
    same = await two.key_value(f"{buses.prefix}-b", create=False)
    assert second > first
    assert await same.get("app.faces") == KeyValueEntry("app.faces", b"\x00\xff", second)
    assert (await same.get("model.m/1")).value == b""
    assert sorted(await same.keys()) == ["app.faces", "model.m/1"]
    with pytest.raises(NotFound, match=r"app\.other"):
        await same.get("app.other")


async def test_a_deleted_key_is_not_there_and_may_be_made_again(buses: Buses, connect: Connects) -> None:
    bucket = await (await connect()).key_value(f"{buses.prefix}-b")
    assert await bucket.keys() == []
    await bucket.put("k", b"1")
    await bucket.delete("k")
    with pytest.raises(NotFound):
        await bucket.get("k")
    assert await bucket.keys() == []
    revision = await bucket.create("k", b"2")
    assert await bucket.get("k") == KeyValueEntry("k", b"2", revision)


async def test_keys_may_be_asked_for_by_what_they_begin_with(buses: Buses, connect: Connects) -> None:
    bucket = await (await connect()).key_value(f"{buses.prefix}-b")
    for key in ("app._", "app.x", "app.x.y", "app2.x", "app", "other.app.x"):
        await bucket.put(key, b"1")
    await bucket.delete("app.x")
    assert sorted(await bucket.keys("app")) == ["app._", "app.x.y"]
    assert sorted((one.key, one.value) for one in await bucket.entries("app")) == [("app._", b"1"), ("app.x.y", b"1")]
    assert await bucket.keys("nobody") == []


async def test_compare_and_set_lets_one_win(buses: Buses, connect: Connects) -> None:
    one = await (await connect()).key_value(f"{buses.prefix}-b")
    two = await (await connect()).key_value(f"{buses.prefix}-b")
    made = await asyncio.gather(one.create("leader", b"one"), two.create("leader", b"two"), return_exceptions=True)
    assert [type(result) for result in made if not isinstance(result, int)] == [WrongRevision]
    revision = next(result for result in made if isinstance(result, int))
    renewed = await one.update("leader", b"three", revision)
    with pytest.raises(WrongRevision, match="leader"):
        await two.update("leader", b"four", revision)
    assert await two.get("leader") == KeyValueEntry("leader", b"three", renewed)
    with pytest.raises(WrongRevision, match="leader"):
        await two.create("leader", b"five")


async def test_a_watch_tells_what_is_then_that_this_is_all_then_what_changes(buses: Buses, connect: Connects) -> None:
    one, two = await connect(), await connect()
    bucket = await one.key_value(f"{buses.prefix}-b")
    await bucket.put("a", b"old")
    await bucket.put("b", b"1")
    await bucket.put("a", b"new")
    got: list[KeyValueEntry | None] = []
    watch = await (await two.key_value(f"{buses.prefix}-b")).watch(got.append)
    await until(lambda: None in got)
    assert [(e.key, e.value) for e in got[:-1] if e] == [("b", b"1"), ("a", b"new")]
    assert got[-1] is None
    await bucket.put("c", b"2")
    for key in ("never", "b", "b"):  # what is not there leaves no mark
        await bucket.delete(key)
    await bucket.put("d", b"3")
    await until(lambda: len(got) >= 6)
    assert [(e.key, e.value) for e in got[3:] if e] == [("c", b"2"), ("b", None), ("d", b"3")]
    await watch.drain()
    await bucket.put("c", b"3")
    await two.flush()
    await asyncio.sleep(0.05)
    assert len(got) == 6


async def test_a_watch_of_an_empty_bucket_is_complete_at_once(buses: Buses, connect: Connects) -> None:
    bucket = await (await connect()).key_value(f"{buses.prefix}-b")
    got: list[KeyValueEntry | None] = []
    await bucket.watch(got.append)
    await until(lambda: got == [None])
    revision = await bucket.put("a", b"1")
    await until(lambda: len(got) == 2)
    assert got == [None, KeyValueEntry("a", b"1", revision)]


async def test_a_look_into_a_bucket_leaves_no_subscription_and_no_reader(nats_url: str, prefix: str) -> None:
    """Neither one that finds something nor one that finds nothing, which ends before its reader has begun. A reader holds all that it has read,
    and the collector comes seldom to a process that serves.
    """
    bus = await NatsBus.connect(nats_url, name="test")
    try:
        bucket = await bus.key_value(f"{prefix}-test")
        before = len(bus._client._subs)
        gc.collect()
        gc.disable()
        for _ in range(3):
            await bucket.keys()
            await bucket.put("a", b"1")
            await bucket.keys()
            await bucket.delete("a")
            await (await bus.object_store(f"{prefix}-objects")).keys()
        assert len(bus._client._subs) == before
        assert not [one for one in gc.get_objects() if isinstance(one, OrderedReader)]
    finally:
        gc.enable()
        await bus.close()


async def test_a_watch_sees_every_one_of_many_keys(buses: Buses, connect: Connects) -> None:
    bucket = await (await connect()).key_value(f"{buses.prefix}-b")
    await asyncio.gather(*[bucket.put(f"variant.v{n}", os.urandom(2000)) for n in range(500)])
    got: list[KeyValueEntry | None] = []
    await bucket.watch(got.append)
    await until(lambda: None in got)
    assert got.index(None) == 500
    assert {entry.key for entry in got if entry} == {f"variant.v{n}" for n in range(500)}


async def test_a_watcher_that_raises_goes_on(buses: Buses, connect: Connects) -> None:
    errors: list[Exception] = []
    bucket = await (await connect(on_error=errors.append)).key_value(f"{buses.prefix}-b")
    got: list[KeyValueEntry | None] = []

    def handle(entry: KeyValueEntry | None) -> None:
        got.append(entry)
        if entry is not None and entry.value == b"bad":
            raise ValueError("cannot digest this")

    await bucket.watch(handle)
    await bucket.put("a", b"bad")
    await bucket.put("b", b"good")
    await until(lambda: len(got) == 3)
    assert [str(error) for error in errors] == ["cannot digest this"]


@pytest.mark.parametrize("key", ["", "a b", ".a", "a.", "a..b", "a.*", ">", "é", "a\n"])
async def test_what_cannot_be_a_key(buses: Buses, connect: Connects, key: str) -> None:
    bucket = await (await connect()).key_value(f"{buses.prefix}-b")
    for ask in (bucket.put(key, b""), bucket.get(key), bucket.create(key, b""), bucket.delete(key)):
        with pytest.raises(BusError, match="key"):
            await ask


async def test_a_bucket_that_must_exist_and_does_not(buses: Buses, connect: Connects) -> None:
    bus = await connect()
    with pytest.raises(NotFound):
        await bus.key_value(f"{buses.prefix}-none", create=False)
    with pytest.raises(NotFound):
        await bus.object_store(f"{buses.prefix}-none", create=False)


@pytest.mark.parametrize("size", [0, 1, 128 * 1024, 128 * 1024 + 1, 3_000_000])
async def test_an_object_comes_back_as_it_was(buses: Buses, connect: Connects, tmp_path: Path, size: int) -> None:
    store = await (await connect()).object_store(f"{buses.prefix}-o")
    content = os.urandom(size)
    await store.put("bytes", content)
    source = tmp_path / "source"
    source.write_bytes(content)
    await store.put("../a file.onnx", source)
    same = await (await connect()).object_store(f"{buses.prefix}-o", create=False)
    assert await same.get("../a file.onnx") == content
    await same.get_to("bytes", tmp_path / "target")
    assert (tmp_path / "target").read_bytes() == content
    assert sorted(await same.keys()) == ["../a file.onnx", "bytes"]
    assert sorted(os.listdir(tmp_path)) == ["source", "target"]


async def test_an_object_is_replaced_and_deleted(buses: Buses, connect: Connects, tmp_path: Path) -> None:
    store = await (await connect()).object_store(f"{buses.prefix}-o")
    await store.put("k", bytes(300_000))
    await store.put("k", b"new")
    assert await store.get("k") == b"new"
    assert await store.keys() == ["k"]
    assert await store.exists("k")
    await store.delete("k")
    await store.delete("k")
    assert not await store.exists("k")
    assert not await store.exists("never")
    assert await store.keys() == []
    with pytest.raises(NotFound):
        await store.get("k")
    (tmp_path / "kept").write_bytes(b"what was there")
    with pytest.raises(NotFound):
        await store.get_to("k", tmp_path / "kept")
    assert (tmp_path / "kept").read_bytes() == b"what was there"
    await store.put("k", b"back")
    assert await store.get("k") == b"back"


async def test_objects_expire(buses: Buses, connect: Connects) -> None:
    store = await (await connect()).object_store(f"{buses.prefix}-o", max_age_s=1.0)
    began = time.monotonic()
    await store.put("k", b"1")
    assert await store.exists("k") or time.monotonic() - began > 1.0, "unless the machine stood still for so long"
    async with asyncio.timeout(60):
        while await store.exists("k"):  # noqa: ASYNC110  (a bucket does not tell)
            await asyncio.sleep(0.1)
    assert await store.keys() == []


async def test_a_file_that_cannot_be_read_leaves_nothing_behind(
    buses: Buses, connect: Connects, tmp_path: Path
) -> None:
    store = await (await connect()).object_store(f"{buses.prefix}-o")
    with pytest.raises(FileNotFoundError):
        await store.put("k", tmp_path / "missing")
    assert not await store.exists("k")

"""Programs with stock nats-py share messages, buckets and objects with the bus."""

from pathlib import Path

import nats
import pytest

from bus.natsbus import NatsBus
from bus.port import BusError, KeyValueEntry
from tests.support.servers.buses import until


async def connected(url: str) -> NatsBus:
    return await NatsBus.connect(url, name="test")


async def test_a_program_with_stock_nats_py_asks_and_answers(nats_url: str, prefix: str) -> None:
    bus, stock = await connected(nats_url), await nats.connect(nats_url)
    await bus.subscribe(f"{prefix}.ours", lambda d: bus.publish(d.reply, d.data[::-1], headers=d.headers))
    await bus.flush()
    answer = await stock.request(f"{prefix}.ours", b"abc", headers={"Ask": "é"})
    assert (answer.data, answer.headers) == (b"cba", {"Ask": "é"})

    async def reply(message: nats.aio.msg.Msg) -> None:
        await message.respond(message.data * 2)

    await stock.subscribe(f"{prefix}.theirs", cb=reply)
    # its flush does not wait for a subscription just made (the PING overtakes it); a request of its own comes after it
    assert (await stock.request(f"{prefix}.theirs", b"a")).data == b"aa"
    assert (await bus.request(f"{prefix}.theirs", b"abc", 5.0)).data == b"abcabc"
    await stock.close()
    await bus.close()


async def test_buckets_are_shared_with_stock_nats_py(nats_url: str, prefix: str) -> None:
    bus, stock = await connected(nats_url), await nats.connect(nats_url)
    jet = stock.jetstream()
    ours = await bus.key_value(f"{prefix}-b")
    theirs = await jet.key_value(f"{prefix}-b")
    revision = await ours.put("a.b", b"1")
    entry = await theirs.get("a.b")
    assert (entry.value, entry.revision) == (b"1", revision)
    await theirs.put("c", b"2")
    await theirs.delete("a.b")
    await theirs.purge("d")
    assert await ours.keys() == ["c"]
    made = await jet.create_key_value(bucket=f"{prefix}-history", history=5)
    await made.put("x", b"1")
    assert (await (await bus.key_value(f"{prefix}-history")).get("x")).value == b"1"

    content = bytes(range(256)) * 2000
    store = await bus.object_store(f"{prefix}-o", max_age_s=600)
    same = await jet.object_store(f"{prefix}-o")
    await store.put("ours", content)
    assert (await same.get("ours")).data == content
    await same.put("theirs", content)
    assert await store.get("theirs") == content
    assert sorted(info.name for info in await same.list()) == sorted(await store.keys()) == ["ours", "theirs"]
    await same.delete("ours")
    assert await store.keys() == ["theirs"]
    await stock.close()
    await bus.close()


async def test_a_watch_whose_consumer_is_deleted_goes_on(nats_url: str, prefix: str) -> None:
    bus, stock = await connected(nats_url), await nats.connect(nats_url)
    jet = stock.jetstream()
    bucket = await bus.key_value(f"{prefix}-b")
    seen: list[KeyValueEntry | None] = []
    await bucket.watch(seen.append)
    await bucket.put("k", b"1")
    await until(lambda: len(seen) == 2)
    for consumer in await jet.consumers_info(f"KV_{prefix}-b"):
        await jet.delete_consumer(f"KV_{prefix}-b", consumer.name)
    await bucket.put("k", b"2")
    await until(lambda: len(seen) == 3)
    assert [entry and entry.value for entry in seen] == [None, b"1", b"2"]
    await stock.close()
    await bus.close()


async def test_an_object_with_wrong_bytes_is_not_handed_out(nats_url: str, prefix: str, tmp_path: Path) -> None:
    bus, stock = await connected(nats_url), await nats.connect(nats_url)
    store = await bus.object_store(f"{prefix}-o")
    await store.put("k", bytes(300_000))
    jet = stock.jetstream()
    info = await (await jet.object_store(f"{prefix}-o")).get_info("k")
    chunks = f"$O.{prefix}-o.C.{info.nuid}"
    await jet.purge_stream(f"OBJ_{prefix}-o", subject=chunks)
    for chunk in (bytes(128 * 1024), b"\x01" * 128 * 1024, bytes(300_000 - 256 * 1024)):
        await jet.publish(chunks, chunk)
    with pytest.raises(BusError, match="digest"):
        await store.get("k")
    with pytest.raises(BusError, match="digest"):
        await store.get_to("k", tmp_path / "k")
    assert not (tmp_path / "k").exists()
    await stock.close()
    await bus.close()

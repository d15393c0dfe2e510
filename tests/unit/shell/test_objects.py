"""Large tensors in the object store: stored with their size, and deleted as far as they are there."""

import pytest

from bus.memory import Broker
from bus.messages.public import Tensor
from bus.port import NotFound
from services.shell.objects import delete_all, fetch, store_outputs


async def test_outputs_are_stored_with_their_size_and_deleted() -> None:
    bus = Broker().connect()
    await delete_all(bus, "outputs", ["a"])  # there is no bucket yet
    refs = [await store_outputs(bus, "outputs", key, {"y": Tensor("FP32", [1], b"\0" * 4)}) for key in "ab"]
    assert refs[0].bytes == len(await fetch(bus, "outputs", "a"))
    await delete_all(bus, "outputs", ["gone", "a"])
    with pytest.raises(NotFound):
        await fetch(bus, "outputs", "a")
    assert len(await fetch(bus, "outputs", "b")) == refs[1].bytes
    await bus.close()

"""How large the streams of events may become."""

import pytest

from bus.memory import MemoryBus
from bus.port import BusError
from bus.subjects import Subjects
from services.core.settings import BusSettings
from services.recorder.__main__ import streams

SUBJECTS = Subjects()
BODY = bytes(1000)


@pytest.mark.parametrize("size", [10_000, 50_000])
async def test_a_full_stream_of_outcomes_refuses_and_one_of_events_forgets_the_oldest(size: int) -> None:
    bus = MemoryBus()
    found = streams(SUBJECTS, BusSettings(outcome_bytes=size, event_bytes=size))
    for spec in found.values():
        await bus.ensure_stream(spec)
    stored = 0
    with pytest.raises(BusError):
        for stored in range(100):
            await bus.publish_durable(found["outcomes"].subjects[0], BODY, str(stored))
    assert 0.8 * size < stored * len(BODY) <= size
    for number in range(100):
        await bus.publish_durable(found["events"].subjects[0], BODY, str(number))
    consumer = await bus.consumer(SUBJECTS.event_stream, "c")
    kept = await consumer.fetch(100, 1.0)
    assert 0.8 * size < len(kept) * len(BODY) <= size
    await bus.close()

"""The short form of benches/cache.py: memory, the cost of a miss, and throughput in virtual time."""

import sys
from pathlib import Path

import pytest

from bus.messages.catalog import Ensemble
from tests.support.simulated.fleet import variant
from tests.unit.dispatcher.test_equal_queries import fleet_of, inputs

sys.path.insert(0, str(Path(__file__).parents[3] / "benches"))

from cache import memory


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("size", [40, 4_000])
def test_the_process_grows_by_about_the_bound(size: int) -> None:
    grown, counted, _ = memory(size, 16_000_000)
    assert 0.97 < counted <= 1.0
    assert 0.8 < grown < 1.2  # other memory of the process counts too; the bench measures it in a process of its own


def test_half_of_the_queries_repeated_gives_at_least_1_6_times_the_throughput() -> None:
    """One executor, a model of 5 ms without batches; 400 queries at once."""
    seconds = {}
    for cache_mb in (0, 1):
        slow = variant(base_ms=5.0, per_item_ms=0.0, max_batch=1)
        fleet = fleet_of(slow, selection=Ensemble(policy="majority", cache_mb=cache_mb))
        fleet.change(latency_ms=None)
        began = fleet.stage.now
        labels = [fleet.ask(inputs=inputs(number // 2)) for number in range(400)]
        fleet.stage.run(10.0)
        assert [len(fleet.replies(label)) for label in labels] == [1] * 400
        assert not any("error" in fleet.replies(label)[0] for label in labels)
        seconds[cache_mb] = max(at for at, subject, _ in fleet.stage.heard if subject.startswith("_INBOX")) - began
    assert seconds[0] > 1.6 * seconds[1]

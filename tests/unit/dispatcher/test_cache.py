"""Kept answers: what is found, what is evicted, how much memory they take."""

import os
import sys

from hypothesis import given
from hypothesis import strategies as st

from bus.messages.public import Tensor
from services.dispatcher.cache import PartSource, PredictionCache

SOURCE = PartSource("mlp", "1", "mlp.1.cpu", "cpu", "w1", 0.9, simulated=False)


def digest(number: int) -> bytes:
    return number.to_bytes(16, "big")


def outputs(value: int = 0, size: int = 40) -> dict[str, Tensor]:
    return {"y": Tensor("FP32", [1, size // 4], bytes([value]) * size)}


def always(source: PartSource) -> bool:
    del source
    return True


def test_an_answer_is_found_by_its_inputs_model_and_version_only() -> None:
    cache = PredictionCache(100_000)
    cache.put(digest(1), "mlp", "1", SOURCE, outputs(7))
    found = cache.get(digest(1), "mlp", "1", always)
    assert (found.source, found.outputs) == (SOURCE, outputs(7))
    assert cache.get(digest(2), "mlp", "1", always) is None
    assert cache.get(digest(1), "cnn", "1", always) is None
    assert cache.get(digest(1), "mlp", "2", always) is None
    assert cache.get(digest(1), None, None, always) is None
    assert (cache.hits, cache.misses, len(cache)) == (1, 4, 1)


def test_what_does_not_fit_is_a_miss() -> None:
    cache = PredictionCache(100_000)
    cache.put(digest(1), "mlp", "1", SOURCE, outputs())
    assert cache.get(digest(1), "mlp", "1", lambda source: source.reaches(0.91)) is None
    assert cache.get(digest(1), "mlp", "1", lambda source: source.reaches(0.9)) is not None
    unmeasured = SOURCE._replace(accuracy=None)
    cache.put(digest(2), "mlp", "1", unmeasured, outputs())
    assert cache.get(digest(2), "mlp", "1", lambda source: source.reaches(0.1)) is None
    assert cache.get(digest(2), "mlp", "1", lambda source: source.reaches(0.0)) is not None
    assert (cache.hits, cache.misses) == (2, 2)


def test_the_more_accurate_answer_of_a_version_stays() -> None:
    cache = PredictionCache(100_000)
    low, high = SOURCE._replace(accuracy=0.8), SOURCE._replace(accuracy=0.95)
    for source, value in ((SOURCE, 1), (low, 2)):
        cache.put(digest(1), None, None, source, outputs(value))
    held = cache.get(digest(1), None, None, always)
    assert (held.source, held.outputs) == (SOURCE, outputs(1))
    cache.put(digest(1), None, None, high, outputs(3, size=400))
    assert (held.source, held.outputs) == (high, outputs(3, size=400))
    cache.put(digest(1), None, None, low._replace(version="2"), outputs(4))  # the version that serves now
    assert (held.source.version, held.outputs, len(cache)) == ("2", outputs(4), 1)


def test_the_clock_gives_what_was_used_a_second_chance() -> None:
    cache = PredictionCache(20_000)
    number = 0
    while not cache.evictions:
        cache.put(digest(number), "mlp", "1", SOURCE, outputs())
        number += 1
    kept = len(cache)
    assert cache.get(digest(0), "mlp", "1", always) is None  # the first one went
    for used in (1, 3):
        assert cache.get(digest(used), "mlp", "1", always) is not None
    for more in range(number, number + 3):
        cache.put(digest(more), "mlp", "1", SOURCE, outputs())
    found = [one for one in range(6) if cache.get(digest(one), "mlp", "1", always) is not None]
    assert 1 in found
    assert 3 in found
    assert 2 not in found
    assert len(cache) <= kept + 1


def test_the_first_goes_when_all_are_used_or_the_bound_is_smaller() -> None:
    cache = PredictionCache(20_000)
    number = 0
    while not cache.evictions:
        cache.put(digest(number), "mlp", "1", SOURCE, outputs())
        number += 1
    held = [one for one in range(number) if cache.get(digest(one), "mlp", "1", always) is not None]
    cache.put(digest(number), "mlp", "1", SOURCE, outputs())
    cache.put(digest(number + 1), "mlp", "1", SOURCE, outputs())
    assert cache.get(digest(held[0]), "mlp", "1", always) is None
    assert cache.get(digest(held[-1]), "mlp", "1", always) is not None
    cache = PredictionCache(200_000)
    for number in range(300):
        cache.put(digest(number), "mlp", "1", SOURCE, outputs())
    assert cache.evictions == 0
    cache.resize(40_000)
    assert 0 < len(cache) < 300
    assert cache.size <= 40_000


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(1, 900), st.booleans()), max_size=300))
def test_the_bound_holds_and_what_is_found_is_what_was_kept(steps: list[tuple[int, int, bool]]) -> None:
    cache = PredictionCache(9_000)
    said: dict[int, int] = {}
    for key, size, put in steps:
        if put:
            cache.put(digest(key), "mlp", str(size), SOURCE._replace(version=str(size)), outputs(key, size=4 * size))
            said[key] = size
        elif key in said:
            found = cache.get(digest(key), "mlp", str(said[key]), always)
            assert found is None or found.outputs == outputs(key, size=4 * said[key])
        assert cache.size <= 9_000
        assert cache._parts == sum(part.size for part in cache._ring)
        assert cache._tables == sum(map(sys.getsizeof, cache._shards))


def test_large_answers_are_not_kept_and_digests_spread_over_shards() -> None:
    cache = PredictionCache(10_000)
    cache.put(digest(1), "mlp", "1", SOURCE, outputs(size=40))
    cache.put(digest(2), "mlp", "1", SOURCE, outputs(size=8_000))
    assert cache.get(digest(2), "mlp", "1", always) is None
    assert cache.get(digest(1), "mlp", "1", always) is not None
    cache = PredictionCache(4_000_000)
    for _ in range(2_000):
        cache.put(os.urandom(16), "mlp", "1", SOURCE, outputs())
    sizes = [len(shard) for shard in cache._shards]
    assert len(sizes) == 64
    assert max(sizes) < 70

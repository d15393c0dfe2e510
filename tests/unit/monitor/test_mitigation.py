"""Where an interfered instance goes: the policy alone."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.monitor.mitigation import (
    BUSIEST,
    GAIN,
    AskElsewhere,
    CoreUse,
    MoveToCores,
    MoveToDevice,
    better_cores,
    mitigate,
)


@pytest.mark.parametrize(
    ("what", "threads", "at", "busy", "pinned", "chosen"),
    [
        ("the idle core", 1, [0], {0: 1.0, 1: 0.1}, [], [1]),
        ("it is where it would go", 1, [1], {0: 1.0, 1: 0.1}, [], []),
        ("kept to none yet", 1, [], {0: 1.0, 1: 0.1}, [], [1]),
        ("everything is busy", 1, [0], {0: 1.0, 1: 0.9}, [], []),
        ("not clearly better", 1, [0], {0: 0.5, 1: 0.4}, [], []),
        ("the idlest two of four", 2, [0, 1], {0: 1.0, 1: 1.0, 2: 0.3, 3: 0.1}, [], [2, 3]),
        ("one of its two is fine", 2, [0, 1], {0: 1.0, 1: 0.0, 2: 0.0}, [], [1, 2]),
        ("not onto another's core", 1, [0], {0: 1.0, 1: 0.1, 2: 0.2}, [[1]], [2]),
        ("another's core is better than a hog's", 1, [0], {0: 1.0, 1: 0.1}, [[1]], [1]),
        ("it needs all there are", 2, [], {0: 1.0, 1: 0.1}, [], []),
        ("cores that are not measured", 1, [0], {}, [], []),
    ],
)
def test_cores(
    what: str, threads: int, at: list[int], busy: dict[int, float], pinned: list[list[int]], chosen: list[int]
) -> None:
    assert better_cores(threads, at, busy, pinned) == chosen, what


@given(
    st.integers(1, 5),
    st.dictionaries(st.integers(0, 7), st.floats(0, 1), min_size=1),
    st.lists(st.lists(st.integers(0, 7), max_size=3), max_size=4),
    st.data(),
)
def test_a_move_is_always_for_the_better(
    threads: int, busy: dict[int, float], pinned: list[list[int]], data: st.DataObject
) -> None:
    at = data.draw(st.lists(st.sampled_from(sorted(busy)), unique=True, max_size=threads))
    chosen = better_cores(threads, at, busy, pinned)
    if chosen:
        assert len(chosen) == threads == len(set(chosen))
        assert all(busy[core] <= BUSIEST for core in chosen)
        assert set(chosen) != set(at)
        if not pinned:
            here = at or list(busy)
            before, after = (sum(busy[core] for core in cores) / len(cores) for cores in (here, chosen))
            assert before - after >= GAIN - 1e-9


def test_cores_go_before_devices_and_these_before_other_workers() -> None:
    cores = mitigate([1], {1: 0.25}, ["gpu-1"], "slow")
    assert cores == MoveToCores([1], "slow; core 1 (25% busy) would be better")
    assert mitigate([], {}, ["gpu-1", "gpu-2"], "slow") == MoveToDevice("gpu-1", "slow; gpu-1 has room")
    assert isinstance(mitigate([], {}, [], "slow"), AskElsewhere)


def test_one_glance_at_a_core_says_little() -> None:
    use = CoreUse()
    use.sample({0: 0.0})
    use.sample({0: 1.0, 1: 0.4})
    assert use.busy == {0: 0.5, 1: 0.4}
    for _ in range(10):
        use.sample({0: 1.0})
    assert use.busy == {0: pytest.approx(1.0, abs=0.01)}

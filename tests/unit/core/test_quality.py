"""The mean of labels that may change: its interval at every moment, and how soon a change is found. By seeds, so always the same."""

import random
from itertools import pairwise

import numpy as np
import pytest

from services.core.ensemble.outputs import reached, said, score
from services.core.quality import BIN, LEVEL, Score, by_reference, least_agreement, level_of
from tests.support.simulated.fleet import variant


def told(one: Score, share: float, count: int, luck: random.Random) -> None:
    for _ in range(count):
        one.add(float(luck.random() < share), 0.0)


def left_after(one: Score, share: float, registered: float, luck: random.Random, most: int = 2000) -> int:
    """Labels until the interval has left what was registered."""
    for count in range(1, most):
        told(one, share, 1, luck)
        low, high = one.interval(float(count))
        if not low <= registered <= high:
            return count
    return most


def test_the_levels_of_all_windows_add_up_to_less_than_the_level() -> None:
    assert sum(map(level_of, range(10**5))) < LEVEL
    assert all(later < sooner for sooner, later in pairwise(map(level_of, range(1000))))


def test_the_interval_holds_at_every_moment() -> None:
    missed = 0
    for seed in range(60):
        luck, one = random.Random(seed), Score(aim=0.9)
        held = True
        for _ in range(80):
            told(one, 0.9, 8, luck)
            low, high = one.interval(0.0)
            held = held and low <= 0.9 <= high
        missed += not held
    assert missed <= 60 * LEVEL


@pytest.mark.parametrize("before", [0, 2000])
@pytest.mark.parametrize(("share", "most"), [(0.45, 20), (0.9, 250)])
def test_a_change_is_found_soon_however_many_good_labels_came_before(before: int, share: float, most: int) -> None:
    found = []
    for seed in range(15):
        luck, one = random.Random(seed), Score(aim=0.98)
        told(one, 0.98, before, luck)
        one.interval(0.0)
        found.append(left_after(one, share, 0.98, luck))
    assert np.median(found) <= most


def test_after_a_change_only_what_came_since_counts() -> None:
    luck, one = random.Random(7), Score(aim=0.95)
    told(one, 0.95, 600, luck)
    one.interval(1.0)
    for _ in range(300):
        told(one, 0.4, 1, luck)
        low, high = one.interval(2.0)
    assert low < 0.4 < high < 0.7
    assert one.since == 2.0
    assert one.observed.count <= 300 + 2 * BIN
    assert left_after(one, 0.95, 0.4, luck) < 60  # and it is found, too, when it goes back


def test_the_state_stays_small() -> None:
    one = Score()
    for i in range(20_000):
        one.add(float(i % 10 > 0), 0.0)
    assert one.observed.count == 20_000
    assert len(one.bins) < 60


SCORES = np.array([[0.1, 0.7, 0.2], [0.9, 0.05, 0.05]], np.float32)


def test_what_labels_are_compared_with() -> None:
    assert said({"p": SCORES}, "top1") == [1, 0]
    assert said({"p": SCORES}, "top5") == [[1, 2, 0], [0, 1, 2]]
    assert said({"p": np.array([0.2, 0.7], np.float32)}, "top1") == [0, 1]
    assert said({"y": np.array(["cat", "dog"]), "p": SCORES}, "top1") == ["cat", "dog"]
    assert said({"y": np.array([[1.5], [2.5]], np.float32)}, "mae") == [1.5, 2.5]
    assert said({"y": np.zeros((2, 3), np.float32)}, "mae") is None  # several numbers an item
    assert said({"p": SCORES}, "f1_macro") is None  # no mean over the items


def test_how_right_an_answer_is() -> None:
    assert [score(label, 1, "top1", ["a", "b"], None) for label in (1, 0, "b", "a", [1], 1.0)] == [1, 0, 1, 0, 1, 1]
    assert [score(label, [4, 7, 1, 0, 2], "top5", [], None) for label in (7, 3)] == [1, 0]
    assert score("cat", "cat", "top1", [], None) == 1.0
    assert score([1, 2], 1, "top1", [], None) is None
    assert score(10.0, 12.0, "mae", [], 2.0) == pytest.approx(1 - 1 / 20)
    assert score(10.0, 1e9, "mae", [], 2.0) == 0.0
    assert score(10.0, 12.0, "rmse", [], 2.0) == pytest.approx(1 - 1 / 100)
    assert score(10.0, 12.0, "mae", [], None) is None
    for metric, shares in (("mae", 20), ("rmse", 100)):
        assert reached(1 - 1 / shares, metric, 0.25) == pytest.approx(0.25)  # errors as large as at registration
    assert reached(1 - 2 / 20, "mae", 1 / 3) == pytest.approx(1 / 5)  # a mae of 4 in place of 2


@pytest.mark.parametrize("metric", ["top1", "mae", "rmse"])
def test_beside_a_reference_the_interval_holds_whatever_both_have_in_common(metric: str) -> None:
    for seed in range(40):
        luck = np.random.default_rng(seed)
        alike, size = luck.random(), 400
        if metric == "top1":
            truth = luck.integers(0, 4, size)
            by = np.where(luck.random(size) < 0.85, truth, luck.integers(0, 4, size))
            of = np.where(luck.random(size) < alike, by, luck.integers(0, 4, size))
            sure, own = float((by == truth).mean()), float((of == truth).mean())
        else:
            truth = luck.normal(size=size)
            by = truth + luck.normal(0, 0.3, size)
            of = alike * by + (1 - alike) * (truth + luck.normal(0, 0.8, size))
            wrong = [
                float(np.sqrt(((one - truth) ** 2).mean())) if metric == "rmse" else float(np.abs(one - truth).mean())
                for one in (by, of)
            ]
            sure, own = (1.0 / (1.0 + one) for one in wrong)
        record = variant(accuracy=0.7, metric=metric)
        one = Score(aim=least_agreement(record, variant(model="sure", accuracy=sure, metric=metric)))
        for label, answer in zip(by.tolist(), of.tolist(), strict=True):
            found = score(label, answer, metric, [], 1.0 / 0.7 - 1.0)
            assert found is not None
            one.add(found, 0.0)
        accuracy, low, high = by_reference(one, record, sure, 0.0)
        assert low - 1e-9 <= own <= high + 1e-9
        assert low <= accuracy <= high


def test_their_aim_is_where_one_of_both_is_worse_than_registered() -> None:
    for metric in ("top1", "mae", "rmse"):
        of, by = variant(accuracy=0.8, metric=metric), variant(accuracy=0.9, metric=metric)
        aim = least_agreement(of, by)
        one = Score(bins=[(aim * 10**7, 10**7)])
        assert by_reference(one, of, 0.9, 0.0)[2] == pytest.approx(0.8, abs=0.002)

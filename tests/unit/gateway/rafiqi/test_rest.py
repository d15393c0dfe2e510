"""The most likely classes."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.gateway.rafiqi.rest import label_of, top


def test_probabilities_are_told_as_they_are() -> None:
    found = top([0.1, 0.7, 0.2], ["a", "b", "c"], 2)
    assert found == [{"confidence": 0.7, "label": "b"}, {"confidence": 0.2, "label": "c"}]


def test_other_scores_become_probabilities() -> None:
    found = top([0.0, 2.0], ["a"])
    assert [one["label"] for one in found] == ["1", "a"]
    assert found[0]["confidence"] == pytest.approx(math.exp(2) / (1 + math.exp(2)))


def test_classes_without_a_name_have_their_number() -> None:
    assert [label_of(number, ["a"]) for number in (0, 1, -1)] == ["a", "1", "-1"]


@given(st.lists(st.floats(width=32), min_size=2, max_size=20))
def test_any_scores_become_shares_in_order(scores: list[float]) -> None:
    found = top(scores, [])
    shares = [one["confidence"] for one in found]
    assert len(found) == min(5, len(scores))
    assert shares == sorted(shares, reverse=True)
    assert all(0.0 <= share <= 1.0 for share in shares)

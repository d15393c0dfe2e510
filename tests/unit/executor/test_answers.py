"""Answers that an executor keeps to repeat them: how many, and how large."""

import pytest

from bus.messages.flow import Route
from bus.messages.public import Error, Refusal
from services.core.outcomes import KEPT, KEPT_BYTES, RecentAnswers


def route(number: int) -> Route:
    return Route(number.to_bytes(16, "big"), 0, 0, "_INBOX.x", 0.0, 0.0, "d", "i", "app", 1, None)


@pytest.mark.parametrize(("size", "least"), [(2**20, KEPT_BYTES // (2**20 + 200)), (100, KEPT)])
def test_recent_answers_are_bounded_by_number_and_by_bytes(size: int, least: int) -> None:
    answers = RecentAnswers()
    refusal = Refusal(id=None, error=Error(code="model_error", message="x" * size))
    count = 3 * least
    for number in range(count):
        answers.keep(route(number), refusal)
    kept = [number for number in range(count) if answers.get((route(number).uid, 0)) is not None]
    assert least <= len(kept) <= 2 * least + 2
    assert kept == list(range(count - len(kept), count)), "the last ones"
    assert answers.get((route(count - 1).uid, 0)).code == "model_error"  # type: ignore[union-attr]

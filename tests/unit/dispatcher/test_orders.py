"""The reason that a load on demand is recorded with: what the query needed, and why this variant."""

import pytest

from services.core.ask import Ask
from services.dispatcher.orders import reason_of


@pytest.mark.parametrize(
    ("ask", "told"),
    [
        (Ask("a", 1, 10.0), "no instance can take a query; ready soonest"),
        (Ask("a", 1, 10.0, latency_s=0.03), "no instance can do 30 ms; ready soonest"),
        (
            Ask("a", 1, 10.0, 0.1, 0.97, 0.002),
            "no instance can do 100 ms, accuracy 0.97, US$ 0.002 per 1,000; ready soonest",
        ),
        (
            Ask("a", 1, 10.0, model="m", variant="m-v1", accuracy=0.9),
            "no instance can do m-v1, accuracy 0.9; ready soonest",
        ),
    ],
)
def test_the_reason_says_what_was_asked(ask: Ask, told: str) -> None:
    assert reason_of(ask) == told

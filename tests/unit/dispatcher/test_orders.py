"""The reason that a load on demand is recorded with: what the query needed, and why this variant."""

import pytest

from services.core.ask import Ask
from services.dispatcher.orders import reason_of


@pytest.mark.parametrize(
    ("ask", "needs"),
    [
        (Ask("a", 1, 10.0), "needs; of the variants that do, this is ready soonest"),
        (Ask("a", 1, 10.0, latency_s=0.03), "needs (30 ms); of"),
        (Ask("a", 1, 10.0, 0.1, 0.97, 0.002), "needs (100 ms, accuracy 0.97, US$ 0.002 per 1,000); of"),
        (Ask("a", 1, 10.0, model="cnn", variant="cnn-v1", accuracy=0.9), "needs (cnn-v1, accuracy 0.9)"),
    ],
)
def test_the_reason_says_what_was_asked(ask: Ask, needs: str) -> None:
    assert needs in reason_of(ask)

"""What metrics cost a query: counting its messages, folding its outcome, its share of its batch: `python benches/metrics.py`.

Best of several rounds of each part's CPU time, beside the 0.045 ms of CPU that a whole query takes (benches/path.py). Everything else
is done when somebody asks: the last lines are a page of a process with many series, and one of a system that has as many.
"""

import os
import time
from collections.abc import Callable

import rig

from bus.messages.events import OutcomeEvent
from services.core.metric import MetricFamily
from services.executor.instances import BatchTally
from services.shell.metrics.counts import EventTotals
from services.shell.metrics.exposition import page as process_page
from services.shell.metrics.exposition import system_page

QUERY_NS = 45_000.0
ROUNDS = 9
BATCH = 8  # queries computed together, as 64 under way make them
SERIES = 1000


def nanoseconds(work: Callable[[], None], each: int) -> float:
    """CPU time of one of `each`, the best of some rounds."""
    best = float("inf")
    for _ in range(ROUNDS):
        began = time.process_time_ns()
        work()
        best = min(best, time.process_time_ns() - began)
    return best / each


def outcomes(count: int) -> list[OutcomeEvent]:
    return [
        OutcomeEvent(
            *(1.0, os.urandom(16), None, "digits", "ok", "m", f"v{(i // BATCH) % 3}", "w", "cpu", None, 10.0 + i % 7),
            *(50.0, 0.9, None, None, 5, 1, BATCH, False, False, 1e-6, "1", "infaas"),
        )
        for i in range(count)
    ]


def many(series: int) -> MetricFamily:
    family = MetricFamily("infaas_bench", "gauge", "Many series.")
    for number in range(series):
        family.add(number, worker="w0", device="cpu", variant=f"variant-{number}")
    return family


def main() -> None:
    rig.parser(__doc__).parse_args()
    rows, tally, taken, batches = outcomes(1024), EventTotals(time.monotonic), [0], BatchTally()

    def fold() -> None:
        for _ in range(20):
            tally.fold("outcome", rows)

    def count() -> None:
        for _ in range(20_000):
            taken[0] += 1

    def batch() -> None:
        for _ in range(20_000):
            batches.add(BATCH, 0.001)

    def page() -> None:
        process_page([many(SERIES)], SERIES)

    def whole() -> None:
        system_page([], quarters)

    quarters = {name: process_page([many(SERIES // 4)]).text for name in ("one", "two", "three", "four")}
    parts = {
        "its outcome, folded": nanoseconds(fold, 20 * 1024),
        "two messages, counted": 2 * nanoseconds(count, 20_000),
        "its share of a batch": nanoseconds(batch, 20_000) / BATCH,
    }
    total = sum(parts.values())
    page_ms, whole_ms = nanoseconds(page, 1) / 1e6, nanoseconds(whole, 1) / 1e6
    for name, value in parts.items():
        print(f"{name:24} {value:7.0f} ns")
    print(f"{'a query':24} {total:7.0f} ns, {total / QUERY_NS:.2%} of its CPU")
    print(f"a page of {SERIES} series   {page_ms:7.1f} ms, when it is asked for")
    print(f"of {SERIES} of 4 processes  {whole_ms:7.1f} ms, in a thread of `up`")


if __name__ == "__main__":
    main()

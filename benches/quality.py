"""Whether the promise of accuracy holds: `python benches/quality.py statistics [--runs N]` or `served [--seconds S]`.

statistics: of the live interval alone, on labels that are drawn: labels until it has left the registered figure, and how often it holds what it
says at all times, without and with a change. With a change, what it says is the mean over the labels that it counts. Then the same without labels,
of queries of which 1 % are answered once more by a more accurate variant, whose errors are drawn apart from those of the first.

served: scikit-learn's digits, shifted by one pixel, in a system within this process. Two models reach the floor as registered; the cheaper one does
not on shifted pictures. Each query's label is sent back.
"""

import random
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import rig

from services.core.quality import CLOSER, Pace, Score, by_reference, least_agreement
from tests.support.simulated.fleet import variant

CHECKED = 8  # labels between two looks
LABELS = 3000
FLOOR = 0.93
SHARE = 0.01  # quality.reference_share
REFERENCES = 1000


def until_left(before: int, share: float, registered: float, luck: random.Random) -> int:
    """Labels after the change."""
    one = Score(aim=registered)
    for _ in range(before):
        one.add(float(luck.random() < registered), 0.0)
    one.interval(0.0)
    for count in range(1, 10_000):
        one.add(float(luck.random() < share), 0.0)
        low, high = one.interval(0.0)
        if not low <= registered <= high:
            return count
    return 10_000


def holds(truth: Callable[[int], float], luck: random.Random) -> bool:
    """Whether the interval holds, at each look, the mean truth of the labels that it counts."""
    one, truths = Score(aim=truth(0)), np.zeros(LABELS)
    for i in range(LABELS):
        truths[i] = truth(i)
        one.add(float(luck.random() < truths[i]), 0.0)
        if i % CHECKED == 0:
            low, high = one.interval(0.0)
            mean = truths[i + 1 - int(one.observed.count) : i + 1].mean()
            if not low <= mean <= high:
                return False
    return True


def queries_until_found(accuracy: float, sure: float, after: float, before: int, most: int, luck: random.Random) -> int:
    """Queries from when the variant is right in this share of its answers until its references show it; `most` references: they never do."""
    of, by = variant(accuracy=accuracy), variant(model="sure", accuracy=sure)
    one, pace = Score(aim=least_agreement(of, by)), Pace()
    queries, count = 0.0, -before
    while count < most:
        closer = CLOSER if pace.close and pace.spare else 1
        queries += (luck.expovariate(SHARE * closer)) if count >= 0 else 0.0
        pace.asks(closer * luck.random())
        right, true = (luck.random() < share for share in (after if count >= 0 else accuracy, sure))
        one.add(float(right and true), 0.0)  # two that are wrong say different things
        pace.said(float(right and true))
        if count >= 0 or count == -1:
            low, high = by_reference(one, of, sure, 0.0)[1:]
            if not low <= accuracy <= high:
                return round(queries)
        count += 1
    return round(most / SHARE)


def references(runs: int, luck: random.Random) -> None:
    print(
        "queries until references (1 %) show that a variant went wrong (median, 90 % of runs, most), and false alarms"
    )
    for accuracy, sure in ((0.98, 0.99), (0.9, 0.95), (0.9, 0.99)):
        for before in (0, 300, 3000):
            many = max(20, runs // 10)
            found = sorted(queries_until_found(accuracy, sure, 0.45, before, 300, luck) for _ in range(many))
            half, most = found[len(found) // 2], found[int(0.9 * len(found))]
            print(f"  {accuracy} to 0.45 beside {sure}, after {before:,} references: {half:,}, {most:,}, {found[-1]:,}")
        most = round(REFERENCES / SHARE)
        told = sum(queries_until_found(accuracy, sure, accuracy, 0, REFERENCES, luck) < most for _ in range(runs))
        print(f"  {accuracy} throughout beside {sure}, {most:,} queries: {told} of {runs} runs")


def statistics(runs: int) -> None:
    luck = random.Random(1)
    print("labels until the interval has left 0.98 (median, 90 % of runs, most)")
    for share in (0.45, 0.9):
        for before in (0, 300, 10_000):
            found = sorted(until_left(before, share, 0.98, luck) for _ in range(max(20, runs // 10)))
            print(
                f"  {share} after {before:,} at 0.98: {found[len(found) // 2]}, {found[int(0.9 * len(found))]}, {found[-1]}"
            )
    print(f"held at all of {LABELS // CHECKED} looks in {LABELS} labels, of {runs} runs")
    worlds: dict[str, Callable[[int], float]] = {
        "0.9 throughout": lambda _: 0.9,
        "0.98 throughout": lambda _: 0.98,
        "0.98, then 0.45 from label 1,000": lambda i: 0.98 if i < 1000 else 0.45,
        "0.98, then 0.9 from label 1,000, then 0.98 from 2,000": lambda i: 0.9 if 1000 <= i < 2000 else 0.98,
    }
    for name, truth in worlds.items():
        print(f"  {name}: {100 * np.mean([holds(truth, luck) for _ in range(runs)]):.1f} %")
    references(runs, luck)


def shifted(x: Any) -> Any:
    pictures = x.reshape(-1, 8, 8)
    found = np.zeros_like(pictures)
    found[:, :, 1:] = pictures[:, :, :-1]
    return found.reshape(-1, 64)


def served(seconds: float) -> None:
    from sklearn.datasets import load_digits
    from sklearn.ensemble import RandomForestClassifier
    from sklearn.linear_model import LogisticRegression

    import infaas

    digits = load_digits()
    x, y = digits.data.astype(np.float32) / 16, digits.target
    order = np.random.default_rng(0).permutation(len(x))
    train, check, unseen = order[:600], order[600:900], order[900:]
    cheap = LogisticRegression(max_iter=2000).fit(x[train], y[train])
    robust = RandomForestClassifier(60, random_state=0)
    robust.fit(np.r_[x[train], shifted(x[train])], np.r_[y[train], y[train]])
    moved = shifted(x[unseen])
    print(
        f"on shifted pictures: cheap {cheap.score(moved, y[unseen]):.3f}, robust {robust.score(moved, y[unseen]):.3f}"
    )
    with infaas.serve(cheap, x[check], y[check], app="hid", name="cheap") as system:
        system.register(robust, x[check], y[check], app="hid", name="robust")
        took: list[float] = []

        def ask(pictures: Any, i: int) -> tuple[str, bool]:
            answer = system.query("hid", pictures[i : i + 1], accuracy=FLOOR, latency_ms=5000)
            right = answer.labels == [str(y[unseen][i])] if answer.labels else False
            began = time.perf_counter()
            system.feedback("hid", int(y[unseen][i]), query=answer.query)
            took.append(time.perf_counter() - began)
            return str(answer.variant), right

        def phase(name: str, pictures: Any, wanted: str) -> None:
            began, labels, told = time.monotonic(), 0, []
            moved_at: tuple[int, float] | None = None
            elsewhere = 0
            while time.monotonic() < began + seconds:
                who, right = ask(pictures, labels % len(unseen))
                labels += 1
                told.append(right)
                if who.startswith(wanted) and moved_at is None:
                    moved_at = (labels - 1, time.monotonic() - began)
                elsewhere += not who.startswith(wanted)
            where = "never" if moved_at is None else f"first after {moved_at[0]} labels, {moved_at[1]:.2f} s"
            print(f"{name}: {labels} queries, right {np.mean(told):.3f}; {wanted} {where}, {elsewhere} to the other")

        phase("as in training", x[unseen], "cheap")
        phase("shifted by a pixel", moved, "robust")
        print(f"feedback: p50 {1e3 * np.median(took):.2f} ms, p99 {1e3 * np.quantile(took, 0.99):.2f} ms")


def main() -> None:
    parser = rig.parser(__doc__)
    parser.add_argument("what", choices=["statistics", "served"])
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=10.0)
    asked = parser.parse_args()
    if asked.what == "statistics":
        statistics(asked.runs)
    else:
        served(asked.seconds)


if __name__ == "__main__":
    main()

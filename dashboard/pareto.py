"""Which of several choices nobody would pass over: none of the others is as good in every respect and better in one. Pure."""

from collections.abc import Sequence

Point = Sequence[float]


def front(points: Sequence[Point]) -> list[bool]:
    """For each point whether it is on the front; smaller is better in every respect. The first of equal points is."""
    order = sorted(range(len(points)), key=lambda i: tuple(points[i]))
    kept: list[int] = []
    for i in order:
        if not any(all(a <= b for a, b in zip(points[j], points[i], strict=True)) for j in kept):
            kept.append(i)
    chosen = set(kept)
    return [i in chosen for i in range(len(points))]

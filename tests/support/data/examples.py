"""How many examples a property that states a number of its own gets."""

from hypothesis import settings


def examples(thorough: int) -> int:
    """So many in `.ci/run`, and a quarter of them in `make test`: as those of all others."""
    return max(5, thorough * settings().max_examples // 100)

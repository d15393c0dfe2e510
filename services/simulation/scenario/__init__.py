"""Scenarios: what is simulated, read from a file and checked before anything runs (docs/scenarios.md)."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from services.simulation.scenario.place import ScenarioError

if TYPE_CHECKING:
    from services.simulation.scenario.model import Scenario

__all__ = ["ScenarioError", "read_scenario"]


def read_scenario(path: Path, *, policies: Sequence[str] = (), seed: int | None = None) -> "Scenario":
    """What the file says. policies: to run instead of the file's, by name. seed: instead of the file's.

    Raises ScenarioError: file, key, what is wrong there, and the remedy.
    """
    # Reading needs the generators of arrivals, which need this package's model: so only now.
    from services.simulation.scenario.read import read  # noqa: PLC0415

    return read(path, policies, seed)

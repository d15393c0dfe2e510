"""What the system serves for: least cost, or most accuracy. One definition for selection, planning and scaling. Pure."""

from typing import Literal

Goal = Literal["cost", "accuracy"]


def merit(accuracy: float | None) -> float:
    """What an accuracy counts where more of it is wanted: one that was never measured, nothing."""
    return 0.0 if accuracy is None else accuracy

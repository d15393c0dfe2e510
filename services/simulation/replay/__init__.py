"""What was recorded, once more: traffic from the database or from an exported file, as a scenario for any policy."""

from services.simulation.replay.build import Replay, build
from services.simulation.replay.database import Range, database
from services.simulation.replay.file import export, exported
from services.simulation.replay.recording import Head, Query, ReplayError, Source

__all__ = ["Head", "Query", "Range", "Replay", "ReplayError", "Source", "build", "database", "export", "exported"]

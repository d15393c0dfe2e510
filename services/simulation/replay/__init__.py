"""Replays: recorded traffic from the database or from an exported file, as a scenario for any policy (docs/replay.md)."""

from services.simulation.replay.build import Replay, build
from services.simulation.replay.database import TimeRange, database
from services.simulation.replay.recording import RecordedQuery, Recording, RecordingHead, ReplayError, export, exported

__all__ = [
    "RecordedQuery",
    "Recording",
    "RecordingHead",
    "Replay",
    "ReplayError",
    "TimeRange",
    "build",
    "database",
    "export",
    "exported",
]

"""Replays: recorded traffic from the database or from an exported file, as a scenario for any policy (docs/replay.md)."""

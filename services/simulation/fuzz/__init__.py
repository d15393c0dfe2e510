"""Whole small systems and their faults, drawn from a seed, run with everything checked that must always hold (docs/reliability.md)."""

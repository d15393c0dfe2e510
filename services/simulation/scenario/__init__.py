"""Scenarios: what is simulated. `read` reads and checks a file, `model` holds the result (docs/scenarios.md)."""

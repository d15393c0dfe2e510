"""The demo: real handwritten digits, a family of small models trained on them, and the scenario that shows the system at work."""

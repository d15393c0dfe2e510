"""The demo: handwritten digits, a family of small models trained on them, and the run that shows the system at work."""

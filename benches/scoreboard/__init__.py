"""Scenarios, and the plans of one who knows the demand, for benches/decisions.py."""

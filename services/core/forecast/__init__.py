"""Forecasts of demand: what a rate is expected to be, and what it does not exceed, seconds ahead."""

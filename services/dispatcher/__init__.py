"""Picks variant and instance for each query, and sees to it that each query ends exactly once."""

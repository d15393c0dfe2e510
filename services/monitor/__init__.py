"""The monitor of each worker: it admits loads, follows instances and their states, sends heartbeats, and meters cost."""

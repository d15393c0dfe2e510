"""Offline jobs: inputs and outputs are named by URL; each item is computed once, in order, on spare capacity."""

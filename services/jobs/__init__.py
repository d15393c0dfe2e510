"""Offline jobs: inputs by URL in, outputs by URL out, in order, each exactly once, on spare capacity."""

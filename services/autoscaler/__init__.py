"""Scaling: `models` on each worker decides which variants run there, `vms` once a cluster decides which machines run."""

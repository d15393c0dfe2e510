"""Scaling: `vms` once a cluster plans instances and machines, `models` on each worker reacts between two plans."""

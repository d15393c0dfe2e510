"""The VM-autoscaler: one leads a cluster as its controller. It adds and removes workers, and places what a worker had no room for."""

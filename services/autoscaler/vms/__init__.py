"""The VM-autoscaler: one leads a cluster as its controller. It plans what all workers have loaded, and which machines there are."""

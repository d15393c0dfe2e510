"""What all services share: the actor contract, the catalogue, the view of the cluster, selection, planning, cost, settings."""

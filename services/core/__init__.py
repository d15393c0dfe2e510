"""Pure and shared by all services: the actor contract, the catalogue, the cluster view, selection, cost."""

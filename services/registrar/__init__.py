"""Takes models in: decides which variants to make, has them built and profiled on a worker, keeps the catalogue."""

"""The services. Each folder: policy (decide, pure), actor (remember, pure), edge (touch the world), __main__ (wire)."""

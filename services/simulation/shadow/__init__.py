"""A policy beside the running system: it gets the same demand and acts on simulated machines (docs/scaling.md, "Try another policy")."""

"""One a worker: which instances are loaded, their states, heartbeats, the cost meter."""

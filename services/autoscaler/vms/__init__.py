"""The controller: one active in a cluster; adds, drains and removes workers, and places what a worker had no room for."""

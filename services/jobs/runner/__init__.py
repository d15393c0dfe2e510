"""Offline work on one worker: takes chunks of jobs while there is capacity to spare, and has the worker's executor compute them."""

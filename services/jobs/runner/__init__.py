"""Offline work on one worker: takes chunks of jobs while the worker is calm, and has its own executor compute them."""

"""Rafiqi's REST interface: models registered over HTTP, by URL or inline, and images classified."""

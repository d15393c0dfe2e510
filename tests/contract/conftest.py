"""Fixtures of the behaviour suites."""

from tests.support.servers.buses import buses, connect

__all__ = ["buses", "connect"]

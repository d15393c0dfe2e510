"""Fixtures of the behaviour suites."""

from tests.support.servers.buses import buses

__all__ = ["buses"]

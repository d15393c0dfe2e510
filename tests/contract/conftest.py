"""Fixtures of the behaviour suites."""

from tests.contract.buses import buses

__all__ = ["buses"]

"""Fixtures of tests against whole systems."""

from tests.support.servers.ensembles import ensembles

__all__ = ["ensembles"]

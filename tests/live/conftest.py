"""Fixtures of tests against whole systems."""

from tests.support.gateways.curl import place
from tests.support.servers.ensembles import ensembles
from tests.support.servers.pipelines import pipelines

__all__ = ["ensembles", "pipelines", "place"]

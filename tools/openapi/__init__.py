"""The generator of the OpenAPI 3.1 document of everything that the gateway serves over HTTP (`python -m tools.openapi`)."""

"""Looking into generated documents, OpenAPI's and AsyncAPI's."""

from typing import Any


def references(value: Any) -> list[str]:
    """Every `$ref` in it."""
    if isinstance(value, dict):
        own = [value["$ref"]] if isinstance(value.get("$ref"), str) else []
        return own + [found for inner in value.values() for found in references(inner)]
    if isinstance(value, list):
        return [found for inner in value for found in references(inner)]
    return []

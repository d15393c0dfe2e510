"""What the protocol calls a model: `<app>`, `<app>.<model>` or `<app>.<model>.<variant>`. Pure."""

from functools import lru_cache
from typing import NamedTuple

from bus.subjects import valid_name

MOST_NAME = 3 * 64 + 2  # characters of the longest name: three tokens and the dots between them


class Target(NamedTuple):
    """Whom a request is for."""

    app: str
    model: str | None = None
    variant: str | None = None
    version: str | None = None

    def needs(self) -> dict[str, str]:
        """The requirements that the name stands for."""
        named = {"model": self.model, "variant": self.variant, "version": self.version}
        return {name: value for name, value in named.items() if value is not None}


def parse(name: str, version: str | None = None) -> Target | None:
    """The target with this name; None when it is none."""
    if len(name) > MOST_NAME or (version is not None and len(version) > MOST_NAME):
        return None  # what anybody may send at any length is not kept
    return _parse(name, version)


@lru_cache(1024)
def _parse(name: str, version: str | None) -> Target | None:
    parts = name.split(".")
    if (
        len(parts) > 3
        or not all(valid_name(part) for part in parts)
        or (version is not None and not valid_name(version))
    ):
        return None
    app, model, variant = (*parts, None, None)[:3]
    assert app is not None
    return Target(app, model, variant, version)

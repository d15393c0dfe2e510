"""What the protocol calls a model: `<app>`, `<app>.<model>` or `<app>.<model>.<variant>`. Pure."""

from functools import lru_cache
from typing import NamedTuple

from bus.subjects import valid_name


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


@lru_cache(1024)
def parse(name: str, version: str | None = None) -> Target | None:
    """The target with this name; None when it is none."""
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

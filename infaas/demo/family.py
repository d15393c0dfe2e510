"""What the demo can be shown with: a family of models, the pictures they know, and what is asked of them."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from numpy.typing import NDArray

from infaas.demo import asks, data

Variants = Iterable[Mapping[str, Any]]


class Labelled(Protocol):
    """Pictures that the system has not seen, and what they show: x [n, ...] as the models take them, y int64 [n]."""

    @property
    def x(self) -> NDArray[Any]: ...

    @property
    def y(self) -> NDArray[Any]: ...

    def __len__(self) -> int: ...


@dataclass(frozen=True, kw_only=True)
class Family:
    """One family of models that serve one app.

    things: what the pictures are, for people. models: files by name, in the order of registration. save_validation: writes
    what goes along at registration. views: how many rows of `unseen`, one after the other, show the same thing; validated:
    how many different things are behind a promised accuracy. rates: queries a second, one after the other. settings: of
    the system, beside the defaults (TOML).
    """

    app: str
    things: str
    classes: int
    models: Mapping[str, Path]
    save_validation: Callable[[Path], Path]
    unseen: Labelled
    asks: Callable[[Variants], list[asks.Ask]]
    validated: int
    views: int = 1
    rates: Sequence[float] = (50.0, 300.0, 100.0)
    most_items: int = 8
    settings: str = ""


def digits() -> Family:
    """Handwritten digits and seven small classifiers, part of this package."""
    return Family(
        app="digits",
        things="digits",
        classes=10,
        models=data.models(),
        save_validation=data.save_validation,
        unseen=data.load(data.UNSEEN),
        asks=asks.asks,
        validated=data.SIZES[data.VALIDATION],
    )

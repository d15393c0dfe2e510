"""What the demo is shown with: a family of models, labelled pictures, and the kinds of query that are sent."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from msgspec import Struct
from numpy.typing import NDArray

from infaas.queries import Needs

Progress = Callable[[str, float], None]  # what is being done, and how much of it is done (0..1)
Variants = Iterable[Mapping[str, Any]]  # rows of the list of variants

HEADROOM = 48.0  # cost limit of a query of up to 8 items, as a multiple of what one costs on the cheapest variant that would do


class QueryKind(Struct, frozen=True, kw_only=True):
    """Queries with the same requirements.

    possible: some variant can meet them; if not, each of these queries must be refused. weight: share of all queries, relative
    to the other kinds.
    """

    name: str
    needs: Needs
    possible: bool = True
    weight: float = 1.0


class Labelled(Protocol):
    """Labelled pictures: x [n, ...] as the models take them, y int64 [n], the class."""

    @property
    def x(self) -> NDArray[Any]: ...

    @property
    def y(self) -> NDArray[Any]: ...

    def __len__(self) -> int: ...


@dataclass(frozen=True, kw_only=True)
class ModelFamily:
    """Models that serve one app, and everything that the demo needs to query them.

    things: the word for the pictures in printed text. models: files by model name, in the order of registration.
    save_validation: writes the validation set (.npz) to a path. unseen: pictures that the system does not get at registration.
    query_kinds: makes the kinds of query from the list of variants. validated: how many different things the validation set shows.
    views: how many consecutive rows of `unseen` show the same thing. rates: queries/s, one phase after the other.
    max_items: pictures in one query, at most. settings: TOML for the demo's system.
    """

    app: str
    things: str
    classes: int
    models: Mapping[str, Path]
    save_validation: Callable[[Path], Path]
    unseen: Labelled
    query_kinds: Callable[[Variants], list[QueryKind]]
    validated: int
    views: int = 1
    rates: Sequence[float] = (50.0, 300.0, 100.0)
    max_items: int = 8
    settings: str = ""

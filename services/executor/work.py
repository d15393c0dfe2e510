"""What the executor's actor and its edge hand to each other."""

from collections.abc import Mapping
from typing import Any

from msgspec import Raw, Struct

from bus.messages.catalog import VariantRecord
from bus.messages.flow import Route
from bus.messages.public import ObjectRef, Tensor, TensorView

Inputs = TensorView | dict[str, TensorView | list[Any]] | list[Any]


class Work:
    """One query in an instance's queue. shape: what it may share a batch with (equal means compatible)."""

    __slots__ = ("alone", "also", "body", "headers", "inputs", "items", "lapsed", "route", "shape", "taken")

    def __init__(self, route: Route, body: Raw, inputs: Inputs | None, items: int, shape: Any) -> None:
        self.route = route
        self.body = body
        self.inputs = inputs
        self.items = items
        self.shape = shape
        self.alone = route.alone
        self.lapsed = False  # its app's default was answered; what is computed of it is nobody's
        # The same query, sent again while this one waits: one answer, all senders are told.
        self.also: tuple[Route, ...] = ()
        self.headers: Mapping[str, str] | None = None  # that came with it, where it is traced
        self.taken = 0.0  # when, in that case

    @property
    def routes(self) -> tuple[Route, ...]:
        """Everybody's who waits for it."""
        return (self.route, *self.also)


class LoadModel(Struct, frozen=True):
    """Fetch an artifact, load it, prove where it runs, warm it up. cores: of the machine that it is kept to; empty: any."""

    instance: str
    variant: VariantRecord
    cores: tuple[int, ...] = ()


class LoadedModel(Struct, frozen=True):
    """load_ms: fetch excluded. memory_mb: what the process grew by."""

    load_ms: float
    memory_mb: float
    proof: str


class MoveModel(Struct, frozen=True):
    """Load a loaded instance's model once more, on these cores, and let the copy take over; comes back as MovedModel."""

    instance: str
    variant: VariantRecord
    cores: tuple[int, ...]


class MovedModel(Struct, frozen=True):
    """proof: where its threads run now, as the operating system reports it."""

    proof: str


class UnloadModel(Struct, frozen=True):
    """Let go of an instance's model."""

    instance: str


class RunBatch(Struct, frozen=True, gc=False):
    """Compute these queries together. predicted: seconds by the profile; inline: short enough for the loop itself."""

    instance: str
    works: list[Work]
    predicted: float
    inline: bool


class BatchResult(Struct, frozen=True, gc=False):
    """started, finished: Unix seconds. outputs: per query, in order. errors: None, or per query "" or what went wrong.

    bytes: of all outputs together, at most. note: what clients must know of the outputs; it becomes the answers' `reason`.
    """

    started: float
    finished: float
    outputs: list[dict[str, Tensor]]
    errors: list[str] | None = None
    bytes: int = 0
    note: str = ""


class FetchInputs(Struct, frozen=True):
    """Get a query's inputs from the object store."""

    ref: ObjectRef


class StoreOutputs(Struct, frozen=True):
    """Put an answer's outputs into the object store, since they are too large for a message."""

    key: str
    outputs: dict[str, Tensor]


class Shrink(Struct, frozen=True):
    """Give back memory that large batches left behind."""

    instance: str


class MeasureMemory(Struct, frozen=True):
    """Resident memory of this process in MB."""

"""The commands of the executor's actor to its edge, and their results. Pure."""

from typing import Any

from msgspec import Raw, Struct

from bus.messages.catalog import VariantRecord
from bus.messages.fleet import Tier
from bus.messages.flow import TensorRef
from bus.messages.public import ObjectRef, Tensor
from services.executor.queue import QueuedQuery

LOADERS = 4  # models that a device loads at once


class LoadModel(Struct, frozen=True):
    """Fetch an artifact, load it, prove where it runs, warm it up. cores: of the machine that its threads are kept to. Empty: any.

    tier: "host" leaves it in host memory.
    """

    instance: str
    variant: VariantRecord
    cores: tuple[int, ...] = ()
    tier: Tier = "device"


class TransferModel(Struct, frozen=True):
    """Move an idle loaded model to the memory of this tier. The result is LoadedModel. An error if the backend cannot.

    On the way to the device, its copy in host memory stays: weights never change, so the way back needs no transfer. copied: False drops the
    copy of a model that is on the device, which computes meanwhile.
    """

    instance: str
    tier: Tier
    copied: bool = True


class LoadedModel(Struct, frozen=True):
    """load_ms: without the fetch, and without the wait for other loads; of a transfer, its own. memory_mb: growth of the process, or what the
    model takes of its tier's memory; 0.0 if another load or unload overlapped, since then nobody knows whose the growth is.

    one_at_a_time: why it computes one batch at a time; empty: it takes several. copied: it is on the device, and host memory has a copy.
    """

    load_ms: float
    memory_mb: float
    proof: str
    one_at_a_time: str = ""
    tier: Tier = "device"
    copied: bool = False


class MoveModel(Struct, frozen=True):
    """Load a loaded instance's model once more, on these cores, and serve with the copy. The result is MovedModel."""

    instance: str
    variant: VariantRecord
    cores: tuple[int, ...]


class MovedModel(Struct, frozen=True):
    """proof: where its threads run now, as the operating system reports it. one_at_a_time: as of `LoadedModel`."""

    proof: str
    one_at_a_time: str = ""


class UnloadModel(Struct, frozen=True):
    """Unload an instance's model."""

    instance: str


class RunBatch(Struct, frozen=True, gc=False):
    """Compute these queries together. predicted: seconds by the profile. inline: short enough for the event loop itself.

    contexts: batches of the instance that may run at a time.
    """

    instance: str
    queries: list[QueuedQuery]
    predicted: float
    inline: bool
    contexts: int = 1


class BatchResult(Struct, frozen=True, gc=False):
    """started, finished: Unix seconds. outputs: per query, in order. errors: None, or per query "" or what went wrong.

    bytes: of all outputs together, at most. note: why the outputs are zeros that a simulated device made up; it becomes the answers' `reason`. unfit: the
    inputs are to blame for the errors, and not the model. labels: names of the classes, by query; None: the model has none.
    functions_s: seconds of the functions before and after the model; None: it has none. said: by query, as in `DoneBatch`; None: not known.
    """

    started: float
    finished: float
    outputs: list[dict[str, Tensor]]
    errors: list[str] | None = None
    bytes: int = 0
    note: str = ""
    unfit: bool = False
    labels: list[list[str]] | None = None
    functions_s: tuple[float, float] | None = None
    said: list[list[Any] | None] | None = None


class FetchInputs(Struct, frozen=True):
    """Get a query's inputs from the object store. refs: as in its route; then `inputs` are those that its body has."""

    ref: ObjectRef | None
    refs: tuple[TensorRef, ...] = ()
    inputs: Raw = Raw()


class StoreOutputs(Struct, frozen=True):
    """Put an answer's outputs into the object store, since they are too large for a message."""

    key: str
    outputs: dict[str, Tensor]


class MeasureProcess(Struct, frozen=True):
    """What this process uses. The answer is a `ProcessUse`."""


class ProcessUse(Struct, frozen=True):
    """memory_mb: resident, or of the device. cpu_s: CPU seconds since the process began; None: not measured."""

    memory_mb: float
    cpu_s: float | None = None

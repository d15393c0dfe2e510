"""The commands of the dispatcher's actor to its edge, and their results."""

from collections.abc import Mapping
from typing import Any, Literal

from msgspec import Raw, Struct

from bus.messages.flow import TensorRef
from bus.messages.public import Tensor

PolicyMethod = Literal["init", "select", "combine", "observe", "learnt"]


class ReadContext(Struct, frozen=True):
    """Read what is stored of a context in the selection bucket; comes back as StoredContext."""

    key: str


class StoredContext(Struct, frozen=True):
    """The present value of a context. value: None if there is none; then the revision is 0."""

    value: bytes | None
    revision: int


class WriteContext(Struct, frozen=True):
    """Store a context if it is still at this revision (0: not there); comes back as ContextWritten, otherwise as StoredContext."""

    key: str
    value: bytes
    revision: int


class PutQuality(Struct, frozen=True):
    """Put what labels say of an app into the catalogue, unless a later one is there. revision: as in the `AppQuality` that `value` is."""

    app: str
    value: bytes
    revision: int


class FindKept(Struct, frozen=True):
    """Find a query that its app keeps: by its uid in hexadecimal digits, else the latest one with the client's id; comes back as Payload, or None."""

    app: str
    query: str | None
    id: str | None


class ContextWritten(Struct, frozen=True):
    """The value is stored, at this revision."""

    revision: int


class GatherOutputs(Struct, frozen=True):
    """Put an answer's outputs, or a stage's inputs, together in the object store; comes back as ObjectRef. refs: those that are there already."""

    key: str
    outputs: Mapping[str, Tensor | Raw]
    refs: tuple[TensorRef, ...]


class FetchTensors(Struct, frozen=True):
    """Read tensors from the object store; comes back as a map of encoded tensors, by the names that the refs give them."""

    refs: tuple[TensorRef, ...]


class DeleteResults(Struct, frozen=True):
    """Delete these objects from the bucket of outputs; comes back as None. Those that are gone already do not matter."""

    keys: tuple[str, ...]


class RunPolicy(Struct, frozen=True):
    """Call a method of a user's selection policy in the policy's own process.

    policy: "module:Class". args: the arguments of the method as `services.core.ensemble.base.EnsemblePolicy` has it, in its order, with
    the state as bytes. Result: of `init` and `observe` the state as bytes, of `select` a list of models, of `combine` a Combined, of
    `learnt` a list of Learnt. It fails with a sentence that names the class where that raises, hangs, ends its process, cannot be
    imported, or gives something else.
    """

    policy: str
    method: PolicyMethod
    args: tuple[Any, ...]

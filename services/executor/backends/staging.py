"""Page-locked host memory and device memory between which batches travel: one pair an input or output, for the largest batch.

Sized once: a smaller batch uses the first rows. Rows beyond a batch hold what was there before; the model computes them, since a
graph has one shape, and nobody sees what comes out: that items do not influence each other was proved at registration.
"""

from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from services.executor.backends.base import BadInput

if TYPE_CHECKING:
    from services.executor.backends.base import Array


class Slot(Struct, frozen=True):
    """One input or output. shape: of one item; dtype: numpy's name, on the wire and in staging memory."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    def bytes(self, items: int) -> int:
        """What so many items take in staging memory, on either side."""
        return items * prod(self.shape) * int(self.dtype[-1])


def staging_mb(slots: Sequence[Slot], largest: int) -> float:
    """MB of page-locked memory, and again of device memory, for these slots."""
    return sum(slot.bytes(largest) for slot in slots) / 2**20


class Staging:
    """The pair of buffers of one slot. device: a torch.device, None for an output, which a graph keeps; pinned: page-locked."""

    def __init__(self, torch: Any, slot: Slot, largest: int, device: Any, *, pinned: bool) -> None:
        dtype = TORCH_NAMES[slot.dtype]
        self.slot = slot
        self.host = torch.zeros((largest, *slot.shape), dtype=getattr(torch, dtype), pin_memory=pinned)
        whole = (largest, *slot.shape) if device is not None else (0,)
        self.device = torch.zeros(whole, dtype=getattr(torch, dtype), device=device)
        self._array: Array = self.host.numpy()

    def put(self, array: "Array", bucket: int) -> None:
        """Queue the copy of a batch to the device, rounded up to a bucket. Raises BadInput."""
        self.check(array)
        self._array[: len(array)] = array
        self.device[:bucket].copy_(self.host[:bucket], non_blocking=True)

    def fetch(self, bucket_output: Any, items: int) -> None:
        """Queue the copy of a bucket's first rows to the host."""
        self.host[:items].copy_(bucket_output[:items], non_blocking=True)

    def taken(self, items: int) -> "Array":
        """The rows that `fetch` brought, once the copy is done: the caller's own."""
        rows: Array = self._array[:items].copy()
        return rows

    def check(self, array: "Array") -> None:
        """Raises BadInput for another shape or datatype than the model's."""
        slot = self.slot
        if array.shape[1:] != slot.shape:
            raise BadInput(f"input {slot.name!r} has items of shape {list(array.shape[1:])}, not {list(slot.shape)}")
        if array.dtype.str.lstrip("<|=") != slot.dtype.lstrip("<|="):
            raise BadInput(f"input {slot.name!r} is {array.dtype}, the model takes {TORCH_NAMES[slot.dtype]}")


TORCH_NAMES = {
    "<f2": "float16",
    "<f4": "float32",
    "<f8": "float64",
    "<i2": "int16",
    "<i4": "int32",
    "<i8": "int64",
    "<u2": "uint16",
    "<u4": "uint32",
    "<u8": "uint64",
    "|i1": "int8",
    "|u1": "uint8",
    "|b1": "bool",
}

"""torch on an NVIDIA GPU: one CUDA graph for each batch bucket, page-locked staging, a stream of its own for every model and context.

Precision is what the .pt2 program holds (fp32, fp16, bf16 weights and operators); its inputs and outputs stay in the signature's
datatypes, converted on the device. A bucket's graph replays without the Python of the model, which is most of the time of a small one.
What cannot be captured (control flow by data, open lengths) runs operator by operator on the same stream, and the proof says so.

A model can be kept in host memory (Rafiqi, paper 001, section 3.4.1): its weights go there, page-locked, so that they come back at the speed of
the bus. Graphs name addresses of weights, so they are captured anew; nothing is read, compiled or warmed up again.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from bus.datatypes import DATATYPES
from services.executor.backends.base import LoadFailed, LoadSpec, plain
from services.executor.backends.cuda import (
    TORCH_NAMES,
    CudaStream,
    DeviceStream,
    Slot,
    Staging,
    Weights,
    bucket_for,
    buckets,
    bus,
    gpu,
    growth,
)
from services.executor.backends.torch import (
    EXPORT_LOCK,
    TorchBackend,
    TorchHandle,
    as_tensors,
    module_of,
    program_of,
    tensors_of,
)

if TYPE_CHECKING:
    from bus.tensors import Array

WARM_UPS = 3  # before a capture: libraries choose their kernels and take their memory


class TorchCudaBackend(TorchBackend):
    """Runs .pt2 files on a GPU."""

    name = "torch-cuda"
    hardware = "gpu"
    formats = ("pt2",)
    executed = True

    def _open(self, torch: ModuleType, artifact: Path, spec: LoadSpec) -> "GraphHandle":
        """Move the program to the device, capture its graphs, and prove where its parameters are."""
        self.probe(spec.device)  # and takes what torch keeps for all models, which is not this one's
        found = gpu(spec.device, "torch")
        torch.backends.cudnn.allow_tf32 = False  # fp32 is really fp32: TF32 has 10 bits of mantissa
        with growth(spec.device) as grown:
            program = moved(torch, artifact, spec.device)
            handle = GraphHandle(torch, program, spec, partial(CudaStream, torch, spec.device), found.name)
        handle.memory_mb = grown.mb
        return handle


def moved(torch: ModuleType, artifact: Path, device: str) -> Any:
    """The exported program on a device, with its weights, its constants, and the devices that its operators name."""
    from torch.export.passes import move_to_device_pass  # noqa: PLC0415

    program = program_of(torch, artifact)
    with EXPORT_LOCK, bus(device):
        return move_to_device_pass(program, device)


def devices_of(module: Any) -> set[str]:
    """Where a module's parameters and buffers are."""
    return {str(tensor.device) for tensors in (module.parameters(), module.buffers()) for tensor in tensors}


def dtypes(program: Any) -> list[Any]:
    """The torch datatypes that the program's inputs have, in order."""
    values = {node.name: node.meta.get("val") for node in program.graph.nodes}
    return [values[str(name)].dtype for name in program.graph_signature.user_inputs]


def slots(program: Any, spec: LoadSpec) -> list[Slot] | None:
    """The inputs as callers give them: the signature's, or else the program's own. None if a length is open."""
    if spec.signature is not None:
        given = [(one.name, tuple(one.shape), DATATYPES[one.datatype].array) for one in spec.signature.inputs]
    else:
        values = {node.name: node.meta.get("val") for node in program.graph.nodes}
        given = [
            (
                str(name),
                tuple(n if isinstance(n, int) else -1 for n in values[str(name)].shape[1:]),
                _wire(values[str(name)]),
            )
            for name in program.graph_signature.user_inputs
        ]
    return None if any(-1 in shape for _, shape, _ in given) else [Slot(*one) for one in given]


# By torch's name. Half precision is internal to the model, so it becomes fp32.
_WIRES = {row.torch: row.array for row in DATATYPES.values()} | {"float16": "<f4"}


def _wire(value: Any) -> str:
    """Numpy's name of what callers give and get for this tensor."""
    return _WIRES[str(value.dtype).removeprefix("torch.")]


@dataclass(eq=False)
class GraphContext:
    """What one batch at a time needs beside the weights: a stream, staging memory, a graph for each bucket. how: how it runs, in words.

    given: the inputs; None: a length is open, so no memory can be prepared. compute: the model, from tensors to tensors of the wire's
    datatypes.
    """

    torch: ModuleType
    stream: DeviceStream
    compute: Callable[["list[Any]"], "list[Any]"]
    given: list[Slot] | None
    outputs: tuple[str, ...]
    casts: list[Any]
    sizes: tuple[int, ...]
    how: str = field(init=False)
    _graphs: dict[int, tuple[Callable[[], None], list[Any]]] = field(default_factory=dict)
    _in: list[Staging] = field(default_factory=list)
    _out: list[Staging] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.how = "operator by operator: a length is open" if self.given is None else self._prepare(self.given)

    def _prepare(self, given: list[Slot]) -> str:
        """Make staging memory, and a graph for each bucket, the largest first so that their pool is sized once. Returns how it runs."""
        stream, largest = self.stream, self.sizes[-1]
        with stream.on():
            self._in = [Staging(self.torch, slot, largest, stream.device, pinned=stream.pinned) for slot in given]
            made = self._warmed(largest)
            self._out = [
                Staging(self.torch, Slot(name, tuple(one.shape[1:]), _wire(one)), largest, None, pinned=stream.pinned)
                for name, one in zip(self.outputs, made, strict=False)
            ]
            return self._record(self._warmed)

    def _record(self, before: Callable[[int], object]) -> str:
        """Capture a graph for each bucket. before: is called with each one before. Returns how the model runs."""
        try:
            for size in reversed(self.sizes):
                before(size)
                self._graphs[size] = self.stream.capture(lambda size=size: self._compute(size))  # type: ignore[misc]
        except RuntimeError as error:
            self._graphs.clear()
            return f"operator by operator: {plain(error)[:80]}"
        return f"CUDA graphs for batches of {', '.join(map(str, self.sizes))}"

    def _warmed(self, size: int) -> list[Any]:
        for _ in range(WARM_UPS):
            outputs = self._compute(size)
        self.stream.wait()
        return outputs

    def _compute(self, size: int) -> list[Any]:
        """Run the model on the first rows of staging memory. Outputs are in the datatypes of the wire."""
        return self.compute([one.device[:size].to(dtype) for one, dtype in zip(self._in, self.casts, strict=True)])

    def leave(self) -> None:
        """The weights leave the device. Graphs name their addresses."""
        self._graphs.clear()
        self.stream.forget()
        with self.stream.on():
            for staged in self._in:
                staged.leave()

    def come(self) -> None:
        """The weights are there again."""
        with self.stream.on():
            for staged in self._in:
                staged.come()
            if self._in:
                self.how = self._record(lambda _: None)  # libraries have chosen their kernels

    def run(self, arrays: "list[Array]") -> "list[Array]":
        """Raises InputRejected, and whatever torch raises."""
        with self.stream.on():
            return self._run_staged(arrays, len(arrays[0])) if self._in else self._run_open(arrays)

    def _run_staged(self, arrays: "list[Array]", items: int) -> "list[Array]":
        bucket = bucket_for(items, self.sizes)
        for staged, array in zip(self._in, arrays, strict=True):
            staged.put(array, bucket)
        if bucket in self._graphs:
            replay, outputs = self._graphs[bucket]
            replay()
        else:
            outputs = self._compute(bucket)
        for staged, output in zip(self._out, outputs, strict=False):
            staged.fetch(output, items)
        self.stream.wait()
        return [staged.taken(items) for staged in self._out]

    def _run_open(self, arrays: "list[Array]") -> "list[Array]":
        """Inputs of any length: no memory can be prepared."""
        tensors = as_tensors(self.torch, arrays)
        there = [one.to(self.stream.device).to(dtype) for one, dtype in zip(tensors, self.casts, strict=True)]
        return [one.cpu().numpy() for one in self.compute(there)]


class GraphHandle(TorchHandle):
    """One program, and a context for each batch that runs at the same time. See `base.Demotable`.

    The first context is made by the load, another one by the first batch that finds none free: that batch waits for its graphs.
    stream: makes one.
    """

    def __init__(
        self, torch: ModuleType, program: Any, spec: LoadSpec, stream: Callable[[], DeviceStream], device_name: str
    ) -> None:
        named, self._given = program.graph_signature, slots(program, spec)
        most = spec.max_batch if self._given is not None else 0
        super().__init__(torch, spec.signature, named.user_inputs, named.user_outputs, most)
        self._stream = stream
        self._module = module_of(program)  # staging has checked the shapes
        self._weights = Weights(torch, self._module)
        self.host_mb = self._weights.mb
        self._there_mb = 0.0
        first = stream()
        elsewhere = devices_of(self._module) - {str(first.device)}
        if elsewhere:
            raise LoadFailed(f"parameters of this model are on {', '.join(sorted(elsewhere))}, not on {first.device}")
        self._casts = dtypes(program)
        self._wires = [DATATYPES[one.datatype].array for one in spec.signature.outputs] if spec.signature else []
        self._sizes = buckets(spec.max_batch)
        self._making = threading.Lock()
        context = self._context(first)
        self._free = [context]
        self._proof = f"torch {torch.__version__}, parameters on {first.device} ({device_name})"
        self.proof = f"{self._proof}, {context.how}"

    def _context(self, stream: DeviceStream) -> GraphContext:
        return GraphContext(
            self._torch, stream, self._computed, self._given, self.outputs, self._casts, tuple(self._sizes)
        )

    def _computed(self, tensors: list[Any]) -> list[Any]:
        found = tensors_of(self._torch, self._module(*tensors))
        names = self._wires or [_wire(one) for one in found]
        return [one.to(getattr(self._torch, TORCH_NAMES[name])) for one, name in zip(found, names, strict=False)]

    # -- host memory

    def demote(self) -> None:
        """Only the first context stays: others are made again when they are needed."""
        del self._free[1:]
        first = self._free[0]
        first.leave()
        if self._weights.copy is None:
            self._move("cpu", first.stream, pinned=first.stream.pinned)
        else:
            self._weights.back()
        first.stream.trim()
        self._there_mb, self.memory_mb = self.memory_mb, 0.0

    def promote(self) -> None:
        first = self._free[0]
        self._move(first.stream.device, first.stream, pinned=False, keep=True)
        first.come()
        self.proof = f"{self._proof}, {first.how}"
        self.memory_mb = self._there_mb

    def drop_copy(self) -> None:
        self._weights.copy = None

    def _move(self, device: Any, stream: DeviceStream, *, pinned: bool, keep: bool = False) -> None:
        torch = self._torch
        try:
            with bus(str(stream.device)), stream.on(), torch.inference_mode(mode=False), torch.no_grad():
                self._weights.move(torch.device(device), pinned=pinned, wait=stream.wait, keep=keep)
        except RuntimeError as error:
            raise LoadFailed(f"the weights cannot be moved to {device}: {plain(error)}") from error

    # -- running

    def _answers(self, arrays: "list[Array]") -> "list[Array]":
        context = self._taken()
        try:
            return context.run(arrays)
        finally:
            self._free.append(context)

    def _taken(self) -> GraphContext:
        """A free context. It is the caller's until it is put back."""
        try:
            return self._free.pop()  # one step, as the interpreter has it: no two threads get the same
        except IndexError:
            with self._making:
                return self._context(self._stream())

    def close(self) -> None:
        super().close()
        contexts, self._free = self._free, []
        self._module = None
        self._weights.drop()
        streams = [context.stream for context in contexts]
        del contexts
        for stream in streams[:1]:
            stream.trim()

"""torch files: signature and operators of a reduced .pt2 or a TorchScript file, conversion to ONNX, and half precision. Runs in the sandbox."""

import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.export

from bus.datatypes import DATATYPES
from bus.messages.catalog import Signature, TensorSpec
from bus.tensors import datatype_of
from services.executor.backends import pt2
from services.executor.backends.base import plain
from services.executor.backends.torch import module_of
from services.executor.workshop.sandbox.protocol import UploadRejected
from services.executor.workshop.tasks.validation import ValidationSet


def load_program(path: Path) -> Any:
    """The exported program of a reduced archive. Raises UploadRejected."""
    try:
        with warnings.catch_warnings(), path.open("rb") as file:
            warnings.simplefilter("ignore")
            return torch.export.load(file)
    except Exception as error:
        raise UploadRejected(f"torch cannot read this program: {plain(error)}") from error


def signature(path: Path) -> tuple[Signature, bool]:
    """What the program takes and gives, and whether it was exported for single items. Raises UploadRejected."""
    loaded = load_program(path)
    graph = loaded.graph_signature
    values = {node.name: node.meta.get("val") for node in loaded.graph.nodes}
    inputs = [_tensor(str(name), values.get(str(name))) for name in graph.user_inputs]
    said = _said(loaded)
    outputs = [
        TensorSpec(name=said.get(name, str(name)), datatype=one[0].datatype, shape=one[0].shape)
        for name in graph.user_outputs
        if isinstance(values.get(str(name)), torch.Tensor)
        for one in [_tensor(str(name), values[str(name)])]
    ]
    if not inputs or not outputs:
        raise UploadRejected("the program must take and give tensors")
    batches = {size for _, size in inputs if size != -1}
    if batches - {1}:
        raise UploadRejected(
            f"the program was exported for batches of exactly {max(batches)}: export it with dynamic_shapes for axis 0"
        )
    return Signature(inputs=[spec for spec, _ in inputs], outputs=outputs), bool(batches)


def _said(program: Any) -> dict[Any, str]:
    """The names of the map that the program's owner returns, by the graph's own; empty: it returns no map that could name outputs."""
    graph, found = program.graph_signature, program.call_spec.out_spec
    leaves = list(graph.user_outputs)
    if found is None or found.num_leaves != len(leaves):
        return {}
    answer = found.unflatten(leaves)
    if not isinstance(answer, Mapping) or any(one not in leaves for one in answer.values()):
        return {}
    names = dict(zip(answer.values(), answer.keys(), strict=True))
    apart = len(names) == len(leaves) and not set(map(str, graph.user_inputs)) & set(names.values())
    return names if apart and all(isinstance(name, str) and name for name in names.values()) else {}


def script_signature(names: tuple[str, ...], data: dict[str, Any], inputs_key: str) -> Signature:
    """The signature by the validation set, since TorchScript has no shapes. Raises UploadRejected."""
    specs = []
    for name in names:
        key = next((k for k in (inputs_key, name, f"{inputs_key}.{name}") if k in data), None)
        if key is None or (len(names) > 1 and key == inputs_key):
            raise UploadRejected(f"validation: there is no array for the model's input {name!r}")
        array = data[key].astype(np.float32) if data[key].dtype == np.float64 else data[key]
        specs.append(TensorSpec(name=name, datatype=datatype_of(array), shape=list(array.shape[1:])))
    return Signature(inputs=specs, outputs=[])


def script_operators(path: Path) -> list[str]:
    """ATen operators of a TorchScript file. Raises UploadRejected if torch cannot read it."""
    graph = script(path).inlined_graph
    found = {node.kind() for node in graph.nodes()}
    return sorted(kind.removeprefix("aten::") for kind in found if kind.startswith("aten::"))


def script(path: Path) -> Any:
    """The TorchScript module. Raises UploadRejected."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return torch.jit.load(str(path), map_location="cpu").eval()
    except Exception as error:
        raise UploadRejected(f"torch cannot read this file as TorchScript: {plain(error)}") from error


def to_onnx(path: Path, format: str, target: Path, names: Signature, data: ValidationSet) -> None:
    """Convert to one ONNX file with the signature's names. Raises UploadRejected."""
    taken = [spec.name for spec in names.inputs]
    given = [spec.name for spec in names.outputs]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if format == "pt2":
                torch.onnx.export(
                    load_program(path),
                    (),
                    str(target),
                    dynamo=True,
                    external_data=False,
                    verbose=False,
                    input_names=taken,
                    output_names=given,
                )
            else:
                example = tuple(torch.from_numpy(data.inputs[name][:2]) for name in taken)
                torch.onnx.export(
                    script(path),
                    example,
                    str(target),
                    dynamo=False,
                    verbose=False,
                    input_names=taken,
                    output_names=given,
                    dynamic_axes={name: {0: "batch"} for name in (*taken, *given)},
                )
    except UploadRejected:
        raise
    except Exception as error:
        raise UploadRejected(f"the model cannot be converted to ONNX: {plain(error)}") from error


def _tensor(name: str, value: Any) -> tuple[TensorSpec, int]:
    """The spec of one input or output, and its fixed batch size or -1."""
    if not isinstance(value, torch.Tensor) or value.dim() == 0:
        raise UploadRejected(f"the program's input or output {name[:40]!r} is not a tensor with a batch axis")
    dims = [size if isinstance(size, int) else -1 for size in value.shape]
    datatype = _DATATYPES.get(value.dtype)
    if datatype is None:
        raise UploadRejected(
            f"the program's {name[:40]!r} is of {value.dtype}, which no array holds: use one of {', '.join(map(str, _DATATYPES))}"
        )
    return TensorSpec(name=name, datatype=datatype, shape=dims[1:]), dims[0]


_DATATYPES = {getattr(torch, row.torch): name for name, row in DATATYPES.items() if row.code}


# -- half precision

PRECISIONS = {"fp16": torch.float16, "bf16": torch.bfloat16}
EXAMPLE = 2  # items: one alone would fix the batch
MOST_BYTES = 2**34


def to_half(source: Path, target: Path, precision: str, data: ValidationSet) -> None:
    """Convert a reduced .pt2 file to fp16 or bf16. Raises UploadRejected.

    Weights and operators are converted and the program is exported anew. Its inputs and outputs become half precision as well: the
    backend converts them on the device.
    """
    dtype = PRECISIONS[precision]
    whole = target.with_suffix(".exported.pt2")
    try:
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            program = load_program(source)
            values = _values(program)
            arguments = _example(values, data, dtype)
            module = module_of(program).to(dtype)
            exported = torch.export.export(module, arguments, dynamic_shapes=_shapes(program, values))
            torch.export.save(exported, whole)
        pt2.reduce(whole, target, MOST_BYTES)
    except UploadRejected:
        raise
    except Exception as error:
        raise UploadRejected(f"the program cannot be converted to {precision}: {plain(error)}") from error
    finally:
        whole.unlink(missing_ok=True)


def _values(program: Any) -> list[Any]:
    """The program's inputs as its graph describes them, in order."""
    values = {node.name: node.meta.get("val") for node in program.graph.nodes}
    return [values[str(name)] for name in program.graph_signature.user_inputs]


def _example(values: list[Any], data: ValidationSet, dtype: torch.dtype) -> tuple[Any, ...]:
    """Real samples: one if the batch is fixed, else two."""
    tensors = []
    for value, array in zip(values, data.inputs.values(), strict=True):
        items = value.shape[0] if isinstance(value.shape[0], int) else EXAMPLE
        tensor = torch.from_numpy(array[:items].copy())
        tensors.append(tensor.to(dtype) if value.dtype.is_floating_point else tensor.to(value.dtype))
    return tuple(tensors)


def _shapes(program: Any, values: list[Any]) -> tuple[Any, ...]:
    """The same open axes with the same bounds as before. None for an input with a fixed shape."""
    dims: dict[str, Any] = {}

    def dim(size: Any) -> Any:
        name = str(size)
        if not re.fullmatch(r"[su]\d+", name):
            return torch.export.Dim.AUTO  # an expression of other axes
        if name not in dims:
            bounds = program.range_constraints.get(size.node.expr)
            low = int(bounds.lower) if bounds is not None else 1
            high = bounds.upper if bounds is not None else None
            most = int(high) if high is not None and str(high).isdigit() else None
            dims[name] = torch.export.Dim(name, min=low, max=most)
        return dims[name]

    return tuple(
        {axis: dim(size) for axis, size in enumerate(value.shape) if not isinstance(size, int)} or None
        for value in values
    )

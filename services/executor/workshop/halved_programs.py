"""fp16 and bf16 artifacts of a torch program: weights and operators converted, then exported anew so that the file says it all.

Inputs and outputs of the program become half precision, too: the backend converts them on the device.
"""

import re
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.export

from services.executor.backends import pt2
from services.executor.backends.base import plain
from services.executor.backends.torch_cuda import module_of
from services.executor.workshop import torch_files
from services.executor.workshop.jobs import Refusal
from services.executor.workshop.validation import ValidationSet

PRECISIONS = {"fp16": torch.float16, "bf16": torch.bfloat16}
EXAMPLE = 2  # items: one alone would fix the batch
MOST_BYTES = 2**34


def program_file(source: Path, target: Path, precision: str, data: ValidationSet) -> None:
    """Convert one reduced .pt2 file into another; raises Refusal."""
    dtype = PRECISIONS[precision]
    whole = target.with_suffix(".exported.pt2")
    try:
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            program = torch_files.program(source)
            values = _values(program)
            arguments = _example(values, data, dtype)
            module = module_of(program).to(dtype)
            exported = torch.export.export(module, arguments, dynamic_shapes=_shapes(program, values))
            torch.export.save(exported, whole)
        pt2.reduce(whole, target, MOST_BYTES)
    except Refusal:
        raise
    except Exception as error:
        raise Refusal(f"the program cannot be converted to {precision}: {plain(error)}") from error
    finally:
        whole.unlink(missing_ok=True)


def _values(program: Any) -> list[Any]:
    """What the program's inputs look like, in order."""
    values = {node.name: node.meta.get("val") for node in program.graph.nodes}
    return [values[str(name)] for name in program.graph_signature.user_inputs]


def _example(values: list[Any], data: ValidationSet, dtype: torch.dtype) -> tuple[Any, ...]:
    """Real samples: one where the batch is fixed, else two."""
    tensors = []
    for value, array in zip(values, data.inputs.values(), strict=True):
        items = value.shape[0] if isinstance(value.shape[0], int) else EXAMPLE
        tensor = torch.from_numpy(array[:items].copy())
        tensors.append(tensor.to(dtype) if value.dtype.is_floating_point else tensor.to(value.dtype))
    return tuple(tensors)


def _shapes(program: Any, values: list[Any]) -> tuple[Any, ...]:
    """The same open axes between the same bounds as before; None for an input whose shape is fixed."""
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

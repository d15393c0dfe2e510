"""ONNX files: checks of an upload, its signature and operators, an open batch axis, fp16 artifacts, cascades. Runs in the sandbox."""

import logging
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.compose
import onnx.numpy_helper
import onnx.version_converter
from onnx import TensorProto

from bus.datatypes import DATATYPES
from bus.messages.catalog import Signature, TensorSpec
from services.executor.backends.base import plain
from services.executor.workshop.sandbox.protocol import UploadRejected

# Operator sets that onnxruntime ships with; anything else would need somebody's shared library.
DOMAINS = frozenset({"", "ai.onnx", "ai.onnx.ml", "com.microsoft", "com.microsoft.nchwc"})
FOREIGN = frozenset({"PythonOp", "PythonOpGrad", "PyOp", "ATen"})  # of com.microsoft: call into other run-times
# By ONNX's number. onnxruntime takes arrays.
_DATATYPES = {TensorProto.DataType.Value(row.onnx.upper()): name for name, row in DATATYPES.items() if row.native}


def read(path: Path, most_bytes: int) -> Any:
    """The parsed and checked model. Raises UploadRejected."""
    if path.stat().st_size > most_bytes:
        raise UploadRejected(f"the model file is larger than the {most_bytes >> 20} MB allowed")
    content = path.read_bytes()
    try:
        model = onnx.load_model_from_string(content)
    except Exception as error:
        raise UploadRejected(
            "the file is not an ONNX model: it cannot be parsed, perhaps since it is cut off; export the model again, or give --format"
        ) from error
    if not model.graph.node:
        raise UploadRejected("the file is not an ONNX model: it has no operators")
    _check_files(model)
    _check_operators(model)
    try:
        onnx.checker.check_model(model)
    except Exception as error:
        raise UploadRejected(
            f"the ONNX model is not valid: {plain(error).removesuffix('.')}; export it again"
        ) from error
    return model


def operators(model: Any) -> list[str]:
    """Operator types in the model, its subgraphs and functions."""
    return sorted({node.op_type for node in nodes(model)})


def nodes(model: Any) -> Iterator[Any]:
    """All nodes, also those of subgraphs and functions."""
    stack = [model.graph.node, *(function.node for function in model.functions)]
    while stack:
        for node in stack.pop():
            yield node
            for attribute in node.attribute:
                stack += [graph.node for graph in (attribute.g, *attribute.graphs) if graph.node]


def _check_files(model: Any) -> None:
    if any(tensor.data_location == TensorProto.EXTERNAL or tensor.external_data for tensor in _tensors(model)):
        raise UploadRejected(
            "the model keeps tensors in other files: save it as one file (external data is not accepted)"
        )


def _tensors(model: Any) -> Iterator[Any]:
    graphs = [model.graph]
    for function in model.functions:
        for node in function.node:
            yield from _attribute_tensors(node, graphs)
    while graphs:
        graph = graphs.pop()
        yield from graph.initializer
        for sparse in graph.sparse_initializer:
            yield from (sparse.values, sparse.indices)
        for node in graph.node:
            yield from _attribute_tensors(node, graphs)


def _attribute_tensors(node: Any, graphs: list[Any]) -> Iterator[Any]:
    for attribute in node.attribute:
        yield attribute.t
        yield from attribute.tensors
        for sparse in (attribute.sparse_tensor, *attribute.sparse_tensors):
            yield from (sparse.values, sparse.indices)
        graphs += [graph for graph in (attribute.g, *attribute.graphs) if graph.node or graph.initializer]


def _check_operators(model: Any) -> None:
    own = {(function.domain, function.name) for function in model.functions}
    for node in nodes(model):
        if (node.domain, node.op_type) in own:
            continue
        if node.domain not in DOMAINS or node.op_type in FOREIGN:
            name = f"{node.domain[:40]}::{node.op_type[:40]}"
            raise UploadRejected(
                f"the model uses the custom operator {name}: only standard ONNX operators are accepted; serve it by a class of your own (infaas container)"
            )


def signature(model: Any) -> Signature:
    """Inputs and outputs as the file states them. -1: the axis is not fixed. Raises UploadRejected if there is no batch axis."""
    given = {initializer.name for initializer in model.graph.initializer}
    inputs = [_spec(value, "input") for value in model.graph.input if value.name not in given]
    outputs = [_spec(value, "output") for value in model.graph.output if value.type.HasField("tensor_type")]
    if not inputs:
        raise UploadRejected("the model has no inputs: export it with one whose first axis counts items")
    if not outputs:
        raise UploadRejected("the model gives no tensors: with skl2onnx, convert with the option zipmap=False")
    return Signature(inputs=inputs, outputs=outputs)


def batch_sizes(model: Any) -> set[int]:
    """The fixed lengths of the inputs' first axes."""
    given = {initializer.name for initializer in model.graph.initializer}
    inputs = (value for value in model.graph.input if value.name not in given)
    dims = (value.type.tensor_type.shape.dim[0] for value in inputs if value.type.tensor_type.shape.dim)
    return {dim.dim_value for dim in dims if dim.dim_value > 0}


def _spec(value: Any, what: str) -> TensorSpec:
    tensor = value.type.tensor_type
    if not value.type.HasField("tensor_type"):
        raise UploadRejected(f"the model's {what} {value.name[:40]!r} is not a tensor of a known datatype")
    datatype = _DATATYPES.get(tensor.elem_type)
    if datatype is None:
        kind = TensorProto.DataType.Name(tensor.elem_type) if tensor.elem_type in TensorProto.DataType.values() else "?"
        raise UploadRejected(
            f"the model's {what} {value.name[:40]!r} is not a tensor of a known datatype: it is {kind}, "
            f"use one of {', '.join(_DATATYPES.values())}"
        )
    if what == "input" and not tensor.shape.dim:
        raise UploadRejected(
            f"the model's input {value.name[:40]!r} has no batch axis: the first axis must count items"
        )
    shape = [dim.dim_value if dim.dim_value > 0 else -1 for dim in tensor.shape.dim[1:]]
    return TensorSpec(name=value.name, datatype=datatype, shape=shape)


def free_batch(model: Any) -> Any:
    """A copy whose first axes are open, as far as the file can express it. A run must prove that it works."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    given = {initializer.name for initializer in copy.graph.initializer}
    fixed = batch_sizes(copy)
    for value in (*copy.graph.input, *copy.graph.output):
        dims = value.type.tensor_type.shape.dim
        if value.name not in given and dims and dims[0].dim_value in fixed:
            dims[0].Clear()
            dims[0].dim_param = "batch"
    del copy.graph.value_info[:]
    _free_reshapes(copy, fixed)
    return copy


def _free_reshapes(model: Any, fixed: set[int]) -> None:
    """Reshape targets that begin with the fixed batch size begin with -1 or 0 (keep) instead, if nothing else uses them."""
    uses: dict[str, int] = {}
    targets = set()
    for node in model.graph.node:
        for name in node.input:
            uses[name] = uses.get(name, 0) + 1
        if node.op_type == "Reshape" and len(node.input) > 1:
            targets.add(node.input[1])
    constants = [(tensor.name, tensor) for tensor in model.graph.initializer]
    constants += [(n.output[0], a.t) for n in model.graph.node if n.op_type == "Constant" for a in n.attribute]
    for name, tensor in constants:
        if name not in targets or uses[name] > 1 or tensor.data_type != TensorProto.INT64:
            continue
        shape = onnx.numpy_helper.to_array(tensor).tolist()
        if isinstance(shape, list) and len(shape) > 1 and shape[0] in fixed:
            # -1 for the first axis unless it is taken: then the batch must be kept by 0.
            shape[0] = 0 if -1 in shape else -1
            tensor.CopyFrom(onnx.numpy_helper.from_array(np.array(shape, np.int64), tensor.name))


# -- fp16: half the bytes, for devices that compute in half precision; on a CPU such models are slower


def to_fp16(source: Path, target: Path) -> None:
    """Write the fp16 artifact of an fp32 file. Raises UploadRejected.

    Inputs and outputs stay fp32, so that the same queries fit. Measured on EfficientNet-Lite0: all answers equal to fp32's.
    """
    logging.disable(logging.WARNING)
    from onnxruntime.transformers.float16 import convert_float_to_float16  # noqa: PLC0415  # changes sys.path

    model = onnx.load_model_from_string(source.read_bytes())
    del model.graph.value_info[:]  # shapes that exporters leave behind are often stale
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # numbers too small for half precision become its smallest
            halved = convert_float_to_float16(model, keep_io_types=True)
    except Exception as error:
        raise UploadRejected(f"the model cannot be converted to fp16: {plain(error)}") from error
    kinds = {tensor.data_type for tensor in halved.graph.initializer}
    if onnx.TensorProto.FLOAT16 not in kinds and not any(node.op_type == "Cast" for node in halved.graph.node):
        raise UploadRejected("nothing in this model could be converted to fp16: it has no floating-point weights")
    target.write_bytes(halved.SerializeToString())


# -- cascades: one file, which computes a second model for the items of which the first one is unsure

_LEAST_OPSET = 13  # from which on what joins the two is written alike


def cascade(first: Path, then: Path, signature: Signature, scores: str, threshold: float, *, normal: bool) -> bytes:
    """A file that computes the first model, and the other one for the items whose largest probability is below the threshold.

    scores: the output that has them; normal: as probabilities, else their softmax is taken. Raises UploadRejected.
    """
    h = onnx.helper
    try:
        one, two = _alike(*(onnx.load_model_from_string(path.read_bytes()) for path in (first, then)))
        one = onnx.compose.add_prefix(one, "first.", rename_inputs=False)
        two = onnx.compose.add_prefix(two, "then.")
        sure = [] if normal else [h.make_node("Softmax", [f"first.{scores}"], ["cascade.normal"], axis=-1)]
        top = f"first.{scores}" if normal else "cascade.normal"
        constants = {"one": [1], "flat": [-1], "rows": [-1, 1]}
        numbers = [onnx.numpy_helper.from_array(np.array(v, np.int64), f"cascade.{k}") for k, v in constants.items()]
        numbers.append(onnx.numpy_helper.from_array(np.array(0, np.int64), "cascade.none"))
        numbers.append(onnx.numpy_helper.from_array(np.array(threshold, np.float32), "cascade.threshold"))
        sure += [
            h.make_node("TopK", [top, "cascade.one"], ["cascade.best", "cascade.class"], axis=-1),
            h.make_node("Cast", ["cascade.best"], ["cascade.single"], to=TensorProto.FLOAT),
            h.make_node("Reshape", ["cascade.single", "cascade.flat"], ["cascade.confidence"]),
            h.make_node("GreaterOrEqual", ["cascade.confidence", "cascade.threshold"], ["cascade.sure"]),
            h.make_node("Not", ["cascade.sure"], ["cascade.unsure"]),  # NaN is unsure, too
            h.make_node("NonZero", ["cascade.unsure"], ["cascade.places"]),
            h.make_node("Size", ["cascade.places"], ["cascade.count"]),
            h.make_node("Greater", ["cascade.count", "cascade.none"], ["cascade.any"]),
        ]
        outputs = [v for spec in signature.outputs for v in one.graph.output if v.name == f"first.{spec.name}"]
        goes = [
            h.make_node("Reshape", ["cascade.places", "cascade.flat"], ["cascade.items"]),
            h.make_node("Reshape", ["cascade.places", "cascade.rows"], ["cascade.at"]),
            *(h.make_node("Gather", [x.name, "cascade.items"], [f"then.{x.name}"], axis=0) for x in signature.inputs),
            *two.graph.node,
        ]
        stays = []
        for spec in signature.outputs:
            name = f"first.{spec.name}"
            goes.append(h.make_node("ScatterND", [name, "cascade.at", f"then.{spec.name}"], [f"cascade.then.{spec.name}"]))  # fmt: skip
            stays.append(h.make_node("Identity", [name], [f"cascade.stays.{spec.name}"]))
        kinds = {v.name.removeprefix("first."): v.type.tensor_type.elem_type for v in outputs}
        branch = h.make_graph(goes, "then", [], [h.make_tensor_value_info(f"cascade.then.{n}", k, None) for n, k in kinds.items()], two.graph.initializer)  # fmt: skip
        other = h.make_graph(stays, "stays", [], [h.make_tensor_value_info(f"cascade.stays.{n}", k, None) for n, k in kinds.items()])  # fmt: skip
        branching = h.make_node("If", ["cascade.any"], list(kinds), then_branch=branch, else_branch=other)
        given = {initializer.name for initializer in one.graph.initializer}
        for value in outputs:
            value.name = value.name.removeprefix("first.")
        graph = h.make_graph(
            [*one.graph.node, *sure, branching],
            "cascade",
            [value for value in one.graph.input if value.name not in given],
            outputs,
            [*one.graph.initializer, *numbers],
        )
        made = h.make_model(
            graph,
            opset_imports=one.opset_import,
            ir_version=max(one.ir_version, two.ir_version),
            functions=[*one.functions, *two.functions],
        )
        content: bytes = made.SerializeToString()
    except UploadRejected:
        raise
    except Exception as error:
        raise UploadRejected(f"the two models cannot be joined: {plain(error)}") from error
    return content


def _alike(*models: Any) -> list[Any]:
    """The same models with the same sets of operators: the newer ones. Raises ValueError, or what the converter does."""
    wanted: dict[str, int] = {"": _LEAST_OPSET}
    for one in (one for model in models for one in model.opset_import):
        domain = "" if one.domain == "ai.onnx" else one.domain
        wanted[domain] = max(wanted.get(domain, 1), one.version)
    found = []
    for model in models:
        there = {"" if one.domain == "ai.onnx" else one.domain: one.version for one in model.opset_import}
        if there.get("", wanted[""]) != wanted[""]:
            model = onnx.version_converter.convert_version(model, wanted[""])
        if there.get("ai.onnx.ml", wanted.get("ai.onnx.ml")) != wanted.get("ai.onnx.ml"):
            raise ValueError("their sets of operators for machine learning differ")
        del model.opset_import[:]
        model.opset_import.extend(onnx.helper.make_opsetid(*each) for each in wanted.items())
        found.append(model)
    return found

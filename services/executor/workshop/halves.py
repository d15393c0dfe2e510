"""fp16 artifacts of an fp32 ONNX file: half the bytes, for devices that compute in half precision. On a CPU they are slower.

Inputs and outputs stay fp32, so that the same queries fit. Measured on EfficientNet-Lite0: all answers equal to fp32's.
"""

import logging
import warnings
from pathlib import Path

import onnx

from services.executor.backends.base import plain
from services.executor.workshop.jobs import Refusal


def onnx_file(source: Path, target: Path) -> None:
    """Convert one file; raises Refusal."""
    logging.disable(logging.WARNING)
    from onnxruntime.transformers.float16 import convert_float_to_float16  # noqa: PLC0415  # changes sys.path

    model = onnx.load_model_from_string(source.read_bytes())
    del model.graph.value_info[:]  # shapes that exporters leave behind are often stale
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # numbers too small for half precision become its smallest
            halved = convert_float_to_float16(model, keep_io_types=True)
    except Exception as error:
        raise Refusal(f"the model cannot be converted to fp16: {plain(error)}") from error
    kinds = {tensor.data_type for tensor in halved.graph.initializer}
    if onnx.TensorProto.FLOAT16 not in kinds and not any(node.op_type == "Cast" for node in halved.graph.node):
        raise Refusal("nothing in this model could be converted to fp16: it has no floating-point weights")
    target.write_bytes(halved.SerializeToString())

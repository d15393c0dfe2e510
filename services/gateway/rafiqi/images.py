"""The body of a classification as a tensor: an image, a .npy file, the bytes of the array, or a nested list."""

import io
import math
from typing import TYPE_CHECKING, Any

import msgspec

from bus.datatypes import SIZES
from bus.messages.catalog import TensorSpec
from bus.messages.public import Tensor
from bus.tensors import BadTensor, fit, from_array, to_array
from bus.values import Ragged, flatten, from_list
from infaas.errors import BadInput
from infaas.tables import picture
from services.gateway.errors import BadRequest
from services.gateway.json_checks import check_json_size

if TYPE_CHECKING:
    from bus.tensors import Array

NPY = b"\x93NUMPY"


def tensor_of(body: bytes, spec: TensorSpec) -> dict[str, Any]:
    """The tensor of one item, or of several from an array with one more axis. Blocks. Raises RequestFailed."""
    if not body:
        raise BadRequest("the body is empty: send an image, a .npy file, or the bytes of the input's array")
    size = SIZES[spec.datatype]
    if body.startswith(NPY):
        return _plain(_loaded(body), spec)
    if size and -1 not in spec.shape and len(body) == size * math.prod(spec.shape):
        return {"datatype": spec.datatype, "shape": [1, *spec.shape], "data": body}
    try:
        return _plain(_listed(body, spec) if body.lstrip()[:1] == b"[" else picture(body, spec), spec)
    except BadInput as error:
        raise BadRequest(str(error)) from error


def _plain(values: "Array", spec: TensorSpec) -> dict[str, Any]:
    if values.ndim == len(spec.shape):
        values = values[None]
    try:
        tensor = from_array(fit(values, spec, "body"))
    except BadTensor as error:
        raise BadRequest(str(error)) from error
    return {"datatype": tensor.datatype, "shape": tensor.shape, "data": tensor.data}


def _loaded(body: bytes) -> "Array":
    """The array of a .npy file, over the body's own bytes. Its header must fit them."""
    import numpy as np  # noqa: PLC0415  (most gateways do not need numpy)

    file = io.BytesIO(body)
    try:
        version = np.lib.format.read_magic(file)
        readers = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
        shape, columns, dtype = readers[version](file)
    except (ValueError, KeyError, OSError, TypeError, SyntaxError, RecursionError, MemoryError) as error:
        raise BadRequest(f"the .npy file cannot be read: {' '.join(str(error).split())[:200]}") from error
    data = memoryview(body)[file.tell() :]
    if dtype.hasobject or any(axis < 0 for axis in shape) or math.prod(shape) * dtype.itemsize != len(data):
        raise BadRequest("the .npy file cannot be read: it holds objects, or not as many numbers as it says")
    if not len(data):
        raise BadRequest("the .npy file holds no numbers")
    values: Array = np.frombuffer(data, dtype)
    return values.reshape(shape, order="F" if columns else "C")


def _listed(body: bytes, spec: TensorSpec) -> "Array":
    check_json_size(body)
    try:
        found = msgspec.json.decode(body, type=list[Any])
        if spec.datatype != "BYTES":
            return to_array(found, "body")
        return to_array(Tensor(**from_list("BYTES", *flatten(found), "body")), "body")
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, Ragged, BadTensor) as error:
        what = "texts" if spec.datatype == "BYTES" else "numbers"
        raise BadRequest(f"the body is no list of {what}: {error}") from error

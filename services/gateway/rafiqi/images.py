"""The body of a classification as a tensor: an image, a .npy file, the bytes of the array, or a nested list."""

import io
import math
from typing import TYPE_CHECKING, Any

import msgspec

from bus.datatypes import DATATYPES, SIZES
from bus.messages.catalog import TensorSpec
from bus.messages.public import Tensor
from bus.tensors import BadTensor, fit, from_array, to_array
from bus.values import Ragged, flatten, from_list
from services.gateway.errors import BadRequest, RequestFailed
from services.gateway.json_checks import check_json_size

if TYPE_CHECKING:
    from bus.tensors import Array

NPY = b"\x93NUMPY"
MAX_PIXELS = 16 * 2**20
PICTURES = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
_CHANNELS = (1, 3)


def tensor_of(body: bytes, spec: TensorSpec) -> dict[str, Any]:
    """The tensor of one item, or of several from an array with one more axis. Blocks. Raises RequestFailed."""
    if not body:
        raise BadRequest("the body is empty: send an image, a .npy file, or the bytes of the input's array")
    size = SIZES[spec.datatype]
    if body.startswith(NPY):
        return _plain(_loaded(body), spec)
    if size and -1 not in spec.shape and len(body) == size * math.prod(spec.shape):
        return {"datatype": spec.datatype, "shape": [1, *spec.shape], "data": body}
    return _plain(_listed(body, spec) if body.lstrip()[:1] == b"[" else _picture(body, spec), spec)


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


def _picture(body: bytes, spec: TensorSpec) -> "Array":
    """The image in the model's size and colours; brightness is 0 to 255 for UINT8 and 0 to 1 for floating point."""
    import numpy as np  # noqa: PLC0415

    width, height, channels, first = layout(spec)
    image = _decoded(body, "L" if channels == 1 else "RGB", (width, height))
    values: Array = np.asarray(image, np.uint8)
    if DATATYPES[spec.datatype].kind == "f":
        values = values.astype(np.float32) / 255.0
    if channels == 3 and first:
        values = values.transpose(2, 0, 1)
    if len(spec.shape) == 1:
        return values.reshape(-1)
    if channels == 1 and len(spec.shape) == 3:
        return values[None] if first else values[..., None]
    return values


def layout(spec: TensorSpec) -> tuple[int, int, int, bool]:
    """Width, height and channels of a model's input as an image, and whether the channels come first. -1: any. Raises BadRequest."""
    shape = spec.shape
    if len(shape) == 3 and shape[0] in _CHANNELS:
        return shape[2], shape[1], shape[0], True
    if len(shape) == 3 and shape[2] in _CHANNELS:
        return shape[1], shape[0], shape[2], False
    if len(shape) == 2:
        return shape[1], shape[0], 1, False
    if len(shape) == 1:
        for channels in _CHANNELS:
            side = math.isqrt(max(0, shape[0]) // channels)
            if side > 1 and side * side * channels == shape[0]:
                return side, side, channels, False
    raise BadRequest(f"{spec.name} {spec.datatype}{shape} is no image: send a .npy file or the array's own bytes")


def _decoded(body: bytes, mode: str, size: tuple[int, int]) -> Any:
    try:
        from PIL import Image, UnidentifiedImageError  # noqa: PLC0415  (an extra)
    except ImportError as error:
        raise BadRequest("images need the extra `images` (pip install 'infaas[images]'): send a .npy file") from error
    try:
        with Image.open(io.BytesIO(body), formats=PICTURES) as image:
            _check_size(image.width, image.height)
            found = image.convert(mode)
    except RequestFailed:
        raise
    except UnidentifiedImageError as error:
        known = ", ".join(PICTURES)
        raise BadRequest(
            f"the body is no image ({known}), no .npy file, and not as long as the model's input"
        ) from error
    except Exception as error:  # decoders raise all kinds of errors for broken files
        raise BadRequest(f"the image cannot be decoded: {' '.join(str(error).split())[:200]}") from error
    wanted = (found.width if size[0] == -1 else size[0], found.height if size[1] == -1 else size[1])
    return found if found.size == wanted else found.resize(wanted, Image.Resampling.BILINEAR)


def _check_size(width: int, height: int) -> None:
    """Check the size before decoding: a small file may hold a picture larger than the memory."""
    if width * height > MAX_PIXELS:
        raise BadRequest(f"the image has {width * height} pixels: at most {MAX_PIXELS}")

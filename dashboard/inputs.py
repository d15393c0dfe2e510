"""The inputs of a query that a visitor types or uploads, as the arrays that an app takes. Pure.

An app's signature is a list of TensorSpec, whose shapes are without the axis that counts the items.
"""

import io
import json
import math
import zipfile
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from bus.datatypes import DATATYPES
from bus.messages.catalog import TensorSpec
from bus.tensors import BadTensor, fit, shown
from infaas.errors import BadInput
from infaas.inputs import random_items

Array = np.ndarray[Any, Any]

ARRAYS, PICTURES = ("npy", "npz", "json"), ("png", "jpg", "jpeg", "webp", "bmp", "gif")
MAX_ITEMS = 64  # of a file; more would only make the page long
MAX_SIDE = 1024  # pixels of a picture, for models that take any size
VALUES: Mapping[str, str] = {  # how the pixels of a picture become numbers
    "0 to 1": "each value divided by 255",
    "-1 to 1": "each value divided by 127.5, less 1",
    "0 to 255": "as they are",
    "ImageNet": "0 to 1, less the mean of ImageNet and divided by its deviation, for each colour",
}
IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


class PictureShape(NamedTuple):
    """How a tensor holds a picture. height, width: pixels; -1: any. colours: 1 or 3. order: of the axes."""

    height: int
    width: int
    colours: int
    order: str  # "HW", "HWC", "CHW" or "flat"


def takes(specs: Sequence[TensorSpec]) -> str:
    """What the app takes, in words: `x: FP32, [n, 784]`."""
    return "; ".join(f"`{spec.name}`: {spec.datatype}, {shown(spec.shape, 'n')}" for spec in specs)


def example(specs: Sequence[TensorSpec]) -> str:
    """One item of zeros as JSON, or "" if it would be too long to read."""
    shapes = [[abs(length) for length in spec.shape] for spec in specs]
    if not specs or any(math.prod(shape) > 64 for shape in shapes):
        return ""
    values = {
        spec.name: np.full([1, *shape], "text" if spec.datatype == "BYTES" else 0, object).tolist()
        for spec, shape in zip(specs, shapes, strict=True)
    }
    return json.dumps(values if len(specs) > 1 else values[specs[0].name])


def made_up(specs: Sequence[TensorSpec], seed: int) -> dict[str, Array]:
    """One item of random values."""
    return random_items(specs, 1, np.random.default_rng(seed))


def from_json(text: str, specs: Sequence[TensorSpec]) -> dict[str, Array]:
    """The inputs that a JSON text holds: a nested list, or a map of input names to nested lists. Raises BadInput."""
    try:
        value = json.loads(text)
    except ValueError as error:
        raise BadInput(
            f"this is no JSON: {error}. Write a list of items, as {example(specs) or '[[0.1, 0.2]]'}"
        ) from None
    if isinstance(value, dict) and set(value) == {"inputs"}:
        value = value["inputs"]
    if not isinstance(value, (dict, list)):
        raise BadInput("this JSON is neither a list of items nor a map of input names to lists: put the item into [ ]")
    try:
        arrays = (
            {str(name): np.asarray(each) for name, each in value.items()}
            if isinstance(value, dict)
            else np.asarray(value)
        )
    except ValueError:
        raise BadInput("the items of this JSON differ in length: all items need the same shape") from None
    return named(arrays, specs)


def from_file(name: str, data: bytes, specs: Sequence[TensorSpec]) -> dict[str, Array]:
    """The inputs that a .npy, .npz or .json file holds. Raises BadInput."""
    ending = name.rpartition(".")[2].lower()
    if ending == "json":
        return from_json(data.decode(errors="replace"), specs)
    try:
        loaded = np.load(io.BytesIO(data), allow_pickle=False)
        arrays = {key: loaded[key] for key in loaded.files} if hasattr(loaded, "files") else loaded
    except (ValueError, OSError, EOFError, KeyError, zipfile.BadZipFile) as error:
        raise BadInput(
            f"{name} cannot be read as an array ({str(error)[:120]}): save numbers with numpy.save or numpy.savez"
        ) from None
    if isinstance(arrays, dict) and not {spec.name for spec in specs} & set(arrays) and len(specs) == 1 and arrays:
        # A validation set holds inputs and labels; the input is that which looks like one.
        arrays = next(
            (each for each in arrays.values() if each.ndim == len(specs[0].shape) + 1), next(iter(arrays.values()))
        )
    return named(arrays, specs)


def named(arrays: "Array | Mapping[str, Array]", specs: Sequence[TensorSpec]) -> dict[str, Array]:
    """Arrays by the names of the inputs, with an axis of items and the datatypes of the app. At most MAX_ITEMS items. Raises BadInput."""
    if not isinstance(arrays, Mapping):
        if len(specs) > 1:
            raise BadInput(
                f"this app takes {len(specs)} inputs, {', '.join(spec.name for spec in specs)}: give a map of names, or an .npz file"
            )
        arrays = {specs[0].name if specs else "x": arrays}
    known = {spec.name: spec for spec in specs}
    if known and (missing := [name for name in known if name not in arrays]):
        raise BadInput(f"the input {missing[0]} is missing: the app takes {', '.join(known)}")
    found: dict[str, Array] = {}
    for name, array in arrays.items():
        if known and name not in known:
            continue
        spec = known.get(name)
        if not array.size:
            raise BadInput(f"the input {name} has no item: the first axis counts the items")
        if array.ndim == (0 if spec is None else len(spec.shape)):
            array = array[None]
        found[name] = _cast(array[:MAX_ITEMS], spec) if spec is not None else array[:MAX_ITEMS]
    return found


def _cast(array: Array, spec: TensorSpec) -> Array:
    try:
        return fit(array, spec, spec.name)
    except BadTensor as error:
        raise BadInput(str(error)) from None


def picture_shape(specs: Sequence[TensorSpec]) -> PictureShape | None:
    """How the app's only input holds a picture; None: it holds none."""
    if len(specs) != 1 or specs[0].datatype == "BYTES":
        return None
    match specs[0].shape:
        case [height, width, (1 | 3) as colours]:
            return PictureShape(height, width, colours, "HWC")
        case [(1 | 3) as colours, height, width]:
            return PictureShape(height, width, colours, "CHW")
        case [height, width] if min(height, width) > 3 or -1 in (height, width):
            return PictureShape(height, width, 1, "HW")
        case [length] if length >= 64:
            for colours in (1, 3):
                side = math.isqrt(length // colours)
                if side * side * colours == length:
                    return PictureShape(side, side, colours, "flat")
    return None


def from_picture(
    data: bytes, specs: Sequence[TensorSpec], values: str, *, invert: bool
) -> tuple[dict[str, Array], Array]:
    """The input that a picture becomes, and the picture as the model sees it: uint8 [height, width(, 3)].

    values: one of VALUES; datatypes of whole numbers always take 0 to 255. invert: bright becomes dark. Raises BadInput.
    """
    from PIL import Image, UnidentifiedImageError  # noqa: PLC0415  (only for pictures)

    shape = picture_shape(specs)
    if shape is None:
        raise BadInput(f"this app takes no picture, but {takes(specs)}: send numbers as JSON, .npy or .npz")
    try:
        with Image.open(io.BytesIO(data)) as opened:
            picture = opened.convert("L" if shape.colours == 1 else "RGB")
    except (UnidentifiedImageError, OSError, ValueError, Image.DecompressionBombError) as error:
        raise BadInput(f"this picture cannot be read ({str(error)[:80]}): use a PNG or JPEG file") from None
    width = min(picture.width, MAX_SIDE) if shape.width < 0 else shape.width
    height = min(picture.height, MAX_SIDE) if shape.height < 0 else shape.height
    seen: Array = np.asarray(picture.resize((width, height), Image.Resampling.BILINEAR), np.uint8)
    if invert:
        seen = 255 - seen
    array = _scaled(seen, values) if DATATYPES[specs[0].datatype].kind == "f" else seen
    if shape.order == "CHW":
        array = array[None] if shape.colours == 1 else array.transpose(2, 0, 1)
    elif shape.order == "HWC" and shape.colours == 1:
        array = array[..., None]
    elif shape.order == "flat":
        array = array.reshape(-1)
    return {specs[0].name: np.ascontiguousarray(array[None]).astype(DATATYPES[specs[0].datatype].array)}, seen


def _scaled(picture: Array, values: str) -> Array:
    numbers = picture.astype(np.float32)
    if values == "0 to 255":
        return numbers
    if values == "-1 to 1":
        return numbers / 127.5 - 1
    numbers /= 255
    if values != "ImageNet":
        return numbers
    mean, deviation = np.asarray(IMAGENET, np.float32)
    if numbers.ndim < 3:
        mean, deviation = mean.mean(), deviation.mean()
    scaled: Array = (numbers - mean) / deviation
    return scaled

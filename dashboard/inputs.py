"""The inputs of a query that a visitor types or uploads, as the arrays that an app takes. Pure.

An app's signature is a list of TensorSpec, whose shapes are without the axis that counts the items.
"""

import io
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bus.datatypes import DATATYPES
from bus.messages.catalog import TensorSpec
from bus.tensors import shown
from infaas.errors import BadInput
from infaas.inputs import arrays_in, random_items, read_json
from infaas.tables import arranged, as_inputs, layout, pixels

Array = np.ndarray[Any, Any]

ARRAYS, PICTURES = ("npy", "npz", "json"), ("png", "jpg", "jpeg", "webp", "bmp", "gif")
MAX_ITEMS = 64  # of a file; more would only make the page long
MAX_SIDE = 1024  # pixels of a picture, for models that take any size
LEAST_PIXELS = 64  # of an input that may be a picture
VALUES: Mapping[str, str] = {  # how the pixels of a picture become numbers
    "0 to 1": "each value divided by 255",
    "-1 to 1": "each value divided by 127.5, less 1",
    "0 to 255": "as they are",
    "ImageNet": "0 to 1, less the mean of ImageNet and divided by its deviation, for each colour",
}
IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


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
    value = read_json(text)
    return named(value["inputs"] if isinstance(value, dict) and set(value) == {"inputs"} else value, specs)


def from_file(name: str, data: bytes, specs: Sequence[TensorSpec]) -> dict[str, Array]:
    """The inputs that a .npy, .npz or .json file holds. Raises BadInput."""
    if name.lower().endswith(".json"):
        return from_json(data.decode(errors="replace"), specs)
    arrays = arrays_in(io.BytesIO(data), Path(name))
    if isinstance(arrays, dict) and not {spec.name for spec in specs} & set(arrays) and len(specs) == 1 and arrays:
        # A validation set holds inputs and labels; the input is that which looks like one.
        arrays = next(
            (each for each in arrays.values() if each.ndim == len(specs[0].shape) + 1), next(iter(arrays.values()))
        )
    return named(arrays, specs)


def named(x: Any, specs: Sequence[TensorSpec]) -> dict[str, Array]:
    """Inputs by their names, in the app's datatypes. At most MAX_ITEMS items. Raises BadInput."""
    found = as_inputs(x, specs)
    arrays = {name: each[:MAX_ITEMS] for name, each in (found if isinstance(found, dict) else {"x": found}).items()}
    if empty := next((name for name, each in arrays.items() if not each.size), None):
        raise BadInput(f"the input {empty} has no item: the first axis counts the items")
    return arrays


def takes_picture(specs: Sequence[TensorSpec]) -> bool:
    """Whether the app's only input may hold a picture. A row of a few numbers holds none."""
    if len(specs) != 1 or specs[0].datatype == "BYTES":
        return False
    shape = specs[0].shape
    if len(shape) < 3 and -1 not in shape and math.prod(shape) < LEAST_PIXELS:
        return False
    try:
        layout(specs[0])
    except BadInput:
        return False
    return True


def from_picture(
    data: bytes, specs: Sequence[TensorSpec], values: str, *, invert: bool
) -> tuple[dict[str, Array], Array]:
    """The input that a picture becomes, and the picture as the model sees it: uint8 [height, width(, 3)].

    values: one of VALUES; datatypes of whole numbers always take 0 to 255. invert: bright becomes dark. Raises BadInput.
    """
    if not takes_picture(specs):
        raise BadInput(f"this app takes no picture, but {takes(specs)}: send numbers as JSON, .npy or .npz")
    (spec,) = specs
    seen = pixels(data, spec, MAX_SIDE)
    if invert:
        seen = 255 - seen
    array = arranged(_scaled(seen, values) if DATATYPES[spec.datatype].kind == "f" else seen, spec)
    return {spec.name: np.ascontiguousarray(array[None]).astype(DATATYPES[spec.datatype].array)}, seen


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

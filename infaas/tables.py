"""Tables, texts and pictures as what an app takes: what a query's caller has, in the names and datatypes of its signature. Pure."""

import io
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from bus.datatypes import DATATYPES
from bus.fields import similar
from bus.messages.catalog import TensorSpec
from bus.tensors import BadTensor, fit, shown, takes
from infaas.errors import BadInput
from infaas.folders import import_of, short_of

if TYPE_CHECKING:
    from bus.tensors import Array


def is_plain(x: Any) -> bool:
    """Whether inputs go as they are: tensors, arrays with an axis of items, lists of numbers, and maps of names to arrays and nested lists."""
    if isinstance(x, Mapping):
        return {"datatype", "shape", "data"} <= x.keys() or (bool(x) and all(map(_is_plain_column, x.values())))
    if isinstance(x, (list, tuple)):
        first = x[0] if x else []
        if isinstance(first, (list, tuple)):
            return not any(isinstance(one, str) or one is None for one in first)
        return isinstance(first, (bool, int, float)) or hasattr(first, "shape")
    return hasattr(x, "shape") and not hasattr(x, "columns") and len(x.shape) != 1


def _is_plain_column(x: Any) -> bool:
    flat = isinstance(x, (list, tuple)) and len(x) > 0 and not isinstance(x[0], (list, tuple))
    return is_plain(x) and not flat


def as_inputs(x: Any, specs: Sequence[TensorSpec]) -> Any:
    """A DataFrame, a Series, texts, rows (a list of maps), columns (a map of lists), an array of one axis or a picture as inputs by name.

    specs: the app's inputs; empty: they are not known, and x goes as it is as far as that goes. Raises BadInput, which names the column.
    """
    import numpy as np  # noqa: PLC0415

    one = specs[0] if len(specs) == 1 else None
    wanted = [spec.name for spec in specs] if one is None else list(one.columns)
    if wanted and hasattr(x, "to_dict") and not hasattr(x, "columns") and set(wanted) <= set(x.index):
        x = x.to_dict()  # a row of a DataFrame
    table = table_of(x)
    if table is None and len(specs) > 1 and isinstance(x, list) and x and all(_is_row(row, len(specs)) for row in x):
        table = dict(zip(wanted, map(list, zip(*x, strict=True)), strict=True))
    if table is None and one is not None:
        pictures = _pictures(x, one)
        return {one.name: _fitting(_plain_array(x) if pictures is None else pictures, one, one.name)}
    if table is None and specs:
        raise BadInput(
            f"inputs: the app takes {len(specs)} columns, {', '.join(wanted)}: give rows that name them, or a DataFrame"
        )
    if table is None:
        return x if hasattr(x, "shape") or isinstance(x, bytes) else _plain_array(x)
    if not specs:
        columns = {name: _plain_array(values) for name, values in table.items()}
        return {name: array.reshape(-1, 1) if array.ndim == 1 else array for name, array in columns.items()}
    if one is not None and one.name not in table:
        names = wanted or list(table)
        if not names:
            raise BadInput("inputs: the rows have no columns")
        if not one.columns and not takes(one.shape, [len(names)]) and (one.shape or len(names) > 1):
            raise BadInput(
                f"inputs: the app takes {one.name} {shown(one.shape, 'n')}, and there are {len(names)} columns"
            )
        specs = [TensorSpec(name=name, datatype=one.datatype, shape=[1]) for name in names]
        parts = [_column(table, spec, names) for spec in specs]
        return {one.name: np.concatenate(parts, axis=1) if one.shape else parts[0][:, 0]}
    found = {spec.name: _column(table, spec, wanted or [spec.name]) for spec in specs}
    lengths = {name: len(array) for name, array in found.items()}
    if len(set(lengths.values())) > 1:
        raise BadInput(f"the columns differ in length: {', '.join(f'{name} {n}' for name, n in lengths.items())}")
    return found


def table_of(x: Any) -> dict[str, Any] | None:
    """The columns of a DataFrame, of rows (maps of names to values), of one such row, or of a map of names to columns. None: x is no table.

    Raises BadInput where rows differ in their names.
    """
    if hasattr(x, "columns") and hasattr(x, "to_numpy"):
        return {str(name): x[name].to_numpy() for name in x.columns}
    if isinstance(x, Mapping):
        single = all(isinstance(value, (str, int, float, bool, type(None))) or _scalar(value) for value in x.values())
        return {str(name): [value] if single else value for name, value in x.items()}
    if not isinstance(x, (list, tuple)) or not x or not isinstance(x[0], Mapping):
        return None
    for number, row in enumerate(x):
        if not isinstance(row, Mapping):
            raise BadInput(f"row {number} is no map of names to values, as row 0 is")
        if missing := [name for name in x[0] if name not in row] or [name for name in row if name not in x[0]]:
            has = "has no" if missing[0] in x[0] else "alone has"
            raise BadInput(
                f"row {number} {has} {missing[0]!r}: give each row the same names, null where there is no value"
            )
    return {str(name): [row[name] for row in x] for name in x[0]}


def _column(table: Mapping[str, Any], spec: TensorSpec, names: Sequence[str]) -> "Array":
    if spec.name not in table:
        others = [name for name in table if name not in names]
        near = similar(spec.name, others)
        hint = f"; is it {near!r}?" if near else f"; there are {', '.join(map(str, table)) or 'none'}"
        raise BadInput(f"column {spec.name!r} is missing: the app takes {', '.join(names)}{hint}")
    return _fitting(_plain_array(table[spec.name]), spec, f"column {spec.name!r}")


def _plain_array(values: Any) -> "Array":
    import numpy as np  # noqa: PLC0415

    values = [values] if isinstance(values, (str, bytes)) else values
    try:
        array: Array = np.asarray(values)
    except ValueError as error:
        raise BadInput("inputs: each item must have as many values as the others") from error
    if array.dtype.kind == "O" and array.ndim == 0 and not hasattr(values, "dtype"):
        raise BadInput(
            f"inputs: a {type(values).__name__} cannot be sent: give an array, rows, texts, a DataFrame or a picture"
        )
    mixed = array.dtype.kind in "US" and not hasattr(values, "dtype")
    return np.asarray(values, object) if mixed else array  # numpy makes texts of numbers beside texts, and cuts bytes


def _fitting(array: "Array", spec: TensorSpec, what: str) -> "Array":
    """The array with the input's axes and datatype; what it is, for errors. Raises BadInput."""
    import numpy as np  # noqa: PLC0415

    texts, flat = spec.datatype == "BYTES", array.reshape(-1)
    if array.dtype.kind in "mMc":
        raise BadInput(
            f"{what} holds {array.dtype}, and the app takes {'texts' if texts else 'numbers'}: make {'texts' if texts else 'numbers'} of it first"
        )
    if texts and array.dtype.kind not in "OUS":
        raise BadInput(f"{what} holds numbers, and the app takes texts: give it as texts")
    if texts and any(isinstance(one, int) or (isinstance(one, float) and not math.isnan(one)) for one in flat.tolist()):
        raise BadInput(f"{what} holds numbers among its texts, and the app takes texts: give them as texts, too")
    if texts:
        array = array.astype(object if spec.binary else str)
    elif array.dtype.kind in "OUS":
        for row, one in enumerate(flat.tolist()):
            if not isinstance(one, (int, float, type(None))):
                raise BadInput(
                    f"{what} holds {one!r} in row {row}, and the app takes numbers: give a number, or null where there is none"
                )
        try:
            array = array.astype(np.float64)
        except OverflowError as error:
            raise BadInput(f"{what} holds a whole number that is too large") from error
    if spec.shape == [1] and array.ndim == 1:
        array = array.reshape(-1, 1)
    elif array.ndim == len(spec.shape) and takes(spec.shape, array.shape):
        array = array[None]  # one item
    try:
        return fit(array, spec, what)
    except BadTensor as error:
        raise BadInput(str(error).replace(f"field `{what}`", what)) from error


def _is_row(row: Any, width: int) -> bool:
    return isinstance(row, (list, tuple)) and len(row) == width


def _scalar(value: Any) -> bool:
    return getattr(value, "ndim", None) == 0


# -- pictures

MAX_PIXELS = 16 * 2**20
PICTURES = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
_CHANNELS = (1, 3)


def _pictures(x: Any, spec: TensorSpec) -> "Array | None":
    """Pictures of Pillow, or the bytes of their files, one or a list, as items of an input; None: there are none."""
    import numpy as np  # noqa: PLC0415

    given = list(x) if isinstance(x, (list, tuple)) else [x]
    if (
        spec.datatype == "BYTES"
        or not given
        or not all(isinstance(one, bytes) or hasattr(one, "convert") for one in given)
    ):
        return None
    return np.stack([picture(one, spec) for one in given])


def picture(given: Any, spec: TensorSpec) -> "Array":
    """A picture, or the bytes of its file, in the model's size and colours: 0 to 255 for whole numbers, 0 to 1 for others. Raises BadInput."""
    values = pixels(given, spec)
    return arranged(values.astype("float32") / 255.0 if DATATYPES[spec.datatype].kind == "f" else values, spec)


def pixels(given: Any, spec: TensorSpec, most: int = MAX_PIXELS) -> "Array":
    """A picture, or the bytes of its file, in the model's size: uint8 [height, width(, 3)]. most: of each side that may be any. Raises BadInput."""
    import numpy as np  # noqa: PLC0415

    width, height, channels, _ = layout(spec)
    mode = "L" if channels == 1 else "RGB"
    image = _decoded(given, mode) if isinstance(given, bytes) else given.convert(mode)
    wanted = (min(image.width, most) if width == -1 else width, min(image.height, most) if height == -1 else height)
    values: Array = np.asarray(image if image.size == wanted else image.resize(wanted, 2), np.uint8)  # 2: bilinear
    return values


def arranged(values: "Array", spec: TensorSpec) -> "Array":
    """What `pixels` gives, with the axes of the model's input."""
    _, _, channels, first = layout(spec)
    if channels == 3 and first:
        values = values.transpose(2, 0, 1)
    if len(spec.shape) == 1:
        return values.reshape(-1)
    if channels == 1 and len(spec.shape) == 3:
        return values[None] if first else values[..., None]
    return values


def layout(spec: TensorSpec) -> tuple[int, int, int, bool]:
    """Width, height and channels of a model's input as an image, and whether the channels come first. -1: any. Raises BadInput."""
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
    raise BadInput(f"{spec.name} {spec.datatype}{shape} is no image: give an array")


def _decoded(body: bytes, mode: str) -> Any:
    try:
        from PIL import Image, UnidentifiedImageError  # noqa: PLC0415  (an extra)
    except ImportError as error:
        raise BadInput("images need the extra `images` (pip install 'infaas[images]'): send a .npy file") from error
    try:
        with Image.open(io.BytesIO(body), formats=PICTURES) as image:
            _check_size(image.width, image.height)
            return image.convert(mode)
    except BadInput:
        raise
    except UnidentifiedImageError as error:
        raise BadInput(
            f"these bytes are no image ({', '.join(PICTURES)}), and not as long as the model's input"
        ) from error
    except Exception as error:  # decoders raise all kinds of errors for broken files
        raise BadInput(f"the image cannot be decoded: {' '.join(str(error).split())[:200]}") from error


def _check_size(width: int, height: int) -> None:
    """Check the size before decoding: a small file may hold a picture larger than the memory."""
    if width * height > MAX_PIXELS:
        raise BadInput(f"the image has {width * height} pixels: at most {MAX_PIXELS}")


def framed(x: Any) -> Any:
    """Rows and columns as a DataFrame, which is what models of tables were fitted with; anything else as it is. Raises BadInput."""
    table = None if hasattr(x, "columns") else table_of(x)
    if table is None:
        return x
    import_of("pandas", "", "convert")
    import numpy as np  # noqa: PLC0415
    import pandas as pd  # noqa: PLC0415

    flat = {name: np.squeeze(one, 1) if np.shape(one)[1:] == (1,) else one for name, one in table.items()}
    try:
        return pd.DataFrame(flat)
    except ValueError as error:
        raise BadInput(f"x: these columns are no table ({short_of(error)})") from error

"""Inputs from .npy, .npz, .csv and .json files, none of which can run code; and pictures' files."""

import csv
import io
import json
import sys
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from bus.datatypes import DATATYPES
from bus.messages.catalog import TensorSpec
from infaas.errors import BadInput

if TYPE_CHECKING:
    from numpy.random import Generator

    from bus.tensors import Array

STDIN = "-"
NUMPY = (b"\x93NUMPY", b"PK\x03\x04", b"PK\x05\x06")  # how .npy and .npz files begin
LINES = (".jsonl", ".ndjson")
PICTURES = (".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp")
VARYING = 16  # length of a random item's axis whose length may vary


def read_file(path: str | Path, *, key: str | None = None) -> "Array | dict[str, Array]":
    """The array of a .npy file. Of an .npz file: the array named `key`, its only array, or all arrays by name.

    Raises BadInput if there is no such file, it is no numpy file, or it holds Python objects.
    """
    path = Path(path)
    return _chosen(_load(path, key), path, key)


def read_input(path: str | Path, *, key: str | None = None) -> Any:
    """What `read_file` reads of a file, the columns of a .csv file by name, the JSON of a .json file, of each line of a .jsonl file, or a picture; `-` is standard input: the bytes of a .npy
    or .npz file, or JSON. Raises BadInput.
    """
    kind = Path(path).suffix.lower()
    if key is not None and kind in (".csv", ".json", *LINES, *PICTURES):
        raise BadInput(f"{path} has no arrays with names: leave out the key")
    if kind in PICTURES:
        return opened(Path(path))
    if kind in LINES:
        return _lines(Path(path))
    if kind in (".csv", ".json"):
        return read_json(read_text(Path(path))) if kind == ".json" else _columns(Path(path))
    if str(path) != STDIN:
        return read_file(path, key=key)
    given = sys.stdin.buffer.read()
    if not given.strip():
        raise BadInput("standard input is empty: pipe a .npy file, an .npz file or JSON into it")
    if not given.startswith(NUMPY):
        try:
            return read_json(given.decode())
        except UnicodeDecodeError:
            raise BadInput("standard input is no .npy file, no .npz file and no JSON") from None
    return _chosen(arrays_in(io.BytesIO(given), Path("standard input"), key), Path("standard input"), key)


def read_arrays(path: str | Path) -> "dict[str, Array]":
    """The arrays of an .npz file by name. Raises BadInput as `read_file` does, and for a file of one array without a name."""
    loaded = _load(Path(path), None)
    if not isinstance(loaded, dict):
        raise BadInput(f"{path} holds one array without a name: save it as .npz, e.g. np.savez(path, x=array)")
    return loaded


def _load(path: Path, key: str | None) -> "Array | dict[str, Array]":
    """key: the only array of an .npz file to read, unless it is not there."""
    try:
        with path.open("rb") as file:
            return arrays_in(file, path, key)
    except OSError as error:
        raise BadInput(f"cannot read {path}: {error.strerror or error}") from error


def arrays_in(file: IO[bytes], path: Path, key: str | None = None) -> "Array | dict[str, Array]":
    """The array of a .npy file, or those of an .npz file by name. path: what errors call it. key: as of `_load`. Raises BadInput."""
    import numpy as np  # noqa: PLC0415  (commands without inputs start without it)

    try:
        loaded = np.load(file, allow_pickle=False)
        if isinstance(loaded, np.ndarray):
            return loaded
        return {name: loaded[name] for name in loaded.files if key not in loaded.files or key == name}
    except (ValueError, EOFError, zipfile.BadZipFile, MemoryError) as error:
        raise BadInput(_why(path, error)) from error


def read_text(path: Path) -> str:
    """A text in UTF-8. Raises BadInput."""
    try:
        return path.read_text("utf-8-sig")
    except OSError as error:
        raise BadInput(f"cannot read {path}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise BadInput(f"{path} is no text in UTF-8: save it as UTF-8") from error


def _lines(path: Path) -> list[Any]:
    """The JSON of each line, an item each."""
    items = []
    for number, line in enumerate(read_text(path).split("\n"), 1):
        try:
            items += [json.loads(line)] if line.strip() else []
        except (json.JSONDecodeError, RecursionError) as error:
            raise BadInput(f"{path}: line {number} is no JSON ({error}): each line is an item") from error
    if not items:
        raise BadInput(f"{path} is empty: each line is an item")
    return items


def _columns(path: Path) -> dict[str, list[Any]]:
    """The columns of a .csv file, whose first line names them: numbers where all are, an empty cell among them is no value; else texts."""
    names, *rows = [row for row in csv.reader(io.StringIO(read_text(path), newline="")) if row] or [[]]
    if not rows:
        raise BadInput(f"{path} has no rows: its first line names the columns, and each other one is an item")
    for line, row in enumerate(rows, 2):
        if len(row) != len(names):
            raise BadInput(f"{path}: row {line} has {len(row)} values, and the first line names {len(names)} columns")
    return {
        name.strip(): _numbers(cells) for name, cells in zip(names, map(list, zip(*rows, strict=True)), strict=True)
    }


def _numbers(cells: list[str]) -> list[Any]:
    try:
        return [float(cell) if cell.strip() else None for cell in cells]
    except ValueError:
        return cells


def read_json(text: str) -> Any:
    """A nested list of numbers, or a map of input names to nested lists. Raises BadInput."""
    try:
        value = json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        raise BadInput(f"the inputs are not valid JSON: {error}") from error
    if not isinstance(value, (list, dict)):
        raise BadInput(
            "the inputs must be a nested list (the first axis counts items), or a map of input names to lists"
        )
    return value


def as_arrays(inputs: Any) -> "Array | dict[str, Array]":
    """Inputs that may be nested lists, as of JSON, as arrays; numbers with a point as float32. Raises BadInput."""
    import numpy as np  # noqa: PLC0415

    def one(values: Any) -> "Array":
        try:
            array: Array = np.asarray(values)
        except ValueError as error:
            raise BadInput(f"the inputs must have the same number of values in each row: {error}") from error
        return array.astype("float32") if isinstance(values, list) and array.dtype.kind == "f" else array

    return {name: one(values) for name, values in inputs.items()} if isinstance(inputs, Mapping) else one(inputs)


def in_turn(source: "Array | Mapping[str, Array]", items: int, most: int) -> list[Any]:
    """At most `most` queries of `items` consecutive items each. After the last item comes the first again. Raises BadInput."""
    import numpy as np  # noqa: PLC0415

    arrays = dict(source) if isinstance(source, Mapping) else {"": source}
    lengths = {len(array) if array.ndim else 0 for array in arrays.values()}
    if len(lengths) != 1 or 0 in lengths:
        raise BadInput("all inputs need the same number of items, at least one; the first axis counts them")
    (length,) = lengths
    queries: list[Any] = []
    for start in range(0, min(most * items, max(length, items)), items):
        where = np.arange(start, start + items) % length
        part = {name: array[where] for name, array in arrays.items()}
        queries.append(part if isinstance(source, Mapping) else part[""])
    return queries


def random_items(specs: Sequence[TensorSpec], count: int, rng: "Generator") -> "dict[str, Array]":
    """`count` random items for a model with these inputs: numbers 0 to 1, small whole numbers, or texts."""
    arrays: dict[str, Array] = {}
    for spec in specs:
        shape = (count, *(VARYING if axis == -1 else axis for axis in spec.shape))
        row = DATATYPES[spec.datatype]
        if row.kind == "f":
            arrays[spec.name] = rng.random(shape).astype(row.array)
        else:
            most = 1000 if row.kind == "O" else 256 if spec.datatype == "UINT8" else 2
            whole = rng.integers(0, most, shape)
            arrays[spec.name] = whole.astype(str if row.kind == "O" else row.array)
    return arrays


def _chosen(loaded: "Array | dict[str, Array]", path: Path, key: str | None) -> "Array | dict[str, Array]":
    if not isinstance(loaded, dict):
        if key is not None:
            raise BadInput(f"{path} holds one array without a name: leave out the key")
        return loaded
    if key is not None and key not in loaded:
        raise BadInput(f"{path} has no array {key!r}, only {', '.join(loaded)}")
    if not loaded:
        raise BadInput(f"{path} holds no array")
    return next(iter(loaded.values())) if len(loaded) == 1 else loaded


def _why(path: Path, error: Exception) -> str:
    if "allow_pickle" in str(error) or "Object arrays" in str(error) or "pickled" in str(error):
        return (
            f"{path} is no plain numpy array (it holds Python objects, or is another kind of file): "
            "save numbers or strings, e.g. np.save(path, array.astype('float32'))"
        )
    return f"{path} is no .npy or .npz file: {error}"


def opened(x: Any) -> Any:
    """Paths as the bytes of their files, one or a list; anything else as it is. Raises BadInput."""
    paths = x if isinstance(x, (list, tuple)) else [x]
    if not paths or not all(isinstance(one, Path) for one in paths):
        return x
    try:
        return [one.read_bytes() for one in paths]
    except OSError as error:
        raise BadInput(f"cannot read {error.filename}: {error.strerror}") from error

"""Conversion between tensors on the wire and numpy arrays, with checks. Datatypes are those of the Open Inference Protocol.

The first conversion imports numpy, not this module, so that small processes can import this module at low cost.
"""

from functools import cache
from types import ModuleType
from typing import TYPE_CHECKING, Any

from bus.messages.catalog import TensorSpec
from bus.messages.public import Tensor, TensorView

if TYPE_CHECKING:
    from numpy import ndarray

    Array = ndarray[Any, Any]

# Open Inference Protocol datatype -> numpy's name for the same little-endian format. numpy has no names for BF16 and BYTES.
NUMPY_NAMES = {
    "BOOL": "|b1",
    "INT8": "|i1",
    "INT16": "<i2",
    "INT32": "<i4",
    "INT64": "<i8",
    "UINT8": "|u1",
    "UINT16": "<u2",
    "UINT32": "<u4",
    "UINT64": "<u8",
    "FP16": "<f2",
    "FP32": "<f4",
    "FP64": "<f8",
}
ITEM_BYTES = {name: int(numpy_name[2:]) for name, numpy_name in NUMPY_NAMES.items()} | {"BF16": 2}
DATATYPES = (*NUMPY_NAMES, "BF16", "BYTES")
LARGEST_DIMENSION = 2**31 - 1
LARGEST_RANK = 32


class BadTensor(ValueError):
    """A tensor is inconsistent, or does not fit its model. The text names the field and the correct value."""


def to_array(tensor: TensorView | Tensor | list[Any], where: str) -> "Array":
    """A read-only array on the tensor's own bytes (no copy), or a new array from a nested list of numbers.

    where: the name of the field for the error text ("inputs", "inputs.x"). BF16 is converted to float32. BYTES becomes an object array
    of str; on the wire, each string is UTF-8 with a four-byte length before it. Raises BadTensor.
    """
    if isinstance(tensor, list):
        return _from_list(tensor, where)
    code = NUMPY_NAMES.get(tensor.datatype)
    if code is None:
        return _special(tensor, where)
    size = len(tensor.data)
    if items(tensor.shape, where) * ITEM_BYTES[tensor.datatype] != size:
        raise BadTensor(_wrong_size(tensor, where, size))
    array: Array = _numpy().frombuffer(tensor.data, _dtype(code)).reshape(tensor.shape)
    return array


def from_array(array: Any) -> Tensor:
    """The tensor of a numpy array of any layout and byte order. Raises BadTensor for a dtype that has no datatype on the wire."""
    np = _numpy()
    array = np.asarray(array)
    if array.dtype.kind in "OUS":
        return Tensor(datatype="BYTES", shape=list(array.shape), data=_pack_strings(array))
    wire = array.dtype.newbyteorder("<")
    datatype = _names().get(wire.str)
    if datatype is None:
        raise BadTensor(f"a tensor cannot be made of {array.dtype}: use one of {', '.join(DATATYPES)}")
    return Tensor(datatype=datatype, shape=list(array.shape), data=array.astype(wire, copy=False).tobytes())


def items(shape: list[int], where: str) -> int:
    """The number of elements of a shape. Raises BadTensor unless the shape has 1 to 32 axes of 1 to 2**31 - 1 each."""
    if not 1 <= len(shape) <= LARGEST_RANK:
        raise BadTensor(
            f"field `{where}.shape` has {len(shape)} axes: give 1 to {LARGEST_RANK}, the first counts items"
        )
    count = 1
    for axis, length in enumerate(shape):
        if not 1 <= length <= LARGEST_DIMENSION:
            raise BadTensor(f"field `{where}.shape[{axis}]` is {length}: every axis must be 1 to {LARGEST_DIMENSION}")
        count *= length
    return count


def fit(array: "Array", spec: TensorSpec, where: str) -> "Array":
    """`array` with the shape [n, *spec.shape] (-1 fits any length) and the datatype that the model takes.

    Numbers are converted only if no more than floating-point precision is lost. Raises BadTensor.
    """
    wanted = spec.shape
    shape = array.shape[1:]
    if len(shape) != len(wanted) or any(w not in (-1, s) for s, w in zip(shape, wanted, strict=True)):
        axes = ", ".join("any" if length == -1 else str(length) for length in wanted)
        raise BadTensor(
            f"field `{where}` has shape {list(array.shape)}: the model takes [n{', ' if axes else ''}{axes}]"
            f"{shape_remedy(list(array.shape), wanted)}"
        )
    if spec.datatype == "BYTES" or array.dtype.kind == "O":
        if (spec.datatype == "BYTES") != (array.dtype.kind == "O"):
            what = "texts" if array.dtype.kind == "O" else f"{array.dtype} numbers"
            needs = "texts" if spec.datatype == "BYTES" else "numbers"
            raise BadTensor(f"field `{where}` has {what}: the model takes {spec.datatype}, so give {needs}")
        return array
    target = _dtype(NUMPY_NAMES.get(spec.datatype, "<f4"))
    return array if array.dtype == target else _convert(array, target, spec.datatype, where)


def shape_remedy(shape: list[int], wanted: list[int]) -> str:
    """What to do with a tensor of this shape where the model takes [n, *wanted], with a leading semicolon; "" if nothing is plain."""

    def fits(given: list[int]) -> bool:
        return len(given) == len(wanted) and all(w in (-1, s) for s, w in zip(given, wanted, strict=True))

    if fits(shape):
        return "; it lacks the axis of items: send x[None]"
    item = shape[1:]
    if len(item) == len(wanted) == 3:
        if fits([item[1], item[2], item[0]]):
            return "; its channels come first and the model's last: transpose it by (0, 2, 3, 1)"
        if fits([item[2], item[0], item[1]]):
            return "; its channels come last and the model's first: transpose it by (0, 3, 1, 2)"
    if not item and wanted == [1]:
        return "; send x.reshape(-1, 1)"
    return ""


def check_finite(array: "Array", where: str) -> None:
    """Check that floating-point numbers are finite. Raises BadTensor, which names the first that is not by its index."""
    np = _numpy()
    if (
        array.dtype.kind != "f" or np.count_nonzero(np.isfinite(array)) == array.size
    ):  # for small ones faster than all()
        return
    at = np.unravel_index(int(np.argmin(np.isfinite(array))), array.shape)
    what = "NaN" if np.isnan(array[at]) else "an infinite value"
    raise BadTensor(
        f"field `{where}` holds {what} at index {[int(one) for one in at]}: fill or drop it; models registered with "
        "--allow-nan take it"
    )


def datatype_of(array: "Array") -> str:
    """The Open Inference Protocol's name of the array's dtype. Raises BadTensor."""
    if array.dtype.kind in "OUS":
        return "BYTES"
    name = _names().get(array.dtype.newbyteorder("<").str)
    if name is None:
        raise BadTensor(f"a tensor cannot be made of {array.dtype}: use one of {', '.join(DATATYPES)}")
    return name


def _convert(array: "Array", target: Any, datatype: str, where: str) -> "Array":
    np = _numpy()
    have, want = array.dtype.kind, target.kind
    if want == "f" and have in "fiu":
        if have != "f" or array.dtype.itemsize <= target.itemsize:
            return array.astype(target)
        with np.errstate(over="ignore"):
            converted = array.astype(target)
        if not np.isfinite(converted).all() and (np.isinf(converted) & np.isfinite(array)).any():
            raise BadTensor(f"field `{where}` holds numbers that do not fit {datatype}: scale them down")
        return converted
    if want in "iu" and have in "iubf":
        if have == "b" or array.size == 0:
            return array.astype(target)
        limits = np.iinfo(target)
        low, high = array.min(), array.max()
        if have == "f" and not (np.isfinite(array).all() and (array == np.round(array)).all()):
            scaled = datatype == "UINT8" and 0 <= low <= high <= 1
            remedy = "multiply by 255 and convert to uint8" if scaled else "round them, if that is meant"
            raise BadTensor(
                f"field `{where}` holds {array.dtype} values from {low:.4g} to {high:.4g} that are not whole: the model takes "
                f"{datatype}; {remedy}"
            )
        if int(low) < limits.min or int(high) > limits.max:
            raise BadTensor(
                f"field `{where}` holds integers from {int(low)} to {int(high)}, which do not fit {datatype} "
                f"({limits.min} to {limits.max})"
            )
        return array.astype(target)
    if want == "b" and have in "iuf" and ((array == 0) | (array == 1)).all():
        return array.astype(target)
    raise BadTensor(f"field `{where}` has datatype {datatype_of(array)}: the model takes {datatype}")


def _from_list(numbers: list[Any], where: str) -> "Array":
    try:
        array: Array = _numpy().array(numbers)
    except (ValueError, OverflowError, RecursionError) as error:
        raise BadTensor(f"field `{where}` is not a regular nested list: every row must have the same length") from error
    if array.dtype.kind not in "biuf":
        raise BadTensor(f"field `{where}` must be a tensor, or a nested list of numbers that fit 64 bits")
    items(list(array.shape), where)
    return array


def _special(tensor: TensorView | Tensor, where: str) -> "Array":
    np = _numpy()
    count = items(tensor.shape, where)
    if tensor.datatype == "BF16":
        if count * 2 != len(tensor.data):
            raise BadTensor(_wrong_size(tensor, where, len(tensor.data)))
        halves: Array = np.frombuffer(tensor.data, "<u2").astype("<u4")
        return (halves << 16).view("<f4").reshape(tensor.shape)
    if tensor.datatype == "BYTES":
        strings: Array = np.array(_unpack_strings(tensor.data, count, where), dtype=object)
        return strings.reshape(tensor.shape)
    shown = tensor.datatype[:32]
    raise BadTensor(f"field `{where}.datatype` is {shown!r}: use one of {', '.join(DATATYPES)}")


def _unpack_strings(data: bytes | memoryview, count: int, where: str) -> list[str]:
    strings: list[str] = []
    at = 0
    # Each string takes at least four bytes. So the loop ends early, and allocates little, if the count is huge and the data is small.
    while at + 4 <= len(data) and len(strings) <= count:
        length = int.from_bytes(data[at : at + 4], "little")
        at += 4
        piece = bytes(data[at : at + length])
        if len(piece) != length:
            break
        try:
            strings.append(piece.decode())
        except UnicodeDecodeError as error:
            raise BadTensor(f"field `{where}.data`: string {len(strings)} is not UTF-8") from error
        at += length
    if at != len(data) or len(strings) != count:
        raise BadTensor(f"field `{where}.data` does not hold {count} strings, each after its four-byte length")
    return strings


def _pack_strings(array: "Array") -> bytes:
    pieces: list[bytes] = []
    for value in array.reshape(-1).tolist():
        if not isinstance(value, (str, bytes)):
            raise BadTensor(f"a tensor cannot be made of {type(value).__name__} objects: give numbers or strings")
        piece = value.encode() if isinstance(value, str) else value
        pieces += (len(piece).to_bytes(4, "little"), piece)
    return b"".join(pieces)


def _wrong_size(tensor: TensorView | Tensor, where: str, size: int) -> str:
    need = items(tensor.shape, where) * ITEM_BYTES[tensor.datatype]
    needs = f"needs {need}" if need < 2**63 else "needs more than any machine has"
    shape = str(tensor.shape) if len(tensor.shape) <= 8 else f"with {len(tensor.shape)} axes"
    return f"field `{where}.data` has {size} bytes: shape {shape} of {tensor.datatype} {needs}"


@cache
def _numpy() -> ModuleType:
    import numpy  # noqa: ICN001, PLC0415  # imported late on purpose: see the module's docstring

    return numpy


@cache
def _dtype(name: str) -> Any:
    return _numpy().dtype(name)


@cache
def _names() -> dict[str, str]:
    return {code: name for name, code in NUMPY_NAMES.items()}

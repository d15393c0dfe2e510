"""Tensors on the wire as numpy arrays and back, and arrays as a model takes them, with checks.

The first conversion imports numpy, not this module, so that small processes can import this module at low cost.
"""

from collections.abc import Iterable, Sequence
from functools import cache
from struct import Struct
from types import ModuleType
from typing import TYPE_CHECKING, Any

from bus.datatypes import ARRAYS, DATATYPES
from bus.fields import near
from bus.messages.catalog import TensorSpec
from bus.messages.public import Tensor, TensorView

if TYPE_CHECKING:
    from numpy import ndarray

    Array = ndarray[Any, Any]

LARGEST_DIMENSION = 2**31 - 1
LARGEST_RANK = 32
_LENGTH = Struct("<I")  # before each text


class BadTensor(ValueError):
    """A tensor is inconsistent, or does not fit its model. The text names the field and the correct value."""


# -- arrays from the wire, and back


def to_array(
    tensor: TensorView | Tensor | list[Any], where: str, *, binary: bool = False, empty: bool = False
) -> "Array":
    """A read-only array on the tensor's own bytes (no copy), or a new array from a nested list of numbers.

    where: the name of the field for the error text ("inputs", "inputs.x"). BF16 is converted to float32. BYTES becomes an object array
    of str, or of bytes if they are `binary`. empty: axes may have no length, as those of an answer without a box. Raises BadTensor.
    """
    if (
        empty
        and not isinstance(tensor, list)
        and tensor.datatype in DATATYPES
        and tensor.shape
        and min(tensor.shape) == len(tensor.data) == 0
    ):
        return _numpy().zeros(tensor.shape, dtype_of(tensor.datatype))  # type: ignore[no-any-return]
    if isinstance(tensor, list):
        return _from_list(tensor, where)
    row = DATATYPES.get(tensor.datatype)
    if row is None or not row.code:
        return _special(tensor, where, binary)
    size = len(tensor.data)
    if items(tensor.shape, where) * row.size != size:
        raise wrong_size(tensor.datatype, tensor.shape, size, where)
    array: Array = _numpy().frombuffer(tensor.data, dtype_of(tensor.datatype)).reshape(tensor.shape)
    return array


def from_array(array: Any) -> Tensor:
    """The tensor of a numpy array of any layout and byte order. Raises BadTensor for a dtype that has no datatype on the wire."""
    array = _numpy().asarray(array)
    datatype = datatype_of(array)
    if datatype == "BYTES":
        return Tensor(datatype=datatype, shape=list(array.shape), data=pack_texts(array.reshape(-1).tolist()))
    return Tensor(datatype, list(array.shape), array.astype(dtype_of(datatype), copy=False).tobytes())


def datatype_of(array: "Array") -> str:
    """The Open Inference Protocol's name of the array's dtype. Raises BadTensor."""
    found = _datatype_of(array.dtype)
    if found is None:
        raise BadTensor(f"a tensor cannot be made of {array.dtype}: use one of {', '.join(DATATYPES)}")
    return found


def zeros(spec: TensorSpec, length: int = 8) -> "Array":
    """One item of zeros, or of empty texts. length: of axes of any length."""
    shape = (1, *(length if axis < 0 else axis for axis in spec.shape))
    return _numpy().full(shape, "" if spec.datatype == "BYTES" else 0, dtype_of(spec.datatype))  # type: ignore[no-any-return]


@cache
def dtype_of(datatype: str) -> Any:
    """The numpy dtype of the arrays of a datatype."""
    return _numpy().dtype(DATATYPES[datatype].array)


def _special(tensor: TensorView | Tensor, where: str, binary: bool) -> "Array":
    np = _numpy()
    if tensor.datatype == "BF16":
        if items(tensor.shape, where) * 2 != len(tensor.data):
            raise wrong_size(tensor.datatype, tensor.shape, len(tensor.data), where)
        halves: Array = np.frombuffer(tensor.data, "<u2").astype("<u4")
        return (halves << 16).view("<f4").reshape(tensor.shape)
    if tensor.datatype != "BYTES":
        raise unknown_datatype(tensor.datatype, where)
    pieces = texts(tensor.data, items(tensor.shape, where), where)
    try:
        strings: Array = np.array(pieces if binary else [piece.decode() for piece in pieces], dtype=object)
    except UnicodeDecodeError as error:
        raise BadTensor(f"field `{where}.data` holds bytes that are not UTF-8") from error
    return strings.reshape(tensor.shape)


def _from_list(numbers: list[Any], where: str) -> "Array":
    try:
        array: Array = _numpy().array(numbers)
    except (ValueError, OverflowError, RecursionError) as error:
        raise BadTensor(f"field `{where}` is not a regular nested list: every row must have the same length") from error
    if array.dtype.kind not in "biuf":
        raise BadTensor(f"field `{where}` must be a tensor, or a nested list of numbers that fit 64 bits")
    items(array.shape, where)
    return array


# -- the bytes of BYTES


def pack_texts(elements: Iterable[Any]) -> bytes:
    """A BYTES tensor's data. elements: texts, or their UTF-8. Raises BadTensor for anything else."""
    parts: list[bytes] = []
    for element in elements:
        piece = element.encode() if isinstance(element, str) else element
        if not isinstance(piece, bytes):
            raise BadTensor("a tensor holds numbers only, or texts only: null and other objects are neither")
        parts += (_LENGTH.pack(len(piece)), piece)
    return b"".join(parts)


def texts(data: bytes | memoryview, count: int, where: str) -> list[bytes]:
    """The elements of a BYTES tensor, which has `count`. Raises BadTensor."""
    data = bytes(data)
    found: list[bytes] = []
    at, size = 0, len(data)
    # Each text takes at least four bytes. So the loop ends early, and allocates little, if the count is huge and the data is small.
    while at + 4 <= size and len(found) <= count:
        end = at + 4 + _LENGTH.unpack_from(data, at)[0]
        found.append(data[at + 4 : end])
        at = end
    if at != size or len(found) != count:
        raise BadTensor(f"field `{where}.data` does not hold {count} texts, each after its four-byte length")
    return found


# -- shapes and sizes


def items(shape: Sequence[int], where: str) -> int:
    """The number of elements of a shape. Raises BadTensor unless the shape has 1 to 32 axes of 1 to 2**31 - 1 each."""
    if not 1 <= len(shape) <= LARGEST_RANK:
        raise BadTensor(
            f"field `{where}.shape` has {len(shape)} axes: give 1 to {LARGEST_RANK}, the first counts items"
        )
    count = 1
    for length in shape:
        if length < 1 or length > LARGEST_DIMENSION:
            at = list(shape).index(length)
            remedy = ": give at least one item" if length == 0 else ""
            text = f"every axis must be 1 to {LARGEST_DIMENSION}{remedy}"
            raise BadTensor(f"field `{where}.shape[{at}]` is {length}: {text}")
        count *= length
    return count


def takes(wanted: Sequence[int], shape: Sequence[int]) -> bool:
    """Whether an item of this shape is what a model takes. wanted: -1 fits any length."""
    return len(shape) == len(wanted) and all(w in (-1, s) for s, w in zip(shape, wanted, strict=True))


def shown(shape: Sequence[int], *first: str) -> str:
    """A shape for people. first: axes before it."""
    return f"[{', '.join([*first, *('any' if length < 0 else str(length) for length in shape)])}]"


def unknown_datatype(datatype: str, where: str) -> BadTensor:
    """The error for a name that is not in the table."""
    called = {name: one for one, row in DATATYPES.items() for name in (row.onnx, row.torch) if name}
    found = near(called.get(datatype, datatype), DATATYPES)
    hint = f"; did you mean {found}?" if found else ""
    return BadTensor(f"field `{where}.datatype` is {datatype[:32]!r}: use one of {', '.join(DATATYPES)}{hint}")


def wrong_size(datatype: str, shape: Sequence[int], size: int, where: str) -> BadTensor:
    """The error for a tensor whose `size` bytes are not as many as its shape says."""
    need = items(shape, where) * DATATYPES[datatype].size
    needs = f"needs {need}" if need < 2**63 else "needs more than any machine has"
    axes = str(list(shape)) if len(shape) <= 8 else f"with {len(shape)} axes"
    return BadTensor(f"field `{where}.data` has {size} bytes of data: shape {axes} of {datatype} {needs}")


def wrong_shape(shape: Sequence[int], spec: TensorSpec, where: str) -> BadTensor:
    """The error for a tensor of this shape where the model takes [n, *spec.shape], with what to do if that is plain."""
    name = "" if where.rpartition(".")[2] == spec.name else f" for {spec.name}"
    remedy = _remedy(list(shape), spec.shape)
    return BadTensor(f"field `{where}` has shape {list(shape)}: the model takes {shown(spec.shape, 'n')}{name}{remedy}")


def _remedy(shape: list[int], wanted: list[int]) -> str:
    if takes(wanted, shape):
        return f"; it lacks the axis of items: one item has shape {[1, *shape]}"
    item = shape[1:]
    if len(item) == len(wanted) == 3:
        if takes(wanted, [item[1], item[2], item[0]]):
            return "; its channels come first and the model's last: transpose it by (0, 2, 3, 1)"
        if takes(wanted, [item[2], item[0], item[1]]):
            return "; its channels come last and the model's first: transpose it by (0, 3, 1, 2)"
    if not item and wanted == [1]:
        return "; send x.reshape(-1, 1)"
    return ""


# -- arrays as a model takes them


def fit(array: "Array", spec: TensorSpec, where: str) -> "Array":
    """`array` with the shape [n, *spec.shape] (-1 fits any length) and the datatype that the model takes.

    Numbers are converted only if no more than floating-point precision is lost. Raises BadTensor.
    """
    wanted, item = spec.shape, array.shape[1:]
    if list(item) != wanted and not takes(wanted, item):
        raise wrong_shape(array.shape, spec, where)
    target = dtype_of(spec.datatype)
    if array.dtype == target:
        return array
    if target.kind != "O" and array.dtype.kind not in "OUS":
        return _converted(array, target, spec.datatype, where)
    if array.dtype.kind in "US" and target.kind == "O":
        return array.astype(target)
    what, needs = (f"{array.dtype} numbers", "texts") if target.kind == "O" else ("texts", "numbers")
    raise BadTensor(f"field `{where}` has {what}: the model takes {spec.datatype}, so give {needs}")


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
        "allow_nan=True (--allow-nan) take it"
    )


def _converted(array: "Array", target: Any, datatype: str, where: str) -> "Array":
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


@cache
def _datatype_of(dtype: Any) -> str | None:
    return "BYTES" if dtype.kind in "OUS" else ARRAYS.get(dtype.newbyteorder("<").str)


@cache
def _numpy() -> ModuleType:
    import numpy  # noqa: ICN001, PLC0415  # imported late on purpose: see the module's docstring

    return numpy


def scored_shape(shape: list[int]) -> list[int]:
    """The shape of an item's scores without the trailing axes of length 1 that older networks add: [1000, 1, 1] is [1000]."""
    while len(shape) > 1 and shape[-1] == 1:
        shape = shape[:-1]
    return shape

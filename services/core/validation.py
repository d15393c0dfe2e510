"""Checks of a query's head against the contract and the app's signature. A query that does not fit is refused; the refusal names the field.

The bytes of the tensors stay undecoded. Their length is read from the MessagePack frame.
"""

import re
from typing import Any

import msgspec

from bus.codec import explain
from bus.datatypes import SIZES, converts, same_kind
from bus.fields import check_of
from bus.messages.catalog import ACCURACIES, AppRecord, Signature, TensorSpec
from bus.messages.public import ObjectRef, QueryHead, Requirements, TensorHead
from bus.subjects import valid_name
from bus.tensors import BadTensor, items, takes, unknown_datatype, wrong_shape, wrong_size
from bus.values import Ragged, flatten

MOST_ITEMS = 65_536
MOST_KEY = 1000  # characters of an object's name
_BUCKET = re.compile(r"[A-Za-z0-9_-]{1,128}\Z")  # a bucket's name becomes part of subjects
_NUMBERS = {int, float, bool}
# Bytes before the content, by a MessagePack object's first byte: of bin 8, 16 and 32. 0: it is no bin.
_BIN_HEADERS = [{0xC4: 2, 0xC5: 3, 0xC6: 5}.get(first, 0) for first in range(256)]

_tensor = msgspec.msgpack.Decoder(TensorHead).decode
_named = msgspec.msgpack.Decoder(dict[str, msgspec.Raw]).decode
_list = msgspec.msgpack.Decoder(list[Any]).decode
_any = msgspec.msgpack.Decoder().decode


class WrongField(ValueError):
    """A field of the query is wrong. The text names the field and the remedy."""


wrong_requirement = check_of(Requirements)  # the first one of a query that is out of its bounds


def check_name(name: str | None, field: str) -> None:
    """Check that a name can be a token of a subject. Raises WrongField."""
    if name is not None and not valid_name(name):
        raise WrongField(
            f"{field} {name[:80]!r} is no name: 1 to 64 letters, digits, - or _, beginning with a letter or digit"
        )


def count_items(head: QueryHead, app: AppRecord) -> int:
    """Check the query's inputs against the app's signature. Returns how many items they hold. Raises WrongField."""
    if head.inputs_ref is not None:
        check_ref(head.inputs_ref)
        # as told; the executor counts the items once it has fetched them
        return min(head.inputs_ref.items, MOST_ITEMS) or 1
    raw = head.inputs
    if not len(raw):
        raise WrongField("field `inputs` is missing: give a tensor, a map of input name to tensor, or a nested list")
    signature = app.signature
    try:
        tensor = _tensor(raw)
    except msgspec.ValidationError:
        return _count_other(raw, signature)
    return check_tensor(tensor, _only_input(signature), "inputs")


def _only_input(signature: Signature | None) -> TensorSpec | None:
    """What one tensor is compared with; None: it is not known. Raises WrongField where the model takes several."""
    if signature is None:
        return None
    if len(signature.inputs) != 1:
        names = ", ".join(spec.name for spec in signature.inputs)
        raise WrongField(
            f"inputs must be a map with the tensors {names}: give each by its name, or rows that name them"
        )
    return signature.inputs[0]


def check_ref(ref: ObjectRef) -> None:
    """Check that a reference has a valid bucket name and a valid key. Raises WrongField."""
    if not _BUCKET.match(ref.bucket):
        raise WrongField(f"inputs_ref.bucket {ref.bucket[:80]!r} is no name of a bucket: letters, digits, - and _")
    if ref.items < 0:
        raise WrongField(f"inputs_ref.items must be at least 0, not {ref.items}")
    if not 0 < len(ref.key) <= MOST_KEY:
        raise WrongField(f"inputs_ref.key must have 1 to {MOST_KEY} characters, not {len(ref.key)}")


def length_of(head: QueryHead, axis: tuple[str, int]) -> int | None:
    """The length of a checked query's inputs along one axis. axis: (name of the input, index of the axis). None if the length is unknown."""
    if head.inputs_ref is not None:
        return None
    name, place = axis
    try:
        return _tensor(head.inputs).shape[place]
    except msgspec.ValidationError:
        value = _any(head.inputs)
    if isinstance(value, dict):
        value = value[name]
        if isinstance(value, dict):
            return int(value["shape"][place])
    for _ in range(place):
        value = value[0]
    return len(value)


def check_tensor(tensor: TensorHead, spec: TensorSpec | None, where: str) -> int:
    """Check one tensor's datatype, shape and byte count. Returns its number of items. Raises WrongField."""
    datatype, shape = tensor.datatype, tensor.shape
    try:
        size = SIZES[datatype]
    except KeyError:
        raise WrongField(str(unknown_datatype(datatype, where))) from None
    try:
        elements = items(shape, where)
        if shape[0] > MOST_ITEMS:
            raise WrongField(f"{where}.shape: at most {MOST_ITEMS} items a query, not {shape[0]}")
        if size:
            view = memoryview(tensor.data)  # a MessagePack object: the header of its frame, then the content
            header = _BIN_HEADERS[view[0]]
            if not header:
                raise WrongField(f"{where}.data must be bytes (MessagePack bin)")
            if len(view) - header != elements * size:
                raise wrong_size(datatype, shape, len(view) - header, where)
        if spec is not None and shape[1:] != spec.shape and not takes(spec.shape, shape[1:]):
            raise wrong_shape(shape, spec, where)
    except BadTensor as error:
        raise WrongField(str(error)) from error
    if spec is not None and datatype != spec.datatype and not converts(datatype, spec.datatype):
        needs = "texts" if spec.datatype == "BYTES" else "numbers"
        raise WrongField(f"{where}.datatype is {datatype}: the model takes {spec.datatype}, so give {needs}")
    return shape[0]


def fits(given: TensorSpec, wanted: TensorSpec) -> bool:
    """Whether tensors of one specification can be given where the other is wanted. An axis of variable length may fit any."""
    return (
        same_kind(given.datatype, wanted.datatype)
        and len(given.shape) == len(wanted.shape)
        and all(-1 in (n, w) or n == w for n, w in zip(given.shape, wanted.shape, strict=True))
    )


def _count_other(raw: msgspec.Raw, signature: Signature | None) -> int:
    """Check inputs that are not a single tensor: a map of tensors, or a nested list of numbers. Returns the number of items."""
    first = memoryview(raw)[0]
    if first & 0xF0 == 0x80 or first in (0xDE, 0xDF):
        return _count_map(raw, signature)
    try:
        value = _any(raw)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise WrongField(f"inputs cannot be decoded: {error}") from error
    if not isinstance(value, list):
        raise WrongField("inputs must be a tensor, a map of input name to tensor, or a nested list of numbers")
    return _check_list(value, _only_input(signature), "inputs")


def _check_list(value: list[object], spec: TensorSpec | None, where: str) -> int:
    """Check a tensor given as a nested list of numbers. Returns its number of items. Raises WrongField."""
    if not value:
        raise WrongField(f"{where} holds no items")
    if len(value) > MOST_ITEMS:
        raise WrongField(f"{where}: at most {MOST_ITEMS} items a query, not {len(value)}")
    try:
        shape, numbers = flatten(value)
    except Ragged as error:
        raise WrongField(f"{where} {error}") from error
    if not set(map(type, numbers)) <= _NUMBERS:
        kinds = {str: "texts, which come as BYTES tensors", dict: "maps", type(None): "null", bytes: "bytes"}
        wrong = next(kinds.get(type(number), "other things") for number in numbers if type(number) not in _NUMBERS)
        raise WrongField(f"{where} must hold numbers only, not {wrong}")
    if not all(shape):
        raise WrongField(f"{where} holds an empty list")
    if spec is not None and spec.datatype == "BYTES":
        raise WrongField(f"{where} holds numbers: the model takes BYTES, so give texts")
    if spec is not None and not takes(spec.shape, shape[1:]):
        raise WrongField(str(wrong_shape(shape, spec, where)))
    return len(value)


def _is_list(raw: msgspec.Raw) -> bool:
    first = memoryview(raw)[0]
    return first & 0xF0 == 0x90 or first in (0xDC, 0xDD)


def _count_map(raw: msgspec.Raw, signature: Signature | None) -> int:
    try:
        parts = _named(raw)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise WrongField(explain(error, "inputs")) from error
    if {"datatype", "shape", "data"} & parts.keys() and (
        signature is None or "data" not in {s.name for s in signature.inputs}
    ):
        try:
            _tensor(raw)
        except msgspec.ValidationError as error:
            raise WrongField(explain(error, "inputs")) from error
    specs = {s.name: s for s in signature.inputs} if signature is not None else {}
    if specs:
        for name in specs:
            if name not in parts:
                raise WrongField(f"inputs lacks {name!r}: the app takes {', '.join(specs)}")
        for name in parts:
            if name not in specs:
                raise WrongField(f"inputs has an unknown tensor {name!r}: the app takes {', '.join(specs)}")
    found = 0
    for name, part in parts.items():
        where = f"inputs.{name}"
        try:
            if _is_list(part):
                count = _check_list(_list(part), specs.get(name), where)
            else:
                count = check_tensor(_tensor(part), specs.get(name), where)
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
            raise WrongField(explain(error, where)) from error
        if found and count != found:
            raise WrongField(f"{where} holds {count} items, another input {found}")
        found = count
    if not found:
        raise WrongField("inputs holds no tensors")
    return found


def stated_in(metric: str | None, metrics: frozenset[str]) -> bool:
    """Whether an accuracy that is stated in this metric (None: as an accuracy) is one for models that are measured by these."""
    return not metrics or (metric in metrics if metric else not metrics.isdisjoint(ACCURACIES))

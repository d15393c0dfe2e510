"""The table of datatypes. Names are those of the Open Inference Protocol. Whatever else has names for datatypes takes them from here.

A new datatype is a new row. tests/unit/test_datatypes.py walks the table: at each door a datatype works, or is refused by name.
"""

from typing import NamedTuple


class Datatype(NamedTuple):
    """How one datatype travels, and what others call it.

    array: numpy's name of the arrays that its tensors become. size: bytes of an element on the wire; 0: they differ. code: of an element for
    the modules struct and array; empty where it is no number that they know. onnx: ONNX's name; onnxruntime's is `tensor(<name>)`. torch:
    torch's name. contents: its field of gRPC's InferTensorContents. Empty: there is none.
    """

    array: str
    size: int
    code: str
    onnx: str
    torch: str
    contents: str

    @property
    def kind(self) -> str:
        """The kind of its arrays, as numpy names it: b, i, u, f; O: texts."""
        return self.array[1]

    @property
    def native(self) -> bool:
        """Whether arrays hold its elements as they are, not widened."""
        return bool(self.code) or self.kind == "O"


DATATYPES = {
    "BOOL": Datatype("|b1", 1, "?", "bool", "bool", "bool_contents"),
    "INT8": Datatype("|i1", 1, "b", "int8", "int8", "int_contents"),
    "INT16": Datatype("<i2", 2, "h", "int16", "int16", "int_contents"),
    "INT32": Datatype("<i4", 4, "i", "int32", "int32", "int_contents"),
    "INT64": Datatype("<i8", 8, "q", "int64", "int64", "int64_contents"),
    "UINT8": Datatype("|u1", 1, "B", "uint8", "uint8", "uint_contents"),
    "UINT16": Datatype("<u2", 2, "H", "uint16", "uint16", "uint_contents"),
    "UINT32": Datatype("<u4", 4, "I", "uint32", "uint32", "uint_contents"),
    "UINT64": Datatype("<u8", 8, "Q", "uint64", "uint64", "uint64_contents"),
    "FP16": Datatype("<f2", 2, "e", "float16", "float16", ""),
    "FP32": Datatype("<f4", 4, "f", "float", "float32", "fp32_contents"),
    "FP64": Datatype("<f8", 8, "d", "double", "float64", "fp64_contents"),
    # numpy has no such numbers: arrays hold them widened, and nothing is encoded as BF16 from an array.
    "BF16": Datatype("<f4", 2, "", "bfloat16", "bfloat16", ""),
    # On the wire, each text is UTF-8 with a four-byte length before it.
    "BYTES": Datatype("|O", 0, "", "string", "", "bytes_contents"),
}
SIZES = {name: row.size for name, row in DATATYPES.items()}
# Datatypes whose bytes numpy reads as they are, by numpy's name.
ARRAYS = {row.array: name for name, row in DATATYPES.items() if row.code}

# By the kind that is wanted, the kinds that go into it: all but single values, and those of which some values do.
_SAME_KIND = {"b": "b", "i": "iub", "u": "iub", "f": "iuf", "O": "O"}
_CONVERTED = {"b": "biuf", "i": "iubf", "u": "iubf", "f": "iuf", "O": "O"}


def same_kind(given: str, wanted: str) -> bool:
    """Whether a tensor of one datatype may be given for another by its kind. Only precision is lost, and values out of range do not fit."""
    return DATATYPES[given].kind in _SAME_KIND[DATATYPES[wanted].kind]


def converts(given: str, wanted: str) -> bool:
    """Whether a tensor of one datatype may be given for another, if its values fit: `bus.tensors.fit` finds those that do not."""
    return DATATYPES[given].kind in _CONVERTED[DATATYPES[wanted].kind]

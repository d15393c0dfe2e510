"""Arrays of every datatype, with its extremes, as stock clients have them."""

import numpy as np

NUMPY = {
    "BOOL": np.bool_, "INT8": np.int8, "INT16": np.int16, "INT32": np.int32, "INT64": np.int64, "UINT8": np.uint8,
    "UINT16": np.uint16, "UINT32": np.uint32, "UINT64": np.uint64, "FP16": np.float16, "FP32": np.float32,
    "FP64": np.float64, "BF16": np.float32, "BYTES": np.object_,
}  # fmt: skip


def sample(datatype: str) -> np.ndarray:
    dtype = NUMPY[datatype]
    if datatype == "BYTES":
        return np.array([["", "é"], ["longer than before", "\0"]], dtype)
    if datatype == "BOOL":
        return np.array([[True, False], [False, False]])
    if datatype.startswith(("INT", "UINT")):
        limits = np.iinfo(dtype)
        return np.array([[limits.min, limits.max], [0, 1]], dtype)
    if datatype == "BF16":
        return np.array([[1.0, -2.5], [0.0, 2.0**100]], dtype)
    return np.array([[1.5, np.finfo(dtype).max], [0.1, -0.0]], dtype)

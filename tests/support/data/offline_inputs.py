"""What tests of offline jobs need: input files in every format, and what comes out of an honest model for them."""

import json
from pathlib import Path
from typing import Any

import msgpack
import numpy as np


def write(path: Path, x: np.ndarray, *, object_items: int = 7) -> Path:
    """Inputs x [n, ...] as the file's ending says; object_items: of each object in a MessagePack stream."""
    if path.suffix == ".npy":
        np.save(path, x)
    elif path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row.tolist()) + "\n" for row in x))
    else:
        with path.open("wb") as file:
            for at in range(0, len(x), object_items):
                file.write(msgpack.packb(tensor(x[at : at + object_items])))
    return path


def read(path: Path, output: str = "scores") -> np.ndarray:
    """Outputs of a job, as one array."""
    if path.suffix == ".npy":
        return np.load(path)
    if path.suffix == ".jsonl":
        return np.array([json.loads(line)[output] for line in path.read_text().splitlines()])
    with path.open("rb") as file:
        items = [item[output] for item in msgpack.Unpacker(file)]
    assert all(item["shape"][0] == 1 for item in items)
    return np.concatenate([np.frombuffer(item["data"], "<f4").reshape(item["shape"]) for item in items])


def tensor(x: np.ndarray) -> dict[str, Any]:
    names = {"f4": "FP32", "f8": "FP64", "i8": "INT64", "i4": "INT32", "u1": "UINT8", "f2": "FP16", "b1": "BOOL"}
    return {"datatype": names[x.dtype.str[1:]], "shape": list(x.shape), "data": x.tobytes()}

"""Bodies of classifications: images, .npy files, arrays' bytes, lists."""

import io
import json
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bus.messages.catalog import TensorSpec
from infaas.errors import BadInput
from infaas.tables import layout
from services.gateway.errors import BadRequest
from services.gateway.rafiqi import label_of, tensor_of, top

GRAY = TensorSpec(name="x", datatype="FP32", shape=[16])
COLOURS = TensorSpec(name="x", datatype="FP32", shape=[3, 4, 6])
LAST = TensorSpec(name="x", datatype="UINT8", shape=[4, 6, 3])
ANY = TensorSpec(name="x", datatype="FP32", shape=[1, -1, -1])


def array(tensor: dict[str, Any]) -> np.ndarray:
    names = {"FP32": "<f4", "UINT8": "u1", "INT64": "<i8", "FP64": "<f8"}
    return np.frombuffer(tensor["data"], names[tensor["datatype"]]).reshape(tensor["shape"])


def npy(values: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, values, allow_pickle=values.dtype.hasobject)
    return file.getvalue()


def picture(pixels: np.ndarray, kind: str = "PNG") -> bytes:
    image = pytest.importorskip("PIL.Image", reason="images need pillow")
    file = io.BytesIO()
    image.fromarray(pixels).save(file, kind)
    return file.getvalue()


def test_bodies_are_arrays_bytes_or_lists_else_they_say_so() -> None:
    values = np.arange(16, dtype="f4")
    tensor = tensor_of(values.tobytes(), GRAY)
    assert tensor["shape"] == [1, 16]
    assert np.array_equal(array(tensor)[0], values)
    assert array(tensor_of(json.dumps(list(range(16))).encode(), GRAY)).tolist() == [list(map(float, range(16)))]
    assert tensor_of(json.dumps([[0] * 16] * 2).encode(), GRAY)["shape"] == [2, 16]
    for shape in ([17], [2, 3, 4, 5], [5, 4, 4], []):
        with pytest.raises(BadInput, match="no image"):
            layout(TensorSpec(name="x", datatype="FP32", shape=shape))


@pytest.mark.parametrize(
    ("values", "shape"),
    [
        (np.zeros(16, "f4"), [1, 16]),
        (np.zeros((3, 16), "f8"), [3, 16]),
        (np.zeros((1, 16), ">f4"), [1, 16]),
        (np.zeros((2, 16), "i4"), [2, 16]),
        (np.asfortranarray(np.ones((2, 16), "f4")), [2, 16]),
    ],
)
def test_npy_files_of_one_item_or_several(values: np.ndarray, shape: list[int]) -> None:
    assert tensor_of(npy(values), GRAY)["shape"] == shape


def test_pictures_have_the_models_size_and_no_larger_ones_are_decoded() -> None:
    gray = np.arange(16, dtype=np.uint8).reshape(4, 4) * 16
    assert np.allclose(array(tensor_of(picture(gray), GRAY)), gray.reshape(1, -1) / 255)
    rgb = np.random.default_rng(0).integers(0, 256, (4, 6, 3), dtype=np.uint8)
    assert np.array_equal(array(tensor_of(picture(rgb), LAST))[0], rgb)
    assert np.allclose(array(tensor_of(picture(rgb), COLOURS))[0], rgb.transpose(2, 0, 1) / 255)
    assert tensor_of(picture(rgb), ANY)["shape"] == [1, 1, 4, 6]
    larger = np.zeros((40, 60, 3), np.uint8)
    assert tensor_of(picture(larger, "JPEG"), COLOURS)["shape"] == [1, 3, 4, 6]
    whole = bytearray(picture(np.zeros((4, 4), np.uint8)))
    import zlib

    whole[16:24] = (60000).to_bytes(4, "big") * 2
    whole[29:33] = zlib.crc32(bytes(whole[12:29])).to_bytes(4, "big")
    with pytest.raises(BadRequest):
        tensor_of(bytes(whole), GRAY)


@pytest.mark.parametrize(
    ("body", "word"),
    [
        (b"", "empty"),
        (b"hello", "no image"),
        (b"[1, 2", "ends too early"),
        (b"[" * 10000, "nested too deeply"),
        (b'["a"]', "no list"),
        (b"[1, 2]", "shape"),
        (b"\x93NUMPY", "npy"),
        (
            b"\x93NUMPY\x01\x00v\x00{'descr': '<f4', 'fortran_order': False, 'shape': (4000000000, 4000000000), }\n",
            "npy",
        ),
        (npy(np.array([{"a": 1}], object)), "npy"),
        (npy(np.zeros(3, "f4")), "shape"),
        (npy(np.zeros(16, "c8")), "complex64"),
        (npy(np.zeros(0, "f4")), "no numbers"),
        (npy(np.zeros(16, "f4"))[:-1], "npy"),
        (b"\x89PNG\r\n\x1a\n", "image"),
    ],
)
def test_what_is_nothing_of_these(body: bytes, word: str) -> None:
    with pytest.raises(BadRequest, match=word):
        tensor_of(body, GRAY)


@given(st.binary(max_size=200), st.sampled_from([GRAY, COLOURS, LAST, ANY]))
def test_no_bytes_do_anything_else(body: bytes, spec: TensorSpec) -> None:
    for data in (body, b"\x93NUMPY" + body, b"[" + body):
        try:
            tensor = tensor_of(data, spec)
        except BadRequest as error:
            assert str(error)
        else:
            assert tensor["shape"][1:]


# -- The most likely classes.


def test_scores_become_probabilities_with_labels_or_numbers() -> None:
    found = top([0.1, 0.7, 0.2], ["a", "b", "c"], 2)
    assert found == [{"confidence": 0.7, "label": "b"}, {"confidence": 0.2, "label": "c"}]
    found = top([0.0, 2.0], ["a"])
    assert [one["label"] for one in found] == ["1", "a"]
    assert found[0]["confidence"] == pytest.approx(math.exp(2) / (1 + math.exp(2)))
    assert [label_of(number, ["a"]) for number in (0, 1, -1)] == ["a", "1", "-1"]


@given(st.lists(st.floats(width=32), min_size=2, max_size=20))
def test_any_scores_become_shares_in_order(scores: list[float]) -> None:
    found = top(scores, [])
    shares = [one["confidence"] for one in found]
    assert len(found) == min(5, len(scores))
    assert shares == sorted(shares, reverse=True)
    assert all(0.0 <= share <= 1.0 for share in shares)

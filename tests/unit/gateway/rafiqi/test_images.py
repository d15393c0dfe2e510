"""Bodies of classifications: images, .npy files, arrays' bytes, lists."""

import io
import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bus.messages.catalog import TensorSpec
from services.gateway.errors import BadRequest
from services.gateway.rafiqi.images import layout, tensor_of

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


def test_bytes_of_the_models_own_array() -> None:
    values = np.arange(16, dtype="f4")
    tensor = tensor_of(values.tobytes(), GRAY)
    assert tensor["shape"] == [1, 16]
    assert np.array_equal(array(tensor)[0], values)


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


def test_lists_as_json() -> None:
    assert array(tensor_of(json.dumps(list(range(16))).encode(), GRAY)).tolist() == [list(map(float, range(16)))]
    assert tensor_of(json.dumps([[0] * 16] * 2).encode(), GRAY)["shape"] == [2, 16]


def test_pictures_have_the_models_size_colours_and_range() -> None:
    gray = np.arange(16, dtype=np.uint8).reshape(4, 4) * 16
    assert np.allclose(array(tensor_of(picture(gray), GRAY)), gray.reshape(1, -1) / 255)
    rgb = np.random.default_rng(0).integers(0, 256, (4, 6, 3), dtype=np.uint8)
    assert np.array_equal(array(tensor_of(picture(rgb), LAST))[0], rgb)
    assert np.allclose(array(tensor_of(picture(rgb), COLOURS))[0], rgb.transpose(2, 0, 1) / 255)
    assert tensor_of(picture(rgb), ANY)["shape"] == [1, 1, 4, 6]
    larger = np.zeros((40, 60, 3), np.uint8)
    assert tensor_of(picture(larger, "JPEG"), COLOURS)["shape"] == [1, 3, 4, 6]


@pytest.mark.parametrize(
    ("body", "word"),
    [
        (b"", "empty"),
        (b"hello", "no image"),
        (b"[1, 2", "no list"),
        (b"[" * 10000, "no list"),
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


def test_a_picture_larger_than_the_memory_is_not_decoded() -> None:
    whole = bytearray(picture(np.zeros((4, 4), np.uint8)))
    import zlib

    whole[16:24] = (60000).to_bytes(4, "big") * 2
    whole[29:33] = zlib.crc32(bytes(whole[12:29])).to_bytes(4, "big")
    with pytest.raises(BadRequest):
        tensor_of(bytes(whole), GRAY)


def test_inputs_that_are_no_pictures_say_so() -> None:
    for shape in ([17], [2, 3, 4, 5], [5, 4, 4], []):
        with pytest.raises(BadRequest, match="no image"):
            layout(TensorSpec(name="x", datatype="FP32", shape=shape))


@given(st.binary(max_size=200), st.sampled_from([GRAY, COLOURS, LAST, ANY]))
def test_no_bytes_do_anything_else(body: bytes, spec: TensorSpec) -> None:
    for data in (body, b"\x93NUMPY" + body, b"[" + body):
        try:
            tensor = tensor_of(data, spec)
        except BadRequest as error:
            assert str(error)
        else:
            assert tensor["shape"][1:]

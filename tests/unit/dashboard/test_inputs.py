"""What a visitor types or uploads becomes the arrays that an app takes, or is refused with the remedy."""

import io
import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from bus.messages.catalog import TensorSpec
from dashboard import inputs
from infaas.errors import BadInput

FLAT = [TensorSpec(name="x", datatype="FP32", shape=[784])]
TWO = [TensorSpec(name="a", datatype="FP32", shape=[2]), TensorSpec(name="b", datatype="INT64", shape=[1])]


def saved(write: Any, *args: Any, **arrays: Any) -> bytes:
    file = io.BytesIO()
    write(file, *args, **arrays)
    return file.getvalue()


def picture(width: int, height: int, colour: tuple[int, int, int]) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (width, height), colour).save(file, "PNG")
    return file.getvalue()


def test_json_is_a_list_or_a_map_and_one_item_may_come_alone() -> None:
    assert inputs.from_json("[[1, 2]]", TWO[:1])["a"].tolist() == [[1.0, 2.0]]
    assert inputs.from_json("[1, 2]", TWO[:1])["a"].shape == (1, 2)
    found = inputs.from_json('{"inputs": {"a": [[1, 2], [3, 4]], "b": [[5], [6]]}}', TWO)
    assert (found["a"].dtype, found["b"].dtype) == (np.float32, np.int64)
    assert inputs.from_json("[[1, 2]]", [])["x"].shape == (1, 2)  # of an app whose inputs are not known
    words = [TensorSpec(name="text", datatype="BYTES", shape=[1])]
    assert inputs.from_json('[["yes"]]', words)["text"].tolist() == [["yes"]]


@given(st.sampled_from([FLAT, TWO, [TensorSpec(name="t", datatype="BYTES", shape=[-1])]]), st.integers(0, 99))
def test_made_up_inputs_and_examples_fit_what_the_app_takes(specs: list[TensorSpec], seed: int) -> None:
    assert set(inputs.named(inputs.made_up(specs, seed), specs)) == {spec.name for spec in specs}
    if text := inputs.example(specs):
        inputs.from_json(text, specs)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[1,", "not valid JSON"),
        ("7", "must be a nested list"),
        ("[[1], [1, 2]]", "rows that name them"),
        ("[[1, 2, 3]]", "rows that name them"),
        ('{"a": [[1, 2]]}', "column 'b' is missing"),
        ('{"a": [[1, 2, 3]], "b": [[1]]}', "the model takes [n, 2]"),
        ('{"a": [], "b": [[1]]}', "has shape [0]"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_remedy(text: str, told: str) -> None:
    with pytest.raises(BadInput) as refused:
        inputs.from_json(text, TWO)
    assert told in str(refused.value)


def test_files_hold_arrays_by_name_or_one_that_fits() -> None:
    x = np.arange(2 * 784, dtype=np.float32).reshape(2, 784)
    assert inputs.from_file("x.npy", saved(np.save, x), FLAT)["x"].shape == (2, 784)
    assert inputs.from_file("v.NPZ", saved(np.savez, x=x, y=np.arange(2)), FLAT)["x"].shape == (2, 784)
    assert inputs.from_file("v.npz", saved(np.savez, y=np.arange(2), pixels=x), FLAT)["x"].shape == (2, 784)
    assert inputs.from_file("x.json", json.dumps(x.tolist()).encode(), FLAT)["x"].shape == (2, 784)
    assert len(inputs.from_file("x.npy", saved(np.save, np.zeros((999, 784), np.float32)), FLAT)["x"]) == 64
    for data in (b"no array", b"", saved(np.save, np.array([{}], object), allow_pickle=True)):
        with pytest.raises(BadInput, match=r"is no (plain numpy array|\.npy or \.npz file)"):
            inputs.from_file("x.npy", data, FLAT)


@pytest.mark.parametrize(
    ("shape", "datatype", "wanted", "seen"),
    [
        ([784], "FP32", (1, 784), (28, 28)),
        ([3072], "FP32", (1, 3072), (32, 32, 3)),
        ([28, 28], "FP32", (1, 28, 28), (28, 28)),
        ([1, 28, 28], "FP32", (1, 1, 28, 28), (28, 28)),
        ([28, 28, 1], "FP64", (1, 28, 28, 1), (28, 28)),
        ([3, 8, 9], "FP16", (1, 3, 8, 9), (8, 9, 3)),
        ([8, 9, 3], "UINT8", (1, 8, 9, 3), (8, 9, 3)),
        ([-1, -1, 3], "UINT8", (1, 30, 40, 3), (30, 40, 3)),
    ],
)
def test_a_picture_gets_the_models_size_colours_and_order(
    shape: list[int], datatype: str, wanted: tuple[int, ...], seen: tuple[int, ...]
) -> None:
    specs = [TensorSpec(name="x", datatype=datatype, shape=shape)]
    arrays, shown = inputs.from_picture(picture(40, 30, (255, 0, 0)), specs, "0 to 1", invert=False)
    assert (arrays["x"].shape, shown.shape) == (wanted, seen)
    inputs.named(arrays, specs)
    assert arrays["x"].max() == (255 if datatype == "UINT8" else 1.0 if shown.ndim == 3 else pytest.approx(76 / 255))


def test_pictures_become_the_models_numbers_or_are_refused() -> None:
    specs = [TensorSpec(name="x", datatype="FP32", shape=[3, 4, 4])]
    for values, low in (("0 to 1", 0.0), ("-1 to 1", -1.0), ("0 to 255", 0.0), ("ImageNet", -0.485 / 0.229)):
        arrays, _ = inputs.from_picture(picture(4, 4, (0, 0, 0)), specs, values, invert=False)
        assert arrays["x"][0, 0, 0, 0] == pytest.approx(low)
    inverted, _ = inputs.from_picture(picture(4, 4, (0, 0, 0)), specs, "0 to 255", invert=True)
    assert inverted["x"].min() == 255
    with pytest.raises(BadInput, match="no image"):
        inputs.from_picture(b"no picture", FLAT, "0 to 1", invert=False)
    assert not inputs.takes_picture(TWO)
    with pytest.raises(BadInput, match="takes no picture"):
        inputs.from_picture(picture(4, 4, (0, 0, 0)), TWO, "0 to 1", invert=False)

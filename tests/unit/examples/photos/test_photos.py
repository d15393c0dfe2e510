"""The photograph family: labels, networks, what is asked of it, and stamps. Nothing is fetched."""

import re
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
from hypothesis import given
from hypothesis import strategies as st

from examples.photos import files, query_kinds, stamps
from infaas.errors import InfaasError

LABELS = stamps.labels()


def test_labels_are_classes_of_pictures_and_none_twice() -> None:
    assert len(LABELS) >= 100
    for name, label in LABELS.items():
        assert re.fullmatch(r"[a-z]+(/[A-Za-z0-9_-]+)+\.png", name), name
        assert type(label) is int
        assert 0 <= label < 1000
    # TOML refuses the same key again; what it does not see is one picture under names that differ in case or mirrored
    plain = [re.sub(r"_mirror", "", name).lower() for name in LABELS]
    assert len(plain) == len(set(plain))
    assert "cartoon" not in "".join(plain)
    assert len(set(LABELS.values())) >= 80
    parts = [stamps.part(number) for number in range(len(LABELS))]
    assert parts.count(stamps.VALIDATION) >= 70
    assert parts.count(stamps.UNSEEN) >= 30
    assert set(parts) == {stamps.VALIDATION, stamps.UNSEEN}


# -- The networks, where their packages are installed; what was made of them, where it was made. Nothing is fetched.


def scores(path: Path, x: np.ndarray) -> np.ndarray:
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    assert [(one.name, one.type, one.shape[1:]) for one in session.get_inputs()] == [
        ("x", "tensor(uint8)", [stamps.SIDE, stamps.SIDE, 3])
    ]
    assert [one.name for one in session.get_outputs()] == ["scores"]
    (found,) = session.run(["scores"], {"x": x})
    return found


@pytest.fixture
def made() -> Path:
    """Where the family was made, if it was."""
    where = files.directory()
    if not files.ready(where):
        pytest.skip("the photograph family was not made here: python -m examples.photos")
    return where


@pytest.mark.torch
def test_the_file_computes_what_the_network_does(made: Path) -> None:
    try:
        files.require_packages()
    except InfaasError as error:
        pytest.skip(str(error))
    import torch

    from examples.photos import networks

    x = np.random.default_rng(0).integers(0, 256, (3, stamps.SIDE, stamps.SIDE, 3)).astype(np.uint8)
    with torch.inference_mode():
        expected = networks.classifier("effnet-lite0")(torch.from_numpy(x)).numpy()
    assert np.abs(scores(made / "effnet-lite0.onnx", x) - expected).max() < 1e-4
    assert np.allclose(expected.sum(axis=1), 1.0, atol=1e-4)


@pytest.mark.parametrize("model", files.MODELS)
def test_networks_know_unseen_photographs(made: Path, model: str) -> None:
    unseen = files.load(made, stamps.UNSEEN)
    x, y = unseen.x[:: len(stamps.VIEWS)], unseen.y[:: len(stamps.VIEWS)]
    found = np.concatenate(
        [scores(made / f"{model}.onnx", x[at : at + 8]).argmax(axis=1) for at in range(0, len(x), 8)]
    )
    assert (found == y).mean() > 0.65  # measured: 0.8 to 0.9 of 38


# -- What is asked of the photograph family follows what was measured of it.
MEASURED = st.fixed_dictionaries({"accuracy": st.floats(0.3, 0.99), "cost_per_1000": st.floats(1e-6, 1e-2)})


@given(variants=st.lists(MEASURED, min_size=1, max_size=12))
def test_what_is_called_possible_some_variant_can(variants: list[dict[str, float]]) -> None:
    made = query_kinds(variants)
    assert len({kind.name for kind in made}) >= len(made) - 1  # the best and the middling accuracy may be one
    for kind in made:
        accuracy, cost = kind.needs.get("accuracy") or 0.0, kind.needs.get("cost") or float("inf")
        can = any(row["accuracy"] >= accuracy and row["cost_per_1000"] <= cost for row in variants)
        if kind.needs.get("latency_ms") != 0.1:
            assert can is kind.possible


# -- Stamps become square pictures; what is missing is named with its remedy.


def test_every_picture_in_every_view(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image", reason="needs the extra photos")
    for name in stamps.labels():
        path = tmp_path / stamps.INSTALLED / name
        path.parent.mkdir(parents=True, exist_ok=True)
        stamp = np.zeros((20, 40, 4), np.uint8)
        stamp[:, :20] = [255, 0, 0, 255]  # red on the left, nothing on the right
        image.fromarray(stamp).save(path)
    directory = stamps.found(tmp_path)
    assert directory is not None
    read = stamps.read(directory)
    n, views = len(stamps.labels()), len(stamps.VIEWS)
    assert read["x"].shape == (n * views, stamps.SIDE, stamps.SIDE, 3)
    assert read["x"].dtype == np.uint8
    assert (read["y"].reshape(n, views) == read["y"][::views, None]).all()
    assert (read["part"].reshape(n, views) == read["part"][::views, None]).all(), "views of one picture in two parts"
    plain, mirrored = read["x"][:2]
    assert plain[130, 60].tolist() == mirrored[130, 200].tolist() == [255, 0, 0]
    assert plain[130, 200].tolist() == [255] * 3
    assert mirrored[130, 60].tolist() == [160] * 3


def test_what_is_missing_is_named_with_its_remedy(tmp_path: Path) -> None:
    for name in list(stamps.labels())[1:]:
        path = tmp_path / stamps.INSTALLED / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    assert stamps.found(tmp_path) is None
    with pytest.raises(InfaasError, match=r"without apt-get: .*--stamps DIRECTORY"):
        stamps.fetch(tmp_path, str(tmp_path))
    with pytest.raises(InfaasError, match=r"extra `photos` \(no_such_network missing\): pip install"):
        files.require_packages(["numpy", "no_such_network"])


def test_a_failing_tool_is_quoted(tmp_path: Path) -> None:
    for name, text in (("apt-get", "echo E: no such package >&2; exit 100"), ("dpkg-deb", "exit 0")):
        program = tmp_path / name
        program.write_text(f"#!/bin/sh\n{text}\n")
        program.chmod(0o755)
    with pytest.raises(
        InfaasError, match=r"apt-get download tuxpaint-stamps-default failed: E: no such package.*apt-get install"
    ):
        stamps.fetch(tmp_path, str(tmp_path))


def test_files_are_ready_only_when_whole_and_current(tmp_path: Path) -> None:
    assert not files.ready(tmp_path)
    for name in (files.PICTURES, *(f"{name}.onnx" for name in files.MODELS)):
        (tmp_path / name).touch()
    assert not files.ready(tmp_path)
    (tmp_path / files.MADE).write_text("other labels")
    assert not files.ready(tmp_path)
    (tmp_path / files.MADE).write_text(files.made_from())
    assert files.ready(tmp_path)
    (tmp_path / f"{files.MODELS[1]}.onnx").unlink()
    assert not files.ready(tmp_path)
